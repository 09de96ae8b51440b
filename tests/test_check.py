"""The matcher and its kin: what a wrong argument is told, and that magic numbers divide."""

import struct
from functools import partial

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from cases import fake_cupy
from hypothesis import example, given
from hypothesis import strategies as st

from cukv import CascadeLevels, MLAPagedCache, PagedKVCache, PageTable, RaggedTensor
from cukv._arrays import BFLOAT16, FLOAT16
from cukv._attention import check_soft_cap
from cukv._check import (
    bits_hint,
    check_indptr,
    match,
    match_dtype,
    match_index,
    match_rows,
    match_writable,
    narrow,
    request_number,
    truth,
    values,
)
from cukv._index import (
    NO_INDEX,
    UNIT_SCALE,
    as_index,
    host_scale,
    pack_divisor,
    pack_index,
    pack_index_argument,
    pack_scale,
)

ROWS = ("nnz", "num_heads", "head_dim")


# Shapes


def test_a_shape_binds_the_names_that_were_free():
    dims = {"num_heads": 2, "batch_size": None}
    match("op", "k", np.zeros((5, 2, 64)), ROWS, dims)
    match("op", "x", np.zeros(7), ("batch_size",), dims)
    assert dims == {"nnz": 5, "num_heads": 2, "head_dim": 64, "batch_size": 7}
    match("op", "v", np.zeros((5, 2, 32)), ("nnz", "num_heads", "head_dim_vo"), dims)


def test_a_size_that_is_always_the_same_is_named_once():
    with pytest.raises(ValueError, match=r"^op: x must be \[n, 2\], got \[5, 3\]$"):
        match("op", "x", np.zeros((5, 3)), ("n", "2"), {"2": 2})


@pytest.mark.parametrize("make", [np.zeros, fake_cupy], ids=["host", "device"])
@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ((5, 2, 32), {"num_heads": 2, "head_dim": 64},
         "PagedKVCache.append: k must be [nnz, num_heads=2, head_dim=64], got [5, 2, 32]"),
        ((5, 3, 64), {"nnz": 5, "num_heads": 2},
         "PagedKVCache.append: k must be [nnz=5, num_heads=2, head_dim], got [5, 3, 64]"),
        ((5, 128), {}, "PagedKVCache.append: k must be [nnz, num_heads, head_dim], got [5, 128]"),
        ((), {"nnz": 0}, "PagedKVCache.append: k must be [nnz=0, num_heads, head_dim], got []"),
        ((1, 1, 1, 1), {}, "PagedKVCache.append: k must be [nnz, num_heads, head_dim], got [1, 1,"),
        ((0, 2, 64), {"nnz": 1, "x": None},
         "PagedKVCache.append: k must be [nnz=1, num_heads, head_dim], got [0, 2, 64]"),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_told_what_is_known_and_what_came(shape, dims, message, make):
    known = dict(dims)
    with pytest.raises(ValueError) as raised:
        match("PagedKVCache.append", "k", make(shape), ROWS, dims)
    assert str(raised.value).startswith(message)
    assert dims == known


# Dtypes


def test_a_wrong_dtype_is_told_which_are_right():
    match_dtype("op", "k", np.zeros(3, np.float16), FLOAT16, BFLOAT16)
    match_dtype("op", "k", fake_cupy(3, "bfloat16"), FLOAT16, BFLOAT16)
    with pytest.raises(TypeError, match=r"^op: k must be float16 or bfloat16, got float64$"):
        match_dtype("op", "k", np.zeros(3), FLOAT16, BFLOAT16)
    with pytest.raises(TypeError, match=r"got uint16; .*\.view\(ml_dtypes\.bfloat16\)$"):
        match_dtype("op", "k", np.zeros(3, np.uint16), FLOAT16, BFLOAT16)


def test_bits_are_told_which_view_they_need():
    assert "ml_dtypes.bfloat16" in bits_hint(np.dtype(np.uint16))
    assert "ml_dtypes.float8_e4m3fn" in bits_hint(np.dtype(np.uint8))
    for dtype in (np.float32, np.int16, np.int8, bool, ml_dtypes.float8_e3m4):
        assert bits_hint(np.dtype(dtype)) == ""


# Index arrays


