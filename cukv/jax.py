"""cukv's operations inside ``jax.jit``, ``lax.scan`` and ``shard_map``.

Nouns are pytrees: their arrays are leaves, layouts and sizes are static. ``noun`` makes one over
JAX arrays or tracers, and ``jax.tree.map(jax.numpy.asarray, a_noun_of_NumPy_arrays)`` turns one
into the other. Such a noun is a bundle of arrays for the functions here, which take the data first
and say what is wrong when they run; it has no methods of its own.

On JAX for the CPU every function runs its NumPy definition through ``jax.pure_callback``, so that a
model can be tested on a laptop. Functions on JAX for a GPU raise NotImplementedError.

All of them are for inference: ``jax.grad`` and ``jax.vmap`` through one raise and name it. Requests
are the batch axis. A sharded caller uses ``shard_map``: heads are independent of each other, and
states over disjoint keys merge by their base-2 lse (``merge_states`` after ``lax.all_gather``).

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
from typing import TYPE_CHECKING, Any

import cupy as cp
import jax
import jax.numpy as jnp
import numpy as np

from cukv import masks as _masks
from cukv import merge as _merge
from cukv._arrays import BFLOAT16, FP8
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
    "append",
    "cascade",
    "decode",
    "gather",
    "merge_states",
    "mla_append",
    "mla_decode",
    "noun",
    "packbits",
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


# ------------------------------------------------------------------------------------ the callback


def _call(op: str, definition: Callable[..., Any], shapes: Any, *args: Any) -> Any:
    """Run a definition on the host: ``definition(*args)`` on the same pytrees of NumPy arrays."""
    if jax.default_backend() != "cpu":
        raise NotImplementedError(
            f"cukv.jax.{op}: runs on JAX for the CPU only; on a GPU use the nouns, outside of jit"
        )
    leaves, structure = jax.tree.flatten(args)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    # Inside shard_map a result differs among the devices that an argument differs among.
    varies = frozenset().union(*(getattr(jax.typeof(leaf), "vma", ()) for leaf in leaves))
    if varies:
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, vma=varies), shapes)

    def on_host(*arrays: Any) -> Any:
        host = [np.array(array) for array in arrays]  # its own, which append writes
        return definition(*jax.tree.unflatten(structure, host))

    def without_vmap(*_: Any) -> Any:
        raise NotImplementedError(
            f"cukv.jax.{op}: has no vmap: requests are its batch; put them in one table or indptr"
        )

    def without_grad(*_: Any) -> Any:
        raise NotImplementedError(f"cukv.jax.{op}: is for inference and has no derivative")

    one_batch = jax.custom_batching.custom_vmap(
        lambda *arrays: jax.pure_callback(on_host, shapes, *arrays)
    )
    one_batch.def_vmap(without_vmap)
    inference = jax.custom_jvp(lambda *arrays: one_batch(*arrays))
    inference.defjvp(without_grad)
    return inference(*leaves)


def _state(q: Array, head_dim_vo: int) -> tuple[Any, Any]:
    """Give the shapes of an output and its lse."""
    dtype = BFLOAT16 if q.dtype in FP8 else q.dtype
    return (
        jax.ShapeDtypeStruct((*q.shape[:2], head_dim_vo), dtype),
        jax.ShapeDtypeStruct(q.shape[:2], np.float32),
    )


def _like(x: Array) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _attend(
    op: str,
    attend: Callable[..., Any],
    q: Array,
    head_dim_vo: int,
    args: tuple[Any, ...],
    arrays: dict[str, Any],
    static: dict[str, Any],
    return_lse: bool,
) -> Any:
    """Attend by a noun's verb. ``arrays`` are options that may be traced, ``static`` may not."""
    found = _call(
        op,
        lambda args, arrays: attend(*args, **arrays, **static, return_lse=True),
        _state(q, head_dim_vo),
        args,
        {name: x for name, x in arrays.items() if x is not None},
    )
    return found if return_lse else found[0]


def _value_dim(cache: PagedKVCache) -> int:
    return int((cache.data[1] if isinstance(cache.data, tuple) else cache.data).shape[-1])


