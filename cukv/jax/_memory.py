"""Memory verbs: append, gather, and bits of masks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cukv._arrays import as_dtype
from cukv._check import whole_number
from cukv.bits import BitOrder, pack_bits
from cukv.jax._arguments import (
    Array,
    like,
    present,
    require,
    require_arrays,
    require_rows,
    require_static,
    split_scales,
)
from cukv.jax._nouns import noun
from cukv.jax._xla import Memory, call
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache
from cukv.ragged import RaggedTensor


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
    """Give the cache with new rows written; as ``PagedKVCache.append``.

    Donate the cache (``jax.jit(step, donate_argnums=...)``): its memory is the result's then, and
    only the new rows are written.

    Parameters
    ----------
    cache, table
        Nouns of JAX arrays.
    k, v : [nnz, num_kv_heads, head_dim], [nnz, num_kv_heads, head_dim_vo], or RaggedTensors
        Of any dtype that a cache can have.
    indptr : [batch_size + 1] int32 or int64
        As there.
    batch_indices, positions : [nnz] int32 or int64
        As there.
    k_scale, v_scale
        As there; may be traced.

    Returns
    -------
    PagedKVCache

    Raises
    ------
    TypeError, ValueError
        As there, when the call is traced (on JAX for the CPU when it runs, inside a
        JaxRuntimeError).
    """
    require("append", PagedKVCache, cache=cache)
    where = present(indptr=indptr, batch_indices=batch_indices, positions=positions)
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
    """Give the cache with new latent rows written; as ``MLAPagedCache.append``.

    Parameters
    ----------
    ckv, kpe : [nnz, head_dim_ckv], [nnz, head_dim_kpe], or with a head axis of 1, or RaggedTensors
        Rows of one dtype.
    cache, table, indptr, batch_indices, positions, ckv_scale, kpe_scale
        As in ``append``, and so are donation and errors.

    Returns
    -------
    MLAPagedCache
    """
    require("mla_append", MLAPagedCache, cache=cache)
    where = present(indptr=indptr, batch_indices=batch_indices, positions=positions)
    scales = {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale}
    written: MLAPagedCache = _appended("mla_append", cache, (ckv, kpe, table), where, scales)
    return written


def _appended(
    op: str, cache: Any, rows: tuple[Any, ...], where: dict[str, Any], scales: dict[str, Any]
) -> Any:
    require(op, PageTable, table=rows[-1])
    names = ("k", "v") if op == "append" else ("ckv", "kpe")
    require_rows(op, **dict(zip(names, rows, strict=False)))
    static, traced = split_scales(scales)

    def write(
        memory: Memory, data: Any, cache: Any, rows: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        cache.append(*rows, **options, **static)

    data = call(
        op,
        write,
        jax.tree.map(like, cache.data),
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

    Parameters
    ----------
    cache, table
        Nouns of JAX arrays.
    nnz : int
        Rows to make, static; ``len(table.indices) * table.page_size`` by default.
    dtype : str or dtype
        What to convert to, static; the cache's by default.
    k_scale, v_scale
        As there; may be traced.

    Returns
    -------
    k, v : RaggedTensor
        ``[nnz, num_kv_heads, head_dim]`` and ``[nnz, num_kv_heads, head_dim_vo]``, with int32
        offsets.

    Raises
    ------
    TypeError, ValueError
        As in ``append``.
    """
    require("gather", PagedKVCache, cache=cache)
    require("gather", PageTable, table=table)
    require_static("gather", {"nnz": nnz})
    nnz = None if nnz is None else whole_number("cukv.jax.gather", "nnz", nnz, 0)
    op = "PagedKVCache.gather"
    parts = cache.data if isinstance(cache.data, tuple) else (cache.data, cache.data)
    size = table.indices.shape[0] * table.page_size if nnz is None else nnz
    heads = parts[0].shape[-2 if cache.layout == "NHD" else -3]
    to = None if dtype is None else as_dtype(op, "dtype", dtype)
    static, traced = split_scales({"k_scale": k_scale, "v_scale": v_scale})

    def copy(
        memory: Memory, rows: Any, cache: Any, table: PageTable, traced: dict[str, Any]
    ) -> None:
        scales = static | traced
        factors = scales["k_scale"], scales["v_scale"]
        cache._pages.gather(op, table, size, to, factors, rows)

    shapes = [jax.ShapeDtypeStruct((size, heads, x.shape[-1]), to or x.dtype) for x in parts]
    k, v = call("gather", copy, shapes, cache, table, traced)
    num_pages = jnp.diff(table.indptr)
    lens = jnp.where(num_pages > 0, (num_pages - 1) * table.page_size + table.last_page_len, 0)
    indptr = jnp.pad(jnp.cumsum(lens), (1, 0)).astype(np.int32)
    return noun(RaggedTensor, k, indptr), noun(RaggedTensor, v, indptr)


def packbits(x: Array, bitorder: BitOrder = "little") -> Array:
    """Pack truth values into bits; as ``cukv.packbits``.

    Parameters
    ----------
    x : array of any shape
        What is not 0 is true.
    bitorder : {"little", "big"}
        Whether the first value of a byte is its lowest bit or its highest.

    Returns
    -------
    [ceil(n / 8)] uint8
        Eight values to a byte; the unused bits of the last one are 0.

    Raises
    ------
    TypeError, ValueError
        As in ``append``.
    """
    require_arrays("packbits", x=x)
    if isinstance(x, np.ndarray) and x.dtype.kind in "iuf":
        x = x != 0  # before JAX cuts 64 bits to the lower 32
    x = jnp.ravel(x)

    def pack(memory: Memory, packed: Array, x: Array) -> None:
        pack_bits("packbits", x, bitorder, packed)

    shape = jax.ShapeDtypeStruct((-(-x.size // 8),), np.uint8)
    return call("packbits", pack, shape, x)
