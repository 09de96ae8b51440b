"""cukv's operations inside ``jax.jit``, ``lax.scan`` and ``shard_map``.

Nouns are pytrees: their arrays are leaves, layouts and sizes are static. ``noun`` makes one over
JAX arrays or tracers, and ``jax.tree.map(jax.numpy.asarray, a_noun_of_NumPy_arrays)`` turns one
into the other. Such a noun is a bundle of arrays for the functions here, which take the data first;
it has no methods of its own.

On JAX for a GPU the functions launch cukv's kernels on XLA's stream. They copy nothing, allocate
nothing that XLA does not know of, and are captured into XLA's command buffers. Shapes, dtypes and
options are checked when a function is traced. On JAX for the CPU they run the NumPy definitions, so
that a model can be tested on a laptop; values are checked too then, when the function runs.

- **In place.** ``append`` gives the cache back. Donate the cache (``donate_argnums``) and its
  memory is the result's. Whatever else holds that memory, as a CuPy, torch or NumPy view of it
  does, turns donation into a copy: drop it before.
- **Plans.** Attention plans its work anew in each call, or takes a ``plan``, made once per step for
  all layers.
- **Devices.** Heads shard as they are, and so do keys: states over disjoint keys merge by their
  base-2 lse (``merge_states`` after ``lax.all_gather``). Shard by ``shard_map``: of calls that are
  only jitted over sharded arrays XLA gathers the arrays.
- **Inference.** ``jax.grad`` and ``jax.vmap`` through a function raise and name it. Requests are
  the batch axis.

Examples
--------
>>> import jax, numpy as np, cukv, cukv.jax
>>> table = cukv.PageTable.from_seq_lens([17, 5], page_size=16, xp=np)
>>> cache = cukv.PagedKVCache(np.zeros((8, 2, 16, 2, 64), np.float16))
>>> table, cache = jax.tree.map(jax.numpy.asarray, (table, cache))
>>> rows = jax.numpy.ones((2, 2, 64), "float16")
>>> cache = jax.jit(cukv.jax.append, donate_argnums=0)(cache, rows, rows, table)
>>> o = jax.jit(cukv.jax.decode)(jax.numpy.ones((2, 4, 64), "float16"), cache, table)
>>> o.shape, o.dtype
((2, 4, 64), dtype('float16'))
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import jax
import jax.numpy as jnp
import numpy as np

from cukv import _plan, _xla
from cukv import masks as _masks
from cukv import merge as _merge
from cukv._arrays import BFLOAT16, FP8, as_dtype
from cukv.cascade import CascadeLevels
from cukv.masks import PackedMask, RaggedMask
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache
from cukv.ragged import RaggedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from cukv._noun import Noun

__all__ = [
    "Plan",
    "append",
    "cascade",
    "decode",
    "gather",
    "merge_states",
    "mla_append",
    "mla_decode",
    "noun",
    "packbits",
    "plan",
    "prefill",
    "ragged_prefill",
]

Array = Any  # jax.Array or a tracer of one

_STATIC = ("layout", "page_size", "head_dim_kpe")  # fields of nouns that are no arrays
_NOUNS = (
    RaggedTensor, PageTable, PagedKVCache, MLAPagedCache, RaggedMask, PackedMask, CascadeLevels
)  # fmt: skip

# ------------------------------------------------------------------------------- nouns as pytrees


def noun(kind: type[Noun], *fields: Any, **named: Any) -> Any:
    """Make a noun over JAX arrays or tracers, which are not looked at.

    Parameters
    ----------
    kind : type
        ``PagedKVCache``, ``PageTable`` or another noun.
    fields, named
        As the noun itself takes them.

    Returns
    -------
    kind
        A pytree for the functions of this module.

    Raises
    ------
    TypeError
        Fields that the noun does not have, or lacks.
    """
    specs = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [f.name for f in specs] + (["indptr"] if kind is PackedMask else [])
    given = dict(zip(names, fields, strict=False)) | named
    defaults = {f.name: f.default for f in specs if f.default is not dataclasses.MISSING}
    if kind is PackedMask:
        defaults["indptr"] = None
    values = defaults | given
    if len(fields) > len(names) or set(values) != set(names):
        raise TypeError(f"noun: {kind.__name__} takes {names}, got {list(given)}")
    made = object.__new__(kind)
    if kind is PackedMask:
        values["_indptr"] = values.pop("indptr")
    made._set(**values)
    return made


def _flatten(x: Noun) -> tuple[list[Any], tuple[Any, ...]]:
    fields = x._fields()
    arrays = [name for name in fields if name not in _STATIC]
    static = tuple((name, value) for name, value in fields.items() if name in _STATIC)
    return [fields[name] for name in arrays], (tuple(arrays), static)


def _unflatten(kind: type[Noun], aux: tuple[Any, ...], children: Any) -> Any:
    """Make the noun again: of NumPy or CuPy arrays the noun itself, which checks them."""
    names, static = aux
    fields = dict(zip(names, children, strict=True)) | dict(static)
    leaves = jax.tree.leaves(list(children))
    for home in (np.ndarray, cp.ndarray):
        if leaves and all(isinstance(leaf, home) for leaf in leaves):
            return kind(**fields)
    return noun(kind, **fields)


for _kind in _NOUNS:
    jax.tree_util.register_pytree_node(_kind, _flatten, functools.partial(_unflatten, _kind))


# -------------------------------------------------------------------------------------- plans


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Prepared attention work, a pytree: made by ``plan``, passed to calls as ``plan=``.

    It belongs to shapes, dtypes and options, and to the contents that the index arrays and the mask
    had: where these change, make it again. A call under other lengths touches no foreign memory but
    gives unspecified values.
    """

    lists: Array  # [bytes] uint8; none on the CPU
    op: str
    key: tuple[tuple[str, Any], ...]
    batch_invariant: bool


