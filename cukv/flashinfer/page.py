"""FlashInfer's ``page``: appending to paged caches, and where rows go."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukv import positions as _positions
from cukv._arrays import Array, home
from cukv._check import match_index, whole_number
from cukv.flashinfer._caller import data, detached, give_back, index, target, working_for
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
]


def get_batch_indices_positions(
    append_indptr: Any,
    seq_lens: Any,
    nnz: int,
    batch_indices: Any = None,
    positions: Any = None,
) -> tuple[Any, Any]:
    """Find the request and the token index of every appended row; -1 and 0 for padding.

    ``batch_indices`` and ``positions``, int32 ``[nnz]``, are written and returned if given.
    """
    op = "get_batch_indices_positions"
    if (batch_indices is None) != (positions is None):
        raise ValueError(f"{op}: give batch_indices and positions, or none of them")
    with working_for(append_indptr):
        like = _home_of_indices(op, "append_indptr", append_indptr)
        indptr = index(op, "append_indptr", append_indptr, like)
        lens = index(op, "seq_lens", seq_lens, like)
        found = _positions.batch_indices_positions(indptr, lens, nnz)
        if batch_indices is None:
            batch_indices, positions = give_back(append_indptr, *found)
            return batch_indices, positions
        given = {"batch_indices": batch_indices, "positions": positions}
        targets = {name: target(op, name, x, like) for name, x in given.items()}
        home(op, append_indptr=indptr, **targets)
        for name, array in targets.items():
            match_index(op, name, array, nnz)
        for array, rows in zip(targets.values(), found, strict=True):
            array[...] = rows
    return batch_indices, positions


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Give the tokens of each request: 0 without pages, whatever its last_page_len says.

    Indices in CPU memory give lengths there.
    """
    op = "get_seq_lens"
    page_size = whole_number(op, "page_size", page_size, 1)
    with working_for(kv_indptr):
        like = _home_of_indices(op, "kv_indptr", kv_indptr)
        indptr = index(op, "kv_indptr", kv_indptr, like)
        last_page_len = index(op, "kv_last_page_len", kv_last_page_len, like)
        match_index(op, "kv_indptr", indptr)
        match_index(op, "kv_last_page_len", last_page_len, len(indptr) - 1)
        table = PageTable(indptr, indptr[:0], last_page_len, page_size)
        return give_back(kv_indptr, table.seq_lens)


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    """Write rows ``[nnz, num_kv_heads, head_dim]`` to their slots of a paged cache, in place.

    Rows of another dtype than the cache's are converted; rows with a negative batch index, and
    positions outside their request's pages, are skipped; ``nnz`` may be 0.
    """
    op = "append_paged_kv_cache"
    with working_for(append_key):
        cache = paged_cache(op, paged_kv_cache, kv_layout)
        rows = data(op, "append_key", append_key), data(op, "append_value", append_value)
        table = page_table(op, kv_indptr, kv_indices, kv_last_page_len, cache.page_size, cache.k)
        cache.append(
            *rows,
            table,
            batch_indices=index(op, "batch_indices", batch_indices, cache.k),
            positions=index(op, "positions", positions, cache.k),
        )


def append_paged_mla_kv_cache(
    append_ckv: Any,
    append_kpe: Any,
    batch_indices: Any,
    positions: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
) -> None:
    """Write latent rows ``[nnz, 512]`` and ``[nnz, 64]`` to their slots of a paged cache, in place.

    As ``append_paged_kv_cache``.
    """
    op = "append_paged_mla_kv_cache"
    with working_for(append_ckv):
        cache = MLAPagedCache((detached(ckv_cache), detached(kpe_cache)))
        rows = data(op, "append_ckv", append_ckv), data(op, "append_kpe", append_kpe)
        table = page_table(op, kv_indptr, kv_indices, kv_last_page_len, cache.page_size, cache.ckv)
        cache.append(
            *rows,
            table,
            batch_indices=index(op, "batch_indices", batch_indices, cache.ckv),
            positions=index(op, "positions", positions, cache.ckv),
        )


# ------------------------------------------------------------------------------------------- parts


def paged_cache(op: str, paged_kv_cache: Any, kv_layout: str) -> PagedKVCache:
    """Make the noun of a cache: 5-D, a pair of 4-D, or, for pages of one token, an axis less."""
    given = detached(paged_kv_cache)
    parts = tuple(
        part if hasattr(part, "ndim") else data(op, "paged_kv_cache", part)
        for part in (given if isinstance(given, tuple) else (given,))
    )
    token_axis = -2 if kv_layout == "NHD" else -1  # where pages of one token lack it
    dims = 4 if isinstance(given, tuple) else 5
    if all(part.ndim == dims - 1 for part in parts):
        # Indexing works on arrays of all frameworks; None is the axis of one token.
        after = (slice(None),) * (-token_axis)
        parts = tuple(part[(..., None, *after)] for part in parts)
    return PagedKVCache(parts if isinstance(given, tuple) else parts[0], kv_layout)


def page_table(
    op: str, indptr: Any, indices: Any, last_page_len: Any, page_size: int, like: Array
) -> PageTable:
    """Make the noun of a page table in the home of ``like``."""
    return PageTable(
        index(op, "kv_indptr", indptr, like),
        index(op, "kv_indices", indices, like),
        index(op, "kv_last_page_len", last_page_len, like),
        page_size,
    )


def _home_of_indices(op: str, name: str, x: Any) -> Array:
    """Give an array in the home of index arrays that stand for themselves: of NumPy on the CPU."""
    return index(op, name, x, np.empty(0))
