"""How long prefill takes: mixed batches against their parts, masks against causal.

GPU time of one planned call, by events around a few of them; what counts are ratios of one run.
"""

import cupy as cp
import numpy as np
import pytest

from cukv import PagedKVCache, PageTable, RaggedMask, RaggedTensor
from cukv._arrays import as_dtype

pytestmark = pytest.mark.gpu

BF16 = as_dtype("bench", "dtype", "bfloat16")
HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 8, 128, 16
CALLS = 4  # between two events


def randn(*shape):
    """Draw normal values in bfloat16, by cutting float32 off."""
    x = cp.random.standard_normal(shape, dtype=cp.float32)
    return (x.view(cp.uint32) >> 16).astype(cp.uint16).view(BF16)


def microseconds(call, rounds=15):
    """Median GPU time of a call."""
    start, end, found = cp.cuda.Event(), cp.cuda.Event(), []
    for _ in range(rounds + 2):
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        found.append(cp.cuda.get_elapsed_time(start, end) * 1000 / CALLS)
    return float(np.median(found[2:]))


def paged(qo_lens, kv_len):
    """Give a planned causal call of requests of one kv_len on shuffled pages."""
    batch_size, pages = len(qo_lens), kv_len // PAGE_SIZE
    cache = PagedKVCache(randn(batch_size * pages, 2, PAGE_SIZE, KV_HEADS, DIM))
    ids = np.random.default_rng(0).permutation(batch_size * pages).astype(np.int32)
    table = PageTable.from_seq_lens([kv_len] * batch_size, PAGE_SIZE, cp.asarray(ids))
    q = RaggedTensor(randn(sum(qo_lens), HEADS, DIM), np.cumsum([0, *qo_lens]).tolist())
    plan, out = cache.plan(q, table, causal=True), cp.empty(q.rows.shape, BF16)
    return lambda: cache.prefill(q, table, causal=True, plan=plan, out=out)


def test_a_mixed_batch_costs_no_more_than_its_parts(benchmark):
    rows, chunk = ([1] * 63, [2048])
    alone = [microseconds(paged(qo_lens, 8192)) for qo_lens in (rows, chunk)]
    call = paged(rows + chunk, 8192)
    together = microseconds(call)
    benchmark.extra_info |= {"rows": alone[0], "chunk": alone[1], "together": together}
    benchmark.pedantic(lambda: (call(), cp.cuda.Device().synchronize()), rounds=10)
    assert together <= 1.10 * sum(alone)


def test_a_tree_mask_costs_little_more_than_causal(benchmark):
    batch_size, n = 4, 4096
    indptr = [b * n for b in range(batch_size + 1)]
    q, k, v = (
        RaggedTensor(randn(batch_size * n, h, DIM), indptr) for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    seen = cp.broadcast_to(cp.tri(n, dtype=bool), (batch_size, n, n)).copy()
    seen[:, -256:, -256:] &= cp.random.random((batch_size, 256, 256)) < 0.3
    seen |= cp.eye(n, dtype=bool)
    mask = RaggedMask(seen.reshape(-1), indptr, indptr).pack()
    out, took = cp.empty(q.rows.shape, BF16), []
    for options in ({"causal": True}, {"custom_mask": mask}):
        plan = q.plan(k, **options)

        def call(options=options, plan=plan):
            q.prefill(k, v, plan=plan, out=out, **options)

        took.append(microseconds(call))
    benchmark.extra_info |= {"causal": took[0], "tree": took[1]}
    benchmark.pedantic(lambda: (call(), cp.cuda.Device().synchronize()), rounds=10)
    assert took[1] <= 1.15 * took[0]
