"""What an eager call costs the host: until it returns, with nothing queued on the GPU."""

import numpy as np
import pytest
from inputs import HOME, Shape, normal, offsets, truth_values
from timing import host_time
from works import append, append_mla, common_prompt, copy_pages, gather, mla, paged, ragged, shared

from cukv import CascadeLevels, PageTable, merge_states, packbits, segment_packbits

pytestmark = pytest.mark.gpu

LATENT = Shape(16, 4096, 1, 16, 1, 576, 64)
WORKS = {
    "append": lambda size: append(size(Shape(64, 1024, 1))),
    "append_mla": lambda size: append_mla(size(LATENT)),
    "gather": lambda size: gather(size(Shape(16))),
    "copy_pages": lambda size: copy_pages(size(Shape(1))),
    "decode": lambda size: paged(size(Shape(16))),
    "ragged_prefill": lambda size: ragged(size(Shape(4, 1024, 1024))),
    "paged_prefill": lambda size: paged(size(Shape(4, 1024, 256))),
    "mla_decode": lambda size: mla(size(LATENT)),
    "cascade": lambda size: shared(*common_prompt(size(Shape(64)), 512), size(Shape(64)))[0],
}


def size(shape):
    """Give a shape, a small one in a rehearsal."""
    return shape.small() if HOME.xp is np else shape


PLANNED = [name for name in WORKS if "decode" in name or "prefill" in name or name == "cascade"]


@pytest.mark.parametrize("name", WORKS)
def test_an_eager_call(benchmark, name):
    work = WORKS[name](size)
    host_time(benchmark, work.eager)


@pytest.mark.parametrize("name", PLANNED)
def test_a_call_with_a_plan(benchmark, name):
    host_time(benchmark, WORKS[name](size).calls[0])


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_update(benchmark, name):
    host_time(benchmark, WORKS[name](size).plan.update)


def test_merge_states(benchmark):
    states = normal(64, 4, 32, 128), normal(64, 4, 32, dtype="float32")
    host_time(benchmark, lambda: merge_states(*states))


def test_packbits(benchmark):
    x = truth_values(1 << 16, 0)
    host_time(benchmark, lambda: packbits(x))


def test_segment_packbits(benchmark):
    x, indptr = truth_values(1 << 16, 0), offsets([1 << 10] * 64)
    host_time(benchmark, lambda: segment_packbits(x, indptr))


def test_prefixes_of_4096_requests_of_1000_pages(benchmark):
    lists, _ = common_prompt(Shape(4096, 16000), 8000)
    ids = np.concatenate(lists).astype(np.int32)
    indptr = np.arange(4097, dtype=np.int32) * 1000
    table = PageTable(indptr, ids, np.full(4096, 16, np.int32), 16)
    host_time(benchmark, lambda: CascadeLevels.from_prefixes(table))
    if benchmark.stats is not None and HOME.xp is not np:
        assert benchmark.stats.stats.median <= 50e-3