@pytest.mark.parametrize("make", [np.zeros, fake_cupy], ids=["host", "device"])
def test_index_arrays_are_1d_and_int32_or_int64(make):
    for dtype in ("int32", "int64"):
        match_index("op", "indptr", make(3, dtype))
        match_index("op", "indptr", make(3, dtype), 3)
    for array, size, error, message in (
        (make(3, "float32"), None, TypeError, "must be int32 or int64, got float32"),
        (make((3, 1), "int32"), None, ValueError, r"must be \[n\], got \[3, 1\]"),
        (make((), "int32"), None, ValueError, r"must be \[n\], got \[\]"),
        (make(3, "int32"), 4, ValueError, r"must be \[n=4\], got \[3\]"),
        (make((4, 4), "int32"), 4, ValueError, r"must be \[n=4\], got \[4, 4\]"),
    ):
        with pytest.raises(error, match=r"^op: indptr " + message):
            match_index("op", "indptr", array, size)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64, np.int8, np.int16, bool])
def test_other_integers_are_no_index(dtype):
    with pytest.raises(TypeError, match=r"^op: x must be int32 or int64, got"):
        match_index("op", "x", np.zeros(3, dtype))


def test_an_indptr_starts_at_zero_never_falls_and_ends_inside():
    for good in ([0], [0, 0], [0, 3, 3, 5]):
        check_indptr("op", "indptr", np.array(good), 5, "rows")
    for bad, message in (
        ([], r"indptr\[0\] must be 0, got nothing"),
        ([1, 2], r"indptr\[0\] must be 0, got 1"),
        ([-1, 2], r"indptr\[0\] must be 0, got -1"),
        ([0, 3, 2], r"indptr falls at request 1: indptr\[1\] = 3, indptr\[2\] = 2"),
        ([0, -3, 2], r"indptr falls at request 0: indptr\[0\] = 0, indptr\[1\] = -3"),
        ([0, 6], "indptr ends at 6, but there are 5 rows"),
        ([0, 2**63 - 1, -(2**63)], "indptr falls at request 1"),
    ):
        with pytest.raises(ValueError, match=r"^op: " + message):
            check_indptr("op", "indptr", np.array(bad, np.int64), 5, "rows")


@pytest.mark.parametrize("beyond", [2**31, -(2**31) - 1, 2**32, -(2**32)])
def test_values_that_a_narrower_dtype_does_not_hold_are_refused_not_cut(beyond):
    held = np.array([0, 2**31 - 1, -(2**31)])
    assert narrow("op", held, np.dtype(np.int32)).tolist() == held.tolist()
    with pytest.raises(ValueError, match=f"op: entry 3 is {beyond}, which int32 does not hold"):
        narrow("op", np.append(held, beyond), np.dtype(np.int32))


def test_values_of_an_index_array_are_int64(xp):
    got = values(xp.array([3, 2**31 - 1], np.int32)[::-1])
    assert isinstance(got, np.ndarray)
    assert got.dtype == np.int64
    assert got.tolist() == [2**31 - 1, 3]


def test_sequences_become_the_smallest_index_dtype():
    for given_, dtype in (
        ([1, 2], np.int32),
        ((), np.int32),
        (range(3), np.int32),
        ([2**31 - 1], np.int32),
        ([2**31], np.int64),
        ([-(2**31) - 5], np.int64),
        ([np.int64(3), np.int32(4)], np.int32),
    ):
        got = as_index("op", "x", given_, None)
        assert got.dtype == dtype
        assert got.tolist() == [int(x) for x in given_]
    array = np.arange(3)
    assert as_index("op", "x", array, None) is array
    for bad in ([1.5], [1.0], ["1"], [True, False], [None], [2**70]):
        with pytest.raises(TypeError, match=r"^op: x must be integers, got"):
            as_index("op", "x", bad, None)


@pytest.mark.parametrize(
    ("given_", "cause"),
    [
        ([0, 2**63], "9223372036854775808, which int64 does not hold"),
        ([-(2**70), 0], "-1180591620717411303424, which int64 does not hold"),
        ([0, [1, 2]], "sequences among them"),
        ([0.5, 1], "float64"),
    ],
)
def test_a_sequence_that_is_no_index_is_told_why(given_, cause):
    with pytest.raises(TypeError, match=f"^op: x must be integers, got {cause}$"):
        as_index("op", "x", given_, None)


def test_a_dtype_of_the_other_byte_order_is_called_so():
    swapped = np.zeros(3, np.dtype(np.int32).newbyteorder())
    with pytest.raises(TypeError, match=r"or int64, got int32 of the other byte order$"):
        match_index("op", "indptr", swapped)
    with pytest.raises(TypeError, match=r"must be float16, got float16 of the other byte order$"):
        match_dtype("op", "k", np.zeros(3, np.dtype(np.float16).newbyteorder()), FLOAT16)


