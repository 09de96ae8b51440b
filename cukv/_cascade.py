"""Cascade attention on a GPU: each level by the attention kernels, then one merge of them all.

A level is a paged call of its own, with its own plan: its requests are the groups of rows that
share pages. Levels give states of disjoint keys, in float32, which ``kernels/merge_states.cu``
makes one, with the sinks, in the order of the caller's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import numpy as np

from cukv._arrays import FLOAT32, Array, as_array, empty, home
from cukv._attention import PagedCall, check_results, output_dtype
from cukv._plan import Plan
from cukv.merge import merge_levels

if TYPE_CHECKING:
    from cukv._paged_attention import PagedAttention
    from cukv.page_table import PageTable


@dataclass(frozen=True, eq=False, repr=False)
class CascadePlan(Plan):
    """A plan of a cascade on a GPU: those of its levels."""

    levels: tuple[Plan, ...] = ()

    def update(self) -> None:
        """Follow the present contents of the index arrays: one launch per level."""
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

    def levels(self, q: Array) -> list[PagedCall]:
        """Give the paged call of each level, for rows in the order of the levels."""
        op, _, qo_indptr, tables, _, causal, window_left = self
        if len(tables) > 1 and window_left >= 0:
            raise NotImplementedError(
                f"{op}: a window over several levels works on NumPy arrays only (.to_host()), got "
                f"window_left={window_left} and {len(tables)} levels"
            )
        last = len(tables) - 1
        return [
            PagedCall(op, q, indptr, table, causal and level == last, window_left, None)
            for level, (indptr, table) in enumerate(zip(qo_indptr, tables, strict=True))
        ]


def plan_cascade(
    call: CascadeCall, attention: PagedAttention, key: tuple[tuple[str, Any], ...]
) -> CascadePlan:
    """Make the work lists of all levels."""
    q, row_order = call.q, call.row_order
    if row_order is not None and len(q):  # plans look at the shape only
        q = cp.broadcast_to(q[:1], (len(row_order), *q.shape[1:]))
    plans = tuple(attention.plan(level, batch_invariant=False) for level in call.levels(q))
    return CascadePlan(call.op, key, levels=plans)


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
    levels = call.levels(q if row_order is None or not len(q) else _take_rows(q, row_order))
    if plan is not None and not isinstance(plan, CascadePlan):
        raise ValueError(f"{op}: the plan was made for NumPy arrays")
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
    rows, num_qo_heads, _ = levels[0].q.shape
    shape = (rows, len(levels), num_qo_heads, head_dim_vo)
    states = empty(op, shape, FLOAT32, cp, like=q), empty(op, shape[:3], FLOAT32, cp, like=q)
    for i, (level, level_plan) in enumerate(zip(levels, plans, strict=True)):
        state = states[0][:, i], states[1][:, i], True
        attention.attend(level, (sm_scale, logits_soft_cap, None), scales, level_plan, state)
    merge_levels(*states, (out, lse), qo_indptr=qo_indptr[-1], row_order=row_order, sinks=sinks)
    return (out, lse) if return_lse else out


def _take_rows(q: Array, row_order: Array) -> Array:
    """Copy rows of q; entries that name none of them, which are padding, take any."""
    bits = q.view(np.dtype(f"u{q.dtype.itemsize}"))
    with q.device:
        return cp.take(bits, row_order, axis=0, mode="clip").view(q.dtype)
