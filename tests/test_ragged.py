"""RaggedTensor: packing and its views; ragged prefill on NumPy; what is refused."""

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from cases import captured, fake_cupy, indptr_of, on, random_rows
from tolerances import (
    ATTENTION,
    ATTENTION_TANH,
    LSE,
    LSE_TANH,
    assert_close,
    assert_same_bits,
    bits,
    max_abs,
    to_numpy,
)

from cukv import (
    PackedMask,
    PagedKVCache,
    PageTable,
    Plan,
    RaggedMask,
    RaggedTensor,
    reference,
)
from cukv._arrays import as_dtype

FLOATS = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
BF16 = np.dtype(ml_dtypes.bfloat16)
INF = np.inf
LENS = (3, 0, 5, 1, 0)


def zeros(shape, dtype="float16"):
    kind = np.dtype(dtype) if dtype in ("int32", "int64") else as_dtype("test", "dtype", dtype)
    return np.zeros(shape, kind)


MAKERS = [pytest.param(zeros, id="host"), pytest.param(fake_cupy, id="device")]


# Packing


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_list_is_packed_without_padding(xp, dtype, layout, rng):
    parts = [random_rows(rng, (n, 2, 8), dtype) for n in LENS]
    given = parts if layout == "NHD" else [p.swapaxes(0, 1).copy() for p in parts]
    ragged = RaggedTensor.from_list([on(xp, p) for p in given], layout)
    assert (len(ragged), ragged.batch_size, ragged.nnz) == (5, 5, 9)
    assert (ragged.num_heads, ragged.head_dim, ragged.dtype.name) == (2, 8, dtype)
    assert ragged.layout == layout
    assert to_numpy(ragged.indptr).tolist() == [0, 3, 3, 8, 9, 9]
    assert ragged.indptr.dtype == np.int32
    assert to_numpy(ragged.lens).tolist() == list(LENS)
    assert_same_bits(ragged.rows, np.concatenate(parts))
    for i, (got, want) in enumerate(zip(ragged, given, strict=True)):
        assert_same_bits(got, want)
        assert_same_bits(ragged[i], want)
        assert_same_bits(ragged[i - 5], want)
        assert_same_bits(ragged[np.int64(i)], want)
    ragged.validate()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_requests_rows_are_a_view(xp, layout):
    shape = (9, 2, 8) if layout == "NHD" else (2, 9, 8)
    ragged = RaggedTensor(xp.zeros(shape, np.float16), indptr_of(LENS).tolist(), layout)
    ragged[2][...] = 1
    for part in ragged:
        part += 1
    want = np.repeat([1, 1, 2, 1, 1], LENS)
    np.testing.assert_array_equal(to_numpy(ragged.rows)[:, 1, 3], want)
    assert xp.shares_memory(ragged.rows, ragged.data)


def test_the_data_is_not_copied_and_may_be_longer(xp):
    data = xp.zeros((9, 4, 16), np.float16)[::2, ::2, 3:11]
    ragged = RaggedTensor(data, xp.array([0, 1, 3]))
    assert ragged.data is data
    assert (ragged.nnz, ragged[1].shape) == (5, (2, 2, 8))
    ragged.validate()


def test_lengths_follow_the_contents(xp):
    for dtype in (np.int32, np.int64):
        indptr = xp.array([0, 9, 1, 9, 3], dtype)[::2]
        ragged = RaggedTensor(xp.zeros((5, 1, 8), np.float16), indptr)
        assert to_numpy(ragged.lens).tolist() == [1, 2]
        indptr[1] = 3
        assert to_numpy(ragged.lens).tolist() == [3, 0]
        assert ragged.lens.dtype == dtype
        assert ragged[0].shape == (3, 1, 8)


def test_iteration_ends_and_requests_are_bounded(xp):
    nobody = RaggedTensor(xp.zeros((3, 1, 8), np.float16), [0])
    assert list(nobody) == []
    assert nobody.lens.shape == (0,)
    ragged = RaggedTensor(xp.zeros((3, 1, 8), np.float16), [0, 1, 3])
    for i in (2, -3, 100):
        with pytest.raises(IndexError, match=f"^RaggedTensor: request {i} of 2"):
            ragged[i]
    with pytest.raises(IndexError, match="request 0 of 0"):
        nobody[0]


