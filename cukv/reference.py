"""NumPy definition of every operation, in float64: what the kernels must compute.

Arrays are NumPy arrays. Index arrays hold any integers and may be longer than their indptr says:
what lies at or past ``indptr[-1]`` is padding. Caches are ``[pages, page_size, heads, dim]`` views
of any strides (an HND cache with two axes swapped, an MLA cache with one head). A page table is the
triple ``indptr`` (pages), ``indices``, ``last_page_len``. Every ``lse`` is base 2. Values that name
nothing (a page the cache lacks, a length past its page) raise ValueError before anything is
written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]
BitOrder = Literal["little", "big"]
Table = tuple[Array, Array, Array]

LOG2_E = float(np.log2(np.e))
FP8 = ("float8_e4m3fn", "float8_e5m2")


# Index arithmetic


def seq_lens(indptr: Array, last_page_len: Array, page_size: int) -> Int64:
    """Return kv_len of each request, [batch_size]: 0 without pages, whatever last_page_len says."""
    num_pages = np.diff(_offsets(indptr))
    last = np.asarray(last_page_len, np.int64)
    for request in np.flatnonzero((num_pages > 0) & ((last < 1) | (last > page_size))):
        raise ValueError(
            f"seq_lens: last_page_len of request {request} must be in [1, page_size={page_size}], "
            f"got {last[request]}"
        )
    return np.where(num_pages > 0, (num_pages - 1) * page_size + last, 0)


def token_indptr(indptr: Array, last_page_len: Array, page_size: int) -> Int64:
    """Return the prefix sum of kv_len, [batch_size + 1]: where each request's tokens start."""
    return _prefix_sum(seq_lens(indptr, last_page_len, page_size))


