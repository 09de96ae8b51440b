"""Tensor maps of keys and values: with them a kernel has whole tiles copied to shared memory.

``kernels/prefill_sm90.cu`` sees an array as spans of 128 bytes, which a map swizzles. The spans of
all heads of a token are one axis with a stride of 128 bytes, whatever lies between heads: head
``h`` begins at span ``h * head_stride / 128``.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from cukv._arrays import BFLOAT16, FLOAT8_E4M3, FLOAT16
from cukv._remember import remember

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cukv._arrays import Array
    from cukv._kernels import BoundLaunch
    from cukv._pages import PagePair

SPAN_BYTES = 128
GROUP = 8  # tokens that a swizzle pattern spans
MAX_STRIDE = 1 << 40  # bytes, exclusive
MAX_SIZE = 1 << 31  # of an axis, so that coordinates are int32
MAX_UNITS = 1 << 31  # of 16 bytes, exclusive: from a token of a cache to any other

# CUtensorMapDataType, ...Swizzle, ...L2promotion of cuda.h
DATA_TYPES = {FLOAT8_E4M3: 0, FLOAT16: 6, BFLOAT16: 9}  # e4m3 as bytes
_SWIZZLE_128B = 3
L2_PROMOTION_128B, L2_PROMOTION_256B = 2, 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64

TEAM_ROWS = 64  # packed rows of a team, in kernels/prefill_sm90.cu


class Box(NamedTuple):
    """An array and what one copy brings of it, axes innermost first."""

    sizes: tuple[int, ...]  # of the array
    strides: tuple[int, ...]  # bytes, of all axes but the innermost
    box: tuple[int, ...]


NO_MAP = bytes(_MAP_BYTES)


class Copies(NamedTuple):
    """How ``prefill_sm90`` has keys and values copied."""

    paged: bool  # a step is tokens of pages, not consecutive rows
    mapped: bool  # by tensor maps; else token by token


class KvMaps(NamedTuple):
    """What ``PrefillSm90Params`` says of keys and values."""

    k_map: bytes
    v_map: bytes
    k_head_spans: int
    v_head_spans: int
    piece_bits: int


NO_KV_MAPS = KvMaps(NO_MAP, NO_MAP, 0, 0, 0)


def span_of(dtype: Any) -> int:
    """Give the elements of a span."""
    return SPAN_BYTES // int(dtype.itemsize)


def copies_of(pages: PagePair, aligned: bool) -> Copies | None:
    """Tell how keys and values are copied: by maps where these can be; None: not at all."""
    if all(_can_be_mapped(p.array) for p in pages):
        if pages.consecutive:
            return Copies(paged=False, mapped=True)
        if pages.page_size % GROUP == 0:
            return Copies(paged=True, mapped=True)
    if aligned and all(_is_in_reach(p.array) for p in pages):
        return Copies(paged=True, mapped=False)
    return None


def _is_in_reach(array: Array) -> bool:
    """Tell whether ``kernels/common/token_server.cuh`` can count the way to every token."""
    steps = zip(array.shape[:2], array.strides[:2], strict=True)
    reach: int = sum((n - 1) * abs(stride) for n, stride in steps)
    return reach < MAX_UNITS * 16


def _can_be_mapped(array: Array) -> bool:
    num_pages, page_size, num_heads, head_dim = array.shape
    strides = [s for n, s in zip(array.shape[:3], array.strides[:3], strict=True) if n > 1]
    head_stride = array.strides[2] if num_heads > 1 else 0
    return (
        array.dtype in DATA_TYPES
        and array.size > 0
        and head_dim % span_of(array.dtype) == 0
        and array.data.ptr % 16 == 0
        and all(0 < s < MAX_STRIDE and s % 16 == 0 for s in strides)
        and head_stride % SPAN_BYTES == 0
        and max(num_pages, page_size, num_heads * max(head_stride, 1)) < MAX_SIZE
    )


def piece_tokens(page_size: int, step_tokens: int) -> int:
    """Tokens of a page that one copy brings into a step of keys."""
    return math.gcd(page_size, step_tokens)


def box_of(array: Array, step_tokens: int, head_dim: int) -> Box:
    """Describe copies of pages ``[num_pages, page_size, num_heads, dim]`` to steps of keys.

    They bring ``head_dim`` elements of each token; those past ``dim`` are other heads' or zeros.
    """
    num_pages, page_size, num_heads, dim = array.shape
    # The strides of axes of one element are never used, but must be strides.
    page, token, head = (
        s if n > 1 else SPAN_BYTES for n, s in zip(array.shape[:3], array.strides[:3], strict=True)
    )
    span = span_of(array.dtype)
    num_spans = (num_heads - 1) * (head // SPAN_BYTES) + dim // span
    spans = head_dim // span
    if page_size == 1:
        return Box((span, num_pages, num_spans), (page, SPAN_BYTES), (span, step_tokens, spans))
    groups = piece_tokens(page_size, step_tokens) // GROUP
    return Box(
        (span, GROUP, num_spans, page_size // GROUP, num_pages),
        (token, SPAN_BYTES, GROUP * token, page),
        (span, GROUP, spans, groups, 1),
    )


class Rows(NamedTuple):
    """Queries or results ``[rows, num_qo_heads, dim]``, wherever they lie."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: Any

    def map_at(self, pointer: int, group_size: int) -> bytes | None:
        """Make the map of such an array; None: there is none.

        A copy brings a team's packed rows: all heads of a group, of as many rows as that is.
        """
        rows, num_heads, dim = self.shape
        span = span_of(self.dtype)
        row, head = (
            s if n > 1 else SPAN_BYTES
            for n, s in zip(self.shape[:2], self.strides[:2], strict=True)
        )
        if (
            self.dtype not in DATA_TYPES
            or dim % span
            or TEAM_ROWS % group_size
            or not all(0 < s < MAX_STRIDE and s % 16 == 0 for s in (row, head))
            or pointer % 16
            or rows >= MAX_SIZE
        ):
            return None
        box = Box(
            (span, num_heads, rows, dim // span),
            (head, row, SPAN_BYTES),
            (span, group_size, TEAM_ROWS // group_size, dim // span),
        )
        return encode(pointer, self.dtype, box)


class MappedLaunch:
    """A launch that is bound to maps of queries and results, which belong to their addresses.

    ``bind`` binds it but for them; calls give the fields of a launch that ``bind`` leaves open, of
    which the second and third are the addresses of q and o.
    """

    __slots__ = ("_bind", "_group_size", "_launches", "_o", "_q")

    def __init__(self, bind: Callable[..., BoundLaunch], q: Rows, o: Rows, group_size: int) -> None:
        self._bind, self._q, self._o, self._group_size = bind, q, o, group_size
        self._launches: dict[tuple[int, int], BoundLaunch] = {}

    def __call__(self, table: bytes, q: int, o: int, *others: Any) -> None:
        """Launch on arrays at these addresses; those that come again find their maps."""
        launch = self._launches.get((q, o))
        if launch is None:
            q_map = self._q.map_at(q, self._group_size)
            o_map = self._o.map_at(o, self._group_size)
            launch = self._bind(
                q_map=q_map or NO_MAP,
                o_map=o_map or NO_MAP,
                q_mapped=q_map is not None,
                o_mapped=o_map is not None,
            )
            remember(self._launches, (q, o), launch)
        launch(table, q, o, *others)


def kv_maps(pages: PagePair, step_tokens: int, head_dim: int, head_dim_vo: int) -> KvMaps:
    """Make the maps of keys and values that ``copies_of`` allows."""
    k, v = (p.array for p in pages)
    k_spans, v_spans = (a.strides[2] // SPAN_BYTES if a.shape[2] > 1 else 0 for a in (k, v))
    return KvMaps(
        encode(k.data.ptr, k.dtype, box_of(k, step_tokens, head_dim)),
        encode(v.data.ptr, v.dtype, box_of(v, step_tokens, head_dim_vo)),
        k_spans,
        v_spans,
        piece_tokens(pages.page_size, step_tokens).bit_length() - 1,
    )


@functools.cache
def _cu_tensor_map_encode_tiled() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


def encode(pointer: int, dtype: Any, box: Box, l2_promotion: int = L2_PROMOTION_256B) -> bytes:
    """Have the driver make a map; what lies outside of the array reads as zeros.

    ``l2_promotion`` says how much the L2 brings of what a copy asks for.
    """
    memory = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    address = ctypes.addressof(memory)
    offset = -address % _MAP_ALIGNMENT
    rank = len(box.sizes)
    error = _cu_tensor_map_encode_tiled()(
        ctypes.c_void_p(address + offset),
        DATA_TYPES[dtype],
        rank,
        ctypes.c_void_p(pointer),
        _numbers(ctypes.c_uint64, box.sizes),
        _numbers(ctypes.c_uint64, box.strides),
        _numbers(ctypes.c_uint32, box.box),
        _numbers(ctypes.c_uint32, (1,) * rank),
        0,  # not interleaved
        _SWIZZLE_128B,
        l2_promotion,
        0,  # zeros outside
    )
    if error:
        raise RuntimeError(f"cukv: cuTensorMapEncodeTiled gave CUDA error {error} for {box}")
    return memory.raw[offset : offset + _MAP_BYTES]


def _numbers(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)