def test_validate_names_the_request_and_the_value(xp):
    data = xp.zeros((5, 1, 8), np.float16)
    for indptr, message in (
        ([1, 3], r"indptr\[0\] must be 0, got 1"),
        ([0, 3, 2], r"indptr falls at request 1: indptr\[1\] = 3, indptr\[2\] = 2"),
        ([0, 3, 6], "indptr ends at 6, but there are 5 rows"),
    ):
        with pytest.raises(ValueError, match=r"^RaggedTensor.validate: " + message):
            RaggedTensor(data, indptr).validate()


@pytest.mark.parametrize("make", MAKERS)
def test_a_ragged_tensor_names_what_it_refuses(make):
    good, indptr = make((5, 2, 8)), make(3, "int32")
    for data, offsets, layout, error, message in (
        (
            make((5, 8)),
            indptr,
            "NHD",
            ValueError,
            r"data must be \[nnz, num_heads, head_dim\], got",
        ),
        (
            make((5, 8)),
            indptr,
            "HND",
            ValueError,
            r"data must be \[num_heads, nnz, head_dim\], got",
        ),
        (good, make((3, 1), "int32"), "NHD", ValueError, r"indptr must be \[n\], got \[3, 1\]"),
        (
            good,
            make(0, "int32"),
            "NHD",
            ValueError,
            r"indptr must be \[batch_size \+ 1\], got \[0\]",
        ),
        (good, make(3, "float32"), "NHD", TypeError, "indptr must be int32 or int64, got float32"),
        (good, indptr, "DHN", ValueError, 'layout must be "NHD" or "HND", got \'DHN\''),
        ("data", indptr, "NHD", TypeError, "data must be a CuPy, NumPy or DLPack array"),
        (good, None, "NHD", TypeError, "indptr must be a CuPy, NumPy or DLPack array"),
    ):
        with pytest.raises(error, match=r"^RaggedTensor: " + message):
            RaggedTensor(data, offsets, layout)
    with pytest.raises(TypeError, match="indptr must be integers, got float64"):
        RaggedTensor(zeros((5, 2, 8)), [0.0, 5.0])


def test_homes_and_devices_do_not_mix():
    with pytest.raises(
        TypeError, match=r"^RaggedTensor: data is in NumPy but indptr is on the GPU"
    ):
        RaggedTensor(zeros((5, 2, 8)), fake_cupy(3, "int32"))
    with pytest.raises(ValueError, match="data is on device 0 but indptr is on device 1"):
        RaggedTensor(fake_cupy((5, 2, 8)), fake_cupy(3, "int32", 1))
    with pytest.raises(TypeError, match=r"^RaggedTensor.from_list: arrays\[0\] is in NumPy but"):
        RaggedTensor.from_list([zeros((5, 2, 8)), fake_cupy((5, 2, 8))])


def test_from_list_names_what_it_refuses():
    part = zeros((3, 2, 8))
    for parts, layout, error, message in (
        ([], "NHD", ValueError, "needs one array at least"),
        ([part, zeros((3, 2))], "NHD", ValueError,
         r"arrays\[1\] must be \[len_1, num_heads=2, head_dim=8\], got \[3, 2\]"),
        ([part, zeros((3, 1, 8))], "NHD", ValueError, r"arrays\[1\] must be .*got \[3, 1, 8\]"),
        ([part, zeros((3, 2, 8))], "HND", None, ""),
        ([part, zeros((2, 2, 8))], "HND", ValueError,
         r"arrays\[1\] must be \[num_heads=3, len_1, head_dim=8\], got \[2, 2, 8\]"),
        ([part, zeros((3, 2, 8), "bfloat16")], "NHD", TypeError,
         r"arrays\[1\] must be float16, got bfloat16"),
        ([part, 3], "NHD", TypeError, r"arrays\[1\] must be a CuPy, NumPy or DLPack array"),
        ([part], "XYZ", ValueError, "layout must be"),
    ):  # fmt: skip
        if error is None:
            assert RaggedTensor.from_list(parts, layout).nnz == 4
            continue
        with pytest.raises(error, match=r"^RaggedTensor.from_list: " + message):
            RaggedTensor.from_list(parts, layout)