def test_an_index_is_packed_with_its_own_stride_and_width():
    memory = fake_cupy((10, 3), "int64")
    for view in (memory[:, 1], memory[::-1, 2], memory[3], memory[:0, 0], memory[2:3, 0]):
        pointer, stride, size, width = struct.unpack("=Qqqq", pack_index(view))
        assert (pointer, stride) == (view.data.ptr, view.strides[0])
        assert (size, width) == (len(view), 8)
        assert pack_index_argument("op", "x", view, len(view), memory) == pack_index(view)
    assert struct.unpack("=Qqqq", pack_index(fake_cupy(4, "int32")))[3] == 4
    assert pack_index(None) == NO_INDEX == bytes(32)
    with pytest.raises(ValueError, match=r"^op: x must be \[n=4\], got \[3\]"):
        pack_index_argument("op", "x", fake_cupy(3, "int32"), 4, memory)
    with pytest.raises(TypeError, match=r"^op: x must be int32 or int64, got float32"):
        pack_index_argument("op", "x", fake_cupy(3, "float32"), 3, memory)
    with pytest.raises(TypeError, match=r"^op: table is on the GPU but x is in NumPy"):
        pack_index_argument("op", "x", np.zeros(3, np.int32), 3, memory)
    with pytest.raises(ValueError, match=r"^op: table is on device 0 but x is on device 1"):
        pack_index_argument("op", "x", fake_cupy(3, "int32", 1), 3, memory)


# Options that are on or off


def test_an_option_that_is_on_or_off_takes_truth_values_and_no_array():
    for on in (True, np.True_, 1):
        assert truth("op", "causal", on) is True
    for off in (False, np.False_, 0):
        assert truth("op", "causal", off) is False
    for bad in ("False", None, 1.0, np.ones(1, bool), np.ones(2, bool), fake_cupy((), "bool")):
        with pytest.raises(TypeError, match=r"^op: causal must be True or False, got <class"):
            truth("op", "causal", bad)


@pytest.mark.parametrize("make", [np.zeros, fake_cupy], ids=["host", "device"])
def test_every_verb_names_an_option_that_is_neither_on_nor_off(make):
    table = PageTable(*(make(n, "int32") for n in (2, 1, 1)), 16)
    cache = PagedKVCache(make((3, 2, 16, 2, 8), "float16"))
    latent = MLAPagedCache(make((3, 16, 576), "float16"))
    q = RaggedTensor(make((1, 2, 8), "float16"), make(2, "int32"))
    nope, pe = (make((1, 4, n), "float16") for n in (512, 64))
    levels = CascadeLevels((q.indptr,), (table,))
    for op, calls in {
        "RaggedTensor.prefill": [partial(q.plan, q), partial(q.prefill, q, q)],
        "PagedKVCache.prefill": [partial(cache.plan, q, table), partial(cache.prefill, q, table)],
        "PagedKVCache.decode": [partial(cache.plan, q.data, table)],
        "MLAPagedCache.decode": [
            partial(latent.plan, nope, table),
            partial(latent.decode, nope, pe, table, sm_scale=0.1),
        ],
        "CascadeLevels.attend": [partial(levels.plan, q, cache), partial(levels.attend, q, cache)],
    }.items():
        for call in calls:
            with pytest.raises(TypeError, match=rf"^{op}: causal must be True or False, got"):
                call(causal="no")
    for call in (partial(q.plan, q), partial(cache.plan, q.data, table)):
        with pytest.raises(TypeError, match=r"fill|decode: batch_invariant must be True or False"):
            call(batch_invariant=make(1, "bool"))
    for op, call in {
        "RaggedTensor.prefill": partial(q.prefill, q, q),
        "PagedKVCache.prefill": partial(cache.prefill, q, table),
        "PagedKVCache.decode": partial(cache.decode, q.data, table),
        "MLAPagedCache.decode": partial(latent.decode, nope, pe, table, sm_scale=0.1),
        "CascadeLevels.attend": partial(levels.attend, q, cache),
    }.items():
        with pytest.raises(TypeError, match=rf"^{op}: return_lse must be True or False, got"):
            call(return_lse="no")


def test_a_cap_may_be_an_array_of_one_number():
    assert check_soft_cap("op", np.array([3.0])) == check_soft_cap("op", np.array(3)) == 3.0
    with pytest.raises(TypeError, match=r"^op: logits_soft_cap must be one number, got"):
        check_soft_cap("op", np.array(["3"]))


@pytest.mark.parametrize("cap", [2.0**80, 1e30, 10**30, float(np.finfo(np.float32).max)])
def test_a_cap_above_all_logits_is_off(cap):
    assert check_soft_cap("op", cap) is None


