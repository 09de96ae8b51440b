"""Which tile, and so which kernel, serves an attention call: chosen by sizes, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cukv._kernels import num_sms, smem_limits
from cukv._specialisations import decode_tiles, prefill_tiles

if TYPE_CHECKING:
    from cukv._pages import PagePair
    from cukv._specialisations import Tile

_SHORT_TOKENS = 2048  # of a request
_SYSTEM_SMEM = 1024  # bytes that each CTA takes of an SM's shared memory beside its own


def choose_tile(
    op: str,
    pages: PagePair,
    aligned: bool,
    num_rows: int,
    group_size: int,
    batch_size: int,
    num_tokens: int,
    one_row: bool,
    batch_invariant: bool,
) -> Tile:
    """Choose a tile by the sizes of a call.

    A batch-invariant one must not depend on the batch.
    """
    k, v, device = pages.first.array, pages.second.array, pages.first.device
    every: tuple[Tile, ...] = (*decode_tiles(), *prefill_tiles())
    tiles: list[Tile] = [
        tile
        for tile in every
        if tile.dtype == k.dtype
        and tile.head_dim >= k.shape[3]
        and tile.head_dim_vo >= v.shape[3]
        and tile.aligned == aligned
    ]
    tiles = [tile for tile in tiles if tile[1:3] == tiles[0][1:3]]  # the narrowest
    least = min(tile.smem_bytes for tile in tiles)
    tiles = [tile for tile in tiles if ctas_per_sm(tile, device)]
    if not tiles:
        raise NotImplementedError(
            f"{op}: head_dim={k.shape[3]} needs {least} bytes of shared memory per CTA, this GPU "
            f"has {smem_limits(device)[0]}"
        )

    # As many rows as the average request has, if a tile holds them.
    packed = group_size if one_row else -(-num_rows * group_size // batch_size)
    if batch_invariant and not one_row:
        packed = 16
    most = max(tile.rows for tile in tiles)
    rows = min(tile.rows for tile in tiles if tile.rows >= min(packed, most))
    tiles = [tile for tile in tiles if tile.rows == rows]

    # CTAs of 8 warps merge fewer states. Two of 4 warps per SM lose less at the ends of tiles,
    # which counts where there are many short ones (512 requests of 319 tokens on an H200: 158
    # us for 204; 128 of 2048: the same).
    many = batch_size * k.shape[2] > 2 * num_sms(device)
    if batch_invariant or (many and num_tokens <= _SHORT_TOKENS * batch_size):
        tiles.reverse()
    return tiles[0]


def ctas_per_sm(tile: Tile, device: int) -> int:
    """CTAs of a tile that an SM holds at a time: as many as were asked for, if they fit."""
    per_cta, per_sm = smem_limits(device)
    if tile.smem_bytes > per_cta:
        return 0
    return min(tile.ctas_per_sm, per_sm // (tile.smem_bytes + _SYSTEM_SMEM))