def test_many_requests_are_packed(xp):
    parts = [xp.full((i % 3, 1, 8), i, np.float16) for i in range(300)]
    ragged = RaggedTensor.from_list(parts)
    assert ragged.nnz == 300
    assert float(ragged[298][0, 0, 0]) == 298


def test_a_ragged_tensor_shows_its_structure_without_reading_it():
    ragged = RaggedTensor(fake_cupy((5, 2, 8), "bfloat16"), fake_cupy(3, "int64"))
    shown = "data=bfloat16[5, 2, 8], indptr=int64[3], layout='NHD'"
    assert repr(ragged) == f"RaggedTensor({shown}, device=cuda:0)"


# Prefill, on NumPy


def batch(rng, dtype, qo_lens, kv_lens, heads=(4, 2), dims=(16, 24)):
    q = RaggedTensor(random_rows(rng, (sum(qo_lens), heads[0], dims[0]), dtype), indptr_of(qo_lens))
    kv_indptr = indptr_of(kv_lens)
    k, v = (
        RaggedTensor(random_rows(rng, (sum(kv_lens), heads[1], d), dtype), kv_indptr) for d in dims
    )
    return q, k, v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_prefill_is_the_definition(dtype, causal, rng):
    q, k, v = batch(rng, dtype, (3, 0, 5, 1, 7), (9, 4, 0, 1, 5))
    options = {
        "causal": causal, "sm_scale": 0.3, "window_left": 4, "logits_soft_cap": 5.0,
        "sinks": np.array([0.5, -1.0, 2.0, -INF], np.float32),
        "q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0,
    }  # fmt: skip
    for chosen in (options, {"causal": causal}):
        got = q.prefill(k, v, return_lse=True, **chosen)
        want = reference.ragged_prefill(q.data, q.indptr, k.data, v.data, k.indptr, **chosen)
        assert got[0].shape == (16, 4, 24)
        assert got[0].dtype.name == dtype
        scale = 3 * np.abs(v.data.astype(np.float32)).max()
        assert_close(got[0], want[0], ATTENTION_TANH[dtype], scale=scale)
        assert_close(got[1], want[1], LSE_TANH)


def test_layouts_and_strides_of_operands_do_not_matter(rng):
    q, k, v = batch(rng, "float32", (3, 0, 5), (9, 4, 5), dims=(16, 16))
    want = q.prefill(k, v, causal=True, return_lse=True)
    heads_first = [RaggedTensor(x.data.swapaxes(0, 1).copy(), x.indptr, "HND") for x in (q, k, v)]
    strided = []
    for x in (q, k, v):
        wide = np.full((2 * x.nnz, x.num_heads, 20), np.nan, np.float32)
        wide[::-2, :, 2:18] = x.data
        strided.append(RaggedTensor(wide[::-2, :, 2:18], x.indptr))
    for other in (heads_first, strided):
        got = other[0].prefill(*other[1:], causal=True, return_lse=True)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


def test_slices_of_one_projection_attend(rng):
    qkv = random_rows(rng, (5, (4 + 2 + 2) * 64), "float16")
    parts = (qkv[:, :256].reshape(5, 4, 64), qkv[:, 256:384].reshape(5, 2, 64),
             qkv[:, 384:].reshape(5, 2, 64))  # fmt: skip
    assert all(np.shares_memory(p, qkv) for p in parts)
    results = [
        RaggedTensor(f(parts[0]), [0, 2, 5]).prefill(
            *(RaggedTensor(f(p), [0, 2, 5]) for p in parts[1:]), causal=True
        )
        for f in (lambda x: x, np.copy)
    ]
    assert_same_bits(*results)


