"""Scratch of calls: what a capture sees of one stream shares it, and nothing else does."""

from contextlib import nullcontext

import cupy as cp
import numpy as np
import pytest
from capturing import capturing
from cases import captured, fake_cupy, random_rows
from tolerances import assert_same_bits, to_numpy

from cukv import PackedMask, PagedKVCache, RaggedMask, _scratch, packbits
from cukv._recording import recording

BYTE = np.dtype(np.uint8)
LIKE = fake_cupy((4,))


class Stream:
    """A stream that a capture sees, or none."""

    def __init__(self, ptr, capture=0):
        self.ptr, self.capture = ptr, capture

    def is_capturing(self):
        return self.capture != 0


@pytest.fixture
def allocate(monkeypatch):
    """Give a function that takes scratch on a stream; addresses are of memory that is not there."""
    taken = []

    def empty(op, shape, dtype, xp, like):
        memory = cp.cuda.UnownedMemory((len(taken) + 1) << 20, 1 << 20, None, 0)
        taken.append(cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0)))
        return taken[-1]

    def own_memory(num_bytes):
        return empty("op", (num_bytes,), BYTE, cp, LIKE)

    def allocate(stream, shape, dtype=BYTE):
        monkeypatch.setattr(cp.cuda, "get_current_stream", lambda device: stream)
        monkeypatch.setattr(_scratch, "capture_id", lambda ptr: stream.capture)
        return _scratch.allocate_scratch("op", shape, np.dtype(dtype), LIKE)

    monkeypatch.setattr(_scratch, "empty", empty)
    monkeypatch.setattr(_scratch, "_own_memory", own_memory)
    monkeypatch.setattr(_scratch, "on_device_of", lambda array: nullcontext())
    monkeypatch.setattr(_scratch, "_of_captures", {})
    return allocate


def address(array):
    return array.data.ptr


def test_calls_of_one_capture_on_one_stream_share_memory(allocate):
    stream = Stream(101, capture=7)
    first, second = allocate(stream, (100,)), allocate(stream, (3, 5), "int32")
    assert address(first) == address(second)
    assert (second.shape, second.dtype) == ((3, 5), np.int32)


def test_a_larger_call_gets_memory_of_its_own_and_the_smaller_keeps_its(allocate):
    stream = Stream(101, capture=7)
    small, large, after = (allocate(stream, (n,)) for n in (100, 200, 150))
    assert address(small) != address(large) == address(after)
    kept = [address(x) for arrays in _scratch._of_captures.values() for x in arrays]
    assert kept == [address(small), address(large)]


def test_other_captures_and_other_streams_share_nothing(allocate):
    streams = Stream(101, capture=7), Stream(102, capture=7), Stream(101, capture=8)
    assert len({address(allocate(stream, (100,))) for stream in streams}) == 3


def test_what_is_not_captured_is_new_and_not_kept(allocate):
    eager, captured_too = Stream(101), Stream(101, capture=7)
    addresses = {address(allocate(eager, (100,))) for _ in range(2)}
    with recording():  # whoever records gives the memory
        addresses |= {address(allocate(captured_too, (100,))) for _ in range(2)}
    assert len(addresses) == 4
    assert not _scratch._of_captures


# On the device only


@pytest.mark.gpu
def test_a_capture_has_a_number_of_its_own():
    numbers = []
    for _ in range(2):
        with captured(lambda: None) as (stream, _, _):
            for _ in range(2):
                with capturing(stream):
                    numbers += [_scratch.capture_id(stream.ptr) for _ in range(2)]
    assert len(numbers) == 8
    assert len(set(numbers)) == 4


@pytest.mark.gpu
def test_many_calls_that_need_scratch_are_captured_in_one_graph(rng):
    """As a step does that copies pages in all layers; pages of layers differ in size here."""
    pages = [random_rows(rng, (8, 2, 4, heads, 64), "float16") for heads in (2, 4, 1, 3)]
    caches = [PagedKVCache(cp.asarray(x)) for x in pages]
    src, dst = cp.array([0, 1, 2]), cp.array([1, 2, 0])
    bits = rng.random((3, 200)) < 0.5
    qo_indptr, kv_indptr = cp.array([0, 3, 10]), cp.array([0, 20, 40])
    masks = [RaggedMask(cp.asarray(x), qo_indptr, kv_indptr) for x in bits]
    columns = cp.asarray(bits.reshape(200, 3))[:, ::2]
    pool, grown = cp.get_default_memory_pool(), []

    def call():
        held = pool.total_bytes()
        for cache in caches:
            cache.copy_pages(src, dst)
        packed = [mask.pack() for mask in masks]
        starts = [PackedMask(p.data, p.qo_indptr, p.kv_indptr).indptr for p in packed]
        grown.append(pool.total_bytes() - held)
        return packed, starts, packbits(columns)

    def ready():
        for cache, first in zip(caches, pages, strict=True):
            cache.data.set(first)

    with captured(call, ready) as (stream, graph, results):
        assert grown[-1] == 0
        # Memory of the capture that went back to the pool would be among these.
        others = [cp.full(n, 7, np.uint8) for n in (512, 1024, 12288) for _ in range(64)]
        for _ in range(3):  # after three turns every page is back in its place
            graph.launch(stream)
        for x in (src, dst):
            x.set(np.array([7, 6, 5] if x is src else [6, 7, 5]), stream)
        graph.launch(stream)
        stream.synchronize()
        assert all((x == 7).all() for x in others)
    for cache, want in zip(caches, pages, strict=True):
        want[[6, 7]] = want[[7, 6]]
        assert_same_bits(cache.data, want)
    packed, starts, of_columns = results
    for mask, start, x in zip(packed, starts, bits, strict=True):
        segments = [np.packbits(part, bitorder="little") for part in (x[:60], x[60:])]
        assert to_numpy(start).tolist() == [0, 8, 26]
        assert_same_bits(mask.data[:26], np.concatenate(segments))
    want = np.packbits(bits.reshape(200, 3)[:, ::2], bitorder="little")
    assert_same_bits(of_columns, want)