# --------------------------------------------------------------------------------------- functions


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

    Donate the cache (``jax.jit(step, donate_argnums=...)``): its memory can then be the result's.
    """
    where = {"indptr": indptr, "batch_indices": batch_indices, "positions": positions}
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
    where = {"indptr": indptr, "batch_indices": batch_indices, "positions": positions}
    scales = {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale}
    written: MLAPagedCache = _appended("mla_append", cache, (ckv, kpe, table), where, scales)
    return written


def _appended(
    op: str, cache: Any, rows: tuple[Any, ...], where: dict[str, Any], scales: dict[str, Any]
) -> Any:
    def write(cache: Any, rows: tuple[Any, ...], options: dict[str, Any]) -> Any:
        cache.append(*rows, **options)
        return cache.data

    options = scales | {name: x for name, x in where.items() if x is not None}
    data = _call(op, write, jax.tree.map(_like, cache.data), cache, rows, options)
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

    The row axis is ``nnz`` long, ``len(table.indices) * table.page_size`` by default.
    """
    parts = cache.data if isinstance(cache.data, tuple) else (cache.data, cache.data)
    size = table.indices.shape[0] * table.page_size if nnz is None else nnz
    heads = parts[0].shape[-2 if cache.layout == "NHD" else -3]
    rows = tuple(
        jax.ShapeDtypeStruct((size, heads, part.shape[-1]), dtype or part.dtype) for part in parts
    )

    def copy(cache: Any, table: Any, scales: dict[str, Any]) -> Any:
        k, v = cache.gather(table, nnz=size, dtype=dtype, **scales)
        return k.data, v.data, k.indptr.astype(np.int32)

    shapes = (*rows, jax.ShapeDtypeStruct(table.indptr.shape, np.int32))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    k, v, indptr = _call("gather", copy, shapes, cache, table, scales)
    return noun(RaggedTensor, k, indptr), noun(RaggedTensor, v, indptr)


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
    return_lse: bool = False,
) -> Any:
    """Attend from one row per request; as ``PagedKVCache.decode``.

    ``sm_scale``, ``window_left`` and ``logits_soft_cap`` are static.
    """
    return _attend(
        "decode",
        lambda q, cache, table, **options: cache.decode(q, table, **options),
        q,
        _value_dim(cache),
        (q, cache, table),
        {"sinks": sinks, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale},
        {"sm_scale": sm_scale, "window_left": window_left, "logits_soft_cap": logits_soft_cap},
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
    return_lse: bool = False,
) -> Any:
    """Attend from any number of rows per request; as ``PagedKVCache.prefill``."""
    return _attend(
        "prefill",
        lambda q, cache, table, **options: cache.prefill(q, table, **options),
        _rows(q),
        _value_dim(cache),
        (q, cache, table),
        {
            "custom_mask": custom_mask,
            "sinks": sinks,
            "q_scale": q_scale,
            "k_scale": k_scale,
            "v_scale": v_scale,
        },
        {
            "causal": causal,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
        },
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
    return_lse: bool = False,
) -> Any:
    """Attend from packed rows to packed keys and values; as ``RaggedTensor.prefill``."""
    return _attend(
        "ragged_prefill",
        lambda q, k, v, **options: q.prefill(k, v, **options),
        _rows(q),
        int(v.data.shape[-1]),
        (q, k, v),
        {
            "custom_mask": custom_mask,
            "sinks": sinks,
            "q_scale": q_scale,
            "k_scale": k_scale,
            "v_scale": v_scale,
        },
        {
            "causal": causal,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
        },
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
    return_lse: bool = False,
) -> Any:
    """Attend in the absorbed form; as ``MLAPagedCache.decode``."""
    return _attend(
        "mla_decode",
        lambda q_nope, q_pe, cache, table, **options: cache.decode(q_nope, q_pe, table, **options),
        q_nope,
        int(q_nope.shape[-1]),
        (q_nope, q_pe, cache, table),
        {"qo_indptr": qo_indptr, "ckv_scale": ckv_scale, "kpe_scale": kpe_scale},
        {"sm_scale": sm_scale, "causal": causal},
        return_lse,
    )


def cascade(
    q: Array,
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
    return_lse: bool = False,
) -> Any:
    """Attend to the keys of all levels; as ``CascadeLevels.attend``."""
    return _attend(
        "cascade",
        lambda q, cache, levels, **options: levels.attend(q, cache, **options),
        _rows(q),
        _value_dim(cache),
        (q, cache, levels),
        {"sinks": sinks, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale},
        {
            "causal": causal,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
        },
        return_lse,
    )


def merge_states(o: Array, lse: Array) -> tuple[Array, Array]:
    """Combine the states of k disjoint sets of keys, ``o [n, k, heads, head_dim]``; base-2 lse."""
    shapes = _like(o[:, 0]), _like(lse[:, 0])
    merged, merged_lse = _call("merge_states", _merge.merge_states, shapes, o, lse)
    return merged, merged_lse


def packbits(x: Array, bitorder: str = "little") -> Array:
    """Pack truth values into bits, eight to a byte, ``[ceil(n / 8)]`` uint8."""
    order: Any = bitorder
    shape = jax.ShapeDtypeStruct((-(-x.size // 8),), np.uint8)
    return _call("packbits", lambda x: _masks.packbits(x, order), shape, x)


def _rows(q: Any) -> Any:
    """Give rows ``[nnz, heads, head_dim]``, of a RaggedTensor as its layout says."""
    if not isinstance(q, RaggedTensor):
        return q
    return q.data if q.layout == "NHD" else jnp.swapaxes(q.data, 0, 1)
