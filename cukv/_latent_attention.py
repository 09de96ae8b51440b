"""Attention over latent pages on a GPU: plans and launches.

As ``_paged_attention.py`` does for keys and values: a cache remembers what it worked out for each
signature of a call, so that a call compares it, checks what may differ and launches.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp

from cukv._arrays import FLOAT32, FP8, Array, as_array, empty, home
from cukv._attention import (
    check_options,
    check_queries,
    check_results,
    output_dtype,
    plan_key,
    require_plan,
)
from cukv._check import match, match_dtype, match_index, match_rows, truth
from cukv._geometry import MlaDecodeSm90Tile, MlaStreamSm90Tile
from cukv._index import as_index, host_scale, pack_divisor
from cukv._kernels import BoundLaunch, arch_of, kernel, num_sms
from cukv._latent_maps import NO_MAPS, can_be_mapped, latent_maps
from cukv._launches import (
    AS_GIVEN,
    PlanKind,
    array_signature,
    make_work,
    pack_query_rows,
    require_arrays,
    require_planned_pages,
    work_of_call,
)
from cukv._plan import Batch, Cut, Plan, WorkSizes
from cukv._remember import remember
from cukv._specialisations import latent_tiles, runs_on, stream_tiles
from cukv._tiles import ctas_per_sm
from cukv.page_table import PageTable

if TYPE_CHECKING:
    from cukv._geometry import LatentTile
    from cukv._pages import PagePair
    from cukv._rows import Pages

_HEAD_DIM_CKV = 512  # kernels/common/latent.cuh
_HEAD_DIM_KPE = 64
_MAX_PARTS = 256  # MAX_LATENT_ITEMS there
# Microseconds of a part's step of fp8 on an H200, and what a call costs beside its steps, in steps.
# Calls of 4, 16, 64, 248 and 496 steps took mla_decode 16, 29, 94, 352 and 700 us; those of 2, 4,
# 16, 62 and 124 took mla_decode_sm90 25, 31, 57, 157 and 306. Calls of 93 took mla_stream_sm90 137
# and mla_decode 152.
_FP8_STEPS = {
    "mla_decode": (1.4, 6),
    "mla_stream_sm90": (1.3, 6),
    "mla_decode_sm90": (2.25, 10),
}
_PER_CALL = ("table", "q_nope", "q_pe", "o", "lse", "work", "ckv_scale", "kpe_scale")


class LatentCall(NamedTuple):
    """Attention over latent pages, but for the cache: what a plan of it must know."""

    op: str
    q_nope: Array  # [rows, num_qo_heads, head_dim_ckv]
    qo_indptr: Array | None  # rows of each request; without it there is one
    table: PageTable
    causal: bool

    @property
    def custom_mask(self) -> None:
        """What paged calls may have, and latent ones have not."""

    @property
    def first_seen(self) -> None:
        """The same."""

    @classmethod
    def of(
        cls,
        op: str,
        pages: PagePair,
        q_nope: Any,
        qo_indptr: Any,
        table: PageTable,
        causal: Any,
    ) -> LatentCall:
        """Make arrays of what a caller gave."""
        if type(table) is not PageTable or table.page_size != pages.page_size:
            pages.check_table(op, table)
        if type(q_nope) is not cp.ndarray:
            q_nope = as_array(op, "q_nope", q_nope)
        if type(qo_indptr) not in AS_GIVEN:
            qo_indptr = as_index(op, "qo_indptr", qo_indptr, table.indptr)
        return cls(op, q_nope, qo_indptr, table, truth(op, "causal", causal))


def check_latent_call(call: LatentCall, pages: PagePair) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """Check a call against a cache: (what a plan depends on, home)."""
    op, q_nope, qo_indptr, table, causal = call
    ckv, kpe = pages
    dims: dict[str, int | None] = {"head_dim_ckv": ckv.array.shape[3]}
    if qo_indptr is None:
        dims["rows"] = table.batch_size
    else:
        match_index(op, "qo_indptr", qo_indptr, table.batch_size + 1)
    match(op, "q_nope", q_nope, ("rows", "num_qo_heads", "head_dim_ckv"), dims)
    check_queries(op, "q_nope", q_nope, ckv.dtype)
    xp = home(op, q_nope=q_nope, cache=ckv.array, table=table.indptr, qo_indptr=qo_indptr)
    key = plan_key(
        q_nope,
        cache=(pages.page_size, kpe.array.shape[3], ckv.dtype.name, kpe.dtype.name),
        batch_size=table.batch_size,
        indices=len(table.indices),
        qo_indptr=qo_indptr is not None,
        causal=causal,
    )
    return key, xp


def check_rotary_queries(op: str, q_nope: Array, q_pe: Array, kpe: Pages) -> None:
    """Raise unless q_pe belongs to q_nope and to kpe."""
    dims: dict[str, int | None] = {
        "rows": q_nope.shape[0],
        "num_qo_heads": q_nope.shape[1],
        "head_dim_kpe": kpe.array.shape[3],
    }
    match(op, "q_pe", q_pe, ("rows", "num_qo_heads", "head_dim_kpe"), dims)
    match_dtype(op, "q_pe", q_pe, q_nope.dtype)
    check_queries(op, "q_pe", q_pe, kpe.dtype)
    home(op, q_nope=q_nope, q_pe=q_pe)


@functools.cache
def _kinds_of(*_geometry: Any) -> dict[tuple[Any, ...], PlanKind]:
    """Give the kinds of plans that caches of one geometry, the layers of a model, share."""
    return {}


class LatentAttention:
    """Attention over one latent cache, by the kernel whose tiles suit a call."""

    __slots__ = ("_aligned", "_kinds", "_mapped", "_pages", "_prepared")

    def __init__(self, pages: PagePair) -> None:
        self._pages = pages
        ckv, kpe = pages
        self._aligned = ckv.alignment == kpe.alignment == 16
        self._mapped = can_be_mapped(pages)
        shapes = ckv.array.shape[1:], kpe.array.shape[1:]
        reads = self._aligned, self._mapped
        self._kinds = _kinds_of(shapes, ckv.dtype, kpe.dtype, ckv.device, reads)
        # By signature: the kind of the plan that a call without one makes, and its launch; None:
        # there is nothing to attend from.
        self._prepared: dict[tuple[Any, ...], tuple[PlanKind, BoundLaunch | None]] = {}

    # -------------------------------------------------------------------------------------- plans

    def plan(self, call: LatentCall) -> Plan:
        """Make the work list of calls like this one."""
        kind = self._kind(call)
        return Plan(call.op, kind.key, make_work(kind, call))

    def _kind(self, call: LatentCall) -> PlanKind:
        """Give what plans like this one share, checked and sized at the first of them."""
        op, q_nope, qo_indptr, table, causal = call
        if type(q_nope) is not cp.ndarray:
            home(op, q_nope=q_nope, cache=self._pages.first.array)
        signature = (
            q_nope.shape,
            q_nope.dtype,
            q_nope.data.device_id,
            None if qo_indptr is None else array_signature(qo_indptr),
            table.sizes,
            causal,
        )
        kind = self._kinds.get(signature)
        if kind is None:
            key, _ = check_latent_call(call, self._pages)
            if table.batch_size == 0 or q_nope.size == 0:
                kind = PlanKind(key, table.device)
            else:
                kind = PlanKind(key, table.device, *self._work(call))
            remember(self._kinds, signature, kind)
        return kind

    def _work(self, call: LatentCall) -> tuple[tuple[LatentTile], WorkSizes]:
        """Choose a tile, and find the sizes of its work list."""
        _, q_nope, qo_indptr, table, causal = call
        num_rows, num_qo_heads, _ = q_nope.shape
        one_row = qo_indptr is None
        tile = self._choose_tile(call)
        num_blocks, group_size = _blocks(tile, num_qo_heads)
        cut = Cut(
            rows=tile.rows,
            head_dim_vo=_HEAD_DIM_CKV,
            step_tokens=tile.tokens,
            round_steps=tile.round_steps,
            num_parts=self._num_parts(tile, call),
            item_steps=2 * tile.round_steps,
            cut_cost=tile.cut_cost,
        )
        num_tokens = table.indices.size * table.page_size
        batch = Batch(table.batch_size, num_tokens, num_rows, group_size, num_blocks, one_row, None)
        return (tile,), WorkSizes(
            (cut,),
            batch,
            table.device,
            causal=causal and not one_row,  # one row sees all keys up to its own
            window_left=-1,
            batch_invariant=False,
        )

    def _choose_tile(self, call: LatentCall) -> LatentTile:
        """Choose a tile by the sizes of a call."""
        op, (ckv, kpe) = call.op, self._pages
        dims = ckv.array.shape[3], kpe.array.shape[3]
        if dims != (_HEAD_DIM_CKV, _HEAD_DIM_KPE):
            raise NotImplementedError(
                f"{op}: head_dim_ckv={_HEAD_DIM_CKV} with head_dim_kpe={_HEAD_DIM_KPE} is what "
                f"there is on a GPU, got {dims[0]} with {dims[1]}"
            )
        dtypes = ckv.dtype, kpe.dtype
        tiles = [tile for tile in latent_tiles() if (tile.ckv, tile.kpe) == dtypes]
        if not tiles:
            known = sorted({f"{tile.ckv.name} with {tile.kpe.name}" for tile in latent_tiles()})
            raise NotImplementedError(
                f"{op}: on a GPU there are {', '.join(known)} for ckv and kpe, "
                f"got {dtypes[0].name} with {dtypes[1].name}"
            )
        arch = arch_of(ckv.device)
        tiles = [
            tile
            for tile in tiles
            if tile.aligned == self._aligned
            and runs_on(tile.kernel, arch)
            and ctas_per_sm(tile, ckv.device)
        ]
        if not tiles:
            raise NotImplementedError(f"{op}: this GPU has too little shared memory per CTA")
        # As many rows as the average request has, if a tile holds them.
        num_rows, num_qo_heads, _ = call.q_nope.shape
        packed = -(-num_rows * num_qo_heads // call.table.batch_size)
        most = max(tile.rows for tile in tiles)
        wide = next(tile for tile in tiles if tile.rows >= min(packed, most))
        if wide == tiles[0] or ckv.dtype not in FP8:
            return wide
        # Rows of fp8 become halves before a wide tile takes them: it begins later, and needs keys
        # enough to make up for that.
        return min(tiles[0], wide, key=lambda tile: self._fp8_time(tile, call))

    def _fp8_time(self, tile: LatentTile, call: LatentCall) -> float:
        """Estimate what a call of fp8 takes with a tile."""
        step, beside = _FP8_STEPS[self._tile_of_launch(tile).kernel]
        return step * (self._part_steps(tile, call) + beside)

    def _part_steps(self, tile: LatentTile, call: LatentCall) -> int:
        """Steps of the part that has most, if requests are alike."""
        _, q_nope, _, table, _ = call
        num_rows, num_qo_heads, _ = q_nope.shape
        _, group_size = _blocks(tile, num_qo_heads)
        batch_size, round_tokens = table.batch_size, tile.tokens * tile.round_steps
        num_tokens = table.indices.size * table.page_size
        rounds: int = batch_size * -(-num_tokens // (batch_size * round_tokens))
        tiles: int = -(-num_rows * group_size // (batch_size * tile.rows))
        return tile.round_steps * -(-rounds * tiles // self._num_parts(tile, call))

    def _num_parts(self, tile: LatentTile, call: LatentCall) -> int:
        """CTAs per block of heads that run at a time, as many as can have work.

        Those without work delay the launch behind, which begins when all have begun.
        """
        _, q_nope, qo_indptr, table, _ = call
        num_rows, num_qo_heads, _ = q_nope.shape
        num_blocks, group_size = _blocks(tile, num_qo_heads)
        # Rounds of all requests' keys, the last of each perhaps short, for each tile of one.
        round_tokens = tile.tokens * tile.round_steps
        num_tokens = table.indices.size * table.page_size
        rounds: int = (num_tokens + table.batch_size * (round_tokens - 1)) // round_tokens
        tiles: int = -(-(1 if qo_indptr is None else num_rows) * group_size // tile.rows)
        device = self._pages.first.device
        ctas = num_sms(device) * ctas_per_sm(tile, device)
        return max(1, min(ctas // num_blocks, rounds * tiles, _MAX_PARTS))

    # -------------------------------------------------------------------------------------- calls

    def attend(
        self,
        call: LatentCall,
        q_pe: Array,
        sm_scale: Any,
        scales: tuple[Any, Any],
        plan: Plan | None,
        results: tuple[Any, Any, bool],
    ) -> Any:
        """Attend by a plan, or by one made for this call.

        ``scales`` are those of ckv and kpe; ``results`` are ``out``, ``lse`` and ``return_lse``.
        All of them are as the caller gave them.
        """
        op, q_nope, qo_indptr, table, causal = call
        if type(q_nope) is not cp.ndarray or type(q_pe) is not cp.ndarray:
            home(op, cache=self._pages.first.array, q_nope=q_nope, q_pe=q_pe)
        out, lse, return_lse = results
        if type(out) not in AS_GIVEN or type(lse) not in AS_GIVEN:
            out, lse = check_results(op, q_nope, _HEAD_DIM_CKV, out, lse)
        if type(sm_scale) is not float:
            sm_scale = host_scale(op, "sm_scale", sm_scale)
        # A plan is checked once for all of its kind, or below if it has no work list.
        work = plan.work if type(plan) is Plan else None
        signature = (
            array_signature(q_nope),
            array_signature(q_pe),
            causal,
            sm_scale,
            None if out is None else array_signature(out),
            None if lse is None else array_signature(lse),
            None if qo_indptr is None else array_signature(qo_indptr),
            table.sizes,
            None if work is None else work.kind,
        )
        prepared = self._prepared.get(signature)
        if prepared is None:
            prepared = self._prepare(call, q_pe, sm_scale, plan, (out, lse))
            remember(self._prepared, signature, prepared)
        kind, launch = prepared
        factors = self._pages.scales(op, scales)
        if work is not None:
            require_arrays(work, call)
        else:
            work = work_of_call(call, plan, kind)
        if out is None:
            out = empty(op, q_nope.shape, output_dtype(q_nope), cp, like=q_nope)
        if lse is None and return_lse:
            lse = empty(op, q_nope.shape[:2], FLOAT32, cp, like=q_nope)
        if work is not None and launch is not None:
            launch(
                table.packed,
                q_nope.data.ptr,
                q_pe.data.ptr,
                out.data.ptr,
                0 if lse is None else lse.data.ptr,
                *work.packed,
                *factors,
            )
        return (out, lse) if return_lse else out

    def _prepare(
        self,
        call: LatentCall,
        q_pe: Array,
        sm_scale: float,
        plan: Plan | None,
        results: tuple[Any, Any],
    ) -> tuple[PlanKind, BoundLaunch | None]:
        """Check a call, and prepare all calls like it."""
        op, q_nope, qo_indptr, table, causal = call
        key, _ = check_latent_call(call, self._pages)
        check_rotary_queries(op, q_nope, q_pe, self._pages.second)
        check_options(op, _HEAD_DIM_CKV, q_nope.shape[1], sm_scale=sm_scale)
        for name, q in (("q_nope", q_nope), ("q_pe", q_pe)):
            match_rows(op, name, q)
        out, lse = results
        check_results(op, q_nope, self._pages.first.array.shape[3], out, lse)
        require_plan(op, plan, key)
        kind = self._kind(call)
        if not kind.tiles:
            return kind, None
        (tile,) = kind.tiles
        if plan is not None and plan.work is not None:
            tile = self._tile_of_plan(op, plan, table.device)
        ckv, kpe = self._pages
        num_blocks, group_size = _blocks(tile, q_nope.shape[1])
        heads = q_nope.shape[:2]
        out_dtype = output_dtype(q_nope) if out is None else out.dtype
        own = self._tile_of_launch(tile)
        maps = {}
        if isinstance(own, (MlaDecodeSm90Tile, MlaStreamSm90Tile)):
            maps = (latent_maps(self._pages) if self._mapped else NO_MAPS)._asdict()
        launch = kernel(own.kernel, ckv.device, **own.template_args).bind(
            self._num_parts(tile, call) * num_blocks,
            own.threads,
            own.smem_bytes,
            per_call=_PER_CALL,
            ckv=ckv.packed,
            kpe=kpe.packed,
            q_nope_rows=pack_query_rows(q_nope, 16),
            q_pe_rows=pack_query_rows(q_pe, 16),
            o_rows=pack_query_rows(out, 4 * out_dtype.itemsize, (*heads, _HEAD_DIM_CKV), out_dtype),
            lse_rows=pack_query_rows(lse, 4, heads, FLOAT32),
            group=pack_divisor(group_size),
            num_qo_heads=q_nope.shape[1],
            sm_scale=sm_scale,
            causal=causal and qo_indptr is not None,
            evict_first=qo_indptr is None,  # rows beyond a tile read the same keys again
            **maps,
        )
        return kind, launch

    def _tile_of_launch(self, tile: LatentTile) -> LatentTile | MlaStreamSm90Tile:
        """Give the tile that attends by a tile's work list; a plan may be of other strides."""
        if isinstance(tile, MlaDecodeSm90Tile):
            return tile._replace(mapped=self._mapped)
        own = MlaStreamSm90Tile(tile.ckv, tile.kpe)
        is_there = own in stream_tiles() and runs_on(own.kernel, arch_of(self._pages.first.device))
        return own if self._mapped and is_there else tile

    def _tile_of_plan(self, op: str, plan: Plan, device: int) -> LatentTile:
        """Give the tile that a plan settled on, or raise if it cannot serve this cache."""
        assert plan.work is not None
        kind = plan.work.kind
        (tile,) = kind.tiles
        require_planned_pages(op, (tile.aligned, kind.device), self._aligned, device)
        return tile  # type: ignore[no-any-return]


def _blocks(tile: LatentTile, num_qo_heads: int) -> tuple[int, int]:
    """Deal query heads to blocks that a tile's rows hold: (blocks, heads of each but the last)."""
    num_blocks = -(-num_qo_heads // tile.rows)
    return num_blocks, -(-num_qo_heads // num_blocks)
