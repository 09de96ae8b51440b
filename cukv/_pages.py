"""Pages of storage arrays: the addressing that K, V, ckv and kpe share, and what moves rows.

A cache is a ``PagePair``, two storage arrays (K and V, or ckv and kpe) under one page table; its
``append``, ``gather`` and ``copy_pages`` are the pair's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import numpy as np

from cukv import reference
from cukv._arrays import DTYPES, FP8, Array, alignment, as_dtype, device_of, empty, home
from cukv._check import check_indptr, match, match_dtype, match_index, match_rows, match_writable
from cukv._check import values as host_values
from cukv._index import (
    NO_INDEX,
    UNIT_SCALE,
    as_index,
    host_scale,
    pack_divisor,
    pack_index,
    pack_index_argument,
    pack_scale,
)
from cukv._kernels import Kernel, kernel, num_sms, packer, vector_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cukv.page_table import PageTable

_pack_pages = packer("Pages")
_pack_rows = packer("Rows")

_BYTE, _FLOAT64 = np.dtype(np.uint8), np.dtype(np.float64)

# How rows are dealt to CTAs. Threads that move rows, and in append a warp that finds their slots.
_MOVE_THREADS = 256
_FEW_MOVE_THREADS = 128  # for few rows, whose time is the latency of one CTA
_SLOT_THREADS = 32
_MAX_ROWS_PER_CTA = 256  # kernels/common/rows.cuh
_CTAS_PER_SM = 7
_VECS_PER_THREAD = 3  # 2 pay too little for finding slots, 4 walk too far apart: 138, 134, 135 us


class Pages:
    """One storage array seen as ``[max_num_pages, page_size, num_heads, head_dim]``."""

    __slots__ = ("alignment", "array", "device", "name", "packed", "read_only")

    def __init__(self, op: str, name: str, array: Array, read_only: str | None) -> None:
        match_rows(op, name, array)
        self.name, self.array, self.read_only = name, array, read_only
        self.device, self.packed, self.alignment = -1, b"", 16
        if isinstance(array, cp.ndarray):
            page, token, head, _ = array.strides
            self.device = array.data.device_id
            self.packed = _pack_pages(array.data.ptr, page, token, head, array.shape[0])
            self.alignment = alignment(array.data.ptr, *_outer_strides(array))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        return self.array.dtype  # type: ignore[no-any-return]

    def require_writable(self, op: str) -> None:
        """Raise if the storage must not be written."""
        if self.read_only is not None:
            raise TypeError(f"{op}: {self.name} is {self.read_only}")
        match_writable(op, self.name, self.array)


def _outer_strides(array: Array) -> list[int]:
    """Byte strides that addressing uses: those of axes longer than 1, without the last axis."""
    return [s for n, s in zip(array.shape[:-1], array.strides[:-1], strict=True) if n > 1]


class _Fit(NamedTuple):
    """How rows of one shape and stride fit one storage array."""

    num_heads: int  # 1 where the heads of both sides are contiguous: one long head
    head_dim: int
    aligned: bool  # strides of both sides and the storage keep 16-byte vectors whole

    @classmethod
    def of(cls, rows: Array, pages: Pages) -> _Fit:
        _, num_heads, head_dim = rows.shape
        whole = num_heads == 1 or (
            rows.strides[1] == head_dim * rows.itemsize
            and pages.array.strides[2] == head_dim * pages.array.itemsize
        )
        if whole:
            num_heads, head_dim = 1, num_heads * head_dim
        return cls(num_heads, head_dim, alignment(pages.alignment, *_outer_strides(rows)) == 16)

    def takes(self, vec: int) -> bool:
        return self.aligned and self.head_dim % vec == 0


class _Deal:
    """How rows of one signature are dealt to CTAs, as vectors of ``vec`` elements."""

    __slots__ = ("_divisors", "_most", "_strides", "columns")

    def __init__(self, rows: Array, fit: _Fit, vec: int) -> None:
        self._strides = rows.strides[:2]
        columns_per_head = fit.head_dim // vec
        self.columns = fit.num_heads * columns_per_head  # vectors of a row
        most = _VECS_PER_THREAD * _MOVE_THREADS // max(self.columns, 1)
        self._most = max(1, min(_MAX_ROWS_PER_CTA, most))
        self._divisors = pack_divisor(self.columns), pack_divisor(columns_per_head)

    def pack(self, pointer: int, nnz: int, ctas: int, threads: int) -> tuple[bytes, int]:
        """Give rows at an address as kernels take them, and how many CTAs move them.

        Each CTA has work for its threads at least, and an equal share of ``ctas`` CTAs at most
        until shares are large enough.
        """
        if not self.columns:
            return _pack_rows(pointer, *self._strides, *self._divisors, 1, 0), 0
        rows = min(max(-(-nnz // ctas), -(-threads // self.columns)), self._most)
        return _pack_rows(pointer, *self._strides, *self._divisors, rows, 0), -(-nnz // rows)


class _AppendMove:
    """Append of rows of one signature: their dtypes, shapes and strides, checked once."""

    def __init__(self, op: str, caches: tuple[Pages, Pages], rows: tuple[Array, Array]) -> None:
        self._op = op
        dims: dict[str, int | None] = {}
        for pages, array in zip(caches, rows, strict=True):
            _, _, num_heads, head_dim = pages.array.shape
            dims.update(num_heads=num_heads, head_dim=head_dim)
            match(op, pages.name, array, ("nnz", "num_heads", "head_dim"), dims)
            match_rows(op, pages.name, array)
            on_host = isinstance(array, np.ndarray)
            match_dtype(op, pages.name, array, *DTYPES, *((_FLOAT64,) if on_host else ()))
            pages.require_writable(op)
        (k, v), (k_cache, v_cache) = rows, caches
        match_dtype(op, v_cache.name, v, k.dtype)
        if k_cache.packed:
            fits = _Fit.of(k, k_cache), _Fit.of(v, v_cache)
            self._dtypes = {"FROM": k.dtype, "K_TO": k_cache.dtype, "V_TO": v_cache.dtype}
            self._device, vec = k_cache.device, vector_size(*self._dtypes.values())
            self._vec = vec if all(fit.takes(vec) for fit in fits) else 1
            self._deals = {n: (_Deal(k, fits[0], n), _Deal(v, fits[1], n)) for n in {1, self._vec}}
            self._kernels: dict[int, Kernel] = {}
            self._ctas = num_sms(self._device) * _CTAS_PER_SM

    def launch(self, k_pointer: int, v_pointer: int, nnz: int, **params: Any) -> None:
        """Launch for rows at these addresses."""
        vec, pointers = self._vec, k_pointer | v_pointer
        if pointers % 16:
            vec, size = 1, self._dtypes["FROM"].itemsize
            if pointers % size:
                raise ValueError(f"{self._op}: rows must be aligned to their {size}-byte elements")
        append = self._kernels.get(vec)
        if append is None:
            append = self._kernels[vec] = kernel("append", self._device, **self._dtypes, VEC=vec)
        k_deal, v_deal = self._deals[vec]
        # Few rows are all on their way at once, and then gain from leaving the L2 first.
        few = nnz * (k_deal.columns + v_deal.columns) <= self._ctas * _FEW_MOVE_THREADS
        threads = _FEW_MOVE_THREADS if few else _MOVE_THREADS
        k_rows, k_ctas = k_deal.pack(k_pointer, nnz, self._ctas, threads)
        v_rows, v_ctas = v_deal.pack(v_pointer, nnz, self._ctas, threads)
        append(
            k_ctas + v_ctas,
            threads + _SLOT_THREADS,
            k=k_rows,
            v=v_rows,
            k_ctas=k_ctas,
            v_ctas=v_ctas,
            nnz=nnz,
            evict_first=few,
            **params,
        )


class PagePair:
    """The two storage arrays of a cache, under one page table."""

    __slots__ = ("_append_moves", "_captured", "first", "page_size", "second")

    def __init__(self, first: Pages, second: Pages) -> None:
        self.first, self.second = first, second
        self.page_size = int(first.array.shape[1])
        self._append_moves: dict[tuple[Any, ...], _AppendMove] = {}
        self._captured: list[Array] = []  # scratch that replays of graphs write to

    def __iter__(self) -> Iterator[Pages]:
        return iter((self.first, self.second))

    def check_table(self, op: str, table: PageTable) -> None:
        """Raise unless the table's pages are of this size."""
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
        k_scale: Any,
        v_scale: Any,
    ) -> None:
        """Write packed rows into the pages of both storage arrays, in one launch."""
        move = self._append_move(op, k, v, table)
        nnz, batch_size, like = k.shape[0], table.batch_size, table.indptr
        _check_row_arguments(op, nnz, batch_size, indptr, batch_indices, positions)
        if isinstance(k, np.ndarray):
            pairs = ((self.first, k_scale), (self.second, v_scale))
            scales = [_append_scale(op, pages, scale, None) for pages, scale in pairs]
            self._append_on_host(op, (k, v), table, indptr, batch_indices, positions, scales)
            return
        rows = batch = token = NO_INDEX
        if indptr is not None:
            rows = pack_index_argument(op, "indptr", indptr, batch_size + 1, like)
        elif positions is not None:
            # Kept until the launch: memory freed before it could become the next argument's.
            batch_indices = as_index(op, "batch_indices", batch_indices, like)
            positions = as_index(op, "positions", positions, like)
            batch = pack_index_argument(op, "batch_indices", batch_indices, nnz, like)
            token = pack_index_argument(op, "positions", positions, nnz, like)
        k_factor = _append_scale(op, self.first, k_scale, self.first.device)
        v_factor = _append_scale(op, self.second, v_scale, self.first.device)
        if nnz == 0 or batch_size == 0 or not (k.size or v.size) or not self.first.array.shape[0]:
            return

        move.launch(
            k.data.ptr,
            v.data.ptr,
            nnz,
            table=table.packed,
            k_cache=self.first.packed,
            v_cache=self.second.packed,
            indptr=rows,
            batch_indices=batch,
            positions=token,
            k_scale=k_factor,
            v_scale=v_factor,
            requests_per_row=batch_size / nnz,
        )

    def _append_move(self, op: str, k: Array, v: Array, table: PageTable) -> _AppendMove:
        """Check homes, devices and sizes of a call, and find the move of its signature."""
        if table.page_size != self.page_size or k.shape[:1] != v.shape[:1]:
            self.check_table(op, table)
            dims = {"nnz": k.shape[0]} if k.ndim else {}
            match(op, self.second.name, v, ("nnz", "num_heads", "head_dim"), dims)
        device = self.first.device
        if not (device == table.device == device_of(k) == device_of(v)):
            names = {self.first.name: k, self.second.name: v}
            home(op, cache=self.first.array, table=table.indptr, **names)
        # Strides of an axis count where it is longer than 1, so none, one and many rows differ.
        num_rows = k.shape[:1] and min(k.shape[0], 2)
        signature = (num_rows, k.dtype, k.strides, k.shape[1:], v.dtype, v.strides, v.shape[1:])
        move = self._append_moves.get(signature)
        if move is None:
            move = self._append_moves[signature] = _AppendMove(
                op, (self.first, self.second), (k, v)
            )
        return move

    def _append_on_host(
        self,
        op: str,
        rows: tuple[Array, Array],
        table: PageTable,
        indptr: Array | None,
        batch_indices: Array | None,
        positions: Array | None,
        scales: list[float],
    ) -> None:
        nnz, like = len(rows[0]), table.indptr
        table.validate(self.first.array.shape[0])
        if positions is None or batch_indices is None:
            if indptr is None:
                indptr = np.arange(table.batch_size + 1)
            indptr = as_index(op, "indptr", indptr, like)
            match_index(op, "indptr", indptr, table.batch_size + 1)
            home(op, table=like, indptr=indptr)
            check_indptr(op, "indptr", host_values(indptr), nnz, "rows")
            batch_indices, positions = reference.batch_indices_positions(
                indptr, table.seq_lens, nnz
            )
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
    ) -> tuple[Array, Array, Array]:
        """Copy every request's tokens out of both arrays: (first, second, token_indptr)."""
        xp = home(op, cache=self.first.array, table=table.indptr)
        self.check_table(op, table)
        length = len(table.indices) * table.page_size if nnz is None else int(nnz)
        if length < 0:
            raise ValueError(f"{op}: nnz must be 0 or more, got {nnz}")
        to = [p.dtype if dtype is None else as_dtype(op, "dtype", dtype) for p in self]
        for pages, kind, scale in zip(self, to, scales, strict=True):
            _check_gather_scale(op, pages, kind, scale)
        if xp is np:
            table.validate(self.first.array.shape[0])
        indptr = table.token_indptr
        gather = _gather_on_host if xp is np else _gather_array
        first, second = (
            gather(op, pages, table, indptr, length, kind, scale)
            for pages, kind, scale in zip(self, to, scales, strict=True)
        )
        return first, second, indptr

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
            if xp is np:
                reference.copy_pages(pages.array, src, dst)
            elif len(src) and pages.array.size:
                scratch = _copy_array(op, pages, src, dst)
                if cp.cuda.get_current_stream().is_capturing():
                    self._captured.append(scratch)


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