def page_indptr(seq_lens: Array, page_size: int) -> tuple[Int64, Int64]:
    """Return indptr [batch_size + 1] in pages and last_page_len, 0 for an empty request."""
    lens = np.asarray(seq_lens, np.int64)
    for request in np.flatnonzero(lens < 0):
        raise ValueError(
            f"page_indptr: seq_lens of request {request} must be at least 0, got {lens[request]}"
        )
    num_pages = -(-lens // page_size)
    last_page_len = np.where(num_pages > 0, lens - (num_pages - 1) * page_size, 0)
    return _prefix_sum(num_pages), last_page_len


def block_table(indptr: Array, indices: Array, width: int) -> Int64:
    """Return the pages of each request as a row, [batch_size, width], padded with -1."""
    indptr = _offsets(indptr)
    request, column = _elements(indptr)
    _check_width("block_table", indptr, width)
    table = np.full((len(indptr) - 1, width), -1, np.int64)
    table[request, column] = _pages(indptr, indices)
    return table


def page_indices(block_table: Array, indptr: Array) -> Int64:
    """Return the page ids that indptr counts, [indptr[-1]], from one row per request."""
    indptr = _offsets(indptr)
    _check_width("page_indices", indptr, block_table.shape[1])
    return block_table[_elements(indptr)].astype(np.int64)


def slot_mapping(
    indptr: Array, indices: Array, page_size: int, batch_indices: Array, positions: Array
) -> Int64:
    """Return page * page_size + entry of each row, [nnz]; -1 where the row names no slot.

    A row names none if its request does not exist or its position is outside the request's pages.
    """
    indptr = _offsets(indptr)
    pages, num_pages = _pages(indptr, indices), np.diff(indptr)
    request, position = np.asarray(batch_indices, np.int64), np.asarray(positions, np.int64)
    slots = np.full(len(request), -1, np.int64)
    rows = np.flatnonzero((request >= 0) & (request < len(num_pages)) & (position >= 0))
    rows = rows[position[rows] // page_size < num_pages[request[rows]]]
    page = pages[indptr[request[rows]] + position[rows] // page_size]
    slots[rows] = page * page_size + position[rows] % page_size
    return slots


def batch_indices_positions(append_indptr: Array, seq_lens: Array, nnz: int) -> tuple[Int64, Int64]:
    """Return the request and the token index of each appended row, both [nnz].

    Appended rows are the last of their sequences, which seq_lens counts with them. Rows at or past
    append_indptr[-1] are padding: request -1, position 0.
    """
    append_indptr = _offsets(append_indptr)
    request, _ = _elements(append_indptr)
    request = request[:nnz]
    row = np.arange(len(request))
    batch_indices = np.full(nnz, -1, np.int64)
    positions = np.zeros(nnz, np.int64)
    batch_indices[row] = request
    positions[row] = row + np.asarray(seq_lens, np.int64)[request] - append_indptr[request + 1]
    return batch_indices, positions


# Caches


def convert(x: Array, dtype: npt.DTypeLike, scale: Any = 1.0) -> Array:
    """Return x in dtype: a bit copy if it has it, else rounded to nearest even.

    To fp8, x is first divided by scale in float32 and saturates to the largest finite value,
    infinities too; NaN stays NaN.
    """
    dtype = np.dtype(dtype)
    if x.dtype == dtype:
        return x.copy()
    with np.errstate(all="ignore"):
        if dtype.name in FP8:
            codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
            largest = codes[np.isfinite(codes)].max()
            x = np.clip(x.astype(np.float32) / np.float32(_scalar(scale)), -largest, largest)
        return x.astype(dtype)


def append(
    cache: Array,
    rows: Array,
    indptr: Array,
    indices: Array,
    batch_indices: Array,
    positions: Array,
    scale: Any = 1.0,
) -> None:
    """Write rows [nnz, heads, dim], in place, to the slots of their requests' positions.

    Rows without a slot are skipped; of several rows for one slot the last wins. fp8 caches hold the
    value divided by scale.
    """
    max_num_pages, page_size = cache.shape[:2]
    _pages(_offsets(indptr), indices, max_num_pages)
    slots = slot_mapping(indptr, indices, page_size, batch_indices, positions)
    writers = _last_of_each(slots)
    slots = slots[writers]
    cache[slots // page_size, slots % page_size] = convert(rows[writers], cache.dtype, scale)


def gather(
    cache: Array,
    indptr: Array,
    indices: Array,
    last_page_len: Array,
    dtype: npt.DTypeLike | None = None,
    scale: Any = 1.0,
) -> Array:
    """Return all tokens of all requests, packed, [sum(seq_lens), heads, dim].

    Bit for bit if dtype is None or the cache's own, else the float32 product of value and scale,
    rounded to dtype.
    """
    max_num_pages, page_size = cache.shape[:2]
    indptr = _offsets(indptr)
    pages = _pages(indptr, indices, max_num_pages)
    request, position = _elements(token_indptr(indptr, last_page_len, page_size))
    page = pages[indptr[request] + position // page_size]
    rows: Array = cache[page, position % page_size]
    if dtype is None or np.dtype(dtype) == cache.dtype:
        return rows
    with np.errstate(all="ignore"):
        return convert(rows.astype(np.float32) * np.float32(_scalar(scale)), dtype)


def copy_pages(cache: Array, src: Array, dst: Array) -> None:
    """Copy pages src to pages dst, in place, as if all sources were read before the call.

    Pairs with a negative id are skipped; of several sources for one page the last wins.
    """
    src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    pairs = _last_of_each(np.where((src < 0) | (dst < 0), -1, dst))
    for pair in pairs[np.maximum(src, dst)[pairs] >= len(cache)]:
        raise ValueError(
            f"copy_pages: pages must be below max_num_pages={len(cache)}, "
            f"got {src[pair]} to {dst[pair]}"
        )
    cache[dst[pairs]] = cache[src[pairs]]


# Masks


def packbits(x: Array, bitorder: BitOrder = "little") -> npt.NDArray[np.uint8]:
    """Return the truth values of x, flattened, eight to a byte; NaN is True, the tail is 0."""
    return np.packbits(np.asarray(x).reshape(-1) != 0, bitorder=bitorder)


def segment_packbits(
    x: Array, indptr: Array, bitorder: BitOrder = "little"
) -> tuple[npt.NDArray[np.uint8], Int64]:
    """Pack each segment of x on its own, so that each starts on a byte.

    Returns the bytes and where each segment starts in them, [segments + 1].
    """
    indptr = _offsets(indptr, len(x))
    byte_indptr = _prefix_sum(-(-np.diff(indptr) // 8))
    segment, bit = _elements(indptr)
    bits = np.zeros(8 * byte_indptr[-1], np.bool_)
    bits[8 * byte_indptr[segment] + bit] = x[: indptr[-1]] != 0
    return packbits(bits, bitorder), byte_indptr


def mask_indptr(qo_indptr: Array, kv_indptr: Array) -> Int64:
    """Return where each request's [qo_len, kv_len] mask starts, in elements, [batch_size + 1]."""
    if len(qo_indptr) != len(kv_indptr):
        raise ValueError(
            f"kv_indptr must be [batch_size + 1 = {len(qo_indptr)}], got [{len(kv_indptr)}]"
        )
    return _prefix_sum(np.diff(_offsets(qo_indptr)) * np.diff(_offsets(kv_indptr)))


def unpack_mask(data: Array, byte_indptr: Array, qo_indptr: Array, kv_indptr: Array) -> Bool:
    """Return the flat mask [sum(qo_len * kv_len)] of bytes with little-endian bits.

    Request b's bits start at byte byte_indptr[b].
    """
    indptr, byte_indptr = mask_indptr(qo_indptr, kv_indptr), _offsets(byte_indptr, len(data))
    given, needed = np.diff(byte_indptr), -(-np.diff(indptr) // 8)
    for short in np.flatnonzero(given < needed):
        raise ValueError(
            f"unpack_mask: byte_indptr must give request {short} {needed[short]} bytes, "
            f"got {given[short]}"
        )
    request, bit = _elements(indptr)
    bits = np.unpackbits(np.asarray(data, np.uint8), bitorder="little").astype(np.bool_)
    mask: Bool = bits[8 * byte_indptr[request] + bit]
    return mask


def visible(
    qo_len: int,
    kv_len: int,
    *,
    causal: bool = False,
    window_left: int = -1,
    mask: Array | None = None,
) -> Bool:
    """Return which keys j each query i sees, [qo_len, kv_len], aligned to the end of both.

    Causal: j <= i + kv_len - qo_len. A mask (True = attend) replaces causal. A window_left of 0 or
    more, with either: j >= i + kv_len - qo_len - window_left.
    """
    position = np.arange(qo_len)[:, None] + (kv_len - qo_len)
    key = np.arange(kv_len)
    seen = np.ones((qo_len, kv_len), np.bool_)
    if mask is not None:
        seen &= mask.reshape(qo_len, kv_len) != 0
    elif causal:
        seen &= key <= position
    if window_left >= 0:
        seen &= key >= position - window_left
    return seen


# Attention


def attend(
    q: Array,
    k: Array,
    v: Array,
    visible: Bool,
    *,
    sm_scale: float,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Float64, Float64]:
    """Return o [qo_len, num_qo_heads, head_dim_vo] and lse [qo_len, num_qo_heads] of one request.

    s = sm_scale * q.k, capped to c * tanh(s / c), then -inf where not visible; o is the softmax of
    s times v, lse the base-2 logarithm of its denominator. A sink is one more logit, natural and
    unscaled, that adds to the denominator only. A row without keys is 0 with lse -inf, or with its
    sink's. Keys that no row sees may hold anything.
    """
    some = np.flatnonzero(visible.any(0))
    k, v, visible = k[some], v[some], visible[:, some]
    (qo_len, num_qo_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    group = (num_kv_heads, num_qo_heads // num_kv_heads)
    queries = q.astype(np.float64).reshape(qo_len, *group, head_dim).transpose(1, 2, 0, 3)
    keys = k.astype(np.float64).transpose(1, 2, 0)[:, None]
    values = v.astype(np.float64).transpose(1, 0, 2)[:, None]
    s = sm_scale * (queries @ keys)  # [num_kv_heads, group_size, qo_len, kv_len]
    if logits_soft_cap:
        s = logits_soft_cap * np.tanh(s / logits_soft_cap)
    s = np.where(visible, s, -np.inf)
    sink = np.full(num_qo_heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    sink = sink.reshape(*group, 1, 1)
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0.0, m)
    p = np.exp(s - m)
    d = p.sum(-1, keepdims=True) + np.exp(sink - m)
    o = p @ values / np.where(d > 0, d, 1.0)
    lse = (m + _log(d)) * LOG2_E
    return _heads_last(o), _heads_last(lse)[..., 0]


def ragged_prefill(
    q: Array,
    qo_indptr: Array,
    k: Array,
    v: Array,
    kv_indptr: Array,
    *,
    causal: bool = False,
    custom_mask: Array | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    q_scale: Any = 1.0,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
) -> tuple[Float64, Float64]:
    """Attend each request's rows of q to its rows of k and v; padding rows get 0 and -inf.

    custom_mask is flat, request b's part starts at mask_indptr[b]. sm_scale is 1 / sqrt(head_dim)
    unless given.
    """
    qo_indptr, kv_indptr = _offsets(qo_indptr, len(q)), _offsets(kv_indptr, min(len(k), len(v)))
    scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
    scale *= _scalar(q_scale) * _scalar(k_scale)
    mask_starts = mask_indptr(qo_indptr, kv_indptr)
    if custom_mask is not None and len(custom_mask) < mask_starts[-1]:
        raise ValueError(
            f"custom_mask must hold {mask_starts[-1]} elements, got {len(custom_mask)}"
        )
    o = np.zeros((len(q), q.shape[1], v.shape[2]))
    lse = np.full((len(q), q.shape[1]), -np.inf)
    requests = (_slices(qo_indptr), _slices(kv_indptr), _slices(mask_starts))
    for rows, keys, part in zip(*requests, strict=True):
        qo_len, kv_len = rows.stop - rows.start, keys.stop - keys.start
        mask = None if custom_mask is None else custom_mask[part]
        seen = visible(qo_len, kv_len, causal=causal, window_left=window_left, mask=mask)
        qkv = q[rows], k[keys], v[keys]
        o[rows], lse[rows] = attend(
            *qkv, seen, sm_scale=scale, logits_soft_cap=logits_soft_cap, sinks=sinks
        )
    return o * _scalar(v_scale), lse


def prefill(
    q: Array,
    qo_indptr: Array,
    k_cache: Array,
    v_cache: Array,
    indptr: Array,
    indices: Array,
    last_page_len: Array,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Attend each request's rows of q to its pages: ragged_prefill over the gathered rows."""
    k = gather(k_cache, indptr, indices, last_page_len)
    v = gather(v_cache, indptr, indices, last_page_len)
    kv_indptr = token_indptr(indptr, last_page_len, k_cache.shape[1])
    return ragged_prefill(q, qo_indptr, k, v, kv_indptr, **options)


def decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    indptr: Array,
    indices: Array,
    last_page_len: Array,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Attend row b of q to all pages of request b: prefill with one row per request."""
    qo_indptr = np.arange(len(indptr))
    return prefill(q, qo_indptr, k_cache, v_cache, indptr, indices, last_page_len, **options)


def mla_decode(
    q_nope: Array,
    q_pe: Array,
    qo_indptr: Array,
    ckv_cache: Array,
    kpe_cache: Array,
    indptr: Array,
    indices: Array,
    last_page_len: Array,
    *,
    sm_scale: float,
    causal: bool = False,
    ckv_scale: Any = 1.0,
    kpe_scale: Any = 1.0,
) -> tuple[Float64, Float64]:
    """Attend to latent pages: all heads share the key [ckv, kpe] and the value ckv."""
    table = (indptr, indices, last_page_len)
    ckv = gather(ckv_cache, *table).astype(np.float64) * _scalar(ckv_scale)
    kpe = gather(kpe_cache, *table).astype(np.float64) * _scalar(kpe_scale)
    kv_indptr = token_indptr(indptr, last_page_len, ckv_cache.shape[1])
    q = np.concatenate([q_nope.astype(np.float64), q_pe.astype(np.float64)], -1)
    k = np.concatenate([ckv, kpe], -1)
    return ragged_prefill(q, qo_indptr, k, ckv, kv_indptr, causal=causal, sm_scale=sm_scale)


def cascade(
    q: Array,
    qo_indptrs: Sequence[Array],
    k_cache: Array,
    v_cache: Array,
    tables: Sequence[Table],
    *,
    row_order: Array | None = None,
    causal: bool = False,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Attend each row to the keys of its request in every level, root first, as if concatenated.

    Row r of the levels is row row_order[r] of q and of the results. causal acts inside the last
    level, aligned to its end; a window counts positions over the concatenation. Rows at or past the
    last level's qo_indptr[-1] are padding; a level that ends before a row has no keys for it.
    """
    page_size, nnz = k_cache.shape[1], len(q)
    levels = [_offsets(qo_indptr) for qo_indptr in qo_indptrs]
    starts = [token_indptr(indptr, last, page_size) for indptr, _, last in tables]
    ks = [gather(k_cache, *table) for table in tables]
    vs = [gather(v_cache, *table) for table in tables]
    order = _row_order(row_order, int(levels[-1][-1]), nnz)
    o, lse = np.zeros((nnz, q.shape[1], v_cache.shape[3])), np.full((nnz, q.shape[1]), -np.inf)
    for part in _slices(np.unique(np.concatenate(levels))):
        # The rows of a part share their keys. Their positions count from the end of their leaf, so
        # all rows of the leaf are attended and the part's are kept.
        leaf = _request_of(part.start, levels[-1], levels[-1])
        rows = order[leaf]
        path = [_request_of(part.start, *level) for level in zip(levels, starts, strict=True)]
        k = np.concatenate([k[keys] for k, keys in zip(ks, path, strict=True)])
        v = np.concatenate([v[keys] for v, keys in zip(vs, path, strict=True)])
        mask = visible(len(rows), len(k), causal=causal)
        mask[:, : len(k) - (path[-1].stop - path[-1].start)] = True
        ends = (np.array([0, len(rows)]), np.array([0, len(k)]))
        leaf_o, leaf_lse = ragged_prefill(
            q[rows], ends[0], k, v, ends[1], custom_mask=mask.reshape(-1), **options
        )
        kept = slice(part.start - leaf.start, part.stop - leaf.start)
        o[rows[kept]], lse[rows[kept]] = leaf_o[kept], leaf_lse[kept]
    return o, lse


# Merging


def merge_states(o: Array, lse: Array) -> tuple[Float64, Float64]:
    """Combine attention states over disjoint keys: o [n, k, h, d] and lse [n, k, h] over axis 1.

    Weights are 2 ** lse. A state with lse -inf has no key and adds nothing, whatever its o.
    """
    o, lse = o.astype(np.float64), lse.astype(np.float64)
    if not (lse < np.inf).all():
        raise ValueError(f"merge_states: lse must be below +inf, got {lse[~(lse < np.inf)][0]}")
    m = lse.max(1, keepdims=True, initial=-np.inf)
    m = np.where(m == -np.inf, 0.0, m)
    weights = np.exp2(lse - m)
    d = weights.sum(1)
    live = np.where(lse[..., None] > -np.inf, o, 0.0)
    merged = np.einsum("nkh,nkhd->nhd", weights, live) / np.where(d > 0, d, 1.0)[..., None]
    return merged, m[:, 0] + _log(d) * LOG2_E


def merge_state(o_a: Array, lse_a: Array, o_b: Array, lse_b: Array) -> tuple[Float64, Float64]:
    """Combine two attention states over disjoint keys: o [n, h, d] and lse [n, h]."""
    return merge_states(np.stack([o_a, o_b], 1), np.stack([lse_a, lse_b], 1))


# Parts of the definitions


def _offsets(indptr: Array, length: int | None = None) -> Int64:
    """Return indptr as int64, checked: from 0, never down, not past an axis of that length."""
    offsets = np.asarray(indptr, np.int64)
    if len(offsets) == 0 or offsets[0] != 0:
        raise ValueError(f"indptr must start at 0, got {offsets[:1]}")
    for request in np.flatnonzero(np.diff(offsets) < 0):
        raise ValueError(
            f"indptr must not decrease, got {offsets[request]}, {offsets[request + 1]} "
            f"for request {request}"
        )
    if length is not None and offsets[-1] > length:
        raise ValueError(f"indptr[-1] must be at most {length} rows, got {offsets[-1]}")
    return offsets


def _prefix_sum(lens: Int64) -> Int64:
    """Return the sums of the first 0, 1, ..., len(lens) entries."""
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)


def _elements(indptr: Int64) -> tuple[Int64, Int64]:
    """Return, for each of the indptr[-1] elements, its request and its position in the request."""
    request = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return request, np.arange(indptr[-1]) - indptr[request]


def _slices(indptr: Int64) -> Iterator[slice]:
    """Yield the rows of each request."""
    for start, stop in pairwise(indptr):
        yield slice(int(start), int(stop))


def _last_of_each(targets: Int64) -> Int64:
    """Return the last index of each distinct target, without the negative ones."""
    found, from_end = np.unique(targets[::-1], return_index=True)
    return (len(targets) - 1 - from_end)[found >= 0]


def _pages(indptr: Int64, indices: Array, max_num_pages: int | None = None) -> Int64:
    """Return the page ids that indptr names, checked against the cache if its size is given."""
    if len(indices) < indptr[-1]:
        raise ValueError(f"indices must hold {indptr[-1]} pages, got {len(indices)}")
    pages = np.asarray(indices[: indptr[-1]], np.int64)
    stop = np.inf if max_num_pages is None else max_num_pages
    for element in np.flatnonzero((pages < 0) | (pages >= stop)):
        request = np.searchsorted(indptr, element, "right") - 1
        raise ValueError(
            f"page ids must be in [0, max_num_pages={stop}), "
            f"got {pages[element]} for request {request}"
        )
    return pages


def _check_width(name: str, indptr: Int64, width: int) -> None:
    """Raise if a request has more pages than a row of the table holds."""
    num_pages = np.diff(indptr)
    for request in np.flatnonzero(num_pages > width):
        raise ValueError(
            f"{name}: width must be at least {num_pages[request]} pages for request {request}, "
            f"got {width}"
        )


def _request_of(row: int, qo_indptr: Int64, indptr: Int64) -> slice:
    """Return indptr's slice of the request that row belongs to, an empty one if there is none."""
    request = int(np.searchsorted(qo_indptr, row, "right")) - 1
    return slice(int(indptr[request]), int(indptr[min(request + 1, len(indptr) - 1)]))


def _row_order(row_order: Array | None, num_rows: int, nnz: int) -> Int64:
    """Return the row of q of each row of the levels, checked: distinct rows that q has."""
    order = np.asarray(np.arange(num_rows) if row_order is None else row_order, np.int64)[:num_rows]
    if len(order) < num_rows or len(np.unique(order)) < num_rows:
        raise ValueError(f"cascade: row_order must be {num_rows} distinct rows, got {order}")
    for row in np.flatnonzero((order < 0) | (order >= nnz)):
        raise ValueError(
            f"cascade: row {row} of the levels must be in [0, nnz={nnz}), got {order[row]}"
        )
    return order


def _scalar(scale: Any) -> float:
    """Return a scalar, or the element of an array of one element, as a float."""
    return float(np.asarray(scale).item())


def _log(d: Float64) -> Float64:
    """Return the natural logarithm, -inf for 0 without a warning."""
    with np.errstate(divide="ignore"):
        return np.log(d)


def _heads_last(x: Float64) -> Float64:
    """Turn [num_kv_heads, group_size, qo_len, dim] into [qo_len, num_qo_heads, dim]."""
    num_kv_heads, group_size, qo_len, dim = x.shape
    return x.transpose(2, 0, 1, 3).reshape(qo_len, num_kv_heads * group_size, dim)
