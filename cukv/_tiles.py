"""Which tiles, and so which kernels, serve an attention call: chosen by sizes, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cukv._geometry import DecodeTile, PrefillTile, Sm90Tile
from cukv._kernels import arch_of, num_sms, smem_limits
from cukv._specialisations import decode_tiles, prefill_tiles, runs_on, sm90_tiles

if TYPE_CHECKING:
    from cukv._arrays import Array
    from cukv._geometry import LatentTile, MlaStreamSm90Tile, Tile
    from cukv._pages import PagePair
    from cukv._tensor_maps import Copies

_SHORT_TOKENS = 2048  # of a request
_BRIEF_TOKENS = 1024  # of a cascade's leaf
_LONG_BYTES = 6 << 20  # of keys and values, for an SM to read
_MAX_HEADS_AT_ONCE = 8  # KV heads that prefill_sm90 works on
_SYSTEM_SMEM = 1024  # bytes that each CTA takes of an SM's shared memory beside its own


# So many packed rows, of all requests, are never worth a second launch.
_FEW_ROWS = 2048
# A request of so many packed rows or fewer is better off with the tiles of decode, even with two of
# them: a tile of 128 rows takes the tensor cores longer than two read the same keys.
_SHORT_ROWS = 32
_ALL_ROWS = (0, (1 << 31) - 1)


class Served(NamedTuple):
    """A tile, and which requests it serves: those of min_rows to max_rows packed rows."""

    tile: Tile
    min_rows: int
    max_rows: int


class Grid(NamedTuple):
    """How a call's work is dealt to CTAs."""

    num_ctas: int
    num_parts: int  # of the work list, each with an equal share of a KV head's keys
    heads: int  # KV heads that are worked on at a time


