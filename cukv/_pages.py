"""PagePair: K and V, or ckv and kpe, under one page table; append, gather, copy_pages of both."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

from cukv import reference
from cukv._arrays import (
    DTYPES,
    FP8,
    Array,
    alignment,
    as_array,
    as_dtype,
    empty,
    home,
    read_only_reason,
)
from cukv._check import check_indptr, check_rows_fit, match, match_dtype, match_index, whole_number
from cukv._check import values as host_values
from cukv._index import (
    NO_INDEX,
    NO_SCALE,
    UNIT_SCALE,
    as_index,
    host_scale,
    pack_index,
    pack_index_argument,
    pack_scale,
)
from cukv._kernels import kernel
from cukv._remember import remember
from cukv._rows import (
    MOVE_THREADS,
    Append,
    AppendMove,
    Deal,
    Fit,
    Pages,
    outer_strides,
    resident_ctas,
)
from cukv._scratch import allocate_scratch
from cukv._specialisations import vector_size
from cukv.page_table import PageTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cukv._kernels import BoundLaunch

_BYTE, _FLOAT64 = np.dtype(np.uint8), np.dtype(np.float64)
# Signatures of rows that a cache remembers, without and with their number, with which the strides
# of HND rows change; of rows to gather; and numbers of pages to copy: so many of each.
_MOST = 64
# Fields of GatherParams and of CopyPagesParams that differ from call to call.
_GATHER_PER_CALL = ("table", "token_indptr", "out", "scale")
_COPY_PER_CALL = ("scratch", "src", "dst")

_UNIT_SCALES = (UNIT_SCALE, UNIT_SCALE)


class PagePair:
    """The two storage arrays of a cache, under one page table."""

    __slots__ = (
        "_append_moves", "_appends", "_copies", "_gathers", "first", "page_size", "second",
    )  # fmt: skip

    def __init__(self, first: Pages, second: Pages) -> None:
        self.first, self.second = first, second
        self.page_size = int(first.array.shape[1])
        self._append_moves: dict[tuple[Any, ...], AppendMove] = {}
        self._appends: dict[tuple[Any, ...], Append] = {}
        self._gathers: dict[tuple[Any, ...], BoundLaunch] = {}
        self._copies: dict[int, tuple[BoundLaunch, ...]] = {}

    @classmethod
    def of(
        cls,
        op: str,
        names: tuple[str, str],
        axes: tuple[str, ...],
        widths: tuple[str, str],
        arrays: Sequence[Array],
        reasons: Sequence[str | None],
        as_pages: Callable[[Array], Array],
    ) -> PagePair:
        """Check that two arrays belong together, and see each as pages.

        ``axes`` name their axes but the last, ``widths`` the last of each, ``reasons`` say why they
        must not be written, and ``as_pages`` gives a view ``[max_num_pages, page_size, num_heads,
        head_dim]``.
        """
        dims: dict[str, int | None] = {}
        for name, array, width in zip(names, arrays, widths, strict=True):
            match(op, name, array, (*axes, width), dims)
            extra = (_FLOAT64,) if isinstance(array, np.ndarray) else ()
            match_dtype(op, name, array, *DTYPES, *extra)
        home(op, **dict(zip(names, arrays, strict=True)))
        if dims["page_size"] == 0:
            raise ValueError(f"{op}: page_size must be 1 or more, got 0")
        pages = [
            Pages(op, name, as_pages(array), reason)
            for name, array, reason in zip(names, arrays, reasons, strict=True)
        ]
        return cls(*pages)

    def __iter__(self) -> Iterator[Pages]:
        return iter((self.first, self.second))

    @property
    def planned_head_dim_vo(self) -> int:
        """Elements of a value, as far as plans depend on them."""
        return int(self.second.array.shape[3])

    @property
    def consecutive(self) -> bool:
        """Whether a request's pages are one token each and lie one after the other."""
        return False

    def check_table(self, op: str, table: PageTable) -> None:
        """Raise unless ``table`` is a page table of this page size."""
        if not isinstance(table, PageTable):
            raise TypeError(f"{op}: table must be a PageTable, got {type(table)}")
        if table.page_size != self.page_size:
            raise ValueError(
                f"{op}: the table's page_size is {table.page_size}, the cache's {self.page_size}"
            )

    # ------------------------------------------------------------------------------------- append

    def append(
        self,
        op: str,
        k: Array,
        v: Array,
        table: PageTable,
        indptr: Array | None,
        batch_indices: Array | None,
        positions: Array | None,
        scales: tuple[Any, Any],
    ) -> None:
        """Write packed rows into the pages of both storage arrays, in one launch."""
        if type(table) is not PageTable or table.page_size != self.page_size:
            self.check_table(op, table)
        first, batch_size = self.first, table.batch_size
        if (
            type(k) is not cp.ndarray
            or type(v) is not cp.ndarray
            or not (first.device == table.device == k.data.device_id == v.data.device_id)
        ):
            self._check_rows(op, k, v, table)
        signature = (k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype, batch_size)
        append = self._appends.get(signature)
        if append is None:
            if k.shape[:1] != v.shape[:1]:
                self._check_rows(op, k, v, table)
            append = self._append(op, k, v, batch_size)
            remember(self._appends, signature, append, _MOST)
        if indptr is None or batch_indices is not None or positions is not None:
            _check_row_arguments(op, len(k), batch_size, indptr, batch_indices, positions)
        factors = self.scales(op, scales, divide=True)
        if first.device < 0:
            self._append_on_host(op, (k, v), table, indptr, batch_indices, positions, factors)
            return
        rows = batch = token = NO_INDEX
        if indptr is not None:
            # Kept until the launch, as those below: memory freed before it could become another's.
            if type(indptr) is not cp.ndarray:
                indptr = as_index(op, "indptr", indptr, table.indptr)
            rows = pack_index_argument(op, "indptr", indptr, batch_size + 1, table.indptr)
        elif positions is not None:
            batch_indices = as_index(op, "batch_indices", batch_indices, table.indptr)
            positions = as_index(op, "positions", positions, table.indptr)
            batch = pack_index_argument(op, "batch_indices", batch_indices, len(k), table.indptr)
            token = pack_index_argument(op, "positions", positions, len(k), table.indptr)
        if append.nothing:
            return
        at = k.data.ptr, v.data.ptr
        append.at(*at)(table.packed, *at, rows, batch, token, *factors)

    def _check_rows(self, op: str, k: Array, v: Array, table: PageTable) -> None:
        """Raise unless there are as many rows of both, in the home of all."""
        if k.shape[:1] != v.shape[:1]:
            pattern = ("nnz", "num_heads", "head_dim")
            num_heads, head_dim = self.first.array.shape[2:]
            match(op, self.first.name, k, pattern, {"num_heads": num_heads, "head_dim": head_dim})
            match(op, self.second.name, v, pattern, {"nnz": k.shape[0]})
        names = {self.first.name: k, self.second.name: v}
        home(op, cache=self.first.array, table=table.indptr, **names)

    def _append(self, op: str, k: Array, v: Array, batch_size: int) -> Append:
        """Prepare to append so many rows; rows that differ only in number are checked once."""
        # Strides of an axis count where it is longer than 1, so none, one and many rows differ.
        num_rows = k.shape[:1] and min(k.shape[0], 2)
        signature = (num_rows, k.dtype, k.strides, k.shape[1:], v.dtype, v.strides, v.shape[1:])
        move = self._append_moves.get(signature)
        if move is None:
            move = AppendMove(op, (self.first, self.second), (k, v))
            remember(self._append_moves, signature, move, _MOST)
        nothing = batch_size == 0 or not (k.size or v.size) or not self.first.array.shape[0]
        return Append(move, len(k), batch_size, nothing)

    def scales(self, op: str, scales: tuple[Any, Any], *, divide: bool = False) -> tuple[Any, Any]:
        """Parse the scales of both storage arrays, for a kernel or as floats for NumPy.

        Only fp8 pages hold scaled values. None may be 0 of those to ``divide`` rows by.
        """
        first, second = scales
        if type(first) is type(second) is float and first == second == 1.0:  # by far the most calls
            return _UNIT_SCALES if self.first.device >= 0 else scales
        return (
            _scale_of_values(op, self.first, first, divide),
            _scale_of_values(op, self.second, second, divide),
        )

    def _append_on_host(
        self,
        op: str,
        rows: tuple[Array, Array],
        table: PageTable,
        indptr: Array | None,
        batch_indices: Array | None,
        positions: Array | None,
        scales: tuple[float, float],
    ) -> None:
        nnz, like = len(rows[0]), table.indptr
        table.validate(self.first.array.shape[0])
        if positions is None or batch_indices is None:
            given = indptr is not None
            indptr = as_index(op, "indptr", indptr if given else range(table.batch_size + 1), like)
            match_index(op, "indptr", indptr, table.batch_size + 1)
            home(op, table=like, indptr=indptr)
            check_indptr(op, "indptr", host_values(indptr), nnz, "rows")
            seq_lens = table.seq_lens
            if given:  # or else a row without a token is skipped
                check_rows_fit(op, indptr, seq_lens)
            batch_indices, positions = reference.batch_indices_positions(indptr, seq_lens, nnz)
        batch_indices = as_index(op, "batch_indices", batch_indices, like)
        positions = as_index(op, "positions", positions, like)
        for name, array in (("batch_indices", batch_indices), ("positions", positions)):
            match_index(op, name, array, nnz)
            home(op, table=like, **{name: array})
        for pages, array, scale in zip(self, rows, scales, strict=True):
            csr = (table.indptr, table.indices)
            reference.append(pages.array, array, *csr, batch_indices, positions, scale)

    # ------------------------------------------------------------------------------------- gather

    def gather(
        self,
        op: str,
        table: PageTable,
        nnz: int | None,
        dtype: Any,
        scales: tuple[Any, Any],
        out: tuple[Array | None, Array | None] = (None, None),
    ) -> tuple[Array, Array, Array]:
        """Copy every request's tokens out of both arrays: (first, second, token_indptr)."""
        self.check_table(op, table)
        xp = home(op, cache=self.first.array, table=table.indptr)
        length = len(table.indices) * table.page_size
        if nnz is not None:
            length = whole_number(op, "nnz", nnz, 0)
        to = [p.dtype if dtype is None else as_dtype(op, "dtype", dtype) for p in self]
        factors = [_gather_scale(op, *each) for each in zip(self, to, scales, strict=True)]
        if xp is np:
            table.validate(self.first.array.shape[0])
        indptr = table.token_indptr
        gather = _gather_on_host if xp is np else self._gather
        first, second = (
            gather(op, pages, table, indptr, length, kind, factor, rows)
            for pages, kind, factor, rows in zip(self, to, factors, out, strict=True)
        )
        return first, second, indptr

    def _gather(
        self,
        op: str,
        pages: Pages,
        table: PageTable,
        token_indptr: Array,
        nnz: int,
        dtype: np.dtype[Any],
        factor: bytes,
        rows: Array | None,
    ) -> Array:
        """Copy every request's tokens out of one array on a GPU."""
        cache = pages.array
        if rows is None:
            rows = empty(op, (nnz, *cache.shape[2:]), dtype, cp, like=cache)
        if rows.size == 0 or table.batch_size == 0:
            return rows
        pointer = rows.data.ptr
        signature = (
            pages is self.first,
            rows.shape,
            rows.strides,
            rows.dtype,
            pointer % 16,
        )
        launch = self._gathers.get(signature)
        if launch is None:
            launch = _bind_gather(pages, rows)
            remember(self._gathers, signature, launch, _MOST)
        launch(table.packed, pack_index(token_indptr), pointer, factor)
        return rows

    # --------------------------------------------------------------------------------- copy_pages

    def copy_pages(self, op: str, src: Any, dst: Any) -> None:
        """Copy whole pages of both arrays, as if all sources were read first."""
        like = self.first.array
        src, dst = as_index(op, "src", src, like), as_index(op, "dst", dst, like)
        xp = home(op, cache=like, src=src, dst=dst)
        match_index(op, "src", src)
        match_index(op, "dst", dst, len(src))
        for pages in self:
            pages.require_writable(op)
        if xp is np:
            _check_page_ids(op, "src", src, len(like))
            _check_page_ids(op, "dst", dst, len(like))
            for pages in self:
                reference.copy_pages(pages.array, src, dst)
            return
        copied = [pages for pages in self if len(src) and pages.array.size]
        if not copied:
            return
        # One after the other, through the same memory.
        num_bytes = len(src) * max(pages.bytes_per_page for pages in copied)
        memory = allocate_scratch(op, (num_bytes,), _BYTE, like)
        launches = self._copies.get(len(src))
        if launches is None:
            bound = (_bind_copies(op, pages, memory, len(src)) for pages in copied)
            launches = tuple(itertools.chain(*bound))
            remember(self._copies, len(src), launches, _MOST)
        arguments = memory.data.ptr, pack_index(src), pack_index(dst)
        for launch in launches:
            launch(*arguments)


