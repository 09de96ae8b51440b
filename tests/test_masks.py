"""Masks: every test with the ``xp`` fixture runs on both homes."""

import copy
import pickle

import cupy as cp
import numpy as np
import pytest
from cases import captured, on
from test_bits import equal, packed_segments, prefix, truths
from tolerances import to_numpy as host

from cukv import PackedMask, RaggedMask, RaggedTensor, packbits, reference, segment_packbits
from cukv._arrays import INDEX_DTYPES


def masks(rng, shapes):
    return [rng.random(shape) < 0.5 for shape in shapes]


# A row without keys, keys without a row, ordinary ones, a whole tile and more.
SHAPES = [(1, 5), (0, 4), (3, 0), (2, 3), (1, 9), (64, 128), (17, 33)]


def test_a_mask_is_the_sum_of_its_requests(xp, rng):
    parts = masks(rng, SHAPES)
    mask = RaggedMask.from_list([on(xp, p) for p in parts])
    assert len(mask) == mask.batch_size == len(SHAPES)
    equal(mask.indptr, prefix([q * k for q, k in SHAPES]))
    equal(mask.qo_indptr, prefix([q for q, _ in SHAPES]).astype(np.int32))
    equal(mask.kv_indptr, prefix([k for _, k in SHAPES]).astype(np.int32))
    for i, (got, want) in enumerate(zip(mask, parts, strict=True)):
        equal(got, want)
        equal(mask[i], want)
        equal(mask[i - len(SHAPES)], want)


def test_a_requests_mask_is_a_view(xp):
    mask = RaggedMask(xp.zeros(11, bool), [0, 1, 3], [0, 5, 8])
    mask[1][1, 2] = True
    assert host(mask.data).tolist() == [False] * 10 + [True]
    strided = RaggedMask(xp.zeros(22, bool)[::-2], [0, 1, 3], [0, 5, 8])
    strided[1][1, 2] = True
    assert host(strided.data).tolist() == [False] * 10 + [True]


def test_iteration_over_a_mask_ends(xp):
    mask = RaggedMask(xp.zeros(0, bool), [0], [0])
    assert list(mask) == []
    with pytest.raises(IndexError, match="RaggedMask: request 0 of 0"):
        mask[0]


@pytest.mark.parametrize("name", ["0", 0.0, None, slice(0, 1), np.array([0])])
def test_a_mask_is_named_by_an_integer_as_rows_are(name):
    for noun in (
        RaggedMask(np.zeros(11, bool), [0, 1, 3], [0, 5, 8]),
        RaggedTensor(np.zeros((3, 1, 8), np.float16), [0, 1, 3]),
    ):
        with pytest.raises(TypeError, match="a request is named by an integer, got"):
            noun[name]


@pytest.mark.parametrize("lens", [(2**62, 4), (2**62 - 1, 4), (2**33, 2**33)])
def test_masks_of_more_elements_than_int64_counts_are_refused_and_do_not_wrap(lens):
    indptrs = [np.array([0, 0, n]) for n in lens]
    mask, packed = RaggedMask(np.zeros(9, bool), *indptrs), PackedMask(np.zeros(9, "u1"), *indptrs)
    for call in (mask.validate, mask.pack, packed.validate, lambda: mask[1], lambda: mask.indptr):
        with pytest.raises(ValueError, match=r"int64 does not count the elements .* to request 1"):
            call()
    assert "int64 does not count" in str(mask.show())


# Two requests, (1, 5) and (1, 9), that keep key 0 and key 8: packed in one run they would shift.
def test_each_request_starts_on_a_byte(xp):
    parts = [np.arange(5) == 0, np.arange(9) == 8]
    packed = RaggedMask.from_list([on(xp, p[None]) for p in parts]).pack()
    equal(packed.data, np.array([0x01, 0x00, 0x01], np.uint8))
    equal(packed.indptr, np.array([0, 1, 3]))
    big, _ = segment_packbits(on(xp, np.concatenate(parts)), [0, 5, 14], "big")
    equal(big, np.array([0x80, 0x00, 0x80], np.uint8))


def test_packing_loses_nothing(xp, rng):
    parts = masks(rng, SHAPES)
    packed = RaggedMask.from_list([on(xp, p) for p in parts]).pack()
    arrays = [host(a) for a in (packed.data, packed.indptr, packed.qo_indptr, packed.kv_indptr)]
    equal(reference.unpack_mask(*arrays), np.concatenate([p.reshape(-1) for p in parts]))
    packed.validate()


def test_packed_requests_follow_each_other_by_default(xp):
    packed = PackedMask(xp.zeros(40, np.uint8), [0, 1, 1, 4], [0, 5, 9, 18])
    equal(packed.indptr, np.array([0, 1, 1, 5]))
    packed.validate()
    assert packed.batch_size == len(packed) == 3


def test_a_default_byte_indptr_follows_the_contents(xp):
    qo_indptr = xp.array([0, 1, 2])
    packed = PackedMask(xp.zeros(40, np.uint8), qo_indptr, [0, 5, 9])
    equal(packed.indptr, np.array([0, 1, 2]))
    qo_indptr[1:] += 3
    equal(packed.indptr, np.array([0, 3, 4]))