def test_padding_may_hold_anything(rng):
    q, k, v = batch(rng, "float32", (3, 2), (4, 5), dims=(16, 16))
    want = q.prefill(k, v)
    longer = [
        RaggedTensor(np.concatenate([x.data, np.full((3, *x.data.shape[1:]), np.nan, np.float32)]),
                     x.indptr) for x in (q, k, v)
    ]  # fmt: skip
    got = longer[0].prefill(*longer[1:])
    assert_same_bits(got[:5], want)


def test_rows_and_requests_of_no_length(rng):
    for qo_lens, kv_lens in (((0, 0), (0, 0)), ((0, 3, 0), (4, 0, 0)), ((), ()), ((0,), (5,))):
        q, k, v = batch(rng, "bfloat16", qo_lens, kv_lens)
        o, lse = q.prefill(k, v, causal=True, return_lse=True)
        assert o.shape == (sum(qo_lens), 4, 24)
        assert lse.shape == (sum(qo_lens), 4)
        assert not bits(o).any()
        assert (lse == -INF).all()
        _, lse = q.prefill(k, v, sinks=np.zeros(4), return_lse=True)
        assert not lse.any()


def test_fp8_operands_give_bfloat16(rng):
    q, k, v = batch(rng, "float8_e4m3fn", (3, 1), (4, 5))
    o, lse = q.prefill(k, v, k_scale=0.5, v_scale=2.0, return_lse=True)
    assert (o.dtype, lse.dtype) == (BF16, np.float32)
    want, _ = reference.ragged_prefill(q.data, q.indptr, k.data, v.data, k.indptr, k_scale=0.5,
                                       v_scale=2.0)  # fmt: skip
    assert_same_bits(o, want.astype(np.float32).astype(BF16))


def test_results_go_where_told(rng):
    q, k, v = batch(rng, "bfloat16", (3, 0, 2), (4, 5, 2))
    want = q.prefill(k, v, return_lse=True)
    for dtype in ("float16", "bfloat16", "float32"):
        whole = np.full((5, 4, 40), 7, as_dtype("test", "out", dtype))
        lse = np.full((10, 4), 7, np.float32)
        got = q.prefill(k, v, out=whole[..., 8:32], lse=lse[::2], return_lse=True)
        assert np.shares_memory(got[0], whole)
        assert np.shares_memory(got[1], lse)
        assert_same_bits(lse[::2], want[1])
        assert (whole[..., :8] == 7).all()
        assert (whole[..., 32:] == 7).all()
        assert (lse[1::2] == 7).all()
    assert whole.dtype == np.float32
    assert_same_bits(whole[..., 8:32].astype(BF16), want[0])
    with pytest.raises(
        ValueError, match=r"^RaggedTensor.prefill: out must be \[rows=5, num_qo_hea"
    ):
        q.prefill(k, v, out=np.zeros((5, 4, 16), np.float32))
    with pytest.raises(ValueError, match="lse must have a contiguous last axis"):
        q.prefill(k, v, lse=np.zeros((5, 8), np.float32)[:, ::2])
    with pytest.raises(ValueError, match="out is written and must not repeat memory"):
        strides = (0, *whole.strides[1:])
        q.prefill(k, v, out=np.lib.stride_tricks.as_strided(whole, (5, 4, 24), strides))


def test_a_plan_serves_the_calls_it_was_made_for_and_no_others(rng):
    q, k, v = batch(rng, "bfloat16", (3, 0, 2), (4, 5, 2))
    mask = RaggedMask(np.ones(16, bool), q.indptr, k.indptr)
    plan = q.plan(k, causal=True, window_left=2, batch_invariant=True)
    assert isinstance(plan, Plan)
    plan.update()
    options = {"causal": True, "window_left": 2}
    assert_same_bits(q.prefill(k, v, plan=plan, **options), q.prefill(k, v, **options))
    for change, message in (
        ({"causal": False}, "made for causal=True, got False"),
        ({"window_left": -1}, "made for window_left=2, got -1"),
        ({"custom_mask": mask}, "made for custom_mask=None, got RaggedMask"),
    ):
        with pytest.raises(ValueError, match=r"^RaggedTensor.prefill: .*" + message):
            q.prefill(k, v, plan=plan, **(options | change))
    masked = q.plan(k, custom_mask=mask)
    with pytest.raises(ValueError, match="made for custom_mask=RaggedMask, got PackedMask"):
        q.prefill(k, v, plan=masked, custom_mask=mask.pack())
    longer = RaggedTensor(np.concatenate([k.data, k.data]), k.indptr)
    with pytest.raises(ValueError, match="made for k="):
        q.prefill(longer, RaggedTensor(np.concatenate([v.data, v.data]), v.indptr), plan=plan,
                  **options)  # fmt: skip