def as_storage(op: str, name: str, x: Any) -> tuple[Array, str | None]:
    """Give an array to keep rows in, and why it must not be written, if so."""
    return as_array(op, name, x), read_only_reason(x, op)


def as_storage_pair(op: str, names: tuple[str, str], data: Any) -> list[tuple[Array, str | None]]:
    """Give a pair of arrays to keep rows in, each with why it must not be written."""
    if len(data) != 2:
        raise ValueError(f"{op}: data must be one array or a pair, got {len(data)}")
    return [as_storage(op, name, x) for name, x in zip(names, data, strict=True)]


def _check_row_arguments(
    op: str,
    nnz: int,
    batch_size: int,
    indptr: Array | None,
    batch_indices: Array | None,
    positions: Array | None,
) -> None:
    """Raise unless the arguments that say where rows go are one of the three kinds."""
    if indptr is None and batch_indices is None and positions is None:
        if nnz < batch_size:
            raise ValueError(
                f"{op}: without indptr or positions there must be one row per request, "
                f"got {nnz} rows for {batch_size} requests"
            )
    elif (batch_indices is None) != (positions is None) or (
        indptr is not None and positions is not None
    ):
        raise ValueError(f"{op}: give indptr, or batch_indices and positions, or none of them")


def _parse_scale(op: str, pages: Pages, scale: Any) -> Any:
    """Pack a scale for a kernel, or give it as a float for NumPy."""
    name = f"{pages.name}_scale"
    if pages.device < 0:
        return host_scale(op, name, scale)
    return pack_scale(op, name, scale, pages.device)


