"""Attention of few query rows over pages on a GPU: which tile serves a call, and its launch.

A cache remembers what it worked out for each signature of a call (shapes, dtypes, strides,
options), so that a call compares it, checks what may differ, allocates its results and launches.
"""

from __future__ import annotations

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
from cukv._attention import check_options, check_results, output_dtype, require_plan
from cukv._check import match_aligned, match_rows
from cukv._index import host_scale, pack_divisor, pack_scale
from cukv._kernels import WARP, BoundLaunch, kernel, num_sms, packer, smem_limits
from cukv._plan import Cut, Plan, WorkSizes
from cukv._specialisations import DecodeTile, decode_tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from cukv._pages import PagePair
    from cukv.page_table import PageTable

_pack_query_rows = packer("QueryRows")

# kernels/common/queries.cuh KIND_*
_KINDS = {FLOAT16: 0, BFLOAT16: 1, FLOAT32: 2, FLOAT8_E4M3: 3, FLOAT8_E5M2: 4}
_MAX_HEAD_DIM = 256
_SHORT_TOKENS = 2048  # of a request
_MAX_REMEMBERED = 256  # signatures of a cache
_SYSTEM_SMEM = 1024  # bytes that each CTA takes of an SM's shared memory beside its own
_SCALES = ("q_scale", "k_scale", "v_scale")
_PER_CALL = ("table", "q", "o", "lse", "sinks", "work", *_SCALES)


class Queries(NamedTuple):
    """The query side of a call."""

    rows: Array  # [nnz, num_qo_heads, head_dim]
    indptr: Array | None  # offsets of the requests' rows; None: one row per request


class _Call(NamedTuple):
    """What calls of one signature share."""

    key: tuple[tuple[str, Any], ...]  # of the plans that serve it
    launch: BoundLaunch | None  # None: there is nothing to attend from
    out_dtype: Any