# Messages


@pytest.mark.parametrize("make", MAKERS)
def test_prefill_names_what_it_refuses(make):
    def ragged(shape, dtype="float16", batch_size=2):
        return RaggedTensor(make(shape, dtype), make(batch_size + 1, "int32"))

    q, k, v = ragged((5, 4, 16)), ragged((7, 2, 16)), ragged((7, 2, 24))
    for arguments, options, error, message in (
        ((ragged((7, 2, 8)), v), {}, ValueError,
         r"k must be \[kv_nnz, num_kv_heads, head_dim=16\], got \[7, 2, 8\]"),
        ((k, ragged((6, 2, 24))), {}, ValueError,
         r"v must be \[kv_nnz=7, num_kv_heads=2, head_dim_vo\], got \[6, 2, 24\]"),
        ((k, ragged((7, 1, 24))), {}, ValueError, r"v must be .*got \[7, 1, 24\]"),
        ((k, ragged((7, 2, 24), "bfloat16")), {}, TypeError, "v must be float16, got bfloat16"),
        ((ragged((7, 2, 16), "bfloat16"), ragged((7, 2, 24), "bfloat16")), {}, TypeError,
         "q and a 16-bit cache share a dtype, got float16 and bfloat16"),
        ((ragged((7, 3, 16)), ragged((7, 3, 24))), {}, ValueError,
         "num_qo_heads must be a multiple of num_kv_heads=3, got 4"),
        ((ragged((7, 0, 16)), ragged((7, 0, 24))), {}, ValueError, "num_qo_heads must be a mul"),
        ((ragged((7, 2, 16), batch_size=3), v), {}, ValueError,
         "k must have batch_size=2 requests, got 3"),
        ((k, ragged((7, 2, 24), batch_size=1)), {}, ValueError,
         "v must have batch_size=2 requests, got 1"),
        ((k.data, v), {}, TypeError, r"k must be a RaggedTensor, got <class '\w+.ndarray'>"),
        ((k, v.data), {}, TypeError, r"v must be a RaggedTensor, got <class '\w+.ndarray'>"),
        ((k, v), {"window_left": -2}, ValueError, "window_left must be a whole number"),
        ((k, v), {"logits_soft_cap": -1}, ValueError, "logits_soft_cap must be finite and 0 or"),
        ((k, v), {"sm_scale": INF}, ValueError, "sm_scale must be finite"),
        ((k, v), {"sinks": make(3, "float32")}, ValueError, r"sinks must be \[num_qo_heads=4\]"),
        ((k, v), {"custom_mask": make((5, 7))}, TypeError, "custom_mask must be a RaggedMask or"),
        ((k, v), {"plan": "plan"}, TypeError, "plan must be a Plan"),
    ):  # fmt: skip
        with pytest.raises(error, match=r"^RaggedTensor.prefill: " + message):
            q.prefill(*arguments, **options)
    integers = ragged((5, 4, 16), "int32")
    with pytest.raises(TypeError, match=r"prefill: q must be float16 or bfloat16 or .*got int32"):
        integers.prefill(k, v)


def test_rows_whose_last_axis_no_kernel_reads_are_refused_on_numpy_too(rng):
    q, k, v = batch(rng, "float16", (3, 2), (4, 5))
    strided = [RaggedTensor(np.asfortranarray(x.data), x.indptr) for x in (q, k, v)]
    cache = PagedKVCache(np.zeros((4, 2, 16, k.num_heads, k.head_dim), np.float16))
    table = PageTable.from_seq_lens([4, 5], 16, xp=np)
    for name, call in (
        ("q", lambda: strided[0].prefill(k, v)),
        ("k", lambda: q.prefill(strided[1], v)),
        ("v", lambda: q.prefill(k, strided[2])),
        ("q", lambda: cache.prefill(strided[0], table)),
        ("q", lambda: cache.decode(np.asfortranarray(q.data[:2]), table)),
    ):
        with pytest.raises(ValueError, match=f": {name} must have a contiguous last axis, got str"):
            call()