@pytest.mark.parametrize("make", [np.zeros, fake_cupy], ids=["host", "device"])
def test_numbers_that_float32_does_not_hold_are_no_caps_and_no_scales(make):
    table = PageTable(*(make(n, "int32") for n in (2, 1, 1)), 16)
    cache, q = PagedKVCache(make((3, 2, 16, 2, 64), "float16")), make((1, 2, 64), "float16")
    for cap in (1e300, 3.5e38, 1e-39, 5e-324):
        with pytest.raises(ValueError, match=r"logits_soft_cap must be .* in float32, got \d"):
            cache.decode(q, table, logits_soft_cap=cap)
    for scale in (1e300, 2**200):
        with pytest.raises(ValueError, match=r"sm_scale must be finite in float32, got 1"):
            cache.decode(q, table, sm_scale=scale)
    with pytest.raises(ValueError, match=r"sm_scale must be finite, got -inf$"):
        cache.decode(q, table, sm_scale=-(10**400))


def test_a_scale_is_any_integer_that_float32_reaches():
    assert host_scale("op", "sm_scale", 2**70) == 2.0**70


def test_numbers_are_not_read_from_a_gpu():
    """Reading them would wait for it, and break a capture."""
    table = PageTable(*(fake_cupy(n, "int32") for n in (2, 1, 1)), 16)
    cache = PagedKVCache(fake_cupy((3, 2, 16, 2, 64), "float16"))
    latent = MLAPagedCache(fake_cupy((3, 16, 576), "float16"))
    q, (nope, pe) = fake_cupy((1, 2, 64)), (fake_cupy((1, 2, n)) for n in (512, 64))
    whole, real = fake_cupy((), "int64"), fake_cupy((), "float32")
    for name, call in (
        ("sm_scale", lambda: cache.decode(q, table, sm_scale=real)),
        ("sm_scale", lambda: latent.decode(nope, pe, table, sm_scale=real)),
        ("logits_soft_cap", lambda: cache.decode(q, table, logits_soft_cap=real)),
        ("window_left", lambda: cache.decode(q, table, window_left=whole)),
        ("window_left", lambda: cache.plan(q, table, window_left=whole)),
        ("page_size", lambda: PageTable(table.indptr, table.indices, table.last_page_len, whole)),
        ("nnz", lambda: cache.gather(table, nnz=whole)),
        ("width", lambda: table.block_table(whole)),
        ("head_dim_kpe", lambda: MLAPagedCache(latent.data, whole)),
    ):
        with pytest.raises(TypeError, match=f": {name} must be a number on the host, got an array"):
            call()


def test_a_truth_value_is_no_number():
    q, k = (RaggedTensor(np.ones((2, 2, 8), np.float16), [0, 2]) for _ in range(2))
    with pytest.raises(ValueError, match="window_left must be a whole number, -1 = off, got True"):
        q.prefill(k, k, window_left=True)
    with pytest.raises(ValueError, match="logits_soft_cap must be finite and 0 or more"):
        q.prefill(k, k, logits_soft_cap=np.True_)
    with pytest.raises(TypeError, match="op: a request is named by an integer, got True"):
        request_number("op", True, 2)


# Rows


@pytest.mark.parametrize("make", [np.zeros, fake_cupy], ids=["host", "device"])
def test_rows_have_a_contiguous_last_axis(make):
    whole = make((6, 4, 16), "float16")
    for good in (whole, whole[::-1], whole[:, ::2], whole[..., 3:9], whole.swapaxes(0, 1),
                 whole[..., ::2][..., :1], whole[:0, :, ::2], whole[..., :0]):  # fmt: skip
        match_rows("op", "k", good)
    for bad in (whole[..., ::2], whole[..., ::-1], whole.swapaxes(1, 2)):
        with pytest.raises(ValueError, match=r"^op: k must have a contiguous last axis, got strid"):
            match_rows("op", "k", bad)


def test_elements_are_aligned():
    raw = np.zeros(6 * 5, np.uint8)
    odd = np.lib.stride_tricks.as_strided(raw.view(np.float16), (3, 2), (5, 2))
    with pytest.raises(ValueError, match=r"^op: k must be aligned to its 2-byte elements"):
        match_rows("op", "k", odd)
    memory = cp.cuda.UnownedMemory((1 << 20) + 2, 64, None, device_id=0)
    odd = cp.ndarray((2, 2), np.float32, memptr=cp.cuda.MemoryPointer(memory, 0))
    with pytest.raises(ValueError, match=r"^op: k must be aligned to its 4-byte elements"):
        match_rows("op", "k", odd)
    match_rows("op", "k", odd.view(np.float16))


