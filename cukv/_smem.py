"""Shared memory of attention kernels: the structs that they lay over it, as the host sizes them.

Each layout has the fields of its kernel's struct, by their names and in their order, under C's own
rules of alignment. ``tests/test_kernels.py`` holds every size to the compiler's.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

from cukv._arrays import FP8

if TYPE_CHECKING:
    from cukv._geometry import (
        DecodeTile,
        MlaDecodeSm90Tile,
        MlaDecodeTile,
        MlaStreamSm90Tile,
        PrefillTile,
        Sm90Tile,
    )


class Field(NamedTuple):
    """A C object: its bytes, and what its address is a multiple of."""

    size: int
    alignment: int = 1


# Sizes in bytes.
_INT = _FLOAT = Field(4, 4)
_POINTER = _BARRIER = _INT64 = _FLOAT2 = Field(8, 8)
_VECTOR = Field(16, 16)  # uint4
_SWIZZLED = 1024  # alignment of tiles and buffers
_WARP = 32


def _array(element: Field, *lens: int) -> Field:
    return Field(element.size * math.prod(lens), element.alignment)


def _bytes(*lens: int) -> Field:
    return _array(Field(1), *lens)


def _struct(alignment: int = 1, /, **fields: Field) -> Field:
    """Lay fields out one after the other, aligned as they are or more."""
    size = 0
    for field in fields.values():
        size += -size % field.alignment + field.size
        alignment = max(alignment, field.alignment)
    return Field(size + -size % alignment, alignment)


_ITEM = _struct(16, fields=_array(_INT, 12))  # kernels/common/work.cuh
_GATE = _struct(item=_ITEM, opened=_INT, shares=_INT)  # kernels/common/latent_merge.cuh


def _query_tile(rows: int, head_dim: int) -> Field:
    """Lay out QueryTile of kernels/common/queries.cuh, whose rows are padded."""
    return _struct(16, x=_bytes(rows, head_dim + 8, 2), factor=_array(_FLOAT, rows))


@functools.cache
def decode(tile: DecodeTile) -> int:
    """Size of ``DecodeCta::Smem`` in kernels/decode.cu."""
    warps, rows, head_dim_vo = tile.warps, tile.rows, tile.head_dim_vo
    token_bytes = (tile.head_dim + head_dim_vo) * tile.dtype.itemsize
    states = _struct(
        o=_array(_FLOAT, warps, rows, head_dim_vo + 4),
        m=_array(_FLOAT, warps, rows),
        d=_array(_FLOAT, warps, rows),
    )
    smem = _struct(
        _SWIZZLED,
        ring=_bytes(warps, tile.stages, tile.tokens, token_bytes),
        states=states,
        q=_array(_query_tile(rows, tile.head_dim), 2),
        rows=_array(_POINTER, warps, 2, tile.tokens),  # of keys and of values
        keys=_bytes(warps, tile.stages, tile.tokens // 8),
        last=_INT,
    )
    return smem.size


def _run_ring(tile: PrefillTile, steps: Field) -> tuple[Field, Field]:
    """Lay out Buffers and Own of ``RunRing`` in kernels/common/run_ring.cuh."""
    operands = _array(_INT, 3)
    lane = _struct(16, k_from=_POINTER, v_from=_POINTER, to=_INT, operands=operands)
    buffers = _struct(
        _SWIZZLED,
        bytes=steps,
        lanes=_array(lane, tile.warps, _WARP),
        num_keys=_bytes(4, tile.warps),
    )
    page = _array(_INT, 2)
    own = _struct(
        runs=_array(_struct(16, page=page, entry=_INT, num_keys=_INT), 4 if tile.masked else 2),
        tokens=_array(_INT, 2),
        first_page=_INT,
        end_token=_INT,
        item_idx=_INT,
        end_item=_INT,
        mask_entry=_INT,
    )
    return buffers, own


def _shared_ring(tile: PrefillTile, steps: Field) -> tuple[Field, Field]:
    """Lay out Buffers and Own of ``SharedRing`` in kernels/common/shared_ring.cuh."""
    own_rows = tile.tokens // tile.warps
    cache = _struct(16, base=_POINTER, page_stride=_INT64, token_stride=_INT64, num_pages=_INT64)
    buffers = _struct(
        _SWIZZLED,
        bytes=steps,
        caches=_array(cache, 2),
        keys=_struct(16, x=_bytes(4, tile.tokens)),
    )
    row = _struct(16, begin=_array(_POINTER, 2), is_key=_INT)
    row_place = _struct(page=_array(_INT, 2), entry=_INT)
    own = _struct(
        rows=_array(row, 2, own_rows),
        places=_array(row_place, 2, own_rows),
        place=_array(_INT, 2, 6),  # StepPlace of kernels/common/kv_ring.cuh
    )
    return buffers, own


@functools.cache
def prefill_sm80(tile: PrefillTile) -> int:
    """Size of ``PrefillCta::Smem`` in kernels/prefill_sm80.cu."""
    token_bytes = (tile.head_dim + tile.head_dim_vo) * tile.dtype.itemsize
    lay_out = _run_ring if tile.plain else _shared_ring
    buffers, own_ring = lay_out(tile, _bytes(2, tile.tokens, token_bytes))
    own = _struct(
        items=_array(_ITEM, 2),
        item_idx=_INT,
        end_item=_INT,
        sight=_array(_INT, 8),  # kernels/common/logits.cuh
        ring=own_ring,
    )
    smem = _struct(
        ring=buffers,
        q=_query_tile(tile.rows, tile.head_dim),
        warps=_array(own, tile.warps),
        kv_head=_INT,
        scale=_FLOAT,
        late_scale=_FLOAT,
        last=_INT,
    )
    return smem.size


@functools.cache
def prefill_sm90(tile: Sm90Tile) -> int:
    """Size of ``PrefillSm90Cta::Smem`` in kernels/prefill_sm90.cu."""
    slots, (k_stages, v_stages) = tile.slots, tile.stages
    teams, dealt, copies_stages = 2, 4, 2
    k_bytes, v_bytes = (
        tile.tokens * dim * tile.dtype.itemsize for dim in (tile.head_dim, tile.head_dim_vo)
    )
    order = _struct(16, item=_ITEM, kv_head=_INT, results=_INT)
    copies = _bytes(1)  # NoCopies has no fields
    if tile.dtype in FP8:  # Fp8Copies of kernels/common/fp8_values.cuh
        copies = _struct(
            _SWIZZLED,
            tiles=_bytes(copies_stages, v_bytes),
            full=_array(_BARRIER, copies_stages),
            empty=_array(_BARRIER, copies_stages),
            num_keys=_array(_INT, copies_stages),
        )
    smem = _struct(
        _SWIZZLED,
        q=_bytes(slots, tile.rows, tile.head_dim, 2),
        k=_bytes(k_stages, k_bytes),
        v=_bytes(v_stages, v_bytes),
        orders=_array(order, slots, teams),
        dealt=_array(order, dealt),
        dealt_full=_array(_BARRIER, dealt),
        dealt_empty=_array(_BARRIER, dealt),
        q_full=_array(_BARRIER, slots, teams),
        o_full=_array(_BARRIER, slots, teams),
        k_full=_array(_BARRIER, k_stages),
        k_empty=_array(_BARRIER, k_stages),
        v_full=_array(_BARRIER, v_stages),
        v_empty=_array(_BARRIER, v_stages),
        v_landed=_BARRIER,
        k_dropped=_array(_INT, k_stages, 1 if tile.mapped else 4),
        k_entry=_array(_INT, k_stages),
        last=_array(_INT, teams),
        unread=_array(_FLOAT, teams, 4),
        copies=copies,
    )
    return smem.size


@functools.cache
def mla_decode(tile: MlaDecodeTile) -> int:
    """Size of ``MlaDecodeCta::Smem`` in kernels/mla_decode.cu."""
    rows, warps, stages = tile.rows, tile.warps, tile.stages
    ckv_bytes, kpe_bytes, weight_bytes = 512 * tile.ckv.itemsize, 128, 128  # of a row
    nope_steps, pe_steps = 32, 4  # of 16 columns
    # Steps whose queries no registers hold, if any; the place of one is there without.
    nope_left = max(nope_steps - tile.held, 1)
    pe_left = 1 if tile.held == nope_steps else pe_steps
    smem = _struct(
        _SWIZZLED,
        ring=_bytes(stages, tile.tokens, ckv_bytes + kpe_bytes),
        weights=_bytes(2, rows, weight_bytes),
        nope_rest=_array(_VECTOR, nope_left, _WARP),
        pe_rest=_array(_VECTOR, pe_left, _WARP),
        maxima=_array(_FLOAT, rows, warps),
        keys=_bytes(stages, warps),
        scales=_array(Field(8, 8), rows),  # float2
        item=_ITEM,
        first_item=_INT,
        postponed=_bytes(1),
        gates=_array(_GATE, 2),
    )
    return smem.size


@functools.cache
def mla_stream_sm90(tile: MlaStreamSm90Tile) -> int:
    """Size of ``MlaStreamSm90Cta::Smem`` in kernels/mla_stream_sm90.cu."""
    rows, warps, stages = tile.rows, tile.warps, tile.stages
    row_lines, line = 5, 128  # of a key, four of them of ckv; bytes
    nope_steps, pe_steps = 32, 4  # of 16 columns
    boxes = _struct(
        buffers=_bytes(stages, row_lines, tile.tokens, line),
        full=_array(_BARRIER, stages),
        empty=_array(_BARRIER, stages),
        keys=_bytes(stages, warps),
    )
    smem = _struct(
        _SWIZZLED,
        boxes=boxes,
        weights=_array(Field(128, 128), 2, rows),
        queries=_bytes(rows, 16 * (nope_steps + pe_steps), 2),
        nope_rest=_array(_VECTOR, nope_steps - tile.held, _WARP),
        pe_rest=_array(_VECTOR, pe_steps, _WARP),
        maxima=_array(_FLOAT, rows, warps),
        scales=_array(_FLOAT2, rows),
        item=_ITEM,
        first_item=_INT,
        gates=_array(_GATE, 2),
    )
    return smem.size


@functools.cache
def mla_decode_sm90(tile: MlaDecodeSm90Tile) -> int:
    """Size of ``LatentSmem`` in kernels/common/latent_sm90.cuh, or of what fp8 adds to it."""
    rows, tokens = tile.rows, tile.tokens
    blocks, block_row_bytes = 9, 128  # of 64 columns of 16 bits: eight of ckv, one of kpe
    smem = _struct(
        _SWIZZLED,
        q=_bytes(blocks, rows, block_row_bytes),
        tiles=_bytes(2, blocks, tokens, block_row_bytes),
        maxima=_array(_FLOAT, 2, rows),
        denominators=_array(_FLOAT, 2, 2, rows),
        keys=_array(_INT64, 2),
        full=_array(_BARRIER, 2, 2, 2),
        empty=_array(_BARRIER, 2, 2),
        landed=_array(_BARRIER, 4),
        weights_full=_array(_BARRIER, 2),
        even_scored=_BARRIER,
        q_full=_BARRIER,
        q_empty=_BARRIER,
        items=_array(_ITEM, 2),
        gates=_array(_GATE, 2),
    )
    if tile.ckv in FP8:
        smem = _struct(
            base=smem,
            scales=_array(_FLOAT2, rows),
            copied=_array(_BARRIER, 2, 4),
        )
    return smem.size