@pytest.mark.parametrize("dtype", ["int32", "bool", "void16", "float8_e3m4", "int4"])
def test_keys_of_a_dtype_that_no_kernel_reads_are_refused_on_numpy_too(rng, dtype):
    q, k, _ = batch(rng, "float32", (3, 2), (4, 5))
    kind = "V2" if dtype == "void16" else dtype
    keys = RaggedTensor(np.zeros(k.data.shape, kind), k.indptr)
    for call in (lambda: q.prefill(keys, keys), lambda: q.plan(keys)):
        with pytest.raises(TypeError, match=r"prefill: k must be float16 or .*, got " + str(dtype)):
            call()


def test_a_layout_that_is_no_name_is_named(rng):
    with pytest.raises(ValueError, match='layout must be "NHD" or "HND", got array'):
        RaggedTensor(np.zeros((3, 1, 8)), [0, 3], np.array(["NHD", "HND"]))


def test_values_are_checked_on_numpy(rng):
    q, k, v = batch(rng, "float32", (3, 2), (4, 5))
    other = RaggedTensor(v.data, [0, 5, 9])
    with pytest.raises(ValueError, match=r"^RaggedTensor.prefill: k and v must have equal indptr"):
        q.prefill(k, other)
    with pytest.raises(ValueError, match="indptr ends at 6, but there are 5 rows"):
        RaggedTensor(q.data, [0, 3, 6]).prefill(k, v)
    short = PackedMask(np.zeros(3, np.uint8), q.indptr, k.indptr)
    with pytest.raises(ValueError, match=r"PackedMask.validate: indptr ends at 4, but there are 3"):
        q.prefill(k, v, custom_mask=short)


def test_calls_mix_no_homes():
    def ragged(make, *shape):
        return RaggedTensor(make(shape), make(3, "int32"))

    there, here = ([ragged(make, 5, 4, 16), ragged(make, 7, 2, 16), ragged(make, 7, 2, 24)]
                   for make in (fake_cupy, zeros))  # fmt: skip
    for call in (
        lambda: there[0].prefill(here[1], there[2]),
        lambda: there[0].prefill(there[1], here[2]),
        lambda: here[0].prefill(there[1], there[2]),
        lambda: here[0].plan(there[1]),
        lambda: here[0].prefill(*here[1:], sinks=fake_cupy(4, "float32")),
        lambda: there[0].prefill(*there[1:], sinks=zeros(4, "float32")),
        lambda: here[0].prefill(*here[1:], q_scale=fake_cupy(1, "float32")),
    ):
        with pytest.raises(TypeError, match=r"^RaggedTensor.prefill: .*on the GPU"):
            call()
    for make, call in ((zeros, there), (fake_cupy, here)):
        bits_of_masks = make(100, "float8_e4m3fn").view(np.uint8)
        mask = PackedMask(bits_of_masks, make(3, "int32"), make(3, "int32"), make(3, "int64"))
        for attempt in (
            lambda call=call, mask=mask: call[0].prefill(*call[1:], custom_mask=mask),
            lambda call=call, mask=mask: call[0].plan(call[1], custom_mask=mask),
        ):
            with pytest.raises(TypeError, match=r"^RaggedTensor.prefill: .*on the GPU"):
                attempt()


# Prefill on both homes: q, k and v with the offsets of QO_LENS and KV_LENS

# Requests without rows, without keys, with more rows than keys, shorter and longer than any tile.
QO_LENS = (0, 5, 1, 130, 40, 3, 33)
KV_LENS = (7, 0, 70, 130, 16, 260, 1)


