"""One storage array as pages, and how rows of a token axis are moved to and from it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import numpy as np

from cukv._arrays import DTYPES, Array, alignment
from cukv._check import match, match_dtype, match_rows, match_writable
from cukv._index import pack_divisor
from cukv._kernels import kernel, num_sms
from cukv._sources import packer
from cukv._specialisations import vector_size

if TYPE_CHECKING:
    from cukv._kernels import BoundLaunch

_pack_pages = packer("Pages")
_pack_rows = packer("Rows")

_FLOAT64 = np.dtype(np.float64)

# How rows are dealt to CTAs. Threads that move rows, and in append a warp that finds their slots.
MOVE_THREADS = 256
_FEW_MOVE_THREADS = 128  # for few rows, whose time is the latency of one CTA
_SLOT_THREADS = 32
_MAX_ROWS_PER_CTA = 256  # kernels/common/rows.cuh
_CTAS_PER_SM = 7
# Fields of AppendParams that differ from call to call.
_PER_CALL = ("table", "k", "v", "indptr", "batch_indices", "positions", "k_scale", "v_scale")
_VECS_PER_THREAD = 3  # 2 pay too little for finding slots, 4 walk too far apart: 138, 134, 135 us


def resident_ctas(device: int) -> int:
    """CTAs that move rows at a time."""
    return num_sms(device) * _CTAS_PER_SM


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
            self.alignment = alignment(array.data.ptr, *outer_strides(array))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the elements."""
        return self.array.dtype  # type: ignore[no-any-return]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page's elements, without what may lie between them."""
        return int(math.prod(self.array.shape[1:]) * self.array.itemsize)

    def require_writable(self, op: str) -> None:
        """Raise if the storage must not be written."""
        if self.read_only is not None:
            raise TypeError(f"{op}: {self.name} is {self.read_only}")
        match_writable(op, self.name, self.array)


def outer_strides(array: Array) -> list[int]:
    """Byte strides that addressing uses: those of axes longer than 1, without the last axis."""
    return [s for n, s in zip(array.shape[:-1], array.strides[:-1], strict=True) if n > 1]


class Fit(NamedTuple):
    """How rows of one shape and stride fit one storage array."""

    num_heads: int  # 1 where the heads of both sides are contiguous: one long head
    head_dim: int
    aligned: bool  # strides of both sides and the storage keep 16-byte vectors whole

    @classmethod
    def of(cls, rows: Array, pages: Pages) -> Fit:
        _, num_heads, head_dim = rows.shape
        whole = num_heads == 1 or (
            rows.strides[1] == head_dim * rows.itemsize
            and pages.array.strides[2] == head_dim * pages.array.itemsize
        )
        if whole:
            num_heads, head_dim = 1, num_heads * head_dim
        return cls(num_heads, head_dim, alignment(pages.alignment, *outer_strides(rows)) == 16)

    def takes(self, vec: int) -> bool:
        return self.aligned and self.head_dim % vec == 0


class Deal:
    """How rows of one signature are dealt to CTAs, as vectors of ``vec`` elements."""

    __slots__ = ("_divisors", "_most", "_strides", "columns")

    def __init__(self, rows: Array, fit: Fit, vec: int) -> None:
        self._strides = rows.strides[:2]
        columns_per_head = fit.head_dim // vec
        self.columns = fit.num_heads * columns_per_head  # vectors of a row
        most = _VECS_PER_THREAD * MOVE_THREADS // max(self.columns, 1)
        self._most = max(1, min(_MAX_ROWS_PER_CTA, most))
        self._divisors = pack_divisor(self.columns), pack_divisor(columns_per_head)

    def shares(self, nnz: int, ctas: int, threads: int) -> tuple[bytes, int]:
        """Deal nnz rows: (kernels/common/rows.cuh's Rows, CTAs that move them).

        Each CTA has work for its threads at least, and an equal share of ``ctas`` CTAs at most
        until shares are large enough.
        """
        rows = min(max(-(-nnz // ctas), -(-threads // max(self.columns, 1))), self._most)
        num_ctas = -(-nnz // rows) if self.columns else 0
        return _pack_rows(*self._strides, *self._divisors, rows), num_ctas


class AppendMove:
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
            fits = Fit.of(k, k_cache), Fit.of(v, v_cache)
            self._dtypes = {"FROM": k.dtype, "K_TO": k_cache.dtype, "V_TO": v_cache.dtype}
            self._device, vec = k_cache.device, vector_size(*self._dtypes.values())
            self._vec = vec if all(fit.takes(vec) for fit in fits) else 1
            self._deals = {n: (Deal(k, fits[0], n), Deal(v, fits[1], n)) for n in {1, self._vec}}
            self._packed = {"k_cache": k_cache.packed, "v_cache": v_cache.packed}

    def bind(self, misaligned: int, nnz: int, batch_size: int) -> BoundLaunch:
        """Prepare a launch for nnz rows at addresses with these bits below 16."""
        vec, size = self._vec, self._dtypes["FROM"].itemsize
        if misaligned % size:
            raise ValueError(f"{self._op}: rows must be aligned to their {size}-byte elements")
        if misaligned:
            vec = 1
        k_deal, v_deal = self._deals[vec]
        ctas = resident_ctas(self._device)
        # Few rows are all on their way at once.
        few = nnz * (k_deal.columns + v_deal.columns) <= ctas * _FEW_MOVE_THREADS
        threads = _FEW_MOVE_THREADS if few else MOVE_THREADS
        k_rows, k_ctas = k_deal.shares(nnz, ctas, threads)
        v_rows, v_ctas = v_deal.shares(nnz, ctas, threads)
        return kernel("append", self._device, **self._dtypes, VEC=vec).bind(
            k_ctas + v_ctas,
            threads + _SLOT_THREADS,
            per_call=_PER_CALL,
            **self._packed,
            k_rows=k_rows,
            v_rows=v_rows,
            nnz=nnz,
            k_ctas=k_ctas,
            v_ctas=v_ctas,
            requests_per_row=batch_size / nnz,
        )


class Append:
    """Append of a number of rows of one signature, for a number of requests."""

    __slots__ = ("_launches", "_move", "_sizes", "nothing")

    def __init__(self, move: AppendMove, nnz: int, batch_size: int, nothing: bool) -> None:
        self._move, self._sizes = move, (nnz, batch_size)
        self.nothing = nothing  # is to be done
        self._launches: dict[int, BoundLaunch] = {}  # by the bits of addresses below 16

    def at(self, k: int, v: int) -> BoundLaunch:
        """Give the launch for rows at these addresses."""
        misaligned = (k | v) % 16
        launch = self._launches.get(misaligned)
        if launch is None:
            launch = self._launches[misaligned] = self._move.bind(misaligned, *self._sizes)
        return launch
