"""Brute force for the definitions: one element at a time, natural logarithms, plain Python."""

import math

import numpy as np


def request_of(row, indptr):
    """Return the request whose rows hold row, None past the last one."""
    for request in range(len(indptr) - 1):
        if int(indptr[request]) <= row < int(indptr[request + 1]):
            return request
    return None


def kv_len(indptr, last_page_len, page_size, request):
    """Count a request's tokens page by page."""
    tokens = 0
    for page in range(int(indptr[request]), int(indptr[request + 1])):
        is_last = page == int(indptr[request + 1]) - 1
        tokens += int(last_page_len[request]) if is_last else page_size
    return tokens


def slot(indptr, indices, page_size, request, position):
    """Walk a request's pages to a position; None if there is no such request, page or position."""
    if not 0 <= request < len(indptr) - 1 or position < 0:
        return None
    pages = [int(page) for page in indices[int(indptr[request]) : int(indptr[request + 1])]]
    slots = [(page, entry) for page in pages for entry in range(page_size)]
    return slots[position] if position < len(slots) else None


def tokens(cache, table, request):
    """Return a request's rows of a [pages, page_size, heads, dim] cache, [kv_len, heads, dim]."""
    indptr, indices, last_page_len = table
    page_size = cache.shape[1]
    count = kv_len(indptr, last_page_len, page_size, request)
    rows = [cache[slot(indptr, indices, page_size, request, t)] for t in range(count)]
    return np.array(rows, cache.dtype).reshape(count, *cache.shape[2:])


def sees(i, j, qo_len, kv_len, causal=False, window_left=-1, mask=None):
    """Say whether query i sees key j, by its distance to the end of both."""
    queries_after, keys_after = qo_len - 1 - i, kv_len - 1 - j
    allowed = (keys_after >= queries_after) if causal else True
    if mask is not None:
        allowed = bool(mask[i][j])
    if window_left >= 0:
        allowed = allowed and keys_after <= queries_after + window_left
    return allowed


def softmax_row(q, keys, values, dim, scale, cap=None, sink=None):
    """Attend one query of one head to lists of keys and values: (o, base-2 lse)."""
    logits = []
    for key in keys:
        s = scale * math.fsum(float(a) * float(b) for a, b in zip(q, key, strict=True))
        logits.append(cap * math.tanh(s / cap) if cap else s)
    extra = [] if sink is None else [float(sink)]
    if not logits + extra:
        return [0.0] * dim, -math.inf
    top = max(logits + extra)
    weights = [math.exp(s - top) for s in logits]
    total = math.fsum(weights + [math.exp(s - top) for s in extra])
    o = [
        math.fsum(w * float(v[d]) for w, v in zip(weights, values, strict=True)) / total
        for d in range(dim)
    ]
    return o, (top + math.log(total)) / math.log(2)


def attention(q, k, v, seen, scale, cap=None, sinks=None):
    """Attend q [qo_len, heads, dim] to rows k and v; seen(i, j) says which."""
    qo_len, num_qo_heads, _ = q.shape
    _, num_kv_heads, dim = v.shape
    o = np.zeros((qo_len, num_qo_heads, dim))
    lse = np.zeros((qo_len, num_qo_heads))
    for i in range(qo_len):
        keys = [j for j in range(len(k)) if seen(i, j)]
        for head in range(num_qo_heads):
            kv_head = head * num_kv_heads // num_qo_heads
            o[i, head], lse[i, head] = softmax_row(
                q[i, head],
                [k[j][kv_head] for j in keys],
                [v[j][kv_head] for j in keys],
                dim,
                scale,
                cap,
                None if sinks is None else sinks[head],
            )
    return o, lse


def cascade(q, qo_indptrs, k_cache, v_cache, tables, row_order, causal, window_left, scale):
    """Attend row by row: every level's keys, causal against the leaf, the window against all."""
    o = np.zeros((*q.shape[:2], v_cache.shape[3]))
    lse = np.full(q.shape[:2], -np.inf)
    for row in range(int(qo_indptrs[-1][-1])):
        k, v = k_cache[0, :0], v_cache[0, :0]
        for qo_indptr, table in zip(qo_indptrs, tables, strict=True):
            prefix_len, request = len(k), request_of(row, qo_indptr)
            if request is not None:
                k = np.concatenate([k, tokens(k_cache, table, request)])
                v = np.concatenate([v, tokens(v_cache, table, request)])
        rows_after = int(qo_indptrs[-1][request + 1]) - 1 - row
        keys = [
            j
            for j in range(len(k))
            if (not causal or j < prefix_len or len(k) - 1 - j >= rows_after)
            and (window_left < 0 or len(k) - 1 - j <= rows_after + window_left)
        ]
        if keys:
            target = int(row_order[row])
            row_o, row_lse = attention(
                q[target : target + 1], k[keys], v[keys], lambda i, j: True, scale
            )
            o[target], lse[target] = row_o[0], row_lse[0]
    return o, lse


def pack(bits, bitorder):
    """Pack a list of truth values into a list of byte values."""
    order = range(8) if bitorder == "little" else range(7, -1, -1)
    weights = [1 << place for place in order]
    padded = list(bits) + [False] * (-len(bits) % 8)
    return [
        sum(w for w, bit in zip(weights, padded[start : start + 8], strict=True) if bit)
        for start in range(0, len(padded), 8)
    ]


def nearest_fp8(value, dtype):
    """Return the finite fp8 value nearest to value, of two the one with the even code."""
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float64)
    finite = [
        (abs(v - value), c % 2, v) for v, c in zip(values, codes, strict=True) if abs(v) < 1e9
    ]
    return min(finite)[2]