def prefill_arrays(rng, dtype, heads, dims, qo_lens=QO_LENS, kv_lens=KV_LENS):
    """Draw q, k and v, NHD, on the host."""
    shapes = zip((qo_lens, kv_lens, kv_lens), heads, (dims[0], *dims), strict=True)
    kinds = ("bfloat16" if dtype.startswith("float8") else dtype, dtype, dtype)
    return [
        random_rows(rng, (sum(lens), n, dim), kind)
        for (lens, n, dim), kind in zip(shapes, kinds, strict=True)
    ]


def assert_is_prefill(got, arrays, dtype, qo_lens=QO_LENS, kv_lens=KV_LENS, **options):
    """Compare o and lse with the definition."""
    q, k, v = arrays
    qo_indptr, kv_indptr = indptr_of(qo_lens), indptr_of(kv_lens)
    want = reference.ragged_prefill(q, qo_indptr, k, v, kv_indptr, **options)
    tanh = "logits_soft_cap" in options
    kind = "bfloat16" if dtype.startswith("float8") else dtype
    scale = max_abs(v) * options.get("v_scale", 1.0)
    assert_close(got[0], want[0], (ATTENTION_TANH if tanh else ATTENTION)[kind], scale=scale)
    assert_close(got[1], want[1], LSE_TANH if tanh else LSE)


# Every dtype and kernel width; groups whose rows fill a tile of 128 and leave it open.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "heads", "dims"),
    [
        ("float16", (4, 2, 2), (64, 64)),
        ("bfloat16", (8, 2, 2), (128, 128)),
        ("float16", (3, 3, 3), (40, 40)),
        ("bfloat16", (5, 1, 1), (192, 128)),
        ("bfloat16", (4, 4, 4), (64, 128)),
        ("float16", (2, 1, 1), (256, 256)),
        ("float8_e4m3fn", (4, 1, 1), (128, 128)),
        ("float8_e5m2", (4, 2, 2), (96, 80)),
    ],
)
def test_prefill_is_the_definition_on_both_homes(xp, dtype, heads, dims, causal, rng):
    arrays = prefill_arrays(rng, dtype, heads, dims)
    q, k, v = (
        RaggedTensor(on(xp, x), on(xp, indptr_of(lens)))
        for x, lens in zip(arrays, (QO_LENS, KV_LENS, KV_LENS), strict=True)
    )
    got = q.prefill(k, v, causal=causal, return_lse=True)
    assert_is_prefill(got, arrays, dtype, causal=causal)


# Each option that shapes logits alone, and with the diagonal.
@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 9},
        {"window_left": 0, "causal": True},
        {"logits_soft_cap": 2.0, "causal": True},
        {"sm_scale": -0.2, "k_scale": 0.5, "v_scale": 3.0},
    ],
    ids=str,
)
def test_options_of_prefill_act_on_both_homes(xp, options, rng):
    arrays = prefill_arrays(rng, "bfloat16", (8, 2, 2), (128, 128))
    q, k, v = (
        RaggedTensor(on(xp, x), on(xp, indptr_of(lens)))
        for x, lens in zip(arrays, (QO_LENS, KV_LENS, KV_LENS), strict=True)
    )
    got = q.prefill(k, v, return_lse=True, **options)
    assert_is_prefill(got, arrays, "bfloat16", **options)


@pytest.mark.gpu
def test_slices_of_one_projection_and_other_layouts_attend_on_a_gpu(rng):
    lens = (5, 140)
    qkv = random_rows(rng, (sum(lens), 4 + 1 + 1, 64), "bfloat16")
    arrays = qkv[:, :4], qkv[:, 4:5], qkv[:, 5:]
    data, indptr = cp.asarray(qkv), cp.asarray(indptr_of(lens, "int64"))
    q, k, v = (RaggedTensor(x, indptr) for x in (data[:, :4], data[:, 4:5], data[:, 5:]))
    want = q.prefill(k, v, causal=True, return_lse=True)
    assert_is_prefill(want, arrays, "bfloat16", lens, lens, causal=True)
    heads_first = [
        RaggedTensor(cp.ascontiguousarray(x.rows.swapaxes(0, 1)), indptr, "HND") for x in (q, k, v)
    ]
    got = heads_first[0].prefill(*heads_first[1:], causal=True, return_lse=True)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


