"""Launches of attention over pages: what a kernel is given, packed once for all calls alike."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cukv._arrays import FLOAT32, Array
from cukv._attention import output_dtype
from cukv._captures import launch_overlapping
from cukv._geometry import DecodeTile, PrefillTile
from cukv._index import UNIT_SCALE, pack_divisor
from cukv._kernels import WARP, BoundLaunch, kernel
from cukv._launches import NO_LEVELS, are_aligned, pack_query_rows
from cukv._plan import LONGEST_WINDOW
from cukv._specialisations import KINDS, prefill_tiles
from cukv._tensor_maps import KvMaps, MappedLaunch, Rows

if TYPE_CHECKING:
    from cukv._attention import PagedCall
    from cukv._cascade import LevelBatch
    from cukv._geometry import Tile
    from cukv._pages import PagePair
    from cukv._tiles import Grid

_PER_CALL = (
    "table", "q", "o", "lse", "sinks", "first_seen", "levels", "work",
    "q_scale", "k_scale", "v_scale", "inputs_ready",
)  # fmt: skip
_VECTOR_BYTES = 16


class CallLaunch:
    """The launches of a call, one for each of its work lists.

    ``arrays`` are the first of ``_PER_CALL``, up to ``first_seen``.
    """

    __slots__ = ("_launches", "_overlaps")

    def __init__(self, launches: tuple[BoundLaunch, ...], first_tile: type | None) -> None:
        self._launches = launches
        # Decode alone: no other kernel looks at inputs_ready, or lets the next one in only after it
        # has waited itself.
        self._overlaps = len(launches) == 1 and first_tile is DecodeTile

    def __call__(
        self,
        arrays: tuple[Any, ...],
        lists: tuple[bytes, ...],
        scales: tuple[Any, ...],
        device: int,
        reads: tuple[Any, ...],
        writes: tuple[Any, ...],
    ) -> None:
        """Launch; ``reads`` and ``writes`` are ``launch_overlapping``'s."""
        if self._overlaps:
            arguments = (*arrays, NO_LEVELS, *lists, *scales)
            launch_overlapping(self._launches[0], arguments, device, reads, writes)
        else:
            for launch, packed in zip(self._launches, lists, strict=True):
                launch(*arrays, NO_LEVELS, packed, *scales, 0)

    def cascade(
        self,
        arrays: tuple[Any, ...],
        lists: tuple[bytes, ...],
        scales: tuple[Any, ...],
        levels: LevelBatch,
    ) -> None:
        """Launch a cascade. v_scale and sinks come once; the leaves wait for states only."""
        shared, leaves = self._launches
        shared(*arrays[:2], *levels.for_shared, lists[0], *scales[:2], UNIT_SCALE, 0)
        leaves(*arrays, levels.packed, lists[1], *scales, 1)


def bind(
    tile: Tile,
    grid: Grid,
    pages: PagePair,
    maps: KvMaps | None,
    options: dict[str, Any],
    q: Array,
    sinks: Array | None,
    out: Array | None,
    lse: Array | None,
) -> BoundLaunch:
    """Prepare the launch of calls of one signature; ``maps`` are None where a tile needs none.

    Calls give addresses, scales, table and work list.
    """
    k, v = pages
    heads, num_kv_heads, head_dim_vo = q.shape[:2], k.array.shape[2], v.array.shape[3]
    group_size = q.shape[1] // num_kv_heads
    out_shape, out_dtype = (*heads, head_dim_vo), output_dtype(q) if out is None else out.dtype
    out_vector = 4 * out_dtype.itemsize if maps is None else _VECTOR_BYTES  # stored together
    launch = functools.partial(
        kernel(tile.kernel, k.device, **tile.template_args).bind,
        grid.num_ctas,
        tile.warps * WARP,
        tile.smem_bytes,
        per_call=_PER_CALL,
        k_cache=k.packed,
        v_cache=v.packed,
        q_rows=pack_query_rows(q, _VECTOR_BYTES),
        o_rows=pack_query_rows(out, out_vector, out_shape, out_dtype),
        lse_rows=pack_query_rows(lse, FLOAT32.itemsize, heads, FLOAT32),
        sinks_stride=0 if sinks is None else sinks.strides[0],
        group=pack_divisor(group_size),
        sinks_kind=0 if sinks is None else KINDS[sinks.dtype],
        head_dim=k.array.shape[3],
        head_dim_vo=head_dim_vo,
        sm_scale=options["sm_scale"],
        logits_soft_cap=options["logits_soft_cap"] or 0.0,
        causal=options["causal"],
        window_left=min(options["window_left"], LONGEST_WINDOW),
    )
    if maps is None:
        return launch()
    return MappedLaunch(
        functools.partial(launch, heads_at_once=grid.heads, **maps._asdict()),
        Rows(q.shape, q.strides, q.dtype),
        Rows(
            out_shape, _contiguous(out_shape, out_dtype) if out is None else out.strides, out_dtype
        ),
        group_size,
    )


def is_plain(
    tile: DecodeTile | PrefillTile,
    pages: PagePair,
    call: PagedCall,
    options: dict[str, Any],
    sinks: Array | None,
    out: Array | None,
) -> bool:
    """Tell whether a call is one that ``decode`` or ``prefill_sm80`` calls PLAIN.

    One of ``prefill_sm80`` may be causal, or have a custom mask: MASKED there.
    """
    rows = (call.q,) if out is None else (call.q, out)  # a new one is contiguous, and alike
    if isinstance(tile, PrefillTile):
        suits = _has_runs(pages, tile.tokens // tile.warps)
    else:
        suits = not options["causal"] and call.custom_mask is None
    return (
        suits
        and sinks is None
        and not options["logits_soft_cap"]
        and options["window_left"] < 0
        and tile[1:3] == tuple(part.array.shape[3] for part in pages)
        and all(x.dtype == tile.dtype and are_aligned(x, _VECTOR_BYTES) for x in rows)
    )


def goes_by_halves(tile: Tile, pages: PagePair, call: PagedCall, capped: bool) -> bool:
    """Tell whether calls leave out halves of steps (HALVES in kernels/prefill_sm80.cu).

    As far as a plan knows; it must not depend on more than plans of a kind share.
    """
    dims = pages.first.array.shape[3], pages.planned_head_dim_vo
    return (
        isinstance(tile, PrefillTile)
        and tile._replace(plain=True, paged=False) in prefill_tiles()
        and pages.consecutive
        and tile[:3] == (call.q.dtype, *dims)
        and call.window_left < 0
        and call.custom_mask is None
        and call.levels is None
        and not capped
    )


def _has_runs(pages: PagePair, tokens: int) -> bool:
    """Tell whether aligned runs of so many tokens lie in one page, and numbers in 32 bits."""
    if pages.consecutive:
        runs = all(len(part.array) < 1 << 31 for part in pages)  # whose pages are rows
    else:
        runs = pages.page_size % tokens == 0
    return runs and all(0 <= s < 1 << 32 for part in pages for s in part.array.strides[:2])


def _contiguous(shape: tuple[int, ...], dtype: Any) -> tuple[int, int, int]:
    """Give the byte strides of a new array ``[rows, heads, dim]``."""
    _, heads, dim = shape
    return heads * dim * dtype.itemsize, dim * dtype.itemsize, dtype.itemsize
