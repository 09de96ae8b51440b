"""Bit packing: every test with the ``xp`` fixture runs on both homes."""

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from brute import pack
from cases import on
from tolerances import to_numpy as host

from cukv import packbits, reference, segment_packbits
from cukv._arrays import INDEX_DTYPES
from cukv._index import pack_index
from cukv._kernels import kernel
from cukv.bits import _pack_elements

ORDERS = ["little", "big"]
# Nothing, parts of a byte, a byte, one over, parts of a tile, many tiles, both with odd tails.
LENGTHS = [0, 1, 7, 8, 9, 10, 99, 128, 999, 5000, 131072, 999999]
DTYPES = [np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.float16, np.int32, np.uint32]
DTYPES += [np.float32, np.int64, np.uint64, np.float64]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def equal(got, want):
    got = host(got)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def truths(rng, n):
    return rng.random(n) < 0.5


def prefix(lens):
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)


def packed_segments(x, lens, bitorder, size):
    """Pack segment by segment with NumPy: bytes at their bound and byte_indptr."""
    ends = np.cumsum(lens)
    parts = [
        np.packbits(x[end - n : end], bitorder=bitorder) for end, n in zip(ends, lens, strict=True)
    ]
    out = np.zeros(size, np.uint8)
    joined = np.concatenate([np.zeros(0, np.uint8), *parts])
    out[: len(joined)] = joined
    return out, prefix([len(p) for p in parts])


def check_segments(xp, x, lens, bitorder, indptr=None):
    indptr = on(xp, prefix(lens)) if indptr is None else indptr
    got, byte_indptr = segment_packbits(on(xp, x), indptr, bitorder)
    size = (len(x) + 7 * len(lens)) // 8
    want, want_indptr = packed_segments(x, lens, bitorder, size)
    equal(got, want)
    equal(byte_indptr, want_indptr)


# packbits


@pytest.mark.parametrize("bitorder", ORDERS)
@pytest.mark.parametrize("n", LENGTHS)
def test_packbits_is_numpys(xp, n, bitorder, rng):
    x = truths(rng, n)
    equal(packbits(on(xp, x), bitorder), np.packbits(x, bitorder=bitorder))


def test_packbits_is_little_by_default(xp):
    x = [True, False, False, True, True]
    equal(packbits(on(xp, np.array(x))), np.array(pack(x, "little"), np.uint8))


@pytest.mark.parametrize("bitorder", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_any_dtype_packs_its_truth_values(xp, dtype, bitorder, rng):
    dtype = np.dtype(dtype)
    bits = rng.integers(0, 256, (5003, dtype.itemsize)).astype(np.uint8)
    bits[rng.random(5003) < 0.5] = 0
    bits[::7] &= 1  # a low bit alone: subnormal floats, a bool's only legal one
    x = np.ascontiguousarray(bits).view(dtype)[:, 0]
    if dtype == np.bool_:
        x = bits[:, 0] != 0
    with np.errstate(invalid="ignore"):
        want = x != 0
    equal(packbits(on(xp, x), bitorder), np.packbits(want, bitorder=bitorder))


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]
)
def test_nan_is_true_and_negative_zero_is_false(xp, dtype):
    values = [np.nan, -0.0, 0.0, -np.inf, -np.nan, 1.0, -1.0, 0.0, -0.0]
    equal(packbits(on(xp, np.array(values).astype(dtype))), np.array([0b01111001, 0], np.uint8))


@pytest.mark.gpu
def test_a_bool_is_true_whatever_nonzero_byte_it_holds(rng):
    x = rng.integers(0, 3, 9000).astype(np.uint8) * 127
    equal(packbits(cp.asarray(x).view(np.bool_)), np.packbits(x != 0, bitorder="little"))


# Backwards, every other, repeated: views that no vector can load.
@pytest.mark.parametrize("dtype", [np.bool_, np.float16, np.int32, np.float64])
@pytest.mark.parametrize("step", [-1, 2, -3, 0])
def test_packbits_takes_any_stride(xp, step, dtype, rng):
    x = on(xp, truths(rng, 15000).astype(dtype))
    view = xp.broadcast_to(x[1:2], (5000,)) if step == 0 else x[::step]
    equal(packbits(view), np.packbits(host(view) != 0, bitorder="little"))


@pytest.mark.parametrize("bitorder", ORDERS)
@pytest.mark.parametrize("start", range(17))
def test_packbits_takes_any_alignment(xp, start, bitorder, rng):
    x = truths(rng, 20000)
    want = np.packbits(x[start:19000], bitorder=bitorder)
    equal(packbits(on(xp, x)[start:19000], bitorder), want)


def test_packbits_reads_nothing_beside_its_array(xp, rng):
    x = np.ones(40000, bool)
    x[1003:30001] = truths(rng, 30001 - 1003)
    equal(packbits(on(xp, x)[1003:30001]), np.packbits(x[1003:30001], bitorder="little"))