def test_what_is_written_repeats_no_memory():
    x = np.zeros((3, 4))
    for good in (x, x[::-1], x[:1], np.broadcast_to(x[:1, :1], (1, 1)), np.zeros((0, 4)),
                 np.broadcast_to(x[:1], (0, 4))):  # fmt: skip
        match_writable("op", "out", good)
    for bad, axis, shape in (
        (np.broadcast_to(x[:1], (3, 4)), 0, r"\[3, 4\]"),
        (np.broadcast_to(x[:, :1], (3, 4)), 1, r"\[3, 4\]"),
        (np.broadcast_to(x[0, 0], (2, 2)), 0, r"\[2, 2\]"),
    ):
        message = (
            f"out is written and must not repeat memory, got stride 0 on axis {axis} of {shape}"
        )
        with pytest.raises(ValueError, match=r"^op: " + message):
            match_writable("op", "out", bad)


# Scales


def test_scales_are_one_number():
    for one in (0.5, np.float16(0.5), np.float64(0.5), np.array(0.5), np.array([[0.5]], np.float32),
                ml_dtypes.bfloat16(0.5)):  # fmt: skip
        assert host_scale("op", "k_scale", one) == 0.5
        assert pack_scale("op", "k_scale", one, 0) == struct.pack("=Qf4x", 0, 0.5)
    assert host_scale("op", "k_scale", 2) == host_scale("op", "k_scale", np.int32(2)) == 2.0
    assert pack_scale("op", "k_scale", 1.0, 0) == pack_scale("op", "k_scale", 1, 0) == UNIT_SCALE
    for bad in ("1", None, [0.5, 0.5], np.ones(2), np.ones(0), 1j, True, object()):
        for call in (host_scale, lambda *a: pack_scale(*a, 0)):
            with pytest.raises(TypeError, match=r"^op: k_scale must be one number, got"):
                call("op", "k_scale", bad)


def test_scales_on_the_device_are_passed_by_address():
    for shape in ((), (1,), (1, 1)):
        scale = fake_cupy(shape, "float32")
        assert pack_scale("op", "k_scale", scale, 0) == struct.pack("=Qf4x", scale.data.ptr, 0)
    with pytest.raises(TypeError, match=r"^op: k_scale must be a number on the host, got an array"):
        host_scale("op", "k_scale", fake_cupy((), "float32"))


# Division by a multiplication


def quotient(n, packed):
    """Divide as kernels/common/types.cuh's Divisor does, in 32-bit arithmetic."""
    _, magic, shift = struct.unpack("=III", packed)
    return (((2 * n) % 2**32) * magic >> 32) >> shift


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 + 5))
@example(2**31 - 1, 1)
@example(2**31 - 1, 2**31 - 1)
@example(2**31 - 2, 2**31 - 1)
@example(2**31 - 1, 3)
@example(2**31 - 1, 2**30 + 1)
@example(2**31 - 1, 2**31)
@example(0, 17)
def test_a_packed_divisor_is_exact(n, divisor):
    assert quotient(n, pack_divisor(divisor)) == n // divisor


# Where a magic number that is too large or too small would show: around multiples.
@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31), st.integers(-1, 1))
def test_a_packed_divisor_is_exact_around_multiples(divisor, multiple, off):
    n = min(max(divisor * (multiple % (2**31 // divisor + 1)) + off, 0), 2**31 - 1)
    assert quotient(n, pack_divisor(divisor)) == n // divisor


@pytest.mark.parametrize("divisor", [*range(1, 70), 99, 100, 127, 128, 129, 576, 640, 4096])
def test_small_divisors_are_exact_at_every_multiple(divisor):
    packed = pack_divisor(divisor)
    n = np.unique(np.linspace(0, 2**31 - 1, 5000, dtype=np.int64) // divisor * divisor)
    for k in (n, n - 1, n + divisor - 1):
        k = k[(k >= 0) & (k < 2**31)]
        _, magic, shift = (np.uint64(x) for x in struct.unpack("=III", packed))
        got = (k.astype(np.uint64) * np.uint64(2) * magic >> np.uint64(32)) >> shift
        np.testing.assert_array_equal(got, k // divisor)


def test_a_packed_divisor_of_nothing_or_of_everything_gives_zero():
    for divisor in (0, -1, 2**31, 2**40):
        assert pack_divisor(divisor) == bytes(12)
    _, magic, shift = struct.unpack("=III", pack_divisor(2**31 - 1))
    assert magic < 2**32
    assert shift <= 31