class PagedDecode:
    """Attention over one paged cache by the kernel ``decode``."""

    __slots__ = ("_aligned", "_calls", "_pages", "_works")

    def __init__(self, pages: PagePair) -> None:
        self._pages = pages
        k, v = pages
        row_bytes = [pages.array.shape[3] * pages.dtype.itemsize for pages in (k, v)]
        self._aligned = all(n % 16 == 0 for n in (*row_bytes, k.alignment, v.alignment))
        self._works: dict[tuple[Any, ...], tuple[DecodeTile, WorkSizes]] = {}
        self._calls: dict[tuple[Any, ...], _Call] = {}

    # -------------------------------------------------------------------------------------- plans

    def plan(
        self,
        op: str,
        key: tuple[tuple[str, Any], ...],
        q: Queries,
        table: PageTable,
        causal: bool,
        window_left: int,
        batch_invariant: bool = False,
    ) -> Plan:
        """Make the work list of calls with these queries, whose shapes are checked."""
        if table.batch_size == 0 or q.rows.size == 0:
            return Plan(op, key)
        tile, work = self._work(op, q, table, causal, window_left, batch_invariant)
        return Plan(op, key, work.make(op, table, q.indptr, tile))

    def _work(
        self,
        op: str,
        q: Queries,
        table: PageTable,
        causal: bool,
        window_left: int,
        batch_invariant: bool,
    ) -> tuple[DecodeTile, WorkSizes]:
        """Find the tile and the sizes of work lists of a signature."""
        num_rows, num_qo_heads, _ = q.rows.shape
        num_indices = table.indices.shape[0]
        options = (q.indptr is None, causal, window_left, batch_invariant)
        signature = (num_rows, num_qo_heads, table.batch_size, num_indices, *options)
        found = self._works.get(signature)
        if found is not None:
            return found
        self._check(op)
        num_kv_heads = self._pages.first.array.shape[2]
        group_size, one_row = num_qo_heads // num_kv_heads, q.indptr is None
        num_tokens = num_indices * table.page_size
        batch = (table.batch_size, num_tokens)
        tile = self._tile(op, num_rows, group_size, *batch, one_row, batch_invariant)
        ctas = num_sms(table.device) * ctas_per_sm(tile, table.device)
        cut = Cut(
            rows=tile.rows,
            head_dim_vo=tile.head_dim_vo,
            step_tokens=tile.tokens,
            round_steps=tile.warps,
            num_parts=max(1, ctas // num_kv_heads),
        )
        work = WorkSizes(
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
        _remember(self._works, signature, (tile, work))
        return tile, work

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

    def _tile(
        self,
        op: str,
        num_rows: int,
        group_size: int,
        batch_size: int,
        num_tokens: int,
        one_row: bool,
        batch_invariant: bool,
    ) -> DecodeTile:
        """Choose a tile by the sizes of a call.

        A batch-invariant one must not depend on the batch.
        """
        k, v = (pages.array for pages in self._pages)
        device = self._pages.first.device
        tiles = [
            tile
            for tile in decode_tiles()
            if tile.dtype == k.dtype
            and tile.head_dim >= k.shape[3]
            and tile.head_dim_vo >= v.shape[3]
            and tile.aligned == self._aligned
        ]
        tiles = [tile for tile in tiles if tile[1:3] == tiles[0][1:3]]  # the narrowest

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
        for tile in tiles:
            if ctas_per_sm(tile, device):
                return tile
        raise NotImplementedError(
            f"{op}: head_dim={k.shape[3]} needs {tiles[-1].smem_bytes} bytes of shared memory per "
            f"CTA, this GPU has {smem_limits(device)[0]}"
        )

    # -------------------------------------------------------------------------------------- calls

    def attend(
        self,
        op: str,
        q: Queries,
        table: PageTable,
        key: Callable[[], tuple[tuple[str, Any], ...]],
        plan: Plan | None,
        results: tuple[Any, Any, bool],
        *,
        causal: bool,
        window_left: int,
        sm_scale: Any,
        logits_soft_cap: float | None,
        sinks: Any,
        scales: tuple[Any, Any, Any],
    ) -> Any:
        """Attend by a plan, or by one made for this call.

        ``key`` checks the queries against cache and table, and names what a plan depends on.
        """
        self._pages.check_table(op, table)
        rows, indptr = q
        out, lse, return_lse = results
        head_dim_vo = self._pages.second.array.shape[3]
        if not (_is_array(out) and _is_array(lse)):
            out, lse = check_results(op, rows, head_dim_vo, out, lse)
        if not _is_array(sinks):
            sinks = as_array(op, "sinks", sinks, rows)
            home(op, q=rows, sinks=sinks)
        if sm_scale is not None and type(sm_scale) is not float:
            sm_scale = host_scale(op, "sm_scale", sm_scale)
        signature = (
            op,
            _signature(rows),
            indptr is None or indptr.shape,
            table.device,
            table.batch_size,
            table.indices.shape,
            causal,
            window_left,
            sm_scale,
            logits_soft_cap,
            sinks is None or _signature(sinks),
            out is None or _signature(out),
            lse is None or _signature(lse),
            return_lse,
            plan.work.tile if isinstance(plan, Plan) and plan.work is not None else None,
        )
        call = self._calls.get(signature)
        if call is None:
            checked = key()
            options = check_options(
                op,
                rows.shape[2],
                rows.shape[1],
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                sinks=sinks,
                like=rows,
            )
            require_plan(op, plan, checked)
            call = self._prepare(op, q, table, checked, plan, out, lse, causal, options)
            _remember(self._calls, signature, call)
        if plan is not None:
            require_plan(op, plan, call.key)
        elif cp.cuda.get_current_stream().is_capturing():
            raise ValueError(
                f"{op}: a call that is captured into a graph needs plan=: memory of one made "
                "meanwhile would be given to others before the graph runs"
            )
        else:
            plan = self.plan(op, call.key, q, table, causal, window_left)

        if out is None:
            out = empty(op, (*rows.shape[:2], head_dim_vo), call.out_dtype, cp, like=rows)
        if lse is None and return_lse:
            lse = empty(op, rows.shape[:2], FLOAT32, cp, like=rows)
        if call.launch is not None and plan.work is not None:
            device = table.device
            call.launch(
                table.packed,
                rows.data.ptr,
                out.data.ptr,
                0 if lse is None else lse.data.ptr,
                0 if sinks is None else sinks.data.ptr,
                plan.work.packed,
                *[
                    pack_scale(op, name, scale, device)
                    for name, scale in zip(_SCALES, scales, strict=True)
                ],
            )
        return (out, lse) if return_lse else out

    def _prepare(
        self,
        op: str,
        q: Queries,
        table: PageTable,
        key: tuple[tuple[str, Any], ...],
        plan: Plan | None,
        out: Array | None,
        lse: Array | None,
        causal: bool,
        options: dict[str, Any],
    ) -> _Call:
        """Check the arrays of a call, and bind the launch of all calls like it."""
        rows, indptr = q
        k, v = self._pages
        match_rows(op, "q", rows)
        out, lse = check_results(op, rows, v.array.shape[3], out, lse)
        sinks = options["sinks"]
        if sinks is not None:
            match_aligned(op, "sinks", sinks)
        dtype = output_dtype(rows) if out is None else out.dtype
        if table.batch_size == 0 or rows.size == 0:
            return _Call(key, None, dtype)
        window_left = options["window_left"]
        if plan is None or plan.work is None:  # a plan for no rows has none
            tile, _ = self._work(op, q, table, causal, window_left, False)
        else:
            tile = plan.work.tile
            if tile.aligned != self._aligned:
                raise ValueError(
                    f"{op}: the plan was made for a cache that is aligned to 16 bytes "
                    f"({tile.aligned}), got one that is ({self._aligned})"
                )
        num_kv_heads, ctas = k.array.shape[2], num_sms(table.device)
        num_parts = max(1, ctas * ctas_per_sm(tile, table.device) // num_kv_heads)
        launch = kernel("decode", table.device, **tile.template_args).bind(
            num_parts * num_kv_heads,
            tile.warps * WARP,
            tile.smem_bytes,
            per_call=_PER_CALL,
            k_cache=k.packed,
            v_cache=v.packed,
            q_rows=_pack_rows(rows, 16),
            o_rows=_pack_rows(out, 4 * dtype.itemsize, (*rows.shape[:2], v.array.shape[3]), dtype),
            lse_rows=_pack_rows(lse, 4, rows.shape[:2], FLOAT32),
            sinks_stride=0 if sinks is None else sinks.strides[0],
            group=pack_divisor(rows.shape[1] // num_kv_heads),
            sinks_kind=0 if sinks is None else _KINDS[sinks.dtype],
            head_dim=k.array.shape[3],
            head_dim_vo=v.array.shape[3],
            sm_scale=options["sm_scale"],
            logits_soft_cap=options["logits_soft_cap"] or 0.0,
            causal=causal and indptr is not None,
            window_left=min(window_left, 1 << 30),
            evict_first=tile.rows <= 16,  # rows beyond a tile read the same keys again
        )
        return _Call(key, launch, dtype)


def ctas_per_sm(tile: DecodeTile, device: int) -> int:
    """CTAs of a tile that an SM holds at a time: as many as were asked for, if they fit."""
    per_cta, per_sm = smem_limits(device)
    if tile.smem_bytes > per_cta:
        return 0
    return min(tile.ctas_per_sm, per_sm // (tile.smem_bytes + _SYSTEM_SMEM))


def _is_array(x: Any) -> bool:
    return x is None or type(x) is cp.ndarray


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
        pointer, (row, head) = array.data.ptr, array.strides[:2]
        dtype = array.dtype
    aligned = (pointer | row | head) % vector_bytes == 0
    return _pack_query_rows(row, head, _KINDS[dtype], aligned)


def _remember(found: dict[tuple[Any, ...], Any], signature: tuple[Any, ...], value: Any) -> None:
    if len(found) >= _MAX_REMEMBERED:
        found.clear()
    found[signature] = value