def choose_tiles(
    op: str,
    pages: PagePair,
    aligned: bool,
    num_rows: int,
    group_size: int,
    batch_size: int,
    num_tokens: int,
    one_row: bool,
    batch_invariant: bool,
    copies: Copies | None,
) -> tuple[Served, ...]:
    """Choose a tile by the sizes of a call, or two: for requests of few rows and of many.

    A batch-invariant one must not depend on the batch. ``copies`` tell how a kernel of Hopper's
    would copy keys and values; None: it cannot.
    """
    tiles = _fitting(op, pages, aligned, batch_size, num_tokens, batch_invariant)

    # As many rows as the average request has, if a tile holds them.
    packed = group_size if one_row else -(-num_rows * group_size // batch_size)
    if batch_invariant and not one_row:
        packed = 16
    if one_row or batch_invariant:
        return (Served(_of_rows(tiles, packed), *_ALL_ROWS),)
    if batch_size == 1 or num_rows * group_size <= _FEW_ROWS:
        return (Served(_on_hopper(_of_rows(tiles, packed), pages, copies), *_ALL_ROWS),)
    # A long prompt may be among requests of a row or few, whatever the average.
    few = [tile for tile in tiles if tile.rows <= _SHORT_ROWS]
    many_rows = [tile for tile in tiles if tile.rows > _SHORT_ROWS]
    if not (few and many_rows):  # a GPU may have too little shared memory for either
        return (Served(_of_rows(tiles, packed), *_ALL_ROWS),)
    return (
        Served(_of_rows(few, packed if packed <= _SHORT_ROWS else group_size), 0, _SHORT_ROWS),
        Served(
            _on_hopper(_of_rows(many_rows, packed), pages, copies), _SHORT_ROWS + 1, _ALL_ROWS[1]
        ),
    )


def choose_level_tiles(
    op: str,
    pages: PagePair,
    aligned: bool,
    num_rows: int,
    group_size: int,
    batch_size: int,
    num_tokens: int,
    copies: Copies | None,
) -> tuple[Served, Served]:
    """Choose tiles for what a cascade's leaves share, and for its leaves, whose sizes are given.

    The first serves leaves of many rows too. It has tiles of many rows whatever is shared: with
    few, a tile of 128 still takes tensor cores no longer than the memory takes for its keys.
    """
    sizes = (op, pages, aligned, batch_size, num_tokens)
    tiles = _fitting(*sizes, batch_invariant=False)
    few = _fitting(*sizes, batch_invariant=False, most_rows=_SHORT_ROWS)
    packed = -(-num_rows * group_size // max(batch_size, 1))
    shared = _on_hopper(_of_rows(tiles, _ALL_ROWS[1]), pages, copies)
    leaves = _of_rows(few, packed if packed <= _SHORT_ROWS else group_size)
    # While one of an SM's four CTAs ends an item and begins the next, the others keep the memory
    # busy: 256 leaves of 128 tokens took an H200 39 us, and 44 with two CTAs of two buffers a warp.
    many_brief = _tiles_per_sm(pages, batch_size) > 2 and num_tokens <= _BRIEF_TOKENS * batch_size
    if many_brief and isinstance(leaves, DecodeTile):
        brief = leaves._replace(warps=4, brief=True)
        if brief in decode_tiles() and ctas_per_sm(brief, pages.first.device) == brief.ctas_per_sm:
            leaves = brief
    return Served(shared, _SHORT_ROWS + 1, _ALL_ROWS[1]), Served(leaves, 0, _SHORT_ROWS)


def _fitting(
    op: str,
    pages: PagePair,
    aligned: bool,
    batch_size: int,
    num_tokens: int,
    batch_invariant: bool,
    most_rows: int = _ALL_ROWS[1],
) -> list[DecodeTile | PrefillTile]:
    """Give the portable tiles that a cache's heads fit in, those that suit a call better first."""
    k, v, device = pages.first.array, pages.second.array, pages.first.device
    every: tuple[DecodeTile | PrefillTile, ...] = (*decode_tiles(), *prefill_tiles())
    tiles: list[DecodeTile | PrefillTile] = [
        tile
        for tile in every
        if tile.dtype == k.dtype
        and tile.head_dim >= k.shape[3]
        and tile.head_dim_vo >= v.shape[3]
        and tile.aligned == aligned
        and tile.rows <= most_rows
        and not tile.plain
        and not (isinstance(tile, DecodeTile) and tile.brief)
    ]
    tiles = [tile for tile in tiles if tile[1:3] == tiles[0][1:3]]  # the narrowest
    least = min(tile.smem_bytes for tile in tiles)
    tiles = [tile for tile in tiles if ctas_per_sm(tile, device)]
    if not tiles:
        raise NotImplementedError(
            f"{op}: head_dim={k.shape[3]} needs {least} bytes of shared memory per CTA, this GPU "
            f"has {smem_limits(device)[0]}"
        )

    # CTAs of 8 warps merge fewer states. Two of 4 warps per SM lose less at the ends of tiles,
    # which counts where there are many short ones (512 requests of 319 tokens on an H200: 158
    # us for 204), and keep the memory busier when every SM has much to read (64 of 8192 tokens:
    # 480 us for 490; 16 of 8192: the same; 16 of 1024: 21 for 18).
    token_bytes = k.shape[2] * (k.shape[3] + v.shape[3]) * k.dtype.itemsize
    bytes_per_sm = num_tokens * token_bytes / num_sms(device)
    many_short = _tiles_per_sm(pages, batch_size) > 2 and num_tokens <= _SHORT_TOKENS * batch_size
    if batch_invariant or many_short or bytes_per_sm >= _LONG_BYTES:
        tiles.reverse()
    return tiles


def _tiles_per_sm(pages: PagePair, batch_size: int) -> float:
    """Give the tiles of decode that an SM has, if each request is one for every KV head."""
    return batch_size * int(pages.first.array.shape[2]) / num_sms(pages.first.device)


def _of_rows(tiles: list[DecodeTile | PrefillTile], packed: int) -> Tile:
    """Give the first of the narrowest tiles that hold so many packed rows, or of the widest."""
    most = max(tile.rows for tile in tiles)
    rows = min(tile.rows for tile in tiles if tile.rows >= min(packed, most))
    return next(tile for tile in tiles if tile.rows == rows)


def copies_in_call(
    q: Array, pages: PagePair, copies: Copies | None, capped: bool, masked: bool
) -> Copies | None:
    """Tell how Hopper's own kernel copies what a call attends to; None: it has no such tile.

    It multiplies queries and keys as they are, which are of one dtype then. A portable tile in the
    place of one that is not there would have the CTAs of that: half of its own, maybe.
    """
    k, v = pages.first.array, pages.second.array
    if copies is None or q.dtype != k.dtype:
        return None
    form = (k.dtype, k.shape[3], v.shape[3], *copies, capped, masked)
    return copies if any(tile[:7] == form for tile in sm90_tiles()) else None


def _on_hopper(tile: Tile, pages: PagePair, copies: Copies | None) -> Tile:
    """Give Hopper's own tile in place of a portable one, where there is one."""
    k, v = pages.first.array, pages.second.array
    hopper = runs_on("prefill_sm90", arch_of(pages.first.device))
    if isinstance(tile, PrefillTile) and hopper and copies is not None:
        sizes = (k.dtype, k.shape[3], v.shape[3], *copies, tile.rows)
        for other in sm90_tiles():
            if (*other[:5], other.rows) == sizes:
                return other
    return tile


def portable_tile(tile: Tile, aligned: bool) -> Tile:
    """Give the portable kernel's tile that works off the same work list."""
    return next(
        other
        for other in prefill_tiles()
        if (other.dtype, other.head_dim_vo, other.rows, other.aligned)
        == (tile.dtype, tile.head_dim_vo, tile.rows, aligned)
        and other.head_dim >= tile.head_dim
    )


def choose_grid(tile: Tile, num_kv_heads: int, device: int) -> Grid:
    """Deal work to as many CTAs as run at a time."""
    num_ctas = num_sms(device) * ctas_per_sm(tile, device)
    num_parts = max(1, num_ctas // num_kv_heads)
    if isinstance(tile, Sm90Tile):
        # Keys of so many heads stay in the L2.
        heads = max(n for n in range(1, _MAX_HEADS_AT_ONCE + 1) if num_kv_heads % n == 0)
        return Grid(num_ctas, num_parts, heads)
    return Grid(num_parts * num_kv_heads, num_parts, num_kv_heads)


def ctas_per_sm(tile: Tile | LatentTile | MlaStreamSm90Tile, device: int) -> int:
    """CTAs of a tile that an SM holds at a time: as many as were asked for, if they fit."""
    per_cta, per_sm = smem_limits(device)
    if tile.smem_bytes > per_cta:
        return 0
    return min(tile.ctas_per_sm, per_sm // (tile.smem_bytes + _SYSTEM_SMEM))