def test_packbits_flattens_in_c_order(xp, rng):
    x = on(xp, truths(rng, 60 * 50).reshape(60, 50))
    for view in (x, x.T, x[::2, 3:], x[0, :1].reshape(())):
        equal(packbits(view), np.packbits(host(view).reshape(-1), bitorder="little"))


def test_packbits_names_what_it_refuses(xp):
    with pytest.raises(ValueError, match=r'^packbits: bitorder must be "little" or "big"'):
        packbits(xp.zeros(3, bool), "native")
    with pytest.raises(TypeError, match=r"^packbits: x must be bool, integers or floats.*complex"):
        packbits(xp.zeros(3, np.complex64))


def test_packbits_needs_an_array():
    with pytest.raises(TypeError, match="packbits: x must be a CuPy, NumPy or DLPack array"):
        packbits([True, False])


# segment_packbits


@pytest.mark.parametrize("bitorder", ORDERS)
@pytest.mark.parametrize("n", LENGTHS)
def test_one_segment_packs_like_packbits(xp, n, bitorder, rng):
    check_segments(xp, truths(rng, n), [n], bitorder)


# No segment, only empty ones, every length up to two tiles' worth of bits.
@pytest.mark.parametrize("bitorder", ORDERS)
@pytest.mark.parametrize("batch", [0, 1, 2, 9, 100, 500])
def test_segment_lengths_zero_to_batch(xp, batch, bitorder, rng):
    lens = list(range(batch))
    check_segments(xp, truths(rng, sum(lens)), lens, bitorder)


# Empty segments at the ends, in runs; long ones that start at every alignment; whole tiles.
SEGMENTS = [
    [0],
    [0, 0, 0],
    [0, 5, 0, 0, 9, 0],
    [1] * 300,
    [0] * 5000 + [3] + [0] * 5000,
    [100003, 0, 65536, 77777, 1],
    [2048, 2048, 4096, 2048],
    [2047, 2049, 16384, 7, 16385],
    [*range(3000, 3017), 40000],
]


