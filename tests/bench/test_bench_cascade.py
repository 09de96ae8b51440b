"""Decoding over shared prefixes as cascades, beside flat decoding of the same requests."""

from pathlib import Path

import numpy as np
import pytest
from inputs import HOME, Shape, growth, shapes
from works import common_prompt, shared

from cukv._workload import SEGMENT, read_trace

pytestmark = pytest.mark.gpu

BATCH = 64  # requests of a trace that are decoded together


def beside_flat(measure, cascade, flat, shape=None):
    """Time a cascade beside flat decoding: never more than 3 % slower."""
    took = measure(cascade, shape, flat=flat)
    measure.at_most(took["this"] / took["flat"], 1.03)


@shapes(Shape(64, 8192 + 256), Shape(256, 2048 + 128))
def test_cascade_of_a_common_prompt(measure, shape):
    own = 256 if shape.batch_size == 64 else 128
    beside_flat(measure, *shared(*common_prompt(shape, shape.kv_len - own), shape), shape)


@growth(Shape(64, 4096), batch_size=(4, 16, 64, 256), kv_len=(512, 2048, 16384), heads=(1, 2, 4, 8))
def test_cascade_grows(measure, shape):
    beside_flat(measure, *shared(*common_prompt(shape, shape.kv_len // 2), shape), shape)


def prefix_tree(seed, batch_size, pages):
    """Grow random prefixes: each request goes on from where another one was, or starts anew."""
    rng = np.random.default_rng(seed)
    lists, fresh = [], 0
    for _ in range(batch_size):
        kept = []
        if lists and rng.random() < 0.8:
            other = lists[rng.integers(len(lists))]
            kept = other[: rng.integers(len(other) + 1)]
        more = int(rng.integers(1, pages))
        lists.append([*kept, *range(fresh, fresh + more)])
        fresh += more
    return lists


TREES = [(0, 8, 300), (1, 32, 20), (2, 64, 100), (3, 64, 400), (4, 128, 60), (5, 256, 30)]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: "seed{}_b{}_pages{}".format(*tree))
def test_cascade_of_a_random_prefix_tree(measure, tree):
    seed, batch_size, pages = tree
    shape = Shape(batch_size)
    if HOME.xp is np:  # a rehearsal
        shape, batch_size, pages = shape.small(), min(batch_size, 5), 4
    lists = prefix_tree(seed, batch_size, pages)
    last = np.random.default_rng(seed).integers(1, shape.page_size + 1, batch_size)
    # A page that another request goes on from is full.
    inner = {page for pages_of in lists for page in pages_of[:-1]}
    lens = [
        (len(pages_of) - 1) * shape.page_size
        + (shape.page_size if pages_of[-1] in inner else int(n))
        for pages_of, n in zip(lists, last, strict=True)
    ]
    beside_flat(measure, *shared(lists, lens, shape))


def pages_of_trace(requests, page_size):
    """Give the page lists and lengths of requests: segments of one hash id share their pages."""
    lists, known, fresh = [], {}, 0
    for request in requests:
        pages = []
        for segment in request.hash_ids:
            if segment not in known:
                known[segment] = range(fresh, fresh + SEGMENT // page_size)
                fresh += SEGMENT // page_size
            pages += known[segment]
        own = -(-request.input_length // page_size) - len(pages)
        lists.append([*pages, *range(fresh, fresh + own)])
        fresh += own
    return lists, [request.input_length for request in requests]


@pytest.mark.parametrize("first", range(0, 1500, BATCH))
def test_cascade_of_a_trace(measure, first, pytestconfig):
    if pytestconfig.option.mooncake is None:
        pytest.skip("needs a Mooncake trace: --mooncake FILE")
    requests, _ = read_trace(Path(pytestconfig.option.mooncake), first + BATCH)
    shape = Shape(num_qo_heads=4, num_kv_heads=1) if HOME.xp is np else Shape()
    if not requests[first:]:
        pytest.skip(f"the trace has {len(requests)} requests")
    beside_flat(measure, *shared(*pages_of_trace(requests[first:], shape.page_size), shape))