@pytest.mark.gpu
def test_padding_of_ragged_operands_is_not_read_on_a_gpu(rng):
    arrays = prefill_arrays(rng, "float16", (4, 2, 2), (64, 64))
    plain, padded = ([
        RaggedTensor(cp.asarray(np.concatenate([x, np.full((pad, *x.shape[1:]), np.nan, x.dtype)])),
                     cp.asarray(indptr_of(lens)))
        for x, lens in zip(arrays, (QO_LENS, KV_LENS, KV_LENS), strict=True)
    ] for pad in (0, 9))  # fmt: skip
    want = plain[0].prefill(*plain[1:], causal=True)
    got = padded[0].prefill(*padded[1:], causal=True)
    assert_same_bits(got[: len(want)], want)


# Values as wide as keys, narrower, and so much wider that the plan's tiles do not hold them.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "fits"), [((64, 64), True), ((192, 128), True), ((64, 96), False)]
)
def test_a_ragged_plan_is_captured_and_follows_the_lengths(dims, fits, rng):
    arrays = prefill_arrays(rng, "bfloat16", (4, 2, 2), dims)
    q_lens, k_lens = cp.asarray(indptr_of(QO_LENS)), cp.asarray(indptr_of(KV_LENS))
    q, k, v = (
        RaggedTensor(cp.asarray(x), indptr)
        for x, indptr in zip(arrays, (q_lens, k_lens, k_lens), strict=True)
    )
    plan = q.plan(k, causal=True)
    if not fits:
        with pytest.raises(NotImplementedError, match=r"^RaggedTensor.prefill: the plan is for"):
            q.prefill(k, v, causal=True, plan=plan)
        return
    out = cp.empty((q.nnz, 4, dims[1]), q.dtype)

    def step():
        plan.update()
        return q.prefill(k, v, causal=True, plan=plan, out=out)

    with captured(step) as (stream, graph, _):
        qo_lens, kv_lens = (50, 0, 100, 3, 9, 40, 10), (300, 2, 0, 3, 90, 40, 49)
        q_lens[:], k_lens[:] = cp.asarray(indptr_of(qo_lens)), cp.asarray(indptr_of(kv_lens))
        graph.launch(stream)
        stream.synchronize()
        _, lse = q.prefill(k, v, causal=True, return_lse=True)
        assert_is_prefill((out, lse), arrays, "bfloat16", qo_lens, kv_lens, causal=True)


@pytest.mark.gpu
def test_lengths_can_be_captured(rng):
    ragged = RaggedTensor(cp.zeros((9, 1, 8), np.float16), cp.zeros(4, np.int64))
    with captured(lambda: ragged.lens) as (stream, graph, lens):
        ragged.indptr.set(np.array([0, 4, 4, 9]), stream)
        graph.launch(stream)
        stream.synchronize()
    assert to_numpy(lens).tolist() == [4, 0, 5]


@pytest.mark.parametrize("dtype", ["O", "complex64", ">f2", "U4"])
def test_data_that_no_row_can_be_made_of_is_refused(dtype):
    with pytest.raises(TypeError, match="data must be of a float dtype"):
        RaggedTensor(np.zeros((3, 1, 8), dtype), [0, 3])


def test_a_request_is_named_by_an_integer():
    ragged = RaggedTensor(np.zeros((3, 1, 8), np.float16), [0, 1, 3])
    assert ragged[np.int64(1)].shape == (2, 1, 8)
    with pytest.raises(TypeError, match="named by an integer"):
        ragged[0:1]


def test_a_broken_indptr_gives_no_rows():
    for indptr in ([0, 3, 9], [0, 2, 1]):
        with pytest.raises(ValueError, match="indptr"):
            RaggedTensor(np.zeros((5, 1, 8), np.float16), indptr)[0]


def test_arrays_to_pack_may_come_one_by_one():
    rows = (np.full((n, 1, 8), n, np.float16) for n in (2, 1))
    assert RaggedTensor.from_list(rows).lens.tolist() == [2, 1]