def _append_scale(op: str, pages: Pages, scale: Any, device: int | None) -> Any:
    """Pack a scale (or give it as a float, for NumPy); only fp8 pages hold scaled values."""
    if device is not None and type(scale) is float and scale == 1.0:
        return UNIT_SCALE
    name = f"{pages.name}_scale"
    packed = host_scale(op, name, scale) if device is None else pack_scale(op, name, scale, device)
    if packed not in (1.0, UNIT_SCALE) and pages.dtype not in FP8:
        shown = "an array on the GPU" if isinstance(scale, cp.ndarray) else scale
        raise ValueError(
            f"{op}: {name} must be 1.0, got {shown}: only fp8 pages hold scaled values, "
            f"these are {pages.dtype.name}"
        )
    return packed


def _check_gather_scale(op: str, pages: Pages, dtype: np.dtype[Any], scale: Any) -> None:
    """Refuse a scale where rows keep the cache's bits."""
    name = f"{pages.name}_scale"
    given = isinstance(scale, cp.ndarray) or host_scale(op, name, scale) != 1.0
    if given and dtype == pages.dtype:
        raise ValueError(
            f"{op}: {name} must be 1.0 where rows keep the cache's dtype and bits; "
            "name another dtype to get values times scale"
        )


def _gather_on_host(
    op: str,
    pages: Pages,
    table: PageTable,
    token_indptr: Array,
    nnz: int,
    dtype: np.dtype[Any],
    scale: Any,
) -> Array:
    if token_indptr[-1] > nnz:
        raise ValueError(f"{op}: nnz must be at least {token_indptr[-1]} tokens, got {nnz}")
    rows = np.zeros((nnz, *pages.array.shape[2:]), dtype)
    to = None if dtype == pages.dtype else dtype
    factor = host_scale(op, f"{pages.name}_scale", scale)
    csr = (table.indptr, table.indices, table.last_page_len)
    found = reference.gather(pages.array, *csr, to, factor)
    rows[: len(found)] = found
    return rows