jax.tree_util.register_dataclass(
    Plan, data_fields=["lists"], meta_fields=["op", "key", "batch_invariant"]
)


def plan(
    q: Array | RaggedTensor,
    keys: PagedKVCache | MLAPagedCache | RaggedTensor,
    where: PageTable | CascadeLevels | None = None,
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
    where : PageTable or CascadeLevels
        Where keys are; None for ``ragged_prefill``.
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
        As those.
    """
    options = {"causal": causal, "window_left": window_left}
    if isinstance(where, CascadeLevels):
        q, where, _ = _in_order(q, where)
    if isinstance(keys, MLAPagedCache):
        options.pop("window_left")
    elif not isinstance(where, CascadeLevels):
        options["batch_invariant"] = batch_invariant

    def make(q: Any, keys: Any, where: Any, arrays: dict[str, Any]) -> _plan.Plan:
        if isinstance(where, CascadeLevels):
            return where.plan(q, keys, **options)
        if where is None:
            return q.plan(keys, **options, **arrays)  # type: ignore[no-any-return]
        return keys.plan(q, where, **options, **arrays)  # type: ignore[no-any-return]

    arrays = _present(qo_indptr=qo_indptr, custom_mask=custom_mask)
    args = q, keys, where, arrays
    op, key, size = _xla.plan_key(make, *args)
    lists = jnp.zeros(0, np.uint8)
    if size:
        lists = _xla.call(
            "plan",
            lambda memory, lists, *args: memory.fill(lambda: make(*args), lists),
            jax.ShapeDtypeStruct((size,), np.uint8),
            *args,
        )
    return Plan(lists, op, key, batch_invariant)


# ------------------------------------------------------------------------------------ memory verbs


def append(
    cache: PagedKVCache,
    k: Array,
    v: Array,
    table: PageTable,
    *,
    indptr: Array | None = None,
    batch_indices: Array | None = None,
    positions: Array | None = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
) -> PagedKVCache:
    """Give the cache with new rows written; ``PagedKVCache.append`` describes the arguments.

    Donate the cache (``jax.jit(step, donate_argnums=...)``): its memory is the result's then.
    """
    where = _present(indptr=indptr, batch_indices=batch_indices, positions=positions)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    written: PagedKVCache = _appended("append", cache, (k, v, table), where, scales)
    return written


def mla_append(
    cache: MLAPagedCache,
    ckv: Array,
    kpe: Array,
    table: PageTable,
    *,
    indptr: Array | None = None,
    batch_indices: Array | None = None,
    positions: Array | None = None,
    ckv_scale: Any = 1.0,
    kpe_scale: Any = 1.0,
) -> MLAPagedCache:
    """Give the cache with new latent rows written, as ``append`` does."""
    where = _present(indptr=indptr, batch_indices=batch_indices, positions=positions)
    scales = {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale}
    written: MLAPagedCache = _appended("mla_append", cache, (ckv, kpe, table), where, scales)
    return written


def _appended(
    op: str, cache: Any, rows: tuple[Any, ...], where: dict[str, Any], scales: dict[str, Any]
) -> Any:
    static, traced = _numbers(scales)

    def write(
        memory: _xla.Memory, data: Any, cache: Any, rows: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        cache.append(*rows, **options, **static)

    data = _xla.call(
        op,
        write,
        jax.tree.map(_like, cache.data),
        cache,
        rows,
        where | traced,
        aliases={i: i for i in range(len(jax.tree.leaves(cache.data)))},
    )
    return noun(type(cache), **(cache._fields() | {"data": data}))


def gather(
    cache: PagedKVCache,
    table: PageTable,
    *,
    nnz: int | None = None,
    dtype: Any = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
) -> tuple[RaggedTensor, RaggedTensor]:
    """Copy the tokens of every request out of its pages; as ``PagedKVCache.gather``.

    The row axis is ``nnz`` long, ``len(table.indices) * table.page_size`` by default; offsets are
    int32.
    """
    op = "PagedKVCache.gather"
    parts = cache.data if isinstance(cache.data, tuple) else (cache.data, cache.data)
    size = table.indices.shape[0] * table.page_size if nnz is None else nnz
    heads = parts[0].shape[-2 if cache.layout == "NHD" else -3]
    to = None if dtype is None else as_dtype(op, "dtype", dtype)
    static, traced = _numbers({"k_scale": k_scale, "v_scale": v_scale})

    def copy(
        memory: _xla.Memory, rows: Any, cache: Any, table: PageTable, traced: dict[str, Any]
    ) -> None:
        scales = static | traced
        factors = scales["k_scale"], scales["v_scale"]
        cache._pages.gather(op, table, size, to, factors, rows)

    shapes = [jax.ShapeDtypeStruct((size, heads, x.shape[-1]), to or x.dtype) for x in parts]
    k, v = _xla.call("gather", copy, shapes, cache, table, traced)
    num_pages = jnp.diff(table.indptr)
    lens = jnp.where(num_pages > 0, (num_pages - 1) * table.page_size + table.last_page_len, 0)
    indptr = jnp.concatenate([jnp.zeros_like(lens[:1]), jnp.cumsum(lens)]).astype(np.int32)
    return noun(RaggedTensor, k, indptr), noun(RaggedTensor, v, indptr)


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

    Here and below scales and sinks may be traced; the other options are static.
    """
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
        _present(sinks=sinks),
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
    """Attend from any number of rows per request; as ``PagedKVCache.prefill``."""
    return _attend(
        _Call(
            "prefill",
            lambda q, cache, table, **options: cache.plan(q, table, **options),
            lambda q, cache, table, **options: cache.prefill(q, table, **options),
            planned={"causal": causal, "window_left": window_left},
            invariant=True,
        ),
        _rows(q),
        _value_dim(cache),
        (q, cache, table),
        _present(custom_mask=custom_mask),
        _present(sinks=sinks),
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
    """Attend from packed rows to packed keys and values; as ``RaggedTensor.prefill``."""
    return _attend(
        _Call(
            "ragged_prefill",
            lambda q, k, v, **options: q.plan(k, **options),
            lambda q, k, v, **options: q.prefill(k, v, **options),
            planned={"causal": causal, "window_left": window_left},
            invariant=True,
        ),
        _rows(q),
        int(v.data.shape[-1]),
        (q, k, v),
        _present(custom_mask=custom_mask),
        _present(sinks=sinks),
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
    """Attend in the absorbed form; as ``MLAPagedCache.decode``."""
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
        _present(qo_indptr=qo_indptr),
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
    """Attend to the keys of all levels; as ``CascadeLevels.attend``."""
    rows, levels, as_given = _in_order(q, levels)
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
        _present(sinks=sinks),
        {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale},
        {"sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap},
        plan,
        return_lse,
    )
    return jax.tree.map(as_given, found)


def merge_states(o: Array, lse: Array) -> tuple[Array, Array]:
    """Combine the states of k disjoint sets of keys, ``o [n, k, heads, head_dim]``; base-2 lse."""

    def merge(memory: _xla.Memory, results: Any, o: Array, lse: Array) -> None:
        _merge.merge_states(o, lse, out=results)

    merged, merged_lse = _xla.call(
        "merge_states", merge, (_like(o[:, 0]), _like(lse[:, 0])), o, lse
    )
    return merged, merged_lse


def packbits(x: Array, bitorder: str = "little") -> Array:
    """Pack truth values into bits, eight to a byte, ``[ceil(n / 8)]`` uint8."""

    def pack(memory: _xla.Memory, packed: Array, x: Array) -> None:
        _masks.pack_bits("packbits", x, bitorder, packed)

    shape = jax.ShapeDtypeStruct((-(-x.size // 8),), np.uint8)
    return _xla.call("packbits", pack, shape, jnp.ravel(x))


# ------------------------------------------------------------------------------------------- parts


class _Call(NamedTuple):
    """A kind of attention, by the nouns' verbs."""

    op: str
    plan: Callable[..., _plan.Plan]
    attend: Callable[..., Any]
    planned: dict[str, Any]  # static options that its plans depend on
    invariant: bool = False  # whether its plans can be batch invariant


def _attend(
    call: _Call,
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
    numbers, arrays = _numbers(scales)
    static = static | numbers | call.planned | {"return_lse": return_lse}
    op, invariant = f"cukv.jax.{call.op}", {}
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"{op}: plan must be a cukv.jax.Plan, got {type(plan)}")
    if call.invariant and plan is not None:
        invariant["batch_invariant"] = plan.batch_invariant

    def make(args: tuple[Any, ...], planned: dict[str, Any]) -> _plan.Plan:
        return call.plan(*args, **planned, **call.planned, **invariant)

    def attend(
        memory: _xla.Memory,
        results: tuple[Array, ...],
        args: tuple[Any, ...],
        planned: dict[str, Any],
        traced: dict[str, Any],
        lists: Array | None,
    ) -> None:
        made = memory.plan(lambda: make(args, planned), lists)
        out, lse = results if return_lse else (*results, None)
        call.attend(*args, **planned, **traced, **static, plan=made, out=out, lse=lse)

    if plan is not None:
        served, key, _ = _xla.plan_key(make, args, planned)
        if plan.op != served:
            raise ValueError(f"{op}: the plan was made for {plan.op}")
        _plan.Plan(served, plan.key)._require(op, key)
    shapes = (
        jax.ShapeDtypeStruct((*q.shape[:2], head_dim_vo), BFLOAT16 if q.dtype in FP8 else q.dtype),
        jax.ShapeDtypeStruct(q.shape[:2], np.float32),
    )
    lists = None if plan is None else plan.lists
    results = shapes if return_lse else shapes[:1]
    found = _xla.call(call.op, attend, results, args, planned, traced | arrays, lists)
    return found if return_lse else found[0]


def _present(**arrays: Any) -> dict[str, Any]:
    """Give the arguments that were given."""
    return {name: x for name, x in arrays.items() if x is not None}


def _numbers(scales: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part scales into numbers, which are static, and arrays."""
    traced = {name: x for name, x in scales.items() if isinstance(x, jax.Array)}
    return {name: x for name, x in scales.items() if name not in traced}, traced


def _like(x: Array) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _value_dim(cache: PagedKVCache) -> int:
    return int((cache.data[1] if isinstance(cache.data, tuple) else cache.data).shape[-1])


def _rows(q: Any) -> Any:
    """Give rows ``[nnz, heads, head_dim]``, of a RaggedTensor as its layout says."""
    if not isinstance(q, RaggedTensor):
        return q
    return q.data if q.layout == "NHD" else jnp.swapaxes(q.data, 0, 1)


def _in_order(q: Any, levels: CascadeLevels) -> tuple[Array, CascadeLevels, Callable[..., Any]]:
    """Give rows in the order of the levels, levels of no other order, and what takes it back."""
    rows, order = _rows(q), levels.row_order
    if order is None:
        return rows, levels, lambda x: x
    named = jnp.arange(order.shape[0]) < levels.qo_indptr[-1][-1]
    target = jnp.where(named, order, rows.shape[0])  # padding goes nowhere

    def as_given(x: Array) -> Array:
        return jnp.zeros((rows.shape[0], *x.shape[1:]), x.dtype).at[target].set(x, mode="drop")

    in_order = noun(CascadeLevels, levels.qo_indptr, levels.tables)
    return jnp.take(rows, order, axis=0, mode="clip"), in_order, as_given
