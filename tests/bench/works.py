"""Work of every operation, as benchmarks time it: calls on rotated inputs, costs, right answers.

Bytes count each row of keys, values, queries and outputs once, index arrays not; FLOPs the pairs
of query and key that attend. Answers are compared with ``cukv.reference``, a few rows of each case.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from inputs import (
    HOME,
    Shape,
    empty,
    normal,
    num_pages,
    num_sets,
    offsets,
    page_table,
    take,
    to_host,
)
from timing import Work
from tolerances import ROW_NORM, assert_rows_close, assert_same_bits

from cukv import (
    CascadeLevels,
    MLAPagedCache,
    PagedKVCache,
    PageTable,
    RaggedMask,
    RaggedTensor,
    reference,
)
from cukv._arrays import as_dtype

SM_SCALE_MLA = (128 + 64) ** -0.5


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return int(as_dtype("bench", "dtype", dtype).itemsize)


def some(count: int) -> list[int]:
    """Pick the first, the last and one in between of so many."""
    return sorted({0, count // 3, count - 1})


# Answers


def attended(q: Any, k: Any, v: Any, sm_scale: float) -> Any:
    """Give the output of query heads [heads, dim] over the keys [n, dim] that they all see."""
    seen = np.ones((1, len(k)), bool)
    o, _ = reference.attend(q[None], k[:, None], v[:, None], seen, sm_scale=sm_scale)
    return o[0]


def check_rows(out: Any, q: Any, rows: Sequence[int], num_kv_heads: int, keys_of: Any) -> None:
    """Compare rows of an output with the definition, one KV head of each.

    ``keys_of(row, kv_head)`` gives the keys and values that the row sees.
    """
    group = q.shape[1] // num_kv_heads
    got, want = [], []
    for row in rows:
        kv_head = row % num_kv_heads
        heads = slice(kv_head * group, (kv_head + 1) * group)
        k, v = keys_of(row, kv_head)
        want.append(attended(to_host(q[row])[heads], k, v, q.shape[2] ** -0.5))
        got.append(to_host(out[row])[heads])
    assert_rows_close(np.concatenate(got), np.concatenate(want), ROW_NORM[str(q.dtype)])


def tokens_of(pages: Any, table: PageTable, request: int, kv_head: int | None = None) -> Any:
    """Copy a request's rows of one head out of pages [pages, page_size, (heads,) dim], to NumPy."""
    at = table.to_host()  # of the indices alone
    begin, end = (int(n) for n in at.indptr[request : request + 2])
    ids = HOME.xp.asarray(at.indices[begin:end])
    chosen = pages if kv_head is None else pages[:, :, kv_head]
    rows = to_host(take(chosen, ids))
    return rows.reshape(-1, rows.shape[-1])[: at.seq_lens_list()[request]]


# Attention over pages


def caches(shape: Shape, pages: int, nbytes: int) -> list[PagedKVCache]:
    """Fill as many caches as a graph rotates."""
    page = (shape.page_size, shape.num_kv_heads)
    page = page if shape.layout == "NHD" else page[::-1]
    return [
        PagedKVCache(normal(pages, 2, *page, shape.head_dim, dtype=shape.dtype), shape.layout)
        for _ in range(num_sets(nbytes))
    ]


def stores(cache: PagedKVCache) -> list[Any]:
    """See keys and values as [pages, page_size, heads, dim] in either layout."""
    nhd = cache.layout == "NHD"
    return [x if nhd else x.swapaxes(1, 2) for x in (cache.k, cache.v)]


