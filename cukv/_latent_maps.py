"""Tensor maps of latent pages: with them a kernel has whole tiles copied to shared memory.

``kernels/mla_decode_sm90.cu`` sees each part of a cache as blocks of 64 columns, and copies some
tokens of one page and one block at a time; a map swizzles them.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from cukv._arrays import BFLOAT16, FLOAT16

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cukv._arrays import Array
    from cukv._pages import PagePair

_BLOCK = 64  # columns, of 128 bytes
_BLOCK_BYTES = 128
_GROUP = 8  # tokens that a swizzle pattern spans
_STEP_TOKENS = 64  # LATENT_TOKENS in kernels/common/latent_sm90.cuh
_MAX_STRIDE = 1 << 40  # bytes, exclusive
_MAX_SIZE = 1 << 31  # of an axis, so that coordinates are int32

# CUtensorMapDataType, ...Swizzle, ...L2promotion of cuda.h
_DATA_TYPES = {FLOAT16: 6, BFLOAT16: 9}
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


class LatentMaps(NamedTuple):
    """What ``LatentSm90Params`` says of a cache."""

    ckv_map: bytes
    kpe_map: bytes
    piece_bits: int


NO_MAPS = LatentMaps(bytes(_MAP_BYTES), bytes(_MAP_BYTES), 0)


class Box(NamedTuple):
    """An array and what one copy brings of it, axes innermost first."""

    sizes: tuple[int, ...]  # of the array
    strides: tuple[int, ...]  # bytes, of all axes but the innermost
    box: tuple[int, ...]


def can_be_mapped(pages: PagePair) -> bool:
    """Tell whether tensor maps can read both parts of a cache."""
    return pages.page_size % _GROUP == 0 and all(_has_map(p.array) for p in pages)


def _has_map(array: Array) -> bool:
    num_pages, page_size, _, dim = array.shape
    strides = [s for n, s in zip(array.shape[:2], array.strides[:2], strict=True) if n > 1]
    return (
        array.dtype in _DATA_TYPES
        and array.size > 0
        and dim % _BLOCK == 0
        and array.data.ptr % 16 == 0
        and all(0 < s < _MAX_STRIDE and s % 16 == 0 for s in strides)
        and max(num_pages, page_size) < _MAX_SIZE
    )


def latent_maps(pages: PagePair) -> LatentMaps:
    """Make the maps of a cache that can be mapped."""
    ckv, kpe = (p.array for p in pages)
    piece = math.gcd(pages.page_size, _STEP_TOKENS)
    return LatentMaps(
        _encode(ckv, box_of(ckv, piece)), _encode(kpe, box_of(kpe, piece)), piece.bit_length() - 1
    )


def box_of(array: Array, piece_tokens: int) -> Box:
    """Describe copies of some tokens and one block of pages ``[num_pages, page_size, 1, dim]``."""
    num_pages, page_size, _, dim = array.shape
    # The strides of axes of one element are never used, but must be strides.
    page, token = (
        s if n > 1 else _BLOCK_BYTES
        for n, s in zip(array.shape[:2], array.strides[:2], strict=True)
    )
    return Box(
        (_BLOCK, page_size, dim // _BLOCK, num_pages),
        (token, _BLOCK_BYTES, page),
        (_BLOCK, piece_tokens, 1, 1),
    )


@functools.cache
def _cu_tensor_map_encode_tiled() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


def _encode(array: Array, box: Box) -> bytes:
    """Have the driver make a map; what lies outside of the array reads as zeros."""
    memory = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    address = ctypes.addressof(memory)
    offset = -address % _MAP_ALIGNMENT
    rank = len(box.sizes)
    error = _cu_tensor_map_encode_tiled()(
        ctypes.c_void_p(address + offset),
        _DATA_TYPES[array.dtype],
        rank,
        ctypes.c_void_p(array.data.ptr),
        _numbers(ctypes.c_uint64, box.sizes),
        _numbers(ctypes.c_uint64, box.strides),
        _numbers(ctypes.c_uint32, box.box),
        _numbers(ctypes.c_uint32, (1,) * rank),
        0,  # not interleaved
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        0,  # zeros outside
    )
    if error:
        raise RuntimeError(f"cukv: cuTensorMapEncodeTiled gave CUDA error {error} for {box}")
    return memory.raw[offset : offset + _MAP_BYTES]


def _numbers(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)