def test_a_given_byte_indptr_is_kept(xp):
    given = xp.array([0, 8, 16])
    packed = PackedMask(xp.zeros(16, np.uint8), [0, 1, 2], [0, 5, 9], given)
    assert packed.indptr is given
    packed.validate()


def test_mask_data_may_be_longer(xp):
    mask = RaggedMask(xp.ones(100, bool), [0, 1, 3], [0, 5, 8])
    mask.validate()
    packed = mask.pack()
    equal(packed.data, np.array([0x1F, 0x3F] + [0] * 12, np.uint8))
    equal(mask[1], np.ones((2, 3), bool))


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_mask_indptrs_of_either_dtype_and_any_stride(xp, dtype, rng):
    lens = rng.integers(0, 9, (2, 3000))
    qo_indptr, kv_indptr = prefix(lens[0]), prefix(lens[1])
    n = int((lens[0] * lens[1]).sum())
    mask = RaggedMask(
        xp.zeros(n, bool),
        on(xp, np.repeat(qo_indptr, 3).astype(dtype))[::3],
        on(xp, kv_indptr[::-1].astype(np.int32))[::-1],
    )
    equal(mask.indptr, reference.mask_indptr(qo_indptr, kv_indptr))


def test_mask_indptr_counts_in_64_bits(xp):
    mask = RaggedMask(xp.zeros(0, bool), [0, 2**20, 2**21], [0, 2**20, 2**21])
    if xp is cp:
        equal(mask.indptr, np.array([0, 2**40, 2**41]))
    else:
        with pytest.raises(ValueError, match="data must be"):
            mask.validate()


@pytest.mark.gpu
def test_negative_lengths_of_a_mask_count_as_zero_on_the_device():
    mask = RaggedMask(cp.zeros(9, bool), cp.array([0, 3, 2, 4]), cp.array([0, 3, 9, 5]))
    equal(mask.indptr, np.array([0, 9, 9, 9]))


def test_a_short_mask_raises(xp):
    mask = RaggedMask(xp.zeros(10, bool), [0, 1, 3], [0, 5, 8])
    match = r"data must be \[sum\(qo_len \* kv_len\) = 11\] or longer, got \[10\].*request 1"
    with pytest.raises(ValueError, match="^RaggedMask.validate: " + match):
        mask.validate()
    with pytest.raises(ValueError, match=match):
        mask[1]
    if xp is np:
        with pytest.raises(ValueError, match=match):
            mask.pack()


@pytest.mark.gpu
def test_a_short_mask_packs_as_false_on_the_device():
    packed = RaggedMask(cp.ones(10, bool), [0, 1, 3], [0, 5, 8]).pack()
    equal(packed.data, np.array([0x1F, 0x1F, 0], np.uint8))
    equal(packed.indptr, np.array([0, 1, 2]))


def test_bad_mask_indptrs_raise(xp):
    with pytest.raises(ValueError, match=r"qo_indptr falls at request 1"):
        RaggedMask(xp.zeros(9, bool), [0, 3, 2], [0, 3, 4]).validate()
    with pytest.raises(ValueError, match=r"kv_indptr\[0\] must be 0, got 1"):
        RaggedMask(xp.zeros(9, bool), [0, 3], [1, 4]).validate()
    with pytest.raises(ValueError, match=r"PackedMask.validate: indptr ends at 3, but there are 2"):
        PackedMask(xp.zeros(2, np.uint8), [0, 1, 2], [0, 5, 14], [0, 1, 3]).validate()
    with pytest.raises(ValueError, match=r"request 1 has 9 mask elements and needs 2 bytes"):
        PackedMask(xp.zeros(2, np.uint8), [0, 1, 2], [0, 5, 14], [0, 1, 2]).validate()
    with pytest.raises(ValueError, match=r"indptr ends at 3, but there are 2 bytes"):
        PackedMask(xp.zeros(2, np.uint8), [0, 1, 2], [0, 5, 14]).validate()


def test_masks_name_what_they_refuse(xp):
    with pytest.raises(TypeError, match=r"^RaggedMask: data must be bool, got uint8"):
        RaggedMask(xp.zeros(9, np.uint8), [0, 3], [0, 3])
    with pytest.raises(TypeError, match=r"^PackedMask: data must be uint8, got bool"):
        PackedMask(xp.zeros(9, bool), [0, 3], [0, 3])
    with pytest.raises(ValueError, match=r"^RaggedMask: data must be \[n\], got \[3, 3\]"):
        RaggedMask(xp.zeros((3, 3), bool), [0, 3], [0, 3])
    with pytest.raises(ValueError, match=r"kv_indptr must be \[n=2\], got \[3\]"):
        RaggedMask(xp.zeros(9, bool), [0, 3], [0, 3, 4])
    with pytest.raises(ValueError, match=r"indptr must be \[n=2\], got \[3\]"):
        PackedMask(xp.zeros(9, np.uint8), [0, 3], [0, 3], [0, 3, 4])
    with pytest.raises(ValueError, match=r"qo_indptr must be \[batch_size \+ 1\], got \[0\]"):
        RaggedMask(xp.zeros(9, bool), [], [])
    with pytest.raises(ValueError, match=r"masks\[1\] must be \[qo_len, kv_len\], got \[3\]"):
        RaggedMask.from_list([xp.zeros((1, 3), bool), xp.zeros(3, bool)])
    with pytest.raises(TypeError, match=r"masks\[0\] must be bool, got int32"):
        RaggedMask.from_list([xp.zeros((1, 3), np.int32)])


