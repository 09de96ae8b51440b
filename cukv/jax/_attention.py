"""Attention, and the merge of its states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from cukv import _plan
from cukv import merge as _merge
from cukv._arrays import BFLOAT16, FP8
from cukv.cascade import CascadeLevels
from cukv.jax._arguments import (
    Array,
    present,
    require,
    require_arrays,
    require_rows,
    require_static,
    split_scales,
)
from cukv.jax._plans import Plan, in_order, rows_of
from cukv.jax._xla import Memory, call, plan_key
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache
from cukv.ragged import RaggedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from cukv.masks import PackedMask, RaggedMask

# --------------------------------------------------------------------------------------- attention


def decode(
    q: Array,
    cache: PagedKVCache,
    table: PageTable,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    q_scale: Any = 1.0,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    plan: Plan | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend from one row per request; as ``PagedKVCache.decode``.

    Parameters
    ----------
    q : [batch_size, num_qo_heads, head_dim]
        One row of each request.
    cache, table
        Nouns of JAX arrays.
    sinks, q_scale, k_scale, v_scale
        As there; arrays may be traced.
    sm_scale, window_left, logits_soft_cap
        As there, static.
    plan : Plan
        Made by ``plan`` from the same shapes, options and contents; one of its own by default.
    return_lse : bool
        Give the log-sum-exp too.

    Returns
    -------
    o : [batch_size, num_qo_heads, head_dim_vo], dtype of q; bfloat16 for fp8
    lse : [batch_size, num_qo_heads] float32, base 2
        With ``return_lse``.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        When the call is traced: what ``PagedKVCache.decode`` cannot take (on JAX for the CPU when
        it runs, inside a JaxRuntimeError); a plan for another call; ``vmap`` and derivatives.
    """
    require("decode", PagedKVCache, cache=cache)
    require("decode", PageTable, table=table)
    require_arrays("decode", q=q)
    return _attend(
        _Call(
            "decode",
            lambda q, cache, table, **options: cache.plan(q, table, **options),
            lambda q, cache, table, **options: cache.decode(q, table, **options),
            planned={"window_left": window_left},
            invariant=True,
        ),
        q,
        _value_dim(cache),
        (q, cache, table),
        {},
        present(sinks=sinks),
        {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale},
        {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap},
        plan,
        return_lse,
    )


