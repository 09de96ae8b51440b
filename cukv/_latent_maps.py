"""Tensor maps of latent pages: with them a kernel has whole tiles copied to shared memory.

``kernels/mla_decode_sm90.cu`` and ``kernels/mla_stream_sm90.cu`` see each part of a cache as spans
of 128 bytes, and copy some tokens of one page and one span at a time; a map swizzles them. What a
row lacks of a span, as kpe of fp8 does, comes as zeros.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from cukv._arrays import FLOAT8_E4M3
from cukv._tensor_maps import (
    DATA_TYPES,
    GROUP,
    L2_PROMOTION_128B,
    L2_PROMOTION_256B,
    MAX_SIZE,
    MAX_STRIDE,
    NO_MAP,
    SPAN_BYTES,
    Box,
    encode,
    span_of,
)

if TYPE_CHECKING:
    from cukv._arrays import Array
    from cukv._pages import PagePair

# Of both kernels: LATENT_TOKENS in kernels/common/latent_sm90.cuh, MlaStreamSm90Tile.tokens.
_STEP_TOKENS = 64


class LatentMaps(NamedTuple):
    """What ``LatentMappedParams`` says of a cache."""

    ckv_map: bytes
    kpe_map: bytes
    piece_bits: int


NO_MAPS = LatentMaps(NO_MAP, NO_MAP, 0)


def can_be_mapped(pages: PagePair) -> bool:
    """Tell whether tensor maps can read both parts of a cache."""
    return pages.page_size % GROUP == 0 and all(_has_map(p.array) for p in pages)


def _has_map(array: Array) -> bool:
    num_pages, page_size, _, dim = array.shape
    strides = [s for n, s in zip(array.shape[:2], array.strides[:2], strict=True) if n > 1]
    return (
        array.dtype in DATA_TYPES
        and array.size > 0
        and (dim % span_of(array.dtype) == 0 or dim < span_of(array.dtype))
        and array.data.ptr % 16 == 0
        and all(0 < s < MAX_STRIDE and s % 16 == 0 for s in strides)
        and max(num_pages, page_size) < MAX_SIZE
    )


def latent_maps(pages: PagePair) -> LatentMaps:
    """Make the maps of a cache that can be mapped."""
    ckv, kpe = (p.array for p in pages)
    piece = math.gcd(pages.page_size, _STEP_TOKENS)
    # Attending to rows of e4m3 takes little but the time of reading them, a tenth of it more if the
    # L2 brings 256 bytes at a time, twice what a copy reads of a row. Rows of 16 bits do not mind.
    promotion = L2_PROMOTION_128B if ckv.dtype == FLOAT8_E4M3 else L2_PROMOTION_256B
    ckv_map, kpe_map = (
        encode(x.data.ptr, x.dtype, box_of(x, piece), promotion) for x in (ckv, kpe)
    )
    return LatentMaps(ckv_map, kpe_map, piece.bit_length() - 1)


def box_of(array: Array, piece_tokens: int) -> Box:
    """Describe copies of some tokens and one span of pages ``[num_pages, page_size, 1, dim]``."""
    num_pages, page_size, _, dim = array.shape
    # The strides of axes of one element are never used, but must be strides.
    page, token = (
        s if n > 1 else SPAN_BYTES for n, s in zip(array.shape[:2], array.strides[:2], strict=True)
    )
    span = span_of(array.dtype)
    return Box(
        (min(dim, span), page_size, max(dim // span, 1), num_pages),
        (token, SPAN_BYTES, page),
        (span, piece_tokens, 1, 1),
    )
