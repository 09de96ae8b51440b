"""A step of append and decode over 32 layers in ``jax.jit``, and as a CUDA graph of CuPy's.

``pytest tests/bench/test_jax_steps.py`` times both, on the same caches. What a layer gives is the
next one's queries, and a step's the next step's; queries are donated as caches are, so that all lie
where they lay and XLA's graph need not be changed. What fails is a cache that moves or is copied.
"""

import functools
import os
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
import pytest
from capturing import nothing_collected
from timing import ask

import cukv

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy needs memory too
pytest.importorskip("pytest_benchmark")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of JAX, from within
]

LAYERS, PAGE_SIZE, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 16, 32, 8, 128
STEPS, ROUNDS, WARMUP = 10, 7, 2  # steps of a round
# Of the time of CuPy's graph, by the batch size.
LIMITS = {64: 1.10, 8: 1.25}


class Loop(NamedTuple):
    """What both take: JAX arrays and nouns of them."""

    caches: list[Any]
    q: object  # [batch_size, num_qo_heads, head_dim]
    rows: object  # [batch_size, num_kv_heads, head_dim], of k and of v
    table: cukv.PageTable
    took: dict[str, float]  # seconds of a round


@pytest.fixture(scope="module", params=[(64, 8192), (8, 1024)], ids=["64x8192", "8x1024"])
def loop(request):
    """Make the caches of all layers, 69 GB of them at most; each test leaves them to the next."""
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    import cukv.jax as cj

    batch_size, kv_len = request.param
    num_pages = batch_size * kv_len // PAGE_SIZE
    shape = num_pages, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM
    normal = jax.jit(lambda key, shape: jax.random.normal(key, shape, "float16"), static_argnums=1)
    keys = iter(jax.random.split(jax.random.key(0), LAYERS + 2))
    ids = np.random.default_rng(0).permutation(num_pages)
    table = cukv.PageTable.from_seq_lens([kv_len] * batch_size, PAGE_SIZE, ids, xp=np)
    caches = [cj.noun(cukv.PagedKVCache, normal(next(keys), shape)) for _ in range(LAYERS)]
    q = normal(next(keys), (batch_size, NUM_QO_HEADS, HEAD_DIM))
    rows = normal(next(keys), (batch_size, NUM_KV_HEADS, HEAD_DIM))
    loop = Loop(caches, q, rows, jax.tree.map(jax.numpy.asarray, table), {})
    jax.block_until_ready(loop)
    yield loop
    for cache in caches:  # those of now
        cache.data.delete()


def test_a_step_in_jit(benchmark, loop):
    import jax

    import cukv.jax as cj

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(caches, x, rows, table):
        plan = cj.plan(x, caches[0], table)
        for layer, cache in enumerate(caches):
            caches[layer] = cj.append(cache, rows, rows, table)
            x = cj.decode(x, caches[layer], table, plan=plan)
        return caches, x

    x = loop.q.copy()
    memory = step.lower(loop.caches, x, loop.rows, loop.table).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(cache.data.nbytes for cache in loop.caches)
    assert memory.temp_size_in_bytes < loop.caches[0].data.nbytes
    before = [cache.data.unsafe_buffer_pointer() for cache in loop.caches]

    def steps():
        nonlocal x
        for _ in range(STEPS):
            loop.caches[:], x = step(loop.caches, x, loop.rows, loop.table)
        jax.block_until_ready(x)

    benchmark.group = f"a step over {LAYERS} layers, {loop.q.shape[0]} requests, times {STEPS}"
    benchmark.pedantic(steps, rounds=ROUNDS, warmup_rounds=WARMUP)
    if benchmark.stats is not None:
        loop.took["jit"] = benchmark.stats.stats.median
    assert [cache.data.unsafe_buffer_pointer() for cache in loop.caches] == before


def test_a_step_in_a_graph_of_cupy(benchmark, loop):
    import jax

    caches, q, rows, table = jax.tree.map(cp.from_dlpack, loop[:4])
    x = [q.copy(), cp.empty_like(q)]
    plan = caches[0].plan(q, table)

    def step():
        plan.update()
        for layer, cache in enumerate(caches):
            cache.append(rows, rows, table)
            cache.decode(x[layer % 2], table, plan=plan, out=x[(layer + 1) % 2])

    with cp.cuda.Stream(non_blocking=True) as stream:
        cp.cuda.Device().synchronize()
        step()
        stream.synchronize()
        with nothing_collected():
            stream.begin_capture()
            step()
            graph = stream.end_capture()

        def steps():
            for _ in range(STEPS):
                graph.launch(stream)
            stream.synchronize()

        benchmark.group = f"a step over {LAYERS} layers, {len(q)} requests, times {STEPS}"
        benchmark.pedantic(steps, rounds=ROUNDS, warmup_rounds=WARMUP)
    if benchmark.stats is not None and "jit" in loop.took:
        reached = loop.took["jit"] / benchmark.stats.stats.median
        ask(benchmark, LIMITS[len(q)], "of CuPy's graph", reached)
