"""Cascade attention on a GPU: each level by the attention kernels, then one merge of them all.

A level is a paged call of its own, with its own plan: its requests are the groups of rows that
share pages. Levels give states of disjoint keys, in float32, which ``kernels/merge_states.cu``
makes one, with the sinks, in the order of the caller's rows. Where a row's window begins in a level
above its leaf depends on the levels below: ``kernels/first_seen.cu`` finds that beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import numpy as np

from cukv._arrays import FLOAT32, Array, as_array, empty, home
from cukv._attention import PagedCall, check_results, output_dtype
from cukv._index import pack_index
from cukv._kernels import kernel, one_per_thread, packer
from cukv._plan import Plan
from cukv.merge import merge_levels

if TYPE_CHECKING:
    from cukv._paged_attention import PagedAttention
    from cukv.page_table import PageTable

_INT32 = np.dtype(np.int32)
_pack_level = packer("Level", "first_seen")
_LONGEST_WINDOW = 1 << 30  # no request is longer


@dataclass(frozen=True, eq=False, repr=False)
class CascadePlan(Plan):
    """A plan of a cascade on a GPU: those of its levels."""

    levels: tuple[Plan, ...] = ()
    windows: Windows | None = None

    def update(self) -> None:
        """Follow the present contents of the index arrays: one launch per level.

        With a window over several levels it is one more for each but the last.
        """
        if self.windows is not None:
            self.windows.update()
        for plan in self.levels:
            plan.update()


class CascadeCall(NamedTuple):
    """A cascade, but for the cache: what a plan of it must know."""

    op: str
    q: Array  # [nnz, num_qo_heads, head_dim]
    qo_indptr: tuple[Array, ...]
    tables: tuple[PageTable, ...]
    row_order: Array | None
    causal: bool
    window_left: int

    def windows(self) -> Windows | None:
        """Find where windows begin in the levels above the leaves; None if there are none."""
        num_rows = len(self.q if self.row_order is None else self.row_order)
        num_upper = len(self.tables) - 1
        if self.window_left < 0 or num_upper == 0 or num_rows == 0 or len(self.q) == 0:
            return None
        first_seen = empty(self.op, (num_upper, num_rows), _INT32, cp, like=self.q)
        windows = Windows(self.tables, self.qo_indptr, self.window_left, first_seen)
        windows.update()
        return windows

    def levels(self, q: Array, windows: Windows | None) -> list[PagedCall]:
        """Give the paged call of each level, for rows in the order of the levels."""
        op, _, qo_indptr, tables, _, causal, window_left = self
        last = len(tables) - 1
        first_seen = [None] * last if windows is None else windows.first_seen
        return [
            PagedCall(op, q, indptr, table, causal and level == last, window_left, None, first)
            for level, (indptr, table, first) in enumerate(
                zip(qo_indptr, tables, [*first_seen, None], strict=True)
            )
        ]


class Windows:
    """Where the window of each row begins in the levels above the leaves, in device memory.

    A window counts positions over all levels of a row, so that the rows of a request of an upper
    level see it from different tokens on.
    """

    __slots__ = ("_levels", "_tables", "_window_left", "first_seen")

    def __init__(
        self,
        tables: tuple[PageTable, ...],
        qo_indptr: tuple[Array, ...],
        window_left: int,
        first_seen: Array,
    ) -> None:
        self._tables = tables, qo_indptr  # kept alive
        self._levels = [
            _pack_level(table.packed, pack_index(indptr))
            for table, indptr in zip(tables, qo_indptr, strict=True)
        ]
        self._window_left = min(window_left, _LONGEST_WINDOW)
        self.first_seen = first_seen  # [num_levels - 1, rows] int32, tokens of the row's request

    def update(self) -> None:
        """Follow the present contents of the index arrays: each level from the one below it."""
        *upper, leaf = self._levels
        num_rows, below = self.first_seen.shape[1], 0
        launch = kernel("first_seen", self.first_seen.data.device_id)
        for level, first_seen in zip(upper[::-1], self.first_seen[::-1], strict=True):
            launch(
                *one_per_thread(num_rows),
                level=level,
                leaf=leaf,
                below=below,
                first_seen=first_seen.data.ptr,
                num_rows=num_rows,
                window_left=self._window_left,
            )
            below = first_seen.data.ptr


def plan_cascade(
    call: CascadeCall, attention: PagedAttention, key: tuple[tuple[str, Any], ...]
) -> CascadePlan:
    """Make the work lists of all levels."""
    q, row_order = call.q, call.row_order
    if row_order is not None and len(q):  # plans look at the shape only
        q = cp.broadcast_to(q[:1], (len(row_order), *q.shape[1:]))
    windows = call.windows()
    levels = call.levels(q, windows)
    plans = tuple(attention.plan(level, batch_invariant=False) for level in levels)
    return CascadePlan(call.op, key, levels=plans, windows=windows)


def attend_cascade(
    call: CascadeCall,
    attention: PagedAttention,
    head_dim_vo: int,
    logits: tuple[float, float | None, Any],
    scales: tuple[Any, Any, Any],
    plan: Plan | None,
    results: tuple[Any, Any, bool],
) -> Any:
    """Attend level by level, by a plan or by those made for this call, and merge.

    ``logits``, ``scales`` and ``results`` are those of ``PagedAttention.attend``.
    """
    op, q, qo_indptr, _, row_order, *_ = call
    sm_scale, logits_soft_cap, sinks = logits
    if plan is not None and not isinstance(plan, CascadePlan):
        raise ValueError(f"{op}: the plan was made for NumPy arrays")
    windows = call.windows() if plan is None else plan.windows
    rows = q if row_order is None or not len(q) else _take_rows(q, row_order)
    levels = call.levels(rows, windows)
    plans = (None,) * len(levels) if plan is None else plan.levels
    if len(levels) == 1 and row_order is None:
        return attention.attend(levels[0], logits, scales, plans[0], results)
    if sinks is not None:
        sinks = as_array(op, "sinks", sinks, q)
        home(op, q=q, sinks=sinks)
    out, lse, return_lse = results
    out, lse = check_results(op, q, head_dim_vo, out, lse)
    if out is None:
        out = empty(op, (*q.shape[:2], head_dim_vo), output_dtype(q), cp, like=q)
    if lse is None:
        lse = empty(op, q.shape[:2], FLOAT32, cp, like=q)
    shape = (len(rows), len(levels), q.shape[1], head_dim_vo)
    states = empty(op, shape, FLOAT32, cp, like=q), empty(op, shape[:3], FLOAT32, cp, like=q)
    for i, (level, level_plan) in enumerate(zip(levels, plans, strict=True)):
        state = states[0][:, i], states[1][:, i], True
        attention.attend(level, (sm_scale, logits_soft_cap, None), scales, level_plan, state)
    merge_levels(*states, (out, lse), qo_indptr=qo_indptr[-1], row_order=row_order, sinks=sinks)
    return (out, lse) if return_lse else out


def _take_rows(q: Array, row_order: Array) -> Array:
    """Copy rows of q; entries that name none of them, which are padding, take any.

    All levels share the copy. Hopper's kernel has queries brought by tensor map, which takes rows
    that lie together.
    """
    bits = q.view(np.dtype(f"u{q.dtype.itemsize}"))
    with q.device:
        return cp.take(bits, row_order, axis=0).view(q.dtype)  # wraps what is out of bounds