def _scale_of_values(op: str, pages: Pages, scale: Any, divide: bool) -> Any:
    """Parse the scale of what pages hold; only fp8 pages hold scaled values."""
    parsed = _parse_scale(op, pages, scale)
    # As float32, which a kernel divides by: smaller numbers are 0 there.
    if divide and (parsed == NO_SCALE or (pages.device < 0 and np.float32(parsed) == 0)):
        raise ValueError(f"{op}: {pages.name}_scale must not be 0: rows are divided by it")
    if parsed not in (1.0, UNIT_SCALE) and pages.dtype not in FP8:
        shown = "an array on the GPU" if isinstance(scale, cp.ndarray) else scale
        raise ValueError(
            f"{op}: {pages.name}_scale must be 1.0, got {shown}: only fp8 pages hold scaled "
            f"values, these are {pages.dtype.name}"
        )
    return parsed


def _gather_scale(op: str, pages: Pages, dtype: np.dtype[Any], scale: Any) -> Any:
    """Parse the scale of rows to gather; rows that keep the cache's bits take none."""
    name, parsed = f"{pages.name}_scale", _parse_scale(op, pages, scale)
    if parsed not in (1.0, UNIT_SCALE) and dtype == pages.dtype:
        raise ValueError(
            f"{op}: {name} must be 1.0 where rows keep the cache's dtype and bits; "
            "name another dtype to get values times scale"
        )
    return parsed


