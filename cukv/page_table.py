"""PageTable: which pages each request owns, in CSR form; one table serves all layers of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import cupy as cp
import numpy as np

from cukv import reference
from cukv._arrays import (
    INDEX_DTYPES,
    Array,
    as_array,
    device_of,
    empty,
    home,
    on_device_of,
    set_to_zero,
    to_home,
)
from cukv._check import (
    as_whole,
    check_indptr,
    check_rows_fit,
    match_index,
    match_indptr,
    narrow,
    read,
    values,
    whole_number,
)
from cukv._index import SEQUENCES, as_index, pack_divisor, pack_index
from cukv._kernels import ONE_SCAN, kernel, one_per_thread
from cukv._noun import Noun
from cukv._sources import packer

if TYPE_CHECKING:
    from collections.abc import Sequence

_pack_table = packer("PageTable")
_INT32, _INT64 = INDEX_DTYPES
_ANY = 2**63 - 1  # of indices or rows
_LARGEST_PAGE = 2**31 - 1  # tokens: as many pages of so many as int32 counts wrap no int64


@dataclass(frozen=True, eq=False, repr=False)
class PageTable(Noun):
    """CSR page table of one step: request ``b`` owns pages ``indices[indptr[b]:indptr[b + 1]]``.

    Token ``t`` of request ``b`` lives in page ``indices[indptr[b] + t // page_size]`` at entry
    ``t % page_size``, and the request has:

        kv_len = (pages - 1) * page_size + last_page_len[b]  if pages > 0 else 0

    tokens, where ``pages = indptr[b + 1] - indptr[b]``.

    Parameters
    ----------
    indptr : [batch_size + 1] int32 or int64, or a sequence
        Offsets of each request's **pages** in ``indices``; starts at 0. Sequences go to the home of
        the others; if all are sequences, to NumPy.
    indices : [indptr[-1]] int32 or int64, or a sequence
        Page ids. Entries at or past ``indptr[-1]`` are padding and may hold anything.
    last_page_len : [batch_size] int32 or int64, or a sequence
        Tokens in each request's last page, 1 to ``page_size``; ignored without pages.
    page_size : int
        Tokens a page holds, below 2**31.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, shape, home or device. Values are checked by ``validate``.

    Notes
    -----
    Layout: FlashInfer, "KV-Cache Layout in FlashInfer", section "Page Table Layout".

    Examples
    --------
    >>> import numpy as np
    >>> table = PageTable.from_seq_lens([45, 8, 25, 22], page_size=16, xp=np)
    >>> table.indptr
    array([0, 3, 4, 6, 8], dtype=int32)
    >>> table.last_page_len
    array([13,  8,  9,  6], dtype=int32)
    """

    indptr: Array
    indices: Array
    last_page_len: Array
    page_size: int

    batch_size: ClassVar[int]  # requests; set by each instance
    device: ClassVar[int]  # -1 in NumPy
    sizes: ClassVar[tuple[int, ...]]  # what launches depend on: device, sizes of all
    packed: ClassVar[bytes]  # on a GPU: the table as kernels/common/paged.cuh's PageTable

    def __post_init__(self) -> None:
        """Check the structure once; nothing of it can change afterwards."""
        op = "PageTable"
        names = ("indptr", "indices", "last_page_len")
        given = list(zip(names, (self.indptr, self.indices, self.last_page_len), strict=True))
        arrays = (as_array(op, n, x) for n, x in given if not isinstance(x, SEQUENCES))
        like = next(arrays, None)
        indptr, indices, last_page_len = (as_index(op, n, x, like) for n, x in given)
        xp = home(op, indptr=indptr, indices=indices, last_page_len=last_page_len)
        match_indptr(op, "indptr", indptr)
        match_index(op, "indices", indices)
        match_index(op, "last_page_len", last_page_len, len(indptr) - 1)
        size = page_size_of(op, self.page_size)
        batch_size, device = len(indptr) - 1, device_of(indptr)
        self._set(
            indptr=indptr,
            indices=indices,
            last_page_len=last_page_len,
            page_size=size,
            batch_size=batch_size,
            device=device,
            sizes=(device, batch_size, len(indices), size),
        )
        if xp is cp:
            index = (pack_index(indptr), pack_index(indices), pack_index(last_page_len))
            self._set(packed=_pack_table(*index, batch_size, size, pack_divisor(size)))

    # ------------------------------------------------------------------------------- constructors

    @classmethod
    def from_seq_lens(
        cls,
        lens: Array | Sequence[int],
        page_size: int,
        pages: Array | Sequence[int] | None = None,
        num_pages: int | None = None,
        *,
        xp: Any = cp,
    ) -> PageTable:
        """Make the table of requests with the given lengths.

        Parameters
        ----------
        lens : [batch_size] int32 or int64, or a sequence
            Tokens of each request. A sequence goes to the home of ``pages``, else to ``xp``.
        page_size : int
            Tokens a page holds.
        pages : [n] int32 or int64, or a sequence
            Page ids to hand out, in order; ``0, 1, 2, ...`` by default.
        num_pages : int
            Capacity of ``indices`` (pages), at most ``len(pages)``. Needed for lengths on the
            device without ``pages``; otherwise what the lengths need by default.
        xp : module
            ``cupy`` or ``numpy``: home of a table made of sequences alone.

        Returns
        -------
        PageTable
            With int32 indices unless ``pages`` is int64.

        Raises
        ------
        TypeError, ValueError
            Wrong home, dtype or shape; a negative length or too few pages, where the values are on
            the host; lengths on the device without ``pages`` or ``num_pages``.
        CudaUnavailableError
            Sequences alone, ``xp`` is ``cupy`` and there is no GPU.

        Notes
        -----
        Lengths on the device: current stream, no synchronisation. Source: kernels/page_indptr.cu.
        """
        op = "PageTable.from_seq_lens"
        size = page_size_of(op, page_size)
        if num_pages is not None:
            num_pages = whole_number(op, "num_pages", num_pages, 0)
        arrays = {"lens": lens} if pages is None else {"lens": lens, "pages": pages}
        given = (as_array(op, n, x) for n, x in arrays.items() if not isinstance(x, SEQUENCES))
        like = next(given, None)
        if like is None:
            like = empty(op, (0,), _INT32, xp)
        if isinstance(lens, SEQUENCES):
            lens = as_index(op, "lens", lens, None)
            on_host, lens = lens, to_home(lens, like)
        else:
            lens = as_array(op, "lens", lens)
            on_host = lens if isinstance(lens, np.ndarray) else None
        pages = None if pages is None else as_index(op, "pages", pages, like)
        xp = home(op, lens=lens, pages=pages)
        match_index(op, "lens", lens)
        if pages is not None:
            match_index(op, "pages", pages)
            if num_pages is not None and num_pages > len(pages):
                raise ValueError(f"{op}: num_pages={num_pages}, but pages names {len(pages)}")
        if on_host is not None:
            num_pages = _checked_capacity(op, values(on_host), size, pages, num_pages)
        elif num_pages is None:
            if pages is None:
                raise ValueError(f"{op}: lens is on the device: give pages or num_pages (capacity)")
            num_pages = len(pages)
        indices = _count(num_pages, lens) if pages is None else pages[:num_pages]
        indptr, last_page_len = page_indptr(lens, size, indices.dtype)
        table = cls(indptr, indices, last_page_len, size)
        if xp is np:
            table.validate()
        return table

    @classmethod
    def from_block_table(
        cls, block_table: Array, seq_lens: Array | Sequence[int], page_size: int
    ) -> PageTable:
        """Make the table from a dense ``[batch_size, width]`` table of page ids, as vLLM keeps it.

        Parameters
        ----------
        block_table : [batch_size, width] int32 or int64
            Page ids of each request; what lies past its pages is ignored.
        seq_lens : [batch_size] int32 or int64, or a sequence
            Tokens of each request.
        page_size : int
            Tokens a page holds.

        Returns
        -------
        PageTable
            ``indices`` is ``[batch_size * width]``: its tail past ``indptr[-1]`` is padding.

        Raises
        ------
        TypeError, ValueError
            Wrong home, dtype or shape; on NumPy also a length that needs more than ``width`` pages,
            and a negative page id among those it needs.

        Notes
        -----
        Current stream, no synchronisation. Source: kernels/page_indptr.cu, kernels/page_indices.cu.
        """
        op = "PageTable.from_block_table"
        size = page_size_of(op, page_size)
        block_table = as_array(op, "block_table", block_table)
        seq_lens = as_index(op, "seq_lens", seq_lens, block_table)
        xp = home(op, block_table=block_table, seq_lens=seq_lens)
        if block_table.dtype not in INDEX_DTYPES:
            raise TypeError(f"{op}: block_table must be int32 or int64, got {block_table.dtype}")
        if block_table.ndim != 2:
            got = list(block_table.shape)
            raise ValueError(f"{op}: block_table must be [batch_size, width], got {got}")
        batch_size, width = block_table.shape
        match_index(op, "seq_lens", seq_lens, batch_size)
        if xp is np:
            _check_lens(op, seq_lens, size, width)
        indptr, last_page_len = page_indptr(seq_lens, size, block_table.dtype)
        indices = empty(op, (batch_size * width,), block_table.dtype, xp, like=block_table)
        if xp is np:
            indices[:] = -1
            found = reference.page_indices(block_table, indptr)
            indices[: len(found)] = found
        elif indices.size:
            launch = kernel("page_indices", indices.data.device_id)
            launch(
                *one_per_thread(indices.size),
                indptr=pack_index(indptr),
                indices=pack_index(indices),
                block_table=block_table.data.ptr,
                row_stride=block_table.strides[0],
                entry_stride=block_table.strides[1],
                width=width,
                entry_width=block_table.itemsize,
            )
        table = cls(indptr, indices, last_page_len, size)
        if xp is np:
            table.validate()
        return table

    # --------------------------------------------------------------------------------- properties

    @property
    def seq_lens(self) -> Array:
        """Tokens of each request, ``[batch_size]``, computed from the present contents.

        In the dtype of ``indptr``. On NumPy bad values of the table raise ValueError; on a GPU one
        launch. Source: kernels/seq_lens.cu.
        """
        return self._derive("seq_lens", self.batch_size, self.indptr.dtype)

    @property
    def token_indptr(self) -> Array:
        """Prefix sum of ``seq_lens``, ``[batch_size + 1]`` int64: what masks and gather take.

        In tokens, from the present contents. On NumPy bad values of the table raise ValueError; on
        a GPU one launch. Source: kernels/token_indptr.cu.
        """
        return self._derive("token_indptr", self.batch_size + 1, _INT64)

    def _derive(self, name: str, size: int, dtype: np.dtype[Any]) -> Array:
        if type(self.indptr) is not cp.ndarray and self._home() is np:
            self._validate_lens(f"PageTable.{name}", _ANY)  # lengths need no ids
            definition = getattr(reference, name)
            found = definition(self.indptr, self.last_page_len, self.page_size)
            return narrow(f"PageTable.{name}", found, dtype)
        out = empty(f"PageTable.{name}", (size,), dtype, cp, like=self.indptr)
        if self.batch_size:
            geometry = one_per_thread(size) if name == "seq_lens" else ONE_SCAN
            kernel(name, self.device)(*geometry, table=self.packed, **{name: pack_index(out)})
        else:
            set_to_zero(out)  # at most the 0 that an indptr starts with
        return out

    def seq_lens_list(self) -> list[int]:
        """Tokens of each request as a Python list. Synchronises if the table is on a GPU."""
        return [int(n) for n in values(self.seq_lens)]

    # --------------------------------------------------------------------------------- converters

    def block_table(self, width: int) -> Array:
        """Give the pages as rows of a dense table, padded with -1.

        Parameters
        ----------
        width : int
            Pages per row. A request with more raises on NumPy and is cut on the device.

        Returns
        -------
        [batch_size, width], dtype of ``indices``

        Raises
        ------
        ValueError
            A negative width; on NumPy also one that is too small, and bad values of the table.

        Notes
        -----
        Current stream, no synchronisation. Source: kernels/block_table.cu.
        """
        op = "PageTable.block_table"
        width = whole_number(op, "width", width, 0)
        if self._home() is np:
            self.validate()
            _check_widths(op, values(self.indptr), width)
            found = reference.block_table(self.indptr, self.indices, width)
            return found.astype(self.indices.dtype)
        shape = (self.batch_size, width)
        out = empty(op, shape, self.indices.dtype, cp, like=self.indptr)
        if out.size:
            kernel("block_table", self.device)(
                *one_per_thread(out.size),
                table=self.packed,
                block_table=pack_index(out.reshape(-1)),
                width=width,
            )
        return out

    def slot_mapping(self, batch_indices: Array, positions: Array) -> Array:
        """Give the flat slot, ``page * page_size + entry``, of each (request, position) pair.

        Parameters
        ----------
        batch_indices, positions : [n] int32 or int64, or sequences
            Request of each pair and its token index there.

        Returns
        -------
        [n] int64
            -1 where a pair names no slot: a negative or unknown request, a negative position or
            one past the request's pages.

        Raises
        ------
        TypeError, ValueError
            Wrong home, dtype, shape or device; on NumPy also bad values of the table.

        Notes
        -----
        Current stream, no synchronisation. Source: kernels/slot_mapping.cu.
        """
        op = "PageTable.slot_mapping"
        batch_indices = as_index(op, "batch_indices", batch_indices, self.indptr)
        positions = as_index(op, "positions", positions, self.indptr)
        xp = home(op, indptr=self.indptr, batch_indices=batch_indices, positions=positions)
        match_index(op, "batch_indices", batch_indices)
        match_index(op, "positions", positions, len(batch_indices))
        if xp is np:
            self.validate()
            return reference.slot_mapping(
                self.indptr, self.indices, self.page_size, batch_indices, positions
            )
        out = empty(op, (len(batch_indices),), _INT64, cp, like=self.indptr)
        if out.size:
            kernel("slot_mapping", self.device)(
                *one_per_thread(out.size),
                table=self.packed,
                batch_indices=pack_index(batch_indices),
                positions=pack_index(positions),
                slots=pack_index(out),
            )
        return out

    # ---------------------------------------------------------------------------------- validation

    def validate(self, max_num_pages: int | None = None, indptr: Array | None = None) -> None:
        """Check the values, on the host. Synchronises if the table is on a GPU.

        Parameters
        ----------
        max_num_pages : int
            Pages of the cache that the table is used with: every page id must be below it.
        indptr : [batch_size + 1] int32 or int64, or a sequence
            Rows to append per request; each must fit the request's tokens.

        Raises
        ------
        TypeError
            Arguments that are not integers.
        ValueError
            Names the request and the value.
        """
        op = "PageTable.validate"
        if max_num_pages is not None:
            max_num_pages = whole_number(op, "max_num_pages", max_num_pages, 0)
        rows = None if indptr is None else _host_index(op, "indptr", indptr, len(self.indptr))
        pages, counts, last = self._validate_lens(op, len(self.indices))
        used = values(self.indices)[: pages[-1]]
        high = np.inf if max_num_pages is None else max_num_pages
        bad = np.flatnonzero((used < 0) | (used >= high))
        if len(bad):
            i = int(bad[0])
            b = int(np.searchsorted(pages, i, side="right")) - 1
            limit = "" if max_num_pages is None else f" and below max_num_pages={max_num_pages}"
            raise ValueError(
                f"{op}: page {i - pages[b]} of request {b} must be 0 or more{limit}, got {used[i]}"
            )
        if rows is not None:
            self._validate_rows(op, rows, counts, last)

    def _validate_lens(
        self, op: str, num_indices: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Check what lengths are made from: indptr, pages of each request, last_page_len."""
        pages, last = values(self.indptr), values(self.last_page_len)
        check_indptr(op, "indptr", pages, num_indices, "indices")
        counts = np.diff(pages)
        bad = np.flatnonzero((counts > 0) & ((last < 1) | (last > self.page_size)))
        if len(bad):
            b = int(bad[0])
            raise ValueError(
                f"{op}: last_page_len of request {b} must be 1 to page_size={self.page_size}, "
                f"got {last[b]}"
            )
        return pages, counts, last

    def _validate_rows(
        self, op: str, rows: np.ndarray, counts: np.ndarray, last: np.ndarray
    ) -> None:
        check_indptr(op, "indptr", rows, _ANY, "rows")
        lens = np.where(counts > 0, (counts - 1) * self.page_size + last, 0)
        check_rows_fit(op, rows, lens)


def page_indptr(seq_lens: Array, page_size: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Give ``indptr`` (pages) and ``last_page_len`` of requests with the given lengths."""
    op = "PageTable"
    if isinstance(seq_lens, np.ndarray):
        indptr, last_page_len = reference.page_indptr(seq_lens, page_size)
        return narrow(op, indptr, dtype), narrow(op, last_page_len, dtype)
    indptr = empty(op, (len(seq_lens) + 1,), dtype, cp, like=seq_lens)
    last_page_len = empty(op, (len(seq_lens),), dtype, cp, like=seq_lens)
    if not len(seq_lens):
        set_to_zero(indptr)
        return indptr, last_page_len
    kernel("page_indptr", seq_lens.data.device_id)(
        *ONE_SCAN,
        seq_lens=pack_index(seq_lens),
        indptr=pack_index(indptr),
        last_page_len=pack_index(last_page_len),
        page_size=page_size,
    )
    return indptr, last_page_len


def _count(n: int, like: Array) -> Array:
    """Give 0, 1, ..., n - 1 as int32, in the home and on the device of ``like``."""
    if isinstance(like, np.ndarray):
        return np.arange(n, dtype=np.int32)
    with on_device_of(like):
        return cp.arange(n, dtype=np.int32)


def page_size_of(op: str, page_size: Any) -> int:
    """Give a page size as a Python int, which must be 1 or more."""
    size = as_whole(op, "page_size", page_size)
    if size is None or not 1 <= size <= _LARGEST_PAGE:
        most = f", below {_LARGEST_PAGE + 1}" if size is not None and size > _LARGEST_PAGE else ""
        raise ValueError(
            f"{op}: page_size must be a whole number of 1 or more{most}, got {page_size!r}"
        )
    return size


def _check_lens(op: str, lens: np.ndarray, page_size: int, width: int | None = None) -> None:
    negative = np.flatnonzero(lens < 0)
    if len(negative):
        b = int(negative[0])
        raise ValueError(f"{op}: length of request {b} must be 0 or more, got {lens[b]}")
    if width is not None:
        long = np.flatnonzero(-(-lens // page_size) > width)
        if len(long):
            b = int(long[0])
            raise ValueError(
                f"{op}: request {b} of {lens[b]} tokens needs more than width={width} pages"
            )


def _host_index(op: str, name: str, x: Any, size: int) -> np.ndarray:
    """Read an index argument on the host, of whichever library, as int64."""
    x = as_index(op, name, x, None) if isinstance(x, SEQUENCES) else x
    host = read(x)
    match_index(op, name, host, size)
    return values(host)


def _check_widths(op: str, indptr: np.ndarray, width: int) -> None:
    wide = np.flatnonzero(np.diff(indptr) > width)
    if len(wide):
        b = int(wide[0])
        need = indptr[b + 1] - indptr[b]
        raise ValueError(f"{op}: width must be at least {need} pages for request {b}, got {width}")


def _checked_capacity(
    op: str, lens: np.ndarray, page_size: int, pages: Array | None, num_pages: int | None
) -> int:
    """Pages that lengths on the host need, or the capacity asked for if that is enough."""
    _check_lens(op, lens, page_size)
    needed = int((-(-lens // page_size)).sum(dtype=np.float64))  # which never wraps
    limits = [n for n in (num_pages, None if pages is None else len(pages)) if n is not None]
    have = min(limits, default=needed)
    if needed > have:
        raise ValueError(f"{op}: the lengths need {needed} pages, got {have}")
    return needed if num_pages is None else num_pages