def test_a_mask_is_made_of_one_mask_at_least():
    with pytest.raises(ValueError, match="needs one mask at least"):
        RaggedMask.from_list([])


def test_a_mask_shows_its_structure():
    mask = RaggedMask(np.zeros(11, bool), [0, 1, 3], [0, 5, 8])
    shown = "data=bool[11], qo_indptr=int32[3], kv_indptr=int32[3]"
    assert repr(mask) == f"RaggedMask({shown}, device=numpy)"
    packed = PackedMask(np.zeros(2, np.uint8), [0, 1, 3], [0, 5, 8])
    shown = "data=uint8[2], qo_indptr=int32[3], kv_indptr=int32[3]"
    assert repr(packed) == f"PackedMask({shown}, device=numpy)"
    assert "indptr=int64[3], device" in repr(mask.pack())


def test_masks_are_compared_by_identity_and_copied_by_value(xp, rng):
    mask = RaggedMask.from_list([on(xp, m) for m in masks(rng, SHAPES)])
    for noun in (mask, mask.pack(), PackedMask(mask.pack().data, mask.qo_indptr, mask.kv_indptr)):
        for twin in (copy.deepcopy(noun), pickle.loads(pickle.dumps(noun))):
            assert twin != noun
            assert len({twin, noun}) == 2
            equal(twin.data, host(noun.data))
            equal(twin.indptr, host(noun.indptr))
            twin.data[:] = 0
        assert host(noun.data).any()


def test_masks_export_their_data(xp, rng):
    mask = RaggedMask.from_list([on(xp, m) for m in masks(rng, SHAPES)])
    assert xp.shares_memory(xp.from_dlpack(mask), mask.data)
    packed = mask.pack()
    assert xp.shares_memory(xp.from_dlpack(packed), packed.data)


@pytest.mark.gpu
def test_masks_move_between_homes(rng):
    mask = RaggedMask.from_list(masks(rng, SHAPES))
    for noun in (mask, mask.pack()):
        there = noun.to_device()
        assert isinstance(there.indptr, cp.ndarray)
        back = there.to_host()
        equal(back.data, noun.data)
        equal(back.indptr, noun.indptr)
        assert noun.to_host() is noun


def test_a_ragged_tensors_indptr_serves_a_mask(xp):
    k = RaggedTensor(xp.zeros((8, 1, 8), np.float16), [0, 5, 8])
    equal(RaggedMask(xp.zeros(11, bool), [0, 1, 3], k.indptr).indptr, np.array([0, 5, 11]))


# On the device only


@pytest.mark.gpu
def test_captured_packing_writes_nothing_but_its_results(rng):
    mask = RaggedMask(cp.ones(200, bool), cp.array([0, 3, 10]), cp.array([0, 20, 40]))
    packed, columns = mask.pack(), cp.ones((40, 30), bool)[:, ::2]
    calls = [
        mask.pack,
        lambda: PackedMask(packed.data, packed.qo_indptr, packed.kv_indptr).indptr,
        lambda: packbits(columns),
    ]
    for call in calls:
        with captured(call) as (stream, graph, result):
            # Memory of the capture that went back to the pool would be among these.
            others = [cp.full(n, 7, np.uint8) for n in (512, 1024) for _ in range(64)]
            graph.launch(stream)
            stream.synchronize()
            assert all((x == 7).all() for x in others)
            assert len(result)


@pytest.mark.gpu
def test_packing_can_be_captured_and_replayed(rng):
    lens = [100, 0, 7000, 33]
    x, indptr = cp.zeros(sum(lens), bool), cp.zeros(5, np.int64)
    mask = RaggedMask(cp.zeros(200, bool), cp.zeros(3, np.int64), cp.zeros(3, np.int64))

    def call():
        return packbits(x), *segment_packbits(x, indptr), mask.pack().data, mask.indptr

    with captured(call) as (stream, graph, results):
        truth, bits = truths(rng, len(x)), truths(rng, 200)
        x.set(truth, stream)
        indptr.set(prefix(lens), stream)
        mask.data.set(bits, stream)
        mask.qo_indptr.set(np.array([0, 3, 10]), stream)
        mask.kv_indptr.set(np.array([0, 20, 40]), stream)
        graph.launch(stream)
        stream.synchronize()
    packed, segments, byte_indptr, mask_data, mask_indptr = results
    equal(packed, np.packbits(truth, bitorder="little"))
    want, want_indptr = packed_segments(truth, lens, "little", segments.size)
    equal(segments, want)
    equal(byte_indptr, want_indptr)
    equal(mask_data, packed_segments(bits, [60, 140], "little", 26)[0])
    equal(mask_indptr, np.array([0, 60, 200]))