def _gather_array(
    op: str,
    pages: Pages,
    table: PageTable,
    token_indptr: Array,
    nnz: int,
    dtype: np.dtype[Any],
    scale: Any,
) -> Array:
    cache = pages.array
    rows = empty(op, (nnz, *cache.shape[2:]), dtype, cp, like=cache)
    factor = pack_scale(op, f"{pages.name}_scale", scale, pages.device)
    if rows.size == 0 or table.batch_size == 0:
        return rows
    fit, vec = _Fit.of(rows, pages), vector_size(cache.dtype, dtype)
    if rows.data.ptr % 16 or not fit.takes(vec):
        vec = 1
    packed_rows, ctas = _Deal(rows, fit, vec).pack(
        rows.data.ptr, nnz, num_sms(pages.device) * _CTAS_PER_SM, _MOVE_THREADS
    )
    kernel("gather", pages.device, FROM=cache.dtype, TO=dtype, VEC=vec)(
        ctas,
        _MOVE_THREADS,
        table=table.packed,
        token_indptr=pack_index(token_indptr),
        cache=pages.packed,
        rows=packed_rows,
        scale=factor,
        nnz=nnz,
    )
    return rows


def _check_page_ids(op: str, name: str, ids: Array, max_num_pages: int) -> None:
    high = np.flatnonzero(ids >= max_num_pages)
    if len(high):
        i = int(high[0])
        raise ValueError(f"{op}: {name}[{i}] must be below {max_num_pages} pages, got {ids[i]}")