def prefill(
    q: RaggedTensor,
    cache: PagedKVCache,
    table: PageTable,
    *,
    causal: bool = False,
    custom_mask: RaggedMask | PackedMask | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    q_scale: Any = 1.0,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    plan: Plan | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend from any number of rows per request; as ``PagedKVCache.prefill``.

    Parameters
    ----------
    q : RaggedTensor
        Rows of each request, ``[nnz, num_qo_heads, head_dim]``.
    causal : bool
        As there, static.
    custom_mask : RaggedMask or PackedMask
        As there; its arrays may be traced.
    cache, table, sm_scale, window_left, logits_soft_cap, sinks, q_scale, k_scale, v_scale, plan, \
return_lse
        As in ``decode``.

    Returns
    -------
    o : [nnz, num_qo_heads, head_dim_vo], dtype of q; bfloat16 for fp8
        In q's order.
    lse : [nnz, num_qo_heads] float32, base 2
        With ``return_lse``.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        As in ``decode``.
    """
    require("prefill", PagedKVCache, cache=cache)
    require("prefill", RaggedTensor, q=q)
    require("prefill", PageTable, table=table)
    return _attend(
        _Call(
            "prefill",
            lambda q, cache, table, **options: cache.plan(q, table, **options),
            lambda q, cache, table, **options: cache.prefill(q, table, **options),
            planned={"causal": causal, "window_left": window_left},
            invariant=True,
        ),
        rows_of(q),
        _value_dim(cache),
        (q, cache, table),
        present(custom_mask=custom_mask),
        present(sinks=sinks),
        {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale},
        {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap},
        plan,
        return_lse,
    )


def ragged_prefill(
    q: RaggedTensor,
    k: RaggedTensor,
    v: RaggedTensor,
    *,
    causal: bool = False,
    custom_mask: RaggedMask | PackedMask | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    q_scale: Any = 1.0,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    plan: Plan | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend from packed rows to packed keys and values; as ``RaggedTensor.prefill``.

    Parameters
    ----------
    k, v : RaggedTensor
        Tokens of each request, ``[nnz_kv, num_kv_heads, head_dim]`` and
        ``[nnz_kv, num_kv_heads, head_dim_vo]``.
    q and all options
        As in ``prefill``, and so are results and errors.
    """
    require("ragged_prefill", RaggedTensor, q=q, k=k, v=v)
    of_values = getattr(plan, "of_values", True)
    return _attend(
        _Call(
            "ragged_prefill",
            lambda q, k, v, **options: q.plan(k, v if of_values else None, **options),
            lambda q, k, v, **options: q.prefill(k, v, **options),
            planned={"causal": causal, "window_left": window_left},
            invariant=True,
        ),
        rows_of(q),
        int(v.data.shape[-1]),
        (q, k, v),
        present(custom_mask=custom_mask),
        present(sinks=sinks),
        {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale},
        {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap},
        plan,
        return_lse,
    )


def mla_decode(
    q_nope: Array,
    q_pe: Array,
    cache: MLAPagedCache,
    table: PageTable,
    *,
    sm_scale: float,
    qo_indptr: Array | None = None,
    causal: bool = False,
    ckv_scale: Any = 1.0,
    kpe_scale: Any = 1.0,
    plan: Plan | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend in the absorbed form; as ``MLAPagedCache.decode``.

    Parameters
    ----------
    q_nope, q_pe : [rows, num_qo_heads, head_dim_ckv], [rows, num_qo_heads, head_dim_kpe]
        One row of each request, or as ``qo_indptr`` says.
    sm_scale, causal
        As there, static.
    qo_indptr : [batch_size + 1] int32 or int64
        Offsets of each request's rows.
    ckv_scale, kpe_scale
        As there; may be traced.
    cache, table, plan, return_lse
        As in ``decode``.

    Returns
    -------
    o : [rows, num_qo_heads, head_dim_ckv], dtype of q_nope; bfloat16 for fp8
    lse : [rows, num_qo_heads] float32, base 2
        With ``return_lse``.

    Raises
    ------
    NotImplementedError, TypeError, ValueError
        As in ``decode``.
    """
    require("mla_decode", MLAPagedCache, cache=cache)
    require("mla_decode", PageTable, table=table)
    require_arrays("mla_decode", q_nope=q_nope, q_pe=q_pe)
    return _attend(
        _Call(
            "mla_decode",
            lambda q, q_pe, cache, table, **options: cache.plan(q, table, **options),
            lambda q, q_pe, cache, table, **options: cache.decode(q, q_pe, table, **options),
            planned={"causal": causal},
        ),
        q_nope,
        int(q_nope.shape[-1]),
        (q_nope, q_pe, cache, table),
        present(qo_indptr=qo_indptr),
        {},
        {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale},
        {"sm_scale": sm_scale},
        plan,
        return_lse,
    )


def cascade(
    q: Array | RaggedTensor,
    cache: PagedKVCache,
    levels: CascadeLevels,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    q_scale: Any = 1.0,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    plan: Plan | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend to the keys of all levels; as ``CascadeLevels.attend``.

    Parameters
    ----------
    q : [nnz, num_qo_heads, head_dim] array, or RaggedTensor
        In its own order: ``row_order`` of the levels is applied to it, and taken back from the
        results.
    levels : CascadeLevels
        Of JAX arrays.
    cache and all options
        As in ``prefill``, and so are results and errors.
    """
    require("cascade", PagedKVCache, cache=cache)
    require("cascade", CascadeLevels, levels=levels)
    require_rows("cascade", q=q)
    rows, levels, as_given = in_order(q, levels)
    found = _attend(
        _Call(
            "cascade",
            lambda q, cache, levels, **options: levels.plan(q, cache, **options),
            lambda q, cache, levels, **options: levels.attend(q, cache, **options),
            planned={"causal": causal, "window_left": window_left},
        ),
        rows,
        _value_dim(cache),
        (rows, cache, levels),
        {},
        present(sinks=sinks),
        {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale},
        {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap},
        plan,
        return_lse,
    )
    return jax.tree.map(as_given, found)


def merge_states(o: Array, lse: Array) -> tuple[Array, Array]:
    """Combine the states of k disjoint sets of keys; as ``cukv.merge_states``.

    Parameters
    ----------
    o : [n, k, num_heads, head_dim] float16, bfloat16 or float32
        Outputs of k disjoint sets of keys.
    lse : [n, k, num_heads] float32
        Their log-sum-exps, base 2.

    Returns
    -------
    o : [n, num_heads, head_dim], dtype of o
    lse : [n, num_heads] float32, base 2

    Raises
    ------
    TypeError, ValueError
        As there, when the call is traced (on JAX for the CPU when it runs, inside a
        JaxRuntimeError).
    """
    require_arrays("merge_states", o=o, lse=lse)

    def merge(memory: Memory, results: Any, o: Array, lse: Array) -> None:
        _merge.merge_states(o, lse, out=results)

    states = (jax.ShapeDtypeStruct((*x.shape[:1], *x.shape[2:]), x.dtype) for x in (o, lse))
    merged, merged_lse = call("merge_states", merge, tuple(states), o, lse)
    return merged, merged_lse


# ------------------------------------------------------------------------------------------- parts


class _Call(NamedTuple):
    """A kind of attention, by the nouns' verbs."""

    op: str
    plan: Callable[..., _plan.Plan]
    attend: Callable[..., Any]
    planned: dict[str, Any]  # static options that its plans depend on
    invariant: bool = False  # whether its plans can be batch invariant


def _attend(
    kind: _Call,
    q: Array,
    head_dim_vo: int,
    args: tuple[Any, ...],
    planned: dict[str, Any],
    traced: dict[str, Any],
    scales: dict[str, Any],
    static: dict[str, Any],
    plan: Plan | None,
    return_lse: bool,
) -> Any:
    """Attend from q. Arrays of ``planned`` are given to plans and calls, ``traced`` to calls."""
    numbers, arrays = split_scales(scales)
    static = static | numbers | kind.planned | {"return_lse": return_lse}
    require_static(kind.op, static)
    op, invariant = f"cukv.jax.{kind.op}", {}
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"{op}: plan must be a cukv.jax.Plan, got {type(plan)}")
    if kind.invariant and plan is not None:
        invariant["batch_invariant"] = plan.batch_invariant

    def make(args: tuple[Any, ...], planned: dict[str, Any]) -> _plan.Plan:
        return kind.plan(*args, **planned, **kind.planned, **invariant)

    def attend(
        memory: Memory,
        results: tuple[Array, ...],
        args: tuple[Any, ...],
        planned: dict[str, Any],
        traced: dict[str, Any],
        lists: Array | None,
    ) -> None:
        made = memory.plan(lambda: make(args, planned), lists)
        out, lse = results if return_lse else (*results, None)
        kind.attend(*args, **planned, **traced, **static, plan=made, out=out, lse=lse)

    if plan is not None:
        served, key, _ = plan_key(make, args, planned)
        if plan.op != served:
            raise ValueError(f"{op}: the plan was made for {plan.op}")
        _plan.Plan(served, plan.key)._require(op, key)
    shapes = (
        jax.ShapeDtypeStruct((*q.shape[:2], head_dim_vo), BFLOAT16 if q.dtype in FP8 else q.dtype),
        jax.ShapeDtypeStruct(q.shape[:2], np.float32),
    )
    lists = None if plan is None else plan.lists
    results = shapes if return_lse else shapes[:1]
    found = call(kind.op, attend, results, args, planned, traced | arrays, lists)
    return found if return_lse else found[0]


def _value_dim(cache: PagedKVCache) -> int:
    return int((cache.data[1] if isinstance(cache.data, tuple) else cache.data).shape[-1])