def pairs(qo_len: int, kv_len: int, causal: bool) -> int:
    """Count the pairs of query and key that attend."""
    return qo_len * kv_len - (qo_len * (qo_len - 1) // 2 if causal else 0)


def attention_cost(shape: Shape, qo_lens: Sequence[int], kv_lens: Sequence[int]) -> dict[str, int]:
    """Count the bytes and FLOPs of attention with equal dimensions of keys and values."""
    both = sum(pairs(q, kv, shape.causal and q > 1) for q, kv in zip(qo_lens, kv_lens, strict=True))
    keys = sum(kv_lens) * shape.num_kv_heads * itemsize(shape.dtype)
    rows = sum(qo_lens) * shape.num_qo_heads * itemsize(shape.row_dtype)
    return {
        "nbytes": 2 * (keys + rows) * shape.head_dim,
        "flops": 4 * both * shape.num_qo_heads * shape.head_dim,
    }


def paged(shape: Shape, qo_lens: Sequence[int] | None = None, kv_lens: Any = None) -> Work:
    """Attend over pages: ``decode`` of one row per request, or ``prefill`` of given rows.

    Rows and lengths are the shape's, the same for all requests, where they are not given.
    """
    kv_lens = kv_lens or [shape.kv_len] * shape.batch_size
    rows = qo_lens or [shape.qo_len] * len(kv_lens)
    cost = attention_cost(shape, rows, kv_lens)
    table = page_table(kv_lens, shape.page_size)
    each = caches(shape, num_pages(kv_lens, shape.page_size), cost["nbytes"])
    q = normal(sum(rows), shape.num_qo_heads, shape.head_dim, dtype=shape.row_dtype)
    out = empty(*q.shape, dtype=shape.row_dtype)
    if qo_lens is None and shape.qo_len == 1:
        options: dict[str, Any] = {}
        queries: Any = q
    else:
        options = {"causal": shape.causal}
        queries = RaggedTensor(q, offsets(rows))
    plan = each[0].plan(queries, table, **options)

    def attend(cache: PagedKVCache, **more: Any) -> Any:
        method = cache.prefill if options else cache.decode
        return method(queries, table, **options, **more)

    starts = np.cumsum([0, *rows])

    def keys_of(row: int, kv_head: int) -> Any:
        request = int(np.searchsorted(starts, row, "right")) - 1
        seen = kv_lens[request]
        if shape.causal:
            seen += row - starts[request] + 1 - rows[request]
        return [tokens_of(pages, table, request, kv_head)[:seen] for pages in stores(each[-1])]

    def check(result: Any) -> None:
        chosen = {int(starts[b]) + i for b in some(len(rows)) for i in some(rows[b])}
        check_rows(result, q, sorted(chosen), shape.num_kv_heads, keys_of)

    return Work(
        [lambda c=c: attend(c, plan=plan, out=out) for c in each],
        **cost,
        check=check,
        eager=lambda: attend(each[0], out=out),
        plan=plan,
    )


# Attention of ragged keys


def ragged(shape: Shape, mask: Any = None) -> Work:
    """Attend from prompts to their own keys; ``mask`` is one [kv_len, kv_len] for all requests."""
    lens = [shape.kv_len] * shape.batch_size
    cost = attention_cost(shape, lens, lens)
    indptr, heads = offsets(lens), (shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads)
    sets = [
        [
            RaggedTensor(normal(sum(lens), n, shape.head_dim, dtype=shape.dtype), indptr)
            for n in heads
        ]
        for _ in range(num_sets(cost["nbytes"]))
    ]
    out = empty(*sets[0][0].rows.shape, dtype=shape.row_dtype)
    seen = np.tri(shape.kv_len, dtype=bool) if shape.causal else None
    options: dict[str, Any] = {"causal": shape.causal}
    if mask is not None:
        options, seen = {"custom_mask": mask[0]}, mask[1]
        cost["flops"] = int(seen.sum()) * shape.batch_size * 4 * shape.num_qo_heads * shape.head_dim
    plan = sets[0][0].plan(sets[0][1], **options)

    def keys_of(row: int, kv_head: int) -> Any:
        request, i = divmod(row, shape.kv_len)
        own = slice(request * shape.kv_len, (request + 1) * shape.kv_len)
        kept = slice(None) if seen is None else seen[i]
        return [to_host(x.rows[own, kv_head])[kept] for x in sets[-1][1:]]

    def check(result: Any) -> None:
        rows = [b * shape.kv_len + i for b in some(shape.batch_size) for i in some(shape.kv_len)]
        check_rows(result, sets[-1][0].rows, rows, shape.num_kv_heads, keys_of)

    return Work(
        [lambda s=s: s[0].prefill(*s[1:], **options, plan=plan, out=out) for s in sets],
        **cost,
        check=check,
        eager=lambda: sets[0][0].prefill(*sets[0][1:], **options, out=out),
        plan=plan,
    )


def causal_plus(shape: Shape, kept: float, few: int) -> Any:
    """Make a mask for all requests: causal, but of the last tokens' pairs a share is kept.

    Returns the packed mask, and one request's on the host.
    """
    xp, n = HOME.xp, shape.kv_len
    few = min(few, n)
    seen = np.tri(n, dtype=bool)
    seen[-few:, -few:] &= np.random.default_rng(0).random((few, few)) < kept
    seen |= np.eye(n, dtype=bool)
    indptr = offsets([n] * shape.batch_size)
    data = xp.tile(xp.asarray(seen).reshape(-1), shape.batch_size)
    return RaggedMask(data, indptr, indptr).pack(), seen


def tree(shape: Shape) -> Any:
    """Make the mask of speculative trees: among a request's last 256 tokens few pairs attend."""
    return causal_plus(shape, 0.3, 256)


# Latent attention


def mla(shape: Shape, kpe_dtype: str | None = None, kv_lens: Any = None) -> Work:
    """Attend over latent rows of 512 + 64; ckv of the shape's dtype, kpe of another if named.

    ``kv_lens`` replace the shape's batch size and length.
    """
    kpe_dtype = kpe_dtype or shape.dtype
    kv_lens = kv_lens or [shape.kv_len] * shape.batch_size
    rows = [shape.qo_len] * len(kv_lens)
    heads, tokens = shape.num_qo_heads, sum(kv_lens)
    row_bytes = 512 * itemsize(shape.dtype) + 64 * itemsize(kpe_dtype)
    nbytes = tokens * row_bytes + sum(rows) * heads * (512 + 64 + 512) * 2
    both = sum(pairs(shape.qo_len, n, shape.causal and shape.qo_len > 1) for n in kv_lens)
    pages = num_pages(kv_lens, shape.page_size)
    each = [_latent_cache(pages, shape, kpe_dtype) for _ in range(num_sets(nbytes))]
    table = page_table(kv_lens, shape.page_size)
    q_nope, q_pe = (normal(sum(rows), heads, n, dtype=shape.row_dtype) for n in (512, 64))
    out = empty(*q_nope.shape, dtype=shape.row_dtype)
    several: dict[str, Any] = {}
    if shape.qo_len > 1:
        several = {"qo_indptr": offsets(rows), "causal": shape.causal}
    plan = each[0].plan(q_nope, table, **several)

    def attend(cache: MLAPagedCache, **more: Any) -> Any:
        return cache.decode(q_nope, q_pe, table, sm_scale=SM_SCALE_MLA, **several, **more)

    def check(result: Any) -> None:
        got, want = [], []
        for request in some(len(kv_lens)):
            ckv, kpe = (tokens_of(x, table, request) for x in (each[-1].ckv, each[-1].kpe))
            ckv, kpe = ckv.astype(np.float64), kpe.astype(np.float64)
            for i in some(shape.qo_len):
                row, few = request * shape.qo_len + i, slice(0, 16)  # heads
                seen = len(ckv) - (shape.qo_len - 1 - i if several.get("causal") else 0)
                q = np.concatenate(
                    [to_host(x[row])[few].astype(np.float64) for x in (q_nope, q_pe)], 1
                )
                keys = np.concatenate([ckv, kpe], 1)[:seen]
                want.append(attended(q, keys, ckv[:seen], SM_SCALE_MLA))
                got.append(to_host(result[row])[few])
        bound = ROW_NORM[str(q_nope.dtype)]
        assert_rows_close(np.concatenate(got), np.concatenate(want), bound)

    return Work(
        [lambda c=c: attend(c, plan=plan, out=out) for c in each],
        nbytes,
        2 * both * heads * (512 + 64 + 512),
        check,
        eager=lambda: attend(each[0], out=out),
        plan=plan,
    )


def _latent_cache(pages: int, shape: Shape, kpe_dtype: str) -> MLAPagedCache:
    """Fill a cache: one array, or a pair if the parts differ in dtype."""
    page = (pages, shape.page_size)
    if kpe_dtype == shape.dtype:
        return MLAPagedCache(normal(*page, 576, dtype=shape.dtype))
    parts = ((512, shape.dtype), (64, kpe_dtype))
    return MLAPagedCache(tuple(normal(*page, n, dtype=kind) for n, kind in parts))


# Appending and copying


def append(shape: Shape) -> Work:
    """Write ``qo_len`` rows of each request to the ends of their sequences."""
    lens = [max(shape.kv_len, shape.qo_len)] * shape.batch_size
    row = (shape.num_kv_heads, shape.head_dim)
    elements = 2 * shape.nnz * math.prod(row)
    nbytes = elements * (itemsize(shape.row_dtype) + itemsize(shape.dtype))
    table = page_table(lens, shape.page_size)
    each = caches(shape, num_pages(lens, shape.page_size), nbytes)
    rows = [[normal(shape.nnz, *row, dtype=shape.row_dtype) for _ in range(2)] for _ in each]
    indptr = offsets([shape.qo_len] * shape.batch_size)

    def write(i: int) -> None:
        k, v = rows[i]
        each[i].append(k, v, table, indptr=indptr)

    def check(_: None) -> None:
        _check_appended(shape, table, rows[-1], stores(each[-1]), each[-1].dtype)

    return Work(
        [lambda i=i: write(i) for i in range(len(each))],
        nbytes,
        check=check,
        written=lambda _: (each[-1].data,),
        eager=lambda: write(0),
    )


def append_mla(shape: Shape) -> Work:
    """Write ``qo_len`` latent rows of each request to the ends of their sequences."""
    lens = [max(shape.kv_len, shape.qo_len)] * shape.batch_size
    nbytes = shape.nnz * 576 * (itemsize(shape.row_dtype) + itemsize(shape.dtype))
    table, pages = page_table(lens, shape.page_size), num_pages(lens, shape.page_size)
    each = [_latent_cache(pages, shape, shape.dtype) for _ in range(num_sets(nbytes))]
    rows = [[normal(shape.nnz, n, dtype=shape.row_dtype) for n in (512, 64)] for _ in each]
    indptr = offsets([shape.qo_len] * shape.batch_size)

    def write(i: int) -> None:
        ckv, kpe = rows[i]
        each[i].append(ckv, kpe, table, indptr=indptr)

    def check(_: None) -> None:
        stored = (each[-1].ckv, each[-1].kpe)
        _check_appended(shape, table, rows[-1], stored, each[-1].dtype)

    return Work(
        [lambda i=i: write(i) for i in range(len(each))],
        nbytes,
        check=check,
        written=lambda _: (each[-1].data,),
        eager=lambda: write(0),
    )


def _check_appended(shape: Shape, table: PageTable, rows: Any, stored: Any, dtype: Any) -> None:
    """Compare the ends of a few sequences, bit for bit, with the rows appended there."""
    for request in some(shape.batch_size):
        own = slice(request * shape.qo_len, (request + 1) * shape.qo_len)
        for pages, given in zip(stored, rows, strict=True):
            heads = [None] if pages.ndim == 3 else some(pages.shape[2])
            for head in heads:
                written = tokens_of(pages, table, request, head)[-shape.qo_len :]
                want = to_host(given[own] if head is None else given[own, head])
                assert_same_bits(written, reference.convert(want, dtype))


def gather(shape: Shape) -> Work:
    """Copy all tokens out of their pages."""
    lens = [shape.kv_len] * shape.batch_size
    nbytes = 4 * sum(lens) * shape.num_kv_heads * shape.head_dim * itemsize(shape.dtype)
    table = page_table(lens, shape.page_size)
    each = caches(shape, num_pages(lens, shape.page_size), nbytes)

    def check(result: Any) -> None:
        for request in some(shape.batch_size):
            own = slice(request * shape.kv_len, (request + 1) * shape.kv_len)
            for pages, found in zip(stores(each[-1]), result, strict=True):
                head = request % shape.num_kv_heads
                want = tokens_of(pages, table, request, head)
                assert_same_bits(to_host(found.rows[own, head]), want)

    return Work(
        [lambda c=c: c.gather(table, nnz=sum(lens)) for c in each],
        nbytes,
        check=check,
        written=lambda result: tuple(ragged.data for ragged in result),
        eager=lambda: each[0].gather(table, nnz=sum(lens)),
    )


def copy_pages(shape: Shape) -> Work:
    """Copy half of the pages over the other half, through scratch: each byte moves twice."""
    pages = num_pages([shape.kv_len] * shape.batch_size, shape.page_size)
    ids = HOME.xp.asarray(np.random.default_rng(0).permutation(2 * pages).astype(np.int32))
    src, dst = ids[:pages], ids[pages:]
    page_bytes = 2 * shape.page_size * shape.num_kv_heads * shape.head_dim * itemsize(shape.dtype)
    each = caches(shape, 2 * pages, 2 * pages * page_bytes)

    def check(_: None) -> None:
        chosen = HOME.xp.asarray(some(pages))
        data = each[-1].data
        assert_same_bits(*(to_host(take(data, x[chosen])) for x in (dst, src)))

    return Work(
        [lambda c=c: c.copy_pages(src, dst) for c in each],
        2 * pages * page_bytes,
        check=check,
        eager=lambda: each[0].copy_pages(src, dst),
    )


# Shared prefixes


def common_prompt(shape: Shape, tokens: int) -> tuple[list[list[int]], list[int]]:
    """Give requests that share their first tokens: their page lists, and their lengths."""
    prompt = tokens // shape.page_size
    own = -(-shape.kv_len // shape.page_size) - prompt
    lists = [
        [*range(prompt), *range(prompt + b * own, prompt + (b + 1) * own)]
        for b in range(shape.batch_size)
    ]
    return lists, [shape.kv_len] * shape.batch_size


def shared(page_lists: Sequence[Sequence[int]], kv_lens: Sequence[int], shape: Shape) -> Any:
    """Decode requests some of whose pages are the same, as a cascade and flat: both Works.

    Levels are those that ``from_prefixes`` finds. Bytes count each page once.
    """
    xp, counts = HOME.xp, [len(pages) for pages in page_lists]
    distinct = 1 + max(max(pages) for pages in page_lists if pages)
    ids = np.random.default_rng(0).permutation(distinct)[np.concatenate(page_lists)]
    last = [(n - 1) % shape.page_size + 1 for n in kv_lens]
    table = PageTable(
        offsets(counts),
        xp.asarray(ids.astype(np.int32)),
        xp.asarray(np.array(last, np.int32)),
        shape.page_size,
    )
    cost = attention_cost(shape, [1] * len(kv_lens), kv_lens)
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * itemsize(shape.dtype)
    saved = sum(kv_lens) - sum(dict(_tokens(page_lists, last, shape.page_size)).values())
    nbytes = cost["nbytes"] - saved * token_bytes
    each = caches(shape, distinct, nbytes)
    q = normal(len(kv_lens), shape.num_qo_heads, shape.head_dim, dtype=shape.row_dtype)
    levels = CascadeLevels.from_prefixes(table, bytes_per_token=token_bytes)
    outs = [empty(*q.shape, dtype=shape.row_dtype) for _ in range(2)]
    plans = levels.plan(q, each[0]), each[0].plan(q, table)

    def keys_of(row: int, kv_head: int) -> Any:
        return [tokens_of(pages, table, row, kv_head) for pages in stores(each[-1])]

    def check(result: Any) -> None:
        check_rows(result, q, some(len(kv_lens)), shape.num_kv_heads, keys_of)

    info = {"levels": levels.num_levels, "saved": saved / sum(kv_lens)}
    cascade = Work(
        [lambda c=c: levels.attend(q, c, plan=plans[0], out=outs[0]) for c in each],
        nbytes,
        cost["flops"],
        check,
        eager=lambda: levels.attend(q, each[0], out=outs[0]),
        plan=plans[0],
        info=info,
    )
    flat = Work(
        [lambda c=c: c.decode(q, table, plan=plans[1], out=outs[1]) for c in each],
        nbytes,
        cost["flops"],
        check,
    )
    return cascade, flat


def _tokens(page_lists: Any, last: Any, page_size: int) -> Any:
    """Yield every page and the tokens it holds, as often as it is listed."""
    for pages, in_last in zip(page_lists, last, strict=True):
        yield from ((page, page_size) for page in pages[:-1])
        yield from ((page, in_last) for page in pages[-1:])