def _copy_array(op: str, pages: Pages, src: Array, dst: Array) -> Array:
    """Copy pages through scratch, and give it; a copy knows no dtypes, so elements are bytes."""
    _, page_size, num_heads, head_dim = pages.array.shape
    rows = len(src) * page_size
    width = head_dim * pages.array.itemsize
    scratch = empty(op, (rows, num_heads, width), _BYTE, cp, like=pages.array)
    as_bytes = Pages(op, pages.name, pages.array.view(_BYTE), pages.read_only)
    fit = _Fit.of(scratch, as_bytes)
    unit = alignment(pages.alignment, fit.head_dim, *_outer_strides(scratch))
    size = next(n for n in (16, 4, 2, 1) if unit % n == 0)
    packed, ctas = _Deal(scratch, fit, size).pack(
        scratch.data.ptr, rows, num_sms(pages.device) * _CTAS_PER_SM, _MOVE_THREADS
    )
    launch = kernel("copy_pages", pages.device, BYTES=size)
    for to_scratch in (1, 0):
        launch(
            ctas,
            _MOVE_THREADS,
            cache=pages.packed,
            scratch=packed,
            src=pack_index(src),
            dst=pack_index(dst),
            page_size=page_size,
            to_scratch=to_scratch,
        )
    return scratch