@pytest.mark.parametrize("bitorder", ORDERS)
@pytest.mark.parametrize("lens", SEGMENTS, ids=range(len(SEGMENTS)))
def test_segments_of_any_lengths(xp, lens, bitorder, rng):
    check_segments(xp, truths(rng, sum(lens)), lens, bitorder)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_segments_of_any_dtype(xp, dtype, rng):
    lens = [5, 0, 9000, 13, 4096]
    x = truths(rng, sum(lens))
    got, _ = segment_packbits(on(xp, x.astype(dtype)), on(xp, prefix(lens)))
    equal(got, packed_segments(x, lens, "little", (len(x) + 35) // 8)[0])


@pytest.mark.parametrize("step", [-1, 2, -3, 0])
def test_segments_of_any_stride(xp, step, rng):
    x = on(xp, truths(rng, 30000))
    view = xp.broadcast_to(x[1:2], (10000,)) if step == 0 else x[::step][:10000]
    lens = [7, 6000, 0, len(view) - 6007]
    got, _ = segment_packbits(view, prefix(lens).tolist())
    equal(got, packed_segments(host(view), lens, "little", (len(view) + 28) // 8)[0])


@pytest.mark.parametrize("start", range(17))
def test_segments_of_any_alignment(xp, start, rng):
    x = truths(rng, 30000)
    lens = [start, 9000 - start, 12345, 0, 30000 - 21345 - start]
    got, _ = segment_packbits(on(xp, x)[start:], on(xp, prefix(lens)))
    equal(got, packed_segments(x[start:], lens, "little", (len(x) - start + 35) // 8)[0])


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_segment_indptr_of_either_dtype_and_any_stride(xp, dtype, rng):
    lens = rng.integers(0, 40, 1000)
    wide = on(xp, np.repeat(prefix(lens), 2)[::-1].astype(dtype))
    check_segments(xp, truths(rng, lens.sum()), lens, "little", indptr=wide[::-2])


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [1, 3, 20, 200])
def test_seventy_thousand_segments(longest, rng):
    lens = rng.integers(0, longest + 1, 70000)
    x = truths(rng, lens.sum())
    got, byte_indptr = segment_packbits(cp.asarray(x), cp.asarray(prefix(lens)))
    want, want_indptr = reference.segment_packbits(x, prefix(lens))
    equal(byte_indptr, want_indptr)
    equal(got[: len(want)], want)
    assert not host(got[len(want) :]).any()


def test_the_tail_is_zero_whatever_the_padding_holds(xp, rng):
    x = np.ones(50000, bool)
    x[:100] = truths(rng, 100)
    size = (50000 + 14) // 8
    if xp is cp:  # what the pool hands out next is not zero
        poison = [cp.full(size, 0xFF, np.uint8) for _ in range(4)]
        del poison
    got, byte_indptr = segment_packbits(on(xp, x), on(xp, prefix([50, 50])))
    want, want_indptr = packed_segments(x, [50, 50], "little", size)
    equal(got, want)
    equal(byte_indptr, want_indptr)


GARBAGE = {
    "negative": [0, -5, -9, -(2**40)],
    "falling": [0, 9000, 100, 5000],
    "past the end": [0, 2**62, 2**63 - 1, 5],
    "wrapping": [0, 2**63 - 1, -(2**63), 2**63 - 1],
    "not from zero": [7, 20000, 20001, 30000],
    "huge then small": [0, 10**12, 10**12 + 5, 10**12 + 5],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("dtype", [np.bool_, np.float16])
def test_garbage_indptr_touches_nothing_else(dtype, name, rng):
    # The kernel itself, on views inside larger arrays whose other bytes must not change.
    x = cp.asarray(truths(rng, 30000).astype(dtype))
    memory = cp.full(8192, 0xA5, np.uint8)
    indptr = cp.asarray(np.array(GARBAGE[name], np.int64))
    _, byte_indptr = segment_packbits(x, indptr)
    assert (np.diff(host(byte_indptr)) >= 0).all()
    out = memory[1024:5120]
    kernel("segment_packbits", x.data.device_id, BYTES=x.itemsize)(
        3,
        256,
        out=out.data.ptr,
        size=out.size,
        x=_pack_elements(x.data.ptr, x.strides[0], x.size, (1 << 8 * x.itemsize) - 1),
        indptr=pack_index(indptr),
        byte_indptr=pack_index(byte_indptr),
        big=0,
    )
    guards = host(memory)
    assert (guards[:1024] == 0xA5).all()
    assert (guards[5120:] == 0xA5).all()


@pytest.mark.gpu
def test_random_indptr_is_harmless(rng):
    x = cp.ones(100000, bool)
    for dtype in INDEX_DTYPES:
        info = np.iinfo(dtype)
        indptr = rng.integers(info.min, info.max, 5000, dtype=dtype)
        got, byte_indptr = segment_packbits(x, cp.asarray(indptr))
        assert got.size == (100000 + 7 * 4999) // 8
        assert byte_indptr[0] == 0
    cp.cuda.Device().synchronize()


@pytest.mark.gpu
def test_a_negative_length_counts_as_zero_and_elements_past_the_end_as_false():
    got, byte_indptr = segment_packbits(cp.ones(12, bool), cp.array([0, 5, 3, 20]))
    equal(byte_indptr, np.array([0, 1, 1, 4]))
    equal(got, np.array([0x1F, 0xFF, 0x01, 0x00], np.uint8))


def test_numpy_refuses_a_bad_segment_indptr():
    x = np.zeros(9, bool)
    with pytest.raises(ValueError, match=r"^segment_packbits: indptr\[0\] must be 0, got 1"):
        segment_packbits(x, [1, 9])
    with pytest.raises(ValueError, match=r"indptr falls at request 1"):
        segment_packbits(x, [0, 5, 3])
    with pytest.raises(ValueError, match=r"indptr ends at 10, but there are 9 elements"):
        segment_packbits(x, [0, 10])


def test_segment_packbits_names_what_it_refuses(xp):
    x = xp.zeros((3, 3), bool)
    with pytest.raises(ValueError, match=r"^segment_packbits: x must be \[n\], got \[3, 3\]"):
        segment_packbits(x, xp.array([0, 9]))
    with pytest.raises(TypeError, match=r"indptr must be int32 or int64, got float64"):
        segment_packbits(x[0], xp.array([0.0, 3.0]))
    with pytest.raises(ValueError, match=r"indptr must be \[segments \+ 1\], got \[0\]"):
        segment_packbits(x[0], xp.zeros(0, np.int32))
    with pytest.raises(ValueError, match=r"bitorder"):
        segment_packbits(x[0], xp.array([0, 3]), "middle")


@pytest.mark.gpu
def test_homes_do_not_mix():
    with pytest.raises(TypeError, match="x is on the GPU but indptr is in NumPy"):
        segment_packbits(cp.zeros(3, bool), np.array([0, 3]))


# On the device only


@pytest.mark.gpu
def test_packing_follows_the_current_stream(rng):
    truth = truths(rng, 10**6)
    x, later = cp.zeros(10**6, bool), cp.asarray(truth)
    cp.cuda.Device().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        for _ in range(50):
            x[:] = False
        x[:] = later
        got = packbits(x)
        stream.synchronize()
    equal(got, np.packbits(truth, bitorder="little"))


@pytest.mark.gpu
@pytest.mark.long
def test_offsets_are_64_bit():
    # Strided elements beyond 4 GB, and more elements than 32 bits count.
    x = cp.zeros(2**32 + 5000, bool)
    x[-3] = x[7] = True
    got = packbits(x)
    assert got.size == (2**32 + 5000) // 8
    assert cp.flatnonzero(got).get().tolist() == [0, got.size - 1]
    segments, byte_indptr = segment_packbits(x, cp.array([0, 9, 2**32 + 5000]))
    assert cp.flatnonzero(segments).get().tolist() == [0, int(byte_indptr[2]) - 1]
    equal(packbits(x[:: 2**31]), np.array([0], np.uint8))
