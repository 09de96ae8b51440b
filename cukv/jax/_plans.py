"""Plans of attention, and the rows that they are made for in their order."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from cukv import _plan
from cukv.cascade import CascadeLevels
from cukv.jax._arguments import Array, present, require_rows, require_static
from cukv.jax._nouns import noun
from cukv.jax._xla import call, plan_key, vary_as
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache
from cukv.ragged import RaggedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from cukv.masks import PackedMask, RaggedMask


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Prepared attention work, a pytree: made by ``plan``, passed to calls as ``plan=``.

    It belongs to shapes, dtypes and options, and to the contents that the index arrays and the mask
    had: where these change, make it again. A call under other lengths touches no foreign memory but
    gives unspecified values.
    """

    lists: Array  # [bytes] uint8, of which the CPU needs none
    op: str
    key: tuple[tuple[str, Any], ...]
    batch_invariant: bool
    of_values: bool  # whether it was told of the values beside packed keys


jax.tree_util.register_dataclass(
    Plan, data_fields=["lists"], meta_fields=["op", "key", "batch_invariant", "of_values"]
)


def plan(
    q: Array | RaggedTensor,
    keys: PagedKVCache | MLAPagedCache | RaggedTensor,
    where: PageTable | CascadeLevels | RaggedTensor | None = None,
    *,
    qo_indptr: Array | None = None,
    causal: bool = False,
    window_left: int = -1,
    custom_mask: RaggedMask | PackedMask | None = None,
    batch_invariant: bool = False,
) -> Plan:
    """Prepare calls of attention, once for all layers of a step.

    Parameters
    ----------
    q : array or RaggedTensor
        As in the calls that the plan serves: shape, dtype and indptr count, values do not. An array
        and a page table are those of ``decode`` or ``mla_decode``, a RaggedTensor and a page table
        those of ``prefill``.
    keys : PagedKVCache, MLAPagedCache or RaggedTensor
        The cache, of any layer; for ``ragged_prefill`` its k.
    where : PageTable, CascadeLevels or RaggedTensor
        Where keys are; for ``ragged_prefill`` its v, of which ``RaggedTensor.plan`` says more.
    qo_indptr : [batch_size + 1] int32 or int64
        That of ``mla_decode``.
    causal, window_left, custom_mask
        As in the calls.
    batch_invariant : bool
        Make a request's bits independent of its batch mates; not for MLA, nor for cascades.

    Returns
    -------
    Plan
        Made as by the nouns' own ``plan``.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        As those. An argument that the noun's own ``plan`` does not take is a TypeError.
    """
    if not isinstance(keys, (PagedKVCache, MLAPagedCache, RaggedTensor)):
        raise TypeError(
            "cukv.jax.plan: keys must be a PagedKVCache, MLAPagedCache or RaggedTensor, "
            f"got {type(keys)}"
        )
    require_rows("plan", q=q)
    given = {"causal": causal, "window_left": window_left, "batch_invariant": batch_invariant}
    require_static("plan", given)
    # What is asked for, and nothing else: a noun's plan that does not know it raises.
    options: dict[str, Any] = {"causal": causal}
    if window_left != -1:
        options["window_left"] = window_left
    if batch_invariant:
        options["batch_invariant"] = batch_invariant
    if isinstance(where, CascadeLevels):
        q, where, _ = in_order(q, where)

    def make(q: Any, keys: Any, where: Any, arrays: dict[str, Any]) -> _plan.Plan:
        planned: _plan.Plan
        if isinstance(where, CascadeLevels):
            planned = where.plan(q, keys, **options, **arrays)
        else:
            first, second = (q, keys) if isinstance(keys, RaggedTensor) else (keys, q)
            planned = first.plan(second, where, **options, **arrays)
        return planned

    arrays = present(qo_indptr=qo_indptr, custom_mask=custom_mask)
    args = q, keys, where, arrays
    op, key, size = plan_key(make, *args)
    (lists,) = vary_as(jax.tree.leaves(args), [jnp.zeros(0, np.uint8)])
    if size:
        lists = call(
            "plan",
            lambda memory, lists, *args: memory.fill(lambda: make(*args), lists),
            jax.ShapeDtypeStruct((size,), np.uint8),
            *args,
        )
    return Plan(lists, op, key, batch_invariant, isinstance(where, RaggedTensor))


def rows_of(q: Any) -> Any:
    """Give rows ``[nnz, heads, head_dim]``, of a RaggedTensor as its layout says."""
    if not isinstance(q, RaggedTensor):
        return q
    return q.data if q.layout == "NHD" else jnp.swapaxes(q.data, 0, 1)


def in_order(q: Any, levels: CascadeLevels) -> tuple[Array, CascadeLevels, Callable[..., Any]]:
    """Give rows in the order of the levels, levels of no other order, and what takes it back."""
    rows, order = rows_of(q), levels.row_order
    if order is None:
        return rows, levels, lambda x: x
    named = jnp.arange(order.shape[0]) < levels.qo_indptr[-1][-1]
    target = jnp.where(named, order, rows.shape[0])  # padding goes nowhere

    def as_given(x: Array) -> Array:
        return jnp.zeros((rows.shape[0], *x.shape[1:]), x.dtype).at[target].set(x, mode="drop")

    sorted_levels = noun(CascadeLevels, levels.qo_indptr, levels.tables)
    return jnp.take(rows, order, axis=0, mode="clip"), sorted_levels, as_given
