"""Times of MLAPagedCache.decode under CUDA graph replay, on caches rotated past the L2.

Run with ``pytest tests/bench``. A latent row takes 1152 bytes in bfloat16, and 640 with ckv in fp8.
"""

import cupy as cp
import ml_dtypes
import numpy as np
import pytest

from cukv import MLAPagedCache, PageTable

pytest.importorskip("pytest_benchmark")

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
PAGE_SIZE, ROTATED_BYTES = 64, 200_000_000


def random_pages(shape, dtype):
    """Make pages of random numbers of order 1 on the GPU."""
    values = cp.random.standard_normal(shape, cp.float32)
    if dtype == BF16:
        return (values.view(cp.uint32) >> 16).astype(cp.uint16).view(BF16)
    # Any bits but those of NaN: exponents from 2^-6 to 1.
    return cp.random.randint(0, 64, shape, cp.uint8).view(E4M3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("batch_size", "kv_len", "heads"),
    [(128, 4096, 16), (16, 4096, 16), (128, 4096, 128), (1, 65536, 128), (1, 4096, 128)],
)
def test_mla_decode(benchmark, batch_size, kv_len, heads, dtype):
    pages = batch_size * kv_len // PAGE_SIZE
    nbytes = pages * PAGE_SIZE * (512 * dtype.itemsize + 128)
    caches = [
        MLAPagedCache(
            tuple(random_pages((pages, PAGE_SIZE, n), d) for n, d in ((512, dtype), (64, BF16)))
        )
        for _ in range(max(1, -(-ROTATED_BYTES // nbytes)))
    ]
    ids = cp.random.permutation(pages).astype(cp.int32)
    table = PageTable.from_seq_lens([kv_len] * batch_size, PAGE_SIZE, ids)
    q = [random_pages((batch_size, heads, n), BF16) for n in (512, 64)]
    out, plan = cp.empty((batch_size, heads, 512), BF16), caches[0].plan(q[0], table)

    def step():
        for cache in caches:
            cache.decode(*q, table, sm_scale=192**-0.5, plan=plan, out=out)

    with cp.cuda.Stream(non_blocking=True) as stream:
        cp.cuda.Device().synchronize()
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()

        def replay():
            graph.launch(stream)
            stream.synchronize()

        benchmark.extra_info["calls"] = len(caches)
        benchmark.extra_info["bytes"] = nbytes
        benchmark(replay)
