"""Attention over pages on a GPU: plans and launches.

A cache remembers what it worked out for each signature of a call (shapes, dtypes, strides,
options), so that a call compares it, checks what may differ, allocates its results and launches.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp

from cukv._arrays import FLOAT32, as_array, empty, home
from cukv._attention import (
    NO_SOFT_CAP,
    PagedCall,
    check_options,
    check_paged_call,
    check_results,
    check_soft_cap,
    check_window,
    output_dtype,
    require_plan,
)
from cukv._attention_launch import CallLaunch, bind, goes_by_halves, is_plain
from cukv._check import match_aligned, match_rows
from cukv._geometry import DecodeTile, PrefillTile, Sm90Tile
from cukv._index import host_scale, pack_scales
from cukv._launches import (
    AS_GIVEN,
    PlanKind,
    array_signature,
    make_work,
    mask_signature,
    require_arrays,
    require_mask,
    require_planned_pages,
    work_of_call,
)
from cukv._plan import Batch, Cut, Plan, WorkSizes
from cukv._remember import remember
from cukv._specialisations import decode_tiles, prefill_tiles, sm90_tiles
from cukv._tensor_maps import NO_KV_MAPS, KvMaps, copies_of, kv_maps
from cukv._tiles import (
    Grid,
    Served,
    choose_grid,
    choose_level_tiles,
    choose_tiles,
    copies_in_call,
    portable_tile,
)
from cukv.masks import PackedMask
from cukv.page_table import PageTable

if TYPE_CHECKING:
    from cukv._geometry import Tile
    from cukv._kernels import BoundLaunch
    from cukv._pages import PagePair
    from cukv._plan import WorkLists

_MAX_HEAD_DIM = 256


@functools.cache
def _kinds_of(*_geometry: Any) -> dict[tuple[Any, ...], PlanKind]:
    """Give the kinds of plans that caches of one geometry, the layers of a model, share."""
    return {}


class _Launches(NamedTuple):
    """The launches of calls whose arrays and options are of one signature, which are checked."""

    options: dict[str, Any]
    # By kernel too: tiles of two may compare equal. The last says of those of a cascade whether
    # they leave states.
    of_tiles: dict[tuple[str, Tile, Grid, bool], BoundLaunch]


class _Prepared(NamedTuple):
    """What calls of one signature share: that of their arrays and options, and of their plans."""

    kind: PlanKind  # of the plan that a call without one makes
    launch: CallLaunch


class PagedAttention:
    """Attention over one paged cache, by the kernel whose tiles suit a call (``_tiles.py``).

    Queries are ``[nnz, num_qo_heads, head_dim]`` with the offsets ``qo_indptr`` of the requests'
    rows, or None for one row per request.
    """

    __slots__ = (
        "_aligned",
        "_copies",
        "_head_dim_vo",
        "_kinds",
        "_last",
        "_launches",
        "_maps",
        "_pages",
        "_prepared",
        "_stores",
    )

    def __init__(self, pages: PagePair) -> None:
        self._pages = pages
        k, v = pages
        self._stores = k.array, v.array
        self._head_dim_vo = v.array.shape[3]
        row_bytes = [pages.array.shape[3] * pages.dtype.itemsize for pages in (k, v)]
        self._aligned = all(n % 16 == 0 for n in (*row_bytes, k.alignment, v.alignment))
        self._copies = copies_of(pages, self._aligned)  # on Hopper; None: there are none
        self._maps: KvMaps | None = None  # not made yet
        shapes = k.array.shape[1:], v.array.shape[1:]
        layout = self._aligned, self._copies
        self._kinds = _kinds_of(type(pages).__name__, shapes, k.dtype, k.device, layout)
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}
        # Of the last call: its signature, and what was prepared.
        self._last: tuple[tuple[Any, ...], Any] = (), None
        # Launches do not depend on the number of pages, which changes from step to step.
        self._launches: dict[tuple[Any, ...], _Launches] = {}

    # -------------------------------------------------------------------------------------- plans

    def plan(self, call: PagedCall, batch_invariant: bool) -> Plan:
        """Make the work lists of calls like this one."""
        kind = self._kind(call, batch_invariant)
        return Plan(call.op, kind.key, make_work(kind, call), batch_invariant)

    def _kind(self, call: PagedCall, batch_invariant: bool, capped: bool = False) -> PlanKind:
        """Give what plans like this one share, checked and sized at the first of them.

        ``capped``: logits will be, as far as is known.
        """
        op, q, qo_indptr, table, causal, window_left, custom_mask, levels = call
        if type(q) is not cp.ndarray:
            home(op, q=q, cache=self._pages.first.array)
        if type(table) is not PageTable:
            self._pages.check_table(op, table)
        if type(window_left) is not int:
            window_left = check_window(op, window_left)
        signature = (
            q.shape,
            q.dtype,
            q.data.device_id,
            None if qo_indptr is None else qo_indptr.size,
            table.sizes,
            causal,
            window_left,
            None if custom_mask is None else mask_signature(call),
            None if levels is None else levels.signature,
            batch_invariant,
            capped,
        )
        kind = self._kinds.get(signature)
        if kind is None:
            call = call._replace(window_left=window_left)
            key, _ = check_paged_call(call, self._pages)
            if table.batch_size == 0 or q.size == 0:
                kind = PlanKind(key, table.device)
            else:
                kind = PlanKind(key, table.device, *self._work(call, batch_invariant, capped))
            remember(self._kinds, signature, kind)
        return kind

    def _work(
        self, call: PagedCall, batch_invariant: bool, capped: bool
    ) -> tuple[tuple[tuple[Tile, Grid], ...], WorkSizes]:
        """Choose tiles and grids, and find the sizes of their work lists."""
        op, q, qo_indptr, table, causal, window_left, custom_mask, levels = call
        self._check(op)
        num_rows, num_qo_heads, _ = q.shape
        num_kv_heads = self._pages.first.array.shape[2]
        group_size, one_row = num_qo_heads // num_kv_heads, qo_indptr is None
        num_tokens = table.indices.size * table.page_size
        layout = op, self._pages, self._aligned
        copies = copies_in_call(q, self._pages, self._copies, capped, custom_mask is not None)
        served: tuple[Served, ...]
        if levels is None:
            sizes = (num_rows, group_size, table.batch_size, num_tokens)
            served = choose_tiles(*layout, *sizes, one_row, batch_invariant, copies)
        else:
            if levels.first_seen is not None:
                copies = None  # only portable kernels have windows that begin where they are told
            leaves = (levels.num_rows, group_size, levels.num_leaves, levels.num_leaf_tokens)
            served = choose_level_tiles(*layout, *leaves, copies)
            num_rows = levels.num_levels * levels.num_rows
        device = self._pages.first.device
        tiles = [(tile, choose_grid(tile, num_kv_heads, device)) for tile, _, _ in served]
        cuts = [
            self._cut(call, capped, tile, grid, min_rows, max_rows)
            for (tile, grid), (_, min_rows, max_rows) in zip(tiles, served, strict=True)
        ]
        elements = None
        if custom_mask is not None:
            bits = 8 if isinstance(custom_mask, PackedMask) else 1  # of a byte of data
            elements = custom_mask.data.size * bits
        num_shared = 0 if levels is None else levels.num_shared
        counts = (table.batch_size, num_tokens, num_rows, group_size, num_kv_heads)
        batch = Batch(*counts, one_row, elements, num_shared)
        return tuple(tiles), WorkSizes(
            tuple(cuts),
            batch,
            table.device,
            causal=causal and not one_row,  # one row sees all keys up to its own
            window_left=window_left,
            batch_invariant=batch_invariant,
            mask_kind=None if custom_mask is None else type(custom_mask),
        )

    def _cut(
        self, call: PagedCall, capped: bool, tile: Tile, grid: Grid, min_rows: int, max_rows: int
    ) -> Cut:
        """Say how the work of requests of ``min_rows`` to ``max_rows`` packed rows is cut."""
        cut = Cut(
            rows=tile.rows,
            head_dim_vo=tile.head_dim_vo,
            step_tokens=tile.tokens,
            round_steps=tile.round_steps,
            item_steps=tile.item_steps,
            num_parts=grid.num_parts,
            min_rows=min_rows,
            max_rows=max_rows,
            cut_cost=tile.cut_cost,
            merges=call.levels is not None and min_rows == 0,
        )
        if not goes_by_halves(tile, self._pages, call, capped):
            return cut
        # An item costs two halves of a step where others cost two steps. On an H200, 16 causal
        # requests of 1024 rows took 2 % less time than by a plan of whole steps.
        return cut._replace(step_tokens=cut.step_tokens // 2, round_steps=2 * cut.round_steps)

    def _check(self, op: str) -> None:
        """Raise unless the kernel takes this cache."""
        k, v = self._pages
        if k.dtype == FLOAT32:
            raise NotImplementedError(
                f"{op}: a cache must be float16, bfloat16, float8_e4m3fn or float8_e5m2 on a GPU, "
                "got float32"
            )
        for name, dim in (("head_dim", k.array.shape[3]), ("head_dim_vo", v.array.shape[3])):
            if dim % 8 or not 0 < dim <= _MAX_HEAD_DIM:
                raise NotImplementedError(
                    f"{op}: {name} must be a multiple of 8 up to {_MAX_HEAD_DIM} on a GPU, "
                    f"got {dim}"
                )

    # -------------------------------------------------------------------------------------- calls

    def attend(
        self,
        call: PagedCall,
        logits: tuple[Any, float | None, Any],
        scales: tuple[Any, Any, Any],
        plan: Plan | None,
        results: tuple[Any, Any, bool],
    ) -> Any:
        """Attend by a plan, or by one made for this call.

        ``logits`` are ``sm_scale``, ``logits_soft_cap`` and ``sinks``; ``scales`` those of q, k and
        v; ``results`` are ``out``, ``lse`` and ``return_lse``. All of them are as the caller gave
        them.
        """
        op, q, qo_indptr, table, causal, window_left, custom_mask, levels = call
        if type(q) is not cp.ndarray:
            home(op, q=q, cache=self._pages.first.array)
        if type(table) is not PageTable:  # its page size is one of its sizes, which are compared
            self._pages.check_table(op, table)
        sm_scale, logits_soft_cap, sinks = logits
        out, lse, return_lse = results
        if type(out) not in AS_GIVEN or type(lse) not in AS_GIVEN:
            out, lse = check_results(op, q, self._head_dim_vo, out, lse)
        if type(sinks) not in AS_GIVEN:
            sinks = as_array(op, "sinks", sinks, q)
            home(op, q=q, sinks=sinks)
        if sm_scale is not None and type(sm_scale) is not float:
            sm_scale = host_scale(op, "sm_scale", sm_scale)
        if logits_soft_cap is not None and not (
            type(logits_soft_cap) is float and logits_soft_cap < NO_SOFT_CAP
        ):
            logits_soft_cap = check_soft_cap(op, logits_soft_cap)
        if type(window_left) is not int:
            window_left = check_window(op, window_left)
        # Of q and out, which every call has, each field is looked up once, without a call.
        q_at, out_at = q.data.ptr, 0
        out_signature = None
        if out is not None:
            out_at = out.data.ptr
            out_signature = (out.shape, out.dtype, out.strides, out_at % 16, out.data.device_id)
        arrays = (
            (q.shape, q.dtype, q.strides, q_at % 16, q.data.device_id),
            causal,
            window_left,
            sm_scale,
            logits_soft_cap,
            None if sinks is None else array_signature(sinks),
            out_signature,
            None if lse is None else array_signature(lse),
            custom_mask is not None,
            levels is not None,
        )
        # A plan is checked once for all of its kind, or below if it has no work list.
        work = plan.work if type(plan) is Plan else None
        signature = (
            arrays,
            None if qo_indptr is None else qo_indptr.size,
            table.sizes,
            None if custom_mask is None else mask_signature(call),
            None if levels is None else levels.signature,
            None if work is None else work.kind,
        )
        last, prepared = self._last  # which is compared sooner than a signature is hashed
        if last != signature:
            prepared = self._prepared.get(signature)
            if prepared is None:
                call = call._replace(window_left=window_left)
                logits = (sm_scale, logits_soft_cap, sinks)
                prepared = self._prepare(call, logits, plan, (out, lse), arrays)
                remember(self._prepared, signature, prepared)
            self._last = signature, prepared
        factors = pack_scales(op, scales, table.device)
        if work is not None:
            if work.table is not table or work.qo_indptr is not qo_indptr:
                require_arrays(work, call)
        else:
            work = work_of_call(call, plan, prepared.kind)
        if out is None:
            out = empty(op, (*q.shape[:2], self._head_dim_vo), output_dtype(q), cp, like=q)
            out_at = out.data.ptr
        if lse is None and return_lse:
            lse = empty(op, q.shape[:2], FLOAT32, cp, like=q)
        if work is not None:
            if work.mask is not custom_mask:
                require_mask(op, work, custom_mask)
            arrays_at = (
                table.packed,
                q_at,
                out_at,
                0 if lse is None else lse.data.ptr,
                0 if sinks is None else sinks.data.ptr,
                0,  # windows begin at their distance
            )
            if levels is None:
                reads = (*self._stores, table.indices, q, sinks, *scales)
                prepared.launch(arrays_at, work.packed, factors, table.device, reads, (out, lse))
            else:
                prepared.launch.cascade(arrays_at, work.packed, factors, levels)
        return (out, lse) if return_lse else out

    def _prepare(
        self,
        call: PagedCall,
        logits: tuple[Any, float | None, Any],
        plan: Plan | None,
        results: tuple[Any, Any],
        arrays: tuple[Any, ...],
    ) -> _Prepared:
        """Check a call, and find the launch of all calls like it; ``arrays`` is their signature."""
        op, q, qo_indptr, table, causal, window_left, custom_mask, levels = call
        sm_scale, logits_soft_cap, sinks = logits
        out, lse = results
        signature = (qo_indptr is None, *arrays)
        launches = self._launches.get(signature)
        if launches is None:
            key, _ = check_paged_call(call, self._pages)
            options = check_options(
                op,
                q.shape[2],
                q.shape[1],
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                sinks=sinks,
                like=q,
            )
            require_plan(op, plan, key)
            match_rows(op, "q", q)
            if sinks is not None:
                match_aligned(op, "sinks", sinks)
            check_results(op, q, self._head_dim_vo, out, lse)
            options |= {"causal": causal and qo_indptr is not None, "sinks": None}  # keep no array
            if custom_mask is not None:  # which replaces the one, and has the other
                options |= {"causal": False, "window_left": -1}
            launches = _Launches(options, {})
            remember(self._launches, signature, launches)
        kind = self._kind(call, batch_invariant=False, capped=bool(logits_soft_cap))
        require_plan(op, plan, kind.key)
        tiles = kind.tiles
        if tiles and plan is not None and plan.work is not None:
            tiles = self._tiles_of_plan(op, plan.work, table.device)
        bound = []
        for i, (tile, grid) in enumerate(tiles):
            shared = levels is not None and i == 0  # what a cascade's leaves share
            tile, grid = self._suited(tile, grid, call, launches.options, sinks, out, shared)
            name = (tile.kernel, tile, grid, shared)
            if name not in launches.of_tiles:
                maps = self._kv_maps(tile) if isinstance(tile, Sm90Tile) else None
                mine = (self._pages, maps, launches.options)
                theirs = (sinks, out, lse)
                if levels is not None and shared:
                    theirs = (None, levels.o, levels.lse)
                launches.of_tiles[name] = bind(tile, grid, *mine, q, *theirs)
            bound.append(launches.of_tiles[name])
        return _Prepared(kind, CallLaunch(tuple(bound), type(tiles[0][0]) if tiles else None))

    def _kv_maps(self, tile: Sm90Tile) -> KvMaps:
        """Give the tensor maps of keys and values, made once."""
        if not tile.mapped:
            return NO_KV_MAPS
        if self._maps is None:
            self._maps = kv_maps(self._pages, tile.tokens, tile.head_dim, tile.head_dim_vo)
        return self._maps

    def _suited(
        self,
        tile: Tile,
        grid: Grid,
        call: PagedCall,
        options: dict[str, Any],
        sinks: Any,
        out: Any,
        shared: bool,
    ) -> tuple[Tile, Grid]:
        """Give the tile that works off a list in a call.

        Of the portable kernels a plain one where it can, for Hopper's another where it cannot.
        """
        if isinstance(tile, DecodeTile):
            plain = not shared and is_plain(tile, self._pages, call, options, sinks, out)
            suited = tile._replace(plain=plain)
            return suited if suited in decode_tiles() else tile, grid
        if isinstance(tile, PrefillTile):
            plain = call.levels is None and is_plain(tile, self._pages, call, options, sinks, out)
            paged = not (plain and self._pages.consecutive)
            masked = plain and call.custom_mask is not None
            wide = tile._replace(plain=plain, paged=paged, masked=masked)
            return wide if wide in prefill_tiles() else tile, grid
        if not isinstance(tile, Sm90Tile):
            return tile, grid
        if self._copies is not None:
            capped, masked = bool(options["logits_soft_cap"]), call.custom_mask is not None
            own = tile._replace(**self._copies._asdict(), capped=capped, masked=masked)
            # A plan of ragged keys was not told of values, of which only maps may copy too much.
            fits = own.mapped or own.head_dim_vo == self._head_dim_vo
            if fits and own in sm90_tiles():
                return own, grid
        heads = int(self._pages.first.array.shape[2])
        grid = Grid(grid.num_parts * heads, grid.num_parts, heads)
        return portable_tile(tile, self._aligned), grid

    def _tiles_of_plan(
        self, op: str, work: WorkLists, device: int
    ) -> tuple[tuple[Tile, Grid], ...]:
        """Give what a plan settled on, or raise if it cannot serve this cache."""
        tiles: tuple[tuple[Tile, Grid], ...] = work.kind.tiles
        return tuple(self._tile_of_plan(op, *tile, work.kind.device, device) for tile in tiles)

    def _tile_of_plan(
        self, op: str, tile: Tile, grid: Grid, planned: int, device: int
    ) -> tuple[Tile, Grid]:
        if tile.head_dim_vo < self._head_dim_vo:  # a plan of ragged keys was not told of v
            raise NotImplementedError(
                f"{op}: the plan is for values of at most {tile.head_dim_vo} elements, "
                f"got {self._head_dim_vo}; leave out plan="
            )
        aligned = self._aligned if isinstance(tile, Sm90Tile) else tile.aligned
        require_planned_pages(op, (aligned, planned), self._aligned, device)
        return tile, grid