def _gather_on_host(
    op: str,
    pages: Pages,
    table: PageTable,
    token_indptr: Array,
    nnz: int,
    dtype: np.dtype[Any],
    factor: Any,
    rows: Array | None,
) -> Array:
    if token_indptr[-1] > nnz:
        raise ValueError(f"{op}: nnz must be at least {token_indptr[-1]} tokens, got {nnz}")
    if rows is None:
        rows = np.zeros((nnz, *pages.array.shape[2:]), dtype)
    to = None if dtype == pages.dtype else dtype
    csr = (table.indptr, table.indices, table.last_page_len)
    found = reference.gather(pages.array, *csr, to, factor)
    rows[: len(found)] = found
    return rows


def _bind_gather(pages: Pages, rows: Array) -> BoundLaunch:
    """Prepare to gather rows of one signature."""
    cache, nnz = pages.array, len(rows)
    fit, vec = Fit.of(rows, pages), vector_size(cache.dtype, rows.dtype)
    if rows.data.ptr % 16 or not fit.takes(vec):
        vec = 1
    packed, ctas = Deal(rows, fit, vec).shares(nnz, resident_ctas(pages.device), MOVE_THREADS)
    return kernel("gather", pages.device, FROM=cache.dtype, TO=rows.dtype, VEC=vec).bind(
        ctas, MOVE_THREADS, per_call=_GATHER_PER_CALL, cache=pages.packed, rows=packed, nnz=nnz
    )


def _check_page_ids(op: str, name: str, ids: Array, max_num_pages: int) -> None:
    high = np.flatnonzero(ids >= max_num_pages)
    if len(high):
        i = int(high[0])
        raise ValueError(f"{op}: {name}[{i}] must be below {max_num_pages} pages, got {ids[i]}")


def _bind_copies(
    op: str, pages: Pages, memory: Array, num_pairs: int
) -> tuple[BoundLaunch, BoundLaunch]:
    """Prepare to copy so many pages of one array to memory, and back; elements are bytes here."""
    _, page_size, num_heads, head_dim = pages.array.shape
    scratch = memory[: num_pairs * pages.bytes_per_page]
    scratch = scratch.reshape(-1, num_heads, head_dim * pages.array.itemsize)
    as_bytes = Pages(op, pages.name, pages.array.view(_BYTE), pages.read_only)
    fit = Fit.of(scratch, as_bytes)
    unit = alignment(pages.alignment, fit.head_dim, *outer_strides(scratch))
    size = next(n for n in (16, 4, 2, 1) if unit % n == 0)
    deal = Deal(scratch, fit, size)
    rows, ctas = deal.shares(len(scratch), resident_ctas(pages.device), MOVE_THREADS)
    bind = functools.partial(
        kernel("copy_pages", pages.device, BYTES=size).bind,
        ctas,
        MOVE_THREADS,
        per_call=_COPY_PER_CALL,
        cache=pages.packed,
        rows=rows,
        page_size=page_size,
    )
    return bind(to_scratch=1), bind(to_scratch=0)
