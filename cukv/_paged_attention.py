"""Attention over pages on a GPU: plans and launches.

A cache remembers what it worked out for each signature of a call (shapes, dtypes, strides,
options), so that a call compares it, checks what may differ, allocates its results and launches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp

from cukv._arrays import (
    BFLOAT16,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    Array,
    as_array,
    empty,
    home,
)
from cukv._attention import (
    PagedCall,
    check_options,
    check_paged_call,
    check_results,
    check_window,
    output_dtype,
    require_plan,
)
from cukv._check import match_aligned, match_rows
from cukv._index import host_scale, pack_divisor, pack_scales
from cukv._kernels import WARP, BoundLaunch, kernel, num_sms, packer
from cukv._plan import Cut, Plan, WorkSizes
from cukv._tiles import choose_tile, ctas_per_sm

if TYPE_CHECKING:
    from cukv._pages import PagePair
    from cukv._plan import WorkList
    from cukv._specialisations import Tile

_pack_query_rows = packer("QueryRows")

# kernels/common/queries.cuh KIND_*
_KINDS = {FLOAT16: 0, BFLOAT16: 1, FLOAT32: 2, FLOAT8_E4M3: 3, FLOAT8_E5M2: 4}
_MAX_HEAD_DIM = 256
_MAX_REMEMBERED = 256  # signatures of a cache
_AS_GIVEN = (cp.ndarray, type(None))  # types that need no conversion
_PER_CALL = ("table", "q", "o", "lse", "sinks", "work", "q_scale", "k_scale", "v_scale")


@dataclass(frozen=True, eq=False, slots=True)
class _Kind:
    """What plans of one signature share. Compared by identity, so that calls find it at once."""

    key: tuple[tuple[str, Any], ...]
    device: int
    tile: Tile | None = None  # None: there is nothing to attend from
    sizes: WorkSizes | None = None


@functools.cache
def _kinds_of(*_geometry: Any) -> dict[tuple[Any, ...], _Kind]:
    """Give the kinds of plans that caches of one geometry, the layers of a model, share."""
    return {}


class _Launches(NamedTuple):
    """The launches of calls whose arrays and options are of one signature, which are checked."""

    options: dict[str, Any]
    of_tiles: dict[Tile, BoundLaunch]


class _Prepared(NamedTuple):
    """What calls of one signature share: that of their arrays and options, and of their plans."""

    kind: _Kind  # of the plan that a call without one makes
    launch: BoundLaunch | None  # None: there is nothing to attend from


class PagedAttention:
    """Attention over one paged cache, by the kernel whose tiles suit a call (``_tiles.py``).

    Queries are ``[nnz, num_qo_heads, head_dim]`` with the offsets ``qo_indptr`` of the requests'
    rows, or None for one row per request.
    """

    __slots__ = ("_aligned", "_head_dim_vo", "_kinds", "_launches", "_pages", "_prepared")

    def __init__(self, pages: PagePair) -> None:
        self._pages = pages
        k, v = pages
        self._head_dim_vo = v.array.shape[3]
        row_bytes = [pages.array.shape[3] * pages.dtype.itemsize for pages in (k, v)]
        self._aligned = all(n % 16 == 0 for n in (*row_bytes, k.alignment, v.alignment))
        shapes = k.array.shape[1:], v.array.shape[1:]
        self._kinds = _kinds_of(type(pages).__name__, shapes, k.dtype, k.device, self._aligned)
        self._prepared: dict[tuple[Any, ...], _Prepared] = {}
        # Launches do not depend on the number of pages, which changes from step to step.
        self._launches: dict[tuple[Any, ...], _Launches] = {}

    # -------------------------------------------------------------------------------------- plans

    def plan(self, call: PagedCall, batch_invariant: bool) -> Plan:
        """Make the work list of calls like this one."""
        kind = self._kind(call, batch_invariant)
        return Plan(call.op, kind.key, _make_work(kind, call))

    def _kind(self, call: PagedCall, batch_invariant: bool) -> _Kind:
        """Give what plans like this one share, checked and sized at the first of them."""
        op, q, qo_indptr, table, causal, window_left = call
        if type(q) is not cp.ndarray:
            home(op, q=q, cache=self._pages.first.array)
        self._pages.check_table(op, table)
        if type(window_left) is not int:
            window_left = check_window(op, window_left)
        signature = (
            q.shape,
            q.dtype,
            q.data.device_id,
            None if qo_indptr is None else qo_indptr.size,
            table.device,
            table.batch_size,
            table.indices.size,
            causal,
            window_left,
            batch_invariant,
        )
        kind = self._kinds.get(signature)
        if kind is None:
            call = call._replace(window_left=window_left)
            key, _ = check_paged_call(call, self._pages)
            if table.batch_size == 0 or q.size == 0:
                kind = _Kind(key, table.device)
            else:
                tile, sizes = self._work(call, batch_invariant)
                kind = _Kind(key, table.device, tile, sizes)
            _remember(self._kinds, signature, kind)
        return kind

    def _work(self, call: PagedCall, batch_invariant: bool) -> tuple[Tile, WorkSizes]:
        """Choose a tile, and find the sizes of its work lists."""
        op, q, qo_indptr, table, causal, window_left = call
        self._check(op)
        num_rows, num_qo_heads, _ = q.shape
        num_kv_heads = self._pages.first.array.shape[2]
        group_size, one_row = num_qo_heads // num_kv_heads, qo_indptr is None
        num_tokens = table.indices.size * table.page_size
        sizes = (num_rows, group_size, table.batch_size, num_tokens, one_row)
        tile = choose_tile(op, self._pages, self._aligned, *sizes, batch_invariant)
        cut = Cut(
            rows=tile.rows,
            head_dim_vo=tile.head_dim_vo,
            step_tokens=tile.tokens,
            round_steps=tile.round_steps,
            num_parts=self._num_parts(tile),
        )
        return tile, WorkSizes(
            cut,
            table,
            num_rows,
            group_size,
            num_kv_heads,
            one_row=one_row,
            causal=causal and not one_row,  # one row sees all keys up to its own
            window_left=window_left,
            batch_invariant=batch_invariant,
        )

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

    def _num_parts(self, tile: Tile) -> int:
        """CTAs per KV head that run at a time."""
        k = self._pages.first
        ctas = num_sms(k.device) * ctas_per_sm(tile, k.device)
        return max(1, ctas // int(k.array.shape[2]))

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
        op, q, qo_indptr, table, causal, window_left = call
        if type(q) is not cp.ndarray:
            home(op, q=q, cache=self._pages.first.array)
        self._pages.check_table(op, table)
        sm_scale, logits_soft_cap, sinks = logits
        out, lse, return_lse = results
        if type(out) not in _AS_GIVEN or type(lse) not in _AS_GIVEN:
            out, lse = check_results(op, q, self._head_dim_vo, out, lse)
        if type(sinks) not in _AS_GIVEN:
            sinks = as_array(op, "sinks", sinks, q)
            home(op, q=q, sinks=sinks)
        if sm_scale is not None and type(sm_scale) is not float:
            sm_scale = host_scale(op, "sm_scale", sm_scale)
        if logits_soft_cap is not None and type(logits_soft_cap) is not float:
            logits_soft_cap = float(logits_soft_cap)
        if type(window_left) is not int:
            window_left = check_window(op, window_left)
        arrays = (
            _signature(q),
            causal,
            window_left,
            sm_scale,
            logits_soft_cap,
            None if sinks is None else _signature(sinks),
            None if out is None else _signature(out),
            None if lse is None else _signature(lse),
        )
        # A plan is checked once for all of its kind, or below if it has no work list.
        work = plan.work if type(plan) is Plan else None
        signature = (
            arrays,
            None if qo_indptr is None else qo_indptr.size,
            table.device,
            table.batch_size,
            table.indices.size,
            None if work is None else work.kind,
        )
        prepared = self._prepared.get(signature)
        if prepared is None:
            call = call._replace(window_left=window_left)
            logits = (sm_scale, logits_soft_cap, sinks)
            prepared = self._prepare(call, logits, plan, (out, lse), arrays)
            _remember(self._prepared, signature, prepared)
        factors = pack_scales(op, scales, table.device)
        if work is None:
            work = _work_of_call(call, plan, prepared.kind)
        if out is None:
            out = empty(op, (*q.shape[:2], self._head_dim_vo), output_dtype(q), cp, like=q)
        if lse is None and return_lse:
            lse = empty(op, q.shape[:2], FLOAT32, cp, like=q)
        if work is not None and prepared.launch is not None:
            prepared.launch(
                table.packed,
                q.data.ptr,
                out.data.ptr,
                0 if lse is None else lse.data.ptr,
                0 if sinks is None else sinks.data.ptr,
                work.packed,
                *factors,
            )
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
        op, q, qo_indptr, table, causal, window_left = call
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
            launches = _Launches(options, {})
            _remember(self._launches, signature, launches)
        kind = self._kind(call, batch_invariant=False)
        require_plan(op, plan, kind.key)
        tile = kind.tile
        if tile is None:
            return _Prepared(kind, None)
        if plan is not None and plan.work is not None:
            tile = self._tile_of_plan(op, plan.work, table.device)
        if tile not in launches.of_tiles:
            launches.of_tiles[tile] = self._bind(tile, q, launches.options, sinks, out, lse)
        return _Prepared(kind, launches.of_tiles[tile])

    def _bind(
        self,
        tile: Tile,
        q: Array,
        options: dict[str, Any],
        sinks: Array | None,
        out: Array | None,
        lse: Array | None,
    ) -> BoundLaunch:
        """Prepare the launch of calls of one signature."""
        k, v = self._pages
        heads, num_kv_heads = q.shape[:2], k.array.shape[2]
        out_dtype = output_dtype(q) if out is None else out.dtype
        return kernel(tile.kernel, k.device, **tile.template_args).bind(
            self._num_parts(tile) * num_kv_heads,
            tile.warps * WARP,
            tile.smem_bytes,
            per_call=_PER_CALL,
            k_cache=k.packed,
            v_cache=v.packed,
            q_rows=_pack_rows(q, 16),
            o_rows=_pack_rows(out, 4 * out_dtype.itemsize, (*heads, self._head_dim_vo), out_dtype),
            lse_rows=_pack_rows(lse, 4, heads, FLOAT32),
            sinks_stride=0 if sinks is None else sinks.strides[0],
            group=pack_divisor(q.shape[1] // num_kv_heads),
            sinks_kind=0 if sinks is None else _KINDS[sinks.dtype],
            head_dim=k.array.shape[3],
            head_dim_vo=self._head_dim_vo,
            sm_scale=options["sm_scale"],
            logits_soft_cap=options["logits_soft_cap"] or 0.0,
            causal=options["causal"],
            window_left=min(options["window_left"], 1 << 30),
            evict_first=tile.rows <= 16,  # rows beyond a tile read the same keys again
        )

    def _tile_of_plan(self, op: str, work: WorkList, device: int) -> Tile:
        """Give the tile that a plan settled on, or raise if it cannot serve this cache."""
        tile: Tile = work.kind.tile
        if tile.head_dim_vo < self._head_dim_vo:  # a plan of ragged keys was not told of v
            raise NotImplementedError(
                f"{op}: the plan is for values of at most {tile.head_dim_vo} elements, "
                f"got {self._head_dim_vo}; leave out plan="
            )
        if tile.aligned != self._aligned:
            raise ValueError(
                f"{op}: the plan was made for a cache that is aligned to 16 bytes "
                f"({tile.aligned}), got one that is ({self._aligned})"
            )
        if work.kind.device != device:
            raise ValueError(f"{op}: the plan was made for device={work.kind.device}, got {device}")
        return tile


def _make_work(kind: _Kind, call: PagedCall) -> WorkList | None:
    """Make a work list; None: there is nothing to attend from."""
    return None if kind.sizes is None else kind.sizes.make(call.table, call.qo_indptr, kind)


def _work_of_call(call: PagedCall, plan: Plan | None, kind: _Kind) -> WorkList | None:
    """Make the work list of a call that brings none; None: there is nothing to attend from."""
    if plan is not None:
        require_plan(call.op, plan, kind.key)
        if kind.sizes is not None:
            raise ValueError(f"{call.op}: the plan was made for NumPy arrays")
    elif cp.cuda.get_current_stream().is_capturing():
        raise ValueError(
            f"{call.op}: a call that is captured into a graph needs plan=: memory of one made "
            "meanwhile would be given to others before the graph runs"
        )
    return _make_work(kind, call)


def _signature(array: Array) -> tuple[Any, ...]:
    """Name what a launch depends on of an array, but for its address."""
    data = array.data
    return (array.shape, array.dtype, array.strides, data.ptr % 16, data.device_id)


def _pack_rows(
    array: Array | None, vector_bytes: int, shape: tuple[int, ...] = (), dtype: Any = None
) -> bytes:
    """Pack an array [rows, heads, ...]; one that is not there yet will be contiguous."""
    if array is None:
        feats = shape[2] if len(shape) > 2 else 1
        pointer, row, head = 0, shape[1] * feats * dtype.itemsize, feats * dtype.itemsize
    else:
        pointer, (row, head), dtype = array.data.ptr, array.strides[:2], array.dtype
    aligned = (pointer | row | head) % vector_bytes == 0
    return _pack_query_rows(row, head, _KINDS[dtype], aligned)


def _remember(found: dict[tuple[Any, ...], Any], signature: tuple[Any, ...], value: Any) -> None:
    if len(found) >= _MAX_REMEMBERED:
        found.clear()
    found[signature] = value
