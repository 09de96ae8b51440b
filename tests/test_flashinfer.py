"""FlashInfer's names: each against the definitions, on NumPy arrays, and in torch on a GPU."""

import functools
import importlib
import inspect
import warnings

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from capturing import nothing_collected
from cases import MLACase, PagedCase, fake_cupy, random_rows
from fake_gpus import FakeGpus
from tolerances import ATTENTION, LSE, MERGE, assert_close, assert_same_bits, max_abs

from cukv import flashinfer, reference
from cukv.flashinfer._caller import framework

DOCUMENTED = (45, 8, 25, 22)  # the batch of FlashInfer's page documentation
CASE = PagedCase((45, 0, 8, 25, 22), page_size=16, num_kv_heads=2, head_dim=64)
QO_INDPTR = np.array([0, 3, 3, 4, 9, 11], np.int32)
WORKSPACE = np.empty(16, np.uint8)
HEADS = {"num_qo_heads": 4, "num_kv_heads": 2}


class OnCpu:
    """An array of another library in CPU memory: nothing but DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **kwargs):
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class JaxArray:
    """An array of JAX on a GPU, as far as its module says: nothing but DLPack."""

    __module__ = "jaxlib._jax"

    def __dlpack_device__(self):
        return (2, 0)


def read_only(array):
    array.flags.writeable = False
    return array


def repeated(array):
    """Give a view whose first axis repeats its first entry, which NumPy lets be written."""
    return np.lib.stride_tricks.as_strided(array, array.shape, (0, *array.strides[1:]))


# What must not be written, made of an array that may be: the error, and what it says.
NO_TARGETS = [
    (lambda x: JaxArray(), TypeError, "{} is a jax.Array, which is immutable$"),
    (lambda x: x.tolist(), TypeError, "{} must be a CuPy, NumPy or DLPack array"),
    (lambda x: read_only(x.copy()), TypeError, "{} is a read-only NumPy array"),
    (lambda x: repeated(x.copy()), ValueError, "{} is written and must not repeat memory"),
]
no_targets = pytest.mark.parametrize(
    ("spoilt", "error", "match"), NO_TARGETS, ids=["jax", "list", "read-only", "repeated"]
)


def csr(arrays):
    return arrays.indptr, arrays.indices, arrays.last_page_len


def flat_masks(rng, qo_indptr, kv_lens):
    """Draw one mask per request in which every row sees a key: flat booleans."""
    masks = [rng.random((q, k)) < 0.5 for q, k in zip(np.diff(qo_indptr), kv_lens, strict=True)]
    for mask in masks:
        mask[:, :1] = True
    return np.concatenate([mask.reshape(-1) for mask in masks])


def paged(case, arrays, q, qo_indptr, **options):
    """Attend by the definition."""
    return reference.prefill(q, qo_indptr, *case.stores(arrays.data), *csr(arrays), **options)


def assert_attends(got, want, v, dtype="float16"):
    o, lse = got
    assert_close(o, want[0], ATTENTION[dtype], scale=max_abs(v))
    assert_close(lse, want[1], LSE)


def prefill_wrapper(case, arrays, qo_indptr=QO_INDPTR, layout="NHD", **options):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(qo_indptr, *csr(arrays), 4, 2, case.head_dim, case.page_size, **options)
    return wrapper


# Names


def test_names_are_in_their_modules_and_at_the_top():
    for module in ("page", "decode", "prefill", "mla", "cascade", "quantization"):
        found = importlib.import_module(f"cukv.flashinfer.{module}")
        for name in found.__all__:
            assert getattr(flashinfer, name) is getattr(found, name)
            assert name in flashinfer.__all__


def test_an_option_that_is_on_or_off_is_named_where_it_is_neither():
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    mla = flashinfer.mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
    indptr, ids = np.array([0, 1]), np.array([0])
    latent = (indptr, indptr, ids, np.array([1]), 2, 512, 64, 1)
    for call, message in (
        (lambda x: decode(WORKSPACE, use_cuda_graph=x), "Wrapper: use_cuda_graph"),
        (lambda x: decode(WORKSPACE, use_tensor_cores=x), "Wrapper: use_tensor_cores"),
        (lambda x: ragged.plan(indptr, indptr, 2, 2, 8, causal=x), "Wrapper.plan: causal"),
        (lambda x: mla.plan(*latent, x, 0.1, "float16", "float16"), "Wrapper.plan: causal"),
    ):
        for neither in ("False", np.ones(2, bool)):
            with pytest.raises(TypeError, match=rf"{message} must be True or False, got <class"):
                call(neither)


# The leading parameters of scripts that pass them by position.
POSITIONAL = {
    flashinfer.append_paged_kv_cache: "append_key append_value batch_indices positions "
    "paged_kv_cache kv_indices kv_indptr kv_last_page_len kv_layout",
    flashinfer.append_paged_mla_kv_cache: "append_ckv append_kpe batch_indices positions "
    "ckv_cache kpe_cache kv_indices kv_indptr kv_last_page_len",
    flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan: "self indptr indices last_page_len "
    "num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode window_left logits_soft_cap",
    flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan: "self qo_indptr paged_kv_indptr "
    "paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk page_size "
    "head_dim_vo custom_mask packed_custom_mask causal",
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan: "self qo_indptr kv_indptr num_qo_heads "
    "num_kv_heads head_dim_qk head_dim_vo custom_mask packed_custom_mask causal",
    flashinfer.BatchMLAPagedAttentionWrapper.plan: "self qo_indptr kv_indptr kv_indices kv_len_arr "
    "num_heads head_dim_ckv head_dim_kpe page_size causal sm_scale q_data_type kv_data_type",
}


@pytest.mark.parametrize("function", POSITIONAL, ids=lambda f: f.__qualname__)
def test_parameters_stand_where_scripts_put_them(function):
    names = list(inspect.signature(function).parameters)
    wanted = POSITIONAL[function].split()
    assert names[: len(wanted)] == wanted


# Pages


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", ["5d", "pair"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_example_of_the_page_documentation_appends_what_was_given(layout, form, dtype, rng):
    case = PagedCase(DOCUMENTED, page_size=16, dtype=dtype, layout=layout, form=form)
    arrays = case.arrays(rng)
    k, v = (random_rows(rng, (100, 2, 64), dtype) for _ in range(2))
    kv_append_indptr = np.array([0, 45, 53, 78, 100], np.int32)
    batch_indices, positions = flashinfer.get_batch_indices_positions(
        kv_append_indptr,
        flashinfer.get_seq_lens(arrays.indptr, arrays.last_page_len, 16),
        100,
    )
    flashinfer.append_paged_kv_cache(
        k,
        v,
        batch_indices,
        positions,
        arrays.data,
        arrays.indices,
        arrays.indptr,
        arrays.last_page_len,
        kv_layout=layout,
    )
    for store, rows in zip(case.stores(arrays.data), (k, v), strict=True):
        assert_same_bits(reference.gather(store, *csr(arrays)), rows)


def test_rows_of_padding_are_skipped_and_no_rows_are_no_error(rng):
    case = PagedCase((5, 3), page_size=4)
    arrays = case.arrays(rng)
    before = arrays.data.copy()
    rows = random_rows(rng, (2, 2, 64), "float16")
    table = arrays.indices, arrays.indptr, arrays.last_page_len
    nowhere = np.array([-1, -1], np.int32), np.array([0, 4], np.int32)
    flashinfer.append_paged_kv_cache(rows, rows, *nowhere, arrays.data, *table)
    none = np.zeros(0, np.int32)
    flashinfer.append_paged_kv_cache(rows[:0], rows[:0], none, none, arrays.data, *table)
    assert_same_bits(arrays.data, before)


def test_rows_of_another_dtype_are_converted(rng):
    cache = np.zeros((2, 2, 4, 1, 8), ml_dtypes.bfloat16)
    rows = random_rows(rng, (1, 1, 8), "float16")
    where = np.array([0], np.int32), np.array([2], np.int32)
    table = np.array([1], np.int32), np.array([0, 1], np.int32), np.array([3], np.int32)
    flashinfer.append_paged_kv_cache(rows, rows, *where, cache, *table)
    assert_same_bits(cache[1, 0, 2], rows[0].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_of_pages_of_one_token_may_lack_their_axis(layout, rng):
    whole = np.zeros((6, 2, 1, 3, 8) if layout == "NHD" else (6, 2, 3, 1, 8), np.float16)
    short = whole[:, :, 0] if layout == "NHD" else whole[:, :, :, 0]
    rows = random_rows(rng, (2, 3, 8), "float16")
    where = np.zeros(2, np.int32), np.array([0, 1], np.int32)
    table = np.array([4, 1], np.int32), np.array([0, 2], np.int32), np.array([1], np.int32)
    for cache in (short, (short[:, 0], short[:, 1])):
        whole[...] = 0
        flashinfer.append_paged_kv_cache(rows, rows, *where, cache, *table, kv_layout=layout)
        assert_same_bits(np.ascontiguousarray(short[[4, 1], 0]), rows)


def test_mla_rows_are_appended(rng):
    case = MLACase((5, 3), page_size=4, form="pair")
    arrays = case.arrays(rng)
    ckv, kpe = random_rows(rng, (2, 512), "float16"), random_rows(rng, (2, 64), "float16")
    where = np.array([0, 1], np.int32), np.array([4, 2], np.int32)
    table = arrays.indices, arrays.indptr, arrays.last_page_len
    flashinfer.append_paged_mla_kv_cache(ckv, kpe, *where, *arrays.data, *table)
    for store, rows in zip(arrays.data, (ckv, kpe), strict=True):
        got = reference.gather(store[:, :, None], *csr(arrays))[[4, 7], 0]
        assert_same_bits(got, rows)


def test_a_request_without_pages_has_no_tokens():
    indptr, last = np.array([0, 2, 2], np.int32), np.array([3, 7], np.int32)
    assert flashinfer.get_seq_lens(indptr, last, 8).tolist() == [11, 0]


def test_positions_are_written_to_the_arrays_given():
    indptr, lens = np.array([0, 2, 3], np.int32), np.array([5, 1], np.int32)
    batch, positions = np.full(4, 9, np.int32), np.full(4, 9, np.int32)
    got = flashinfer.get_batch_indices_positions(indptr, lens, 4, batch, positions)
    assert got[0] is batch
    assert batch.tolist() == [0, 0, 1, -1]
    assert positions.tolist() == [3, 4, 0, 0]
    wide = np.full(4, 9), np.full(4, 9)
    flashinfer.get_batch_indices_positions(indptr, lens, 4, *(OnCpu(x) for x in wide))
    assert [x.tolist() for x in wide] == [batch.tolist(), positions.tolist()]


@pytest.mark.parametrize("name", ["batch_indices", "positions"])
@no_targets
def test_positions_go_nowhere_if_one_array_must_not_be_written(name, spoilt, error, match):
    indptr, lens = np.array([0, 2, 3], np.int32), np.array([5, 1], np.int32)
    kept = {name: np.full(4, 9, np.int32) for name in ("batch_indices", "positions")}
    with pytest.raises(error, match=match.format(name)):
        flashinfer.get_batch_indices_positions(
            indptr, lens, 4, **(kept | {name: spoilt(kept[name])})
        )
    assert all((x == 9).all() for x in kept.values())


# Bits and states


def test_bits_are_big_endian_unless_told_otherwise():
    x = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], bool)
    indptr = np.array([0, 4, 7, 11], np.int32)
    assert flashinfer.packbits(x).tolist() == np.packbits(x).tolist()
    packed, offsets = flashinfer.segment_packbits(x, indptr)
    assert packed.tolist() == [0b10110000, 0b00100000, 0b11010000]
    assert offsets.tolist() == [0, 1, 2, 3]
    assert offsets.dtype == np.int32
    assert flashinfer.segment_packbits(x, indptr, "little")[0].tolist() == [0b1101, 0b100, 0b1011]


def states(rng, k):
    o = random_rows(rng, (5, k, 3, 16), "float16")
    lse = rng.standard_normal((5, k, 3)).astype(np.float32)
    lse[0, 0] = lse[1] = -np.inf
    return o, lse


def test_states_merge_as_defined(rng):
    o, lse = states(rng, 4)
    want = reference.merge_states(o, lse)
    for got, wanted, bound in zip(
        flashinfer.merge_states(o, lse), want, (MERGE["float16"], LSE), strict=True
    ):
        assert_close(got, wanted, bound, scale=max_abs(o))
    pair = flashinfer.merge_state(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1])
    assert_same_bits(pair[0], flashinfer.merge_states(o[:, :2], lse[:, :2])[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_states_merge_in_place_where_the_mask_says_so(dtype, rng):
    o, lse = states(rng, 2)
    v, s = o[:, 0].copy(), lse[:, 0].astype(dtype)
    mask = np.array([True, True, False, True, False])
    merged = flashinfer.merge_state(v, s.astype(np.float32), o[:, 1], lse[:, 1])
    before = v.copy(), s.copy()
    flashinfer.merge_state_in_place(v, s, o[:, 1], lse[:, 1], mask)
    assert_same_bits(v, np.where(mask[:, None, None], merged[0], before[0]))
    assert_same_bits(s, np.where(mask[:, None], merged[1].astype(dtype), before[1]))
    v, s = before
    flashinfer.merge_state_in_place(v, s, o[:, 1], lse[:, 1])
    assert_same_bits(v, merged[0])
    assert_same_bits(s, merged[1].astype(dtype))


@pytest.mark.parametrize("mask", [None, np.ones(5, bool)], ids=["all", "masked"])
@pytest.mark.parametrize("name", ["v", "s"])
@no_targets
def test_states_merge_nowhere_if_one_array_must_not_be_written(
    name, spoilt, error, match, mask, rng, monkeypatch
):
    o, lse = states(rng, 2)
    kept = {"v": o[:, 0].copy(), "s": lse[:, 0].copy()}
    before = {name: x.copy() for name, x in kept.items()}
    given = kept | {name: spoilt(kept[name])}
    message = f"merge_state_in_place: {match.format(name)}"
    with FakeGpus(monkeypatch, "90"), pytest.raises(error, match=message):
        flashinfer.merge_state_in_place(given["v"], given["s"], o[:, 1], lse[:, 1], mask)
    for name, x in kept.items():
        assert_same_bits(x, before[name])


def test_an_lse_that_is_written_holds_floats(rng):
    o, lse = states(rng, 2)
    with pytest.raises(TypeError, match=r"in_place: s must be .*float32.*, got int32"):
        flashinfer.merge_state_in_place(o[:, 0], np.zeros((5, 3), "i4"), o[:, 1], lse[:, 1])


# Decode


@pytest.mark.parametrize("form", ["5d", "pair"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_decode_attends_as_defined(layout, form, rng):
    case = PagedCase(CASE.kv_lens, page_size=16, layout=layout, form=form)
    arrays = case.arrays(rng)
    q = case.queries(rng, 5, 4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, layout)
    options = {"window_left": 9, "logits_soft_cap": 5.0, "sm_scale": 0.2}
    wrapper.plan(*csr(arrays), 4, 2, 64, 16, **options)
    sinks = np.array([0.5, -1, 2, 0], np.float32)
    got = wrapper.run(q, arrays.data, sinks=sinks, k_scale=0.5, v_scale=2.0, return_lse=True)
    scales = {"sinks": sinks, "k_scale": 0.5, "v_scale": 2.0}
    want = paged(case, arrays, q, np.arange(6), **options, **scales)
    assert_attends(got, want, 2.0 * arrays.v)
    assert_same_bits(wrapper.run(q, arrays.data, sinks=sinks, k_scale=0.5, v_scale=2.0), got[0])


def test_results_go_where_they_are_asked_for(rng):
    arrays = CASE.arrays(rng)
    q = CASE.queries(rng, 5, 4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*csr(arrays), 4, 2, 64, 16, o_data_type="float32")
    out, lse = np.empty((5, 4, 64), np.float32), np.empty((5, 4), np.float32)
    got = wrapper.run(q, arrays.data, out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    assert_attends((out, lse), paged(CASE, arrays, q, np.arange(6)), arrays.v)
    assert wrapper.run(q, arrays.data).dtype == np.float32


@no_targets
@pytest.mark.parametrize("name", ["out", "lse"])
def test_results_go_nowhere_if_one_must_not_be_written(name, spoilt, error, match, rng):
    arrays = CASE.arrays(rng)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*csr(arrays), 4, 2, 64, 16)
    kept = {"out": np.full((5, 4, 64), 7, np.float16), "lse": np.full((5, 4), 7, np.float32)}
    given = kept | {name: spoilt(kept[name])}
    with pytest.raises(error, match=f"{wrapper._op}.run: {match.format(name)}"):
        wrapper.run(CASE.queries(rng, 5, 4), arrays.data, **given)
    assert all((x == 7).all() for x in kept.values())


def test_several_rows_of_a_request_decode_causally(rng):
    case = PagedCase((45, 8, 25), page_size=16)
    arrays = case.arrays(rng)
    q = case.queries(rng, 9, 4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    for is_causal in (None, False):
        wrapper.plan(*csr(arrays), 4, 2, 64, 16, q_len_per_req=3, is_causal=is_causal)
        got = wrapper.run(q, arrays.data, q_len_per_req=3, return_lse=True)
        want = paged(case, arrays, q, np.arange(4) * 3, causal=is_causal is None)
        assert_attends(got, want, arrays.v)
    with pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.run(q, arrays.data, q_len_per_req=1)


def test_old_scripts_begin_and_forward(rng):
    arrays = CASE.arrays(rng)
    q = CASE.queries(rng, 5, 4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(*csr(arrays), 4, 2, 64, 16, data_type="float16")
    o = wrapper.forward(q, arrays.data, sm_scale=0.3, window_left=4)
    got = wrapper.forward_return_lse(q, arrays.data, sm_scale=0.3, window_left=4)
    assert_same_bits(got[0], o)
    want = paged(CASE, arrays, q, np.arange(6), sm_scale=0.3, window_left=4)
    assert_attends(got, want, arrays.v)
    wrapper.end_forward()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single_calls_attend_as_defined(layout, rng):
    q, k, v = (random_rows(rng, (n, h, 64), "float16") for n, h in ((5, 4), (9, 2), (9, 2)))
    lens = np.array([0, 5]), np.array([0, 9])
    stored = [x if layout == "NHD" else x.swapaxes(0, 1).copy() for x in (k, v)]
    want = reference.ragged_prefill(q, lens[0], k, v, lens[1], causal=True)
    got = flashinfer.single_prefill_with_kv_cache(
        q, *stored, causal=True, kv_layout=layout, return_lse=True
    )
    assert_attends(got, want, v)
    want = reference.ragged_prefill(q[:1], np.array([0, 1]), k, v, lens[1])
    o, lse = flashinfer.single_decode_with_kv_cache(q[0], *stored, layout, return_lse=True)
    assert_attends((o[None], lse[None]), want, v)
    o = flashinfer.single_prefill_with_kv_cache(q, *stored, kv_layout=layout, o_dtype="float32")
    assert o.dtype == np.float32


@pytest.mark.parametrize("verb", ["decode", "prefill"])
def test_a_single_call_speaks_in_its_own_name(verb):
    call = getattr(flashinfer, f"single_{verb}_with_kv_cache")
    q, k = np.zeros((2, 64), np.float16), np.zeros((9, 2, 64), np.float16)
    q = q if verb == "decode" else q[None]
    with pytest.raises(TypeError, match=f"^single_{verb}_with_kv_cache: k must be a CuPy"):
        call(q, None, k)
    with pytest.raises(ValueError, match=f"^single_{verb}_with_kv_cache: layout must be"):
        call(q, k, k, kv_layout="NDH")


def test_single_masks_are_booleans_or_bits(rng):
    q, k, v = (random_rows(rng, (n, 2, 64), "float16") for n in (5, 9, 9))
    mask = flat_masks(rng, [0, 5], [9]).reshape(5, 9)
    lens = np.array([0, 5]), np.array([0, 9])
    want = reference.ragged_prefill(q, lens[0], k, v, lens[1], custom_mask=mask.reshape(-1))
    bits = flashinfer.packbits(mask, "little")
    for options in (
        {"custom_mask": mask},
        {"custom_mask": mask.reshape(-1)},
        {"packed_custom_mask": bits},
    ):
        got = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True, **options)
        assert_attends(got, want, v)
    for wrong in (
        mask.T,
        np.ones((6, 9), bool),
        np.ones((5, 10), bool),
        np.ones(44, bool),
        mask[None],
    ):
        with pytest.raises(
            ValueError, match=r"custom_mask must be \[qo_len=5, kv_len=9\], or flat"
        ):
            flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=wrong)


# Prefill


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged_prefill_attends_as_defined(layout, causal, rng):
    case = PagedCase(CASE.kv_lens, page_size=16, layout=layout, dtype="bfloat16")
    arrays = case.arrays(rng)
    q = case.queries(rng, 11, 4)
    options = {"causal": causal, "window_left": 7, "sm_scale": 0.2}
    wrapper = prefill_wrapper(case, arrays, layout=layout, q_data_type="bfloat16", **options)
    got = wrapper.run(q, arrays.data, return_lse=True)
    assert_attends(got, paged(case, arrays, q, QO_INDPTR, **options), arrays.v, "bfloat16")


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_a_batch_are_booleans_or_bits_of_each_request(packed, rng):
    arrays = CASE.arrays(rng)
    q = CASE.queries(rng, 11, 4)
    flat = flat_masks(rng, QO_INDPTR, CASE.kv_lens)
    want = paged(CASE, arrays, q, QO_INDPTR, custom_mask=flat)
    options = {"custom_mask": flat}
    if packed:
        offsets = np.concatenate([[0], np.cumsum(np.diff(QO_INDPTR) * CASE.kv_lens)])
        bits, _ = flashinfer.segment_packbits(flat, offsets.astype(np.int32), "little")
        options = {"packed_custom_mask": bits}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(QO_INDPTR, *csr(arrays), 4, 2, 64, 16, **options)
    assert_attends(wrapper.forward_return_lse(q, arrays.data), want, arrays.v)
    assert_same_bits(wrapper.forward(q, arrays.data), wrapper.run(q, arrays.data))
    wrapper.plan(QO_INDPTR, *csr(arrays), 4, 2, 64, 16, causal=True)  # no mask is left over
    want = paged(CASE, arrays, q, QO_INDPTR, causal=True)
    assert_attends(wrapper.run(q, arrays.data, return_lse=True), want, arrays.v)


def test_a_mask_that_is_too_short_raises_when_it_is_planned(rng):
    arrays = CASE.arrays(rng)
    with pytest.raises(ValueError, match="data must be"):
        prefill_wrapper(CASE, arrays, custom_mask=np.ones(7, bool))


@pytest.mark.parametrize("kind", ["padded", "dense"])
def test_masks_of_a_batch_that_are_not_flat_raise(kind, rng):
    arrays, num_rows = CASE.arrays(rng), np.diff(QO_INDPTR)
    shape = (sum(num_rows), sum(CASE.kv_lens))
    if kind == "padded":
        shape = (len(num_rows), max(num_rows), max(CASE.kv_lens))
    with pytest.raises(
        ValueError, match="custom_mask must be the masks of the requests, flattened"
    ):
        prefill_wrapper(CASE, arrays, custom_mask=np.ones(shape, bool))


def test_the_lse_comes_in_the_base_and_layout_asked_for(rng):
    arrays = CASE.arrays(rng)
    q = CASE.queries(rng, 11, 4)
    wrapper = prefill_wrapper(CASE, arrays)
    o, lse = wrapper.run(q, arrays.data, return_lse=True)
    given = np.empty((4, 11), np.float32)
    got = wrapper.run(q, arrays.data, lse=given, return_lse=True, lse_base="ln", lse_layout="HN")
    assert got[1] is given
    assert_same_bits(got[0], o)
    assert_close(given.T, lse.astype(np.float64) * np.log(2), LSE)
    with pytest.raises(ValueError, match="lse_base"):
        wrapper.run(q, arrays.data, lse_base="e")


LSE_FORMS = [{"lse_base": "ln"}, {"lse_layout": "HN"}, {"lse_base": "ln", "lse_layout": "HN"}]
WRONG_LSES = [
    (lambda shape: np.empty((3, *shape), np.float32), ValueError, r"lse must be \[.*rows=11.*\]"),
    (lambda shape: np.empty(shape[::-1], np.float32), ValueError, r"lse must be \[.*rows=11.*\]"),
    (lambda shape: np.empty(shape, np.float16), TypeError, "lse must be float32"),
    (lambda shape: np.empty(shape, np.int32), TypeError, "lse must be float32"),
    (lambda shape: read_only(np.empty(shape, np.float32)), TypeError, "lse is a read-only"),
    (lambda shape: fake_cupy(shape, "float32"), TypeError, "q is in NumPy but lse is on the GPU"),
]


def paged_run(rng):
    arrays = CASE.arrays(rng)
    run = prefill_wrapper(CASE, arrays).run
    return functools.partial(run, CASE.queries(rng, 11, 4), arrays.data), 64, LSE_FORMS


def latent_run(rng):
    case = MLACase((20, 5, 9), page_size=16, form="pair")
    arrays = case.arrays(rng)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    rows = np.array([0, 3, 4, 11])
    table = arrays.indptr, arrays.indices, np.array(case.kv_lens, np.int32)
    wrapper.plan(rows, *table, 4, 512, 64, 16, False, 0.1, "float16", "float16")
    q = [random_rows(rng, (11, 4, n), "float16") for n in (512, 64)]
    run = functools.partial(wrapper.run, *q, *arrays.data)
    return run, 512, [{"return_lse_base_on_e": True}]


@pytest.mark.parametrize("made", [paged_run, latent_run], ids=["paged", "latent"])
@pytest.mark.parametrize(("wrong", "error", "match"), WRONG_LSES)
def test_an_lse_of_another_form_is_checked_before_anything_is_written(
    made, wrong, error, match, rng
):
    run, head_dim, forms = made(rng)
    for form in forms:
        out = np.full((11, 4, head_dim), 7, np.float16)
        lse = wrong((4, 11) if "lse_layout" in form else (11, 4))
        with pytest.raises(error, match=match):
            run(out=out, lse=lse, return_lse=True, **form)
        assert (out == 7).all()


@pytest.mark.parametrize("masked", [False, True])
def test_ragged_prefill_attends_as_defined(masked, rng):
    kv_indptr = np.array([0, 45, 45, 53, 78, 100], np.int32)
    q = random_rows(rng, (11, 4, 24), "float16")
    k, v = random_rows(rng, (100, 2, 24), "float16"), random_rows(rng, (100, 2, 16), "float16")
    options = {"causal": True}
    if masked:
        options = {"custom_mask": flat_masks(rng, QO_INDPTR, np.diff(kv_indptr))}
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    wrapper.plan(QO_INDPTR, kv_indptr, 4, 2, 24, 16, **options)
    got = wrapper.run_return_lse(q, k, v)
    assert_attends(got, reference.ragged_prefill(q, QO_INDPTR, k, v, kv_indptr, **options), v)
    assert_same_bits(wrapper.forward(q, k, v, causal=True), got[0])


# MLA


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("short", [False, True])
def test_mla_attends_to_as_many_tokens_as_it_is_told(short, causal, rng):
    case = MLACase((45, 0, 8, 25), page_size=8, form="pair")
    arrays = case.arrays(rng)
    lens = np.array([45, 0, 8, 25], np.int32)
    if short:  # fewer pages than each request owns
        lens = np.array([7, 0, 0, 16], np.int32)
    qo_indptr = np.array([0, 2, 3, 4, 8], np.int32)
    q, q_pe = random_rows(rng, (8, 4, 512), "float16"), random_rows(rng, (8, 4, 64), "float16")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(WORKSPACE)
    heads = (4, 512, 64, 8, causal, 0.1, "float16", "float16")
    wrapper.plan(qo_indptr, arrays.indptr, arrays.indices, lens, *heads)
    got = wrapper.run(q, q_pe, *arrays.data, return_lse=True)
    starts = np.concatenate([[0], np.cumsum([45, 0, 8, 25])])
    rows = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lens, strict=False)])
    ckv, kpe = (reference.gather(store[:, :, None], *csr(arrays))[rows] for store in arrays.data)
    keys = np.concatenate([ckv, kpe], axis=2)
    want = reference.ragged_prefill(
        np.concatenate([q, q_pe], axis=2),
        qo_indptr,
        keys,
        ckv,
        np.concatenate([[0], np.cumsum(lens)]),
        causal=causal,
        sm_scale=0.1,
    )
    assert_attends(got, want, ckv)
    natural = wrapper.run(q, q_pe, *arrays.data, return_lse=True, return_lse_base_on_e=True)[1]
    assert_close(natural, want[1] * np.log(2), LSE)


def test_mla_lengths_beyond_the_pages_raise(rng):
    case = MLACase((5,), page_size=4, form="pair")
    arrays = case.arrays(rng)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    heads = (4, 512, 64, 4, False, 0.1, "float16", "float16")
    with pytest.raises(ValueError, match=r"kv_len_arr\[0\] must be 0 to 8 tokens"):
        wrapper.plan([0, 1], arrays.indptr, arrays.indices, [9], *heads)


# Cascade


def cascade_arrays(rng):
    """Two levels over one cache: a root of 32 tokens for both rows of requests, leaves of 5, 9."""
    cache = random_rows(rng, (8, 2, 16, 2, 64), "float16")
    qo_indptr = [np.array([0, 4], np.int32), np.array([0, 1, 4], np.int32)]
    indptr = [np.array([0, 2], np.int32), np.array([0, 1, 2], np.int32)]
    indices = [np.array([6, 1], np.int32), np.array([3, 0], np.int32)]
    last = [np.array([16], np.int32), np.array([5, 9], np.int32)]
    return cache, qo_indptr, indptr, indices, last


def test_a_cascade_attends_as_its_levels_concatenated(rng):
    cache, *levels = cascade_arrays(rng)
    q = random_rows(rng, (4, 4, 64), "float16")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    wrapper.plan(*levels, 4, 2, 64, 16, causal=True, window_left=20)
    got = wrapper.run(q, cache, return_lse=True)
    csrs = list(zip(*levels[1:], strict=True))
    want = reference.cascade(
        q, levels[0], cache[:, 0], cache[:, 1], csrs, causal=True, window_left=20
    )
    assert_attends(got, want, cache)
    assert_same_bits(wrapper.forward(q, cache), got[0])


def test_an_index_array_is_named_as_the_argument_of_plan_that_it_is():
    decode, paged, ragged, latent, levels = (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE),
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE),
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE),
        flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE),
        flashinfer.MultiLevelCascadeAttentionWrapper(1, WORKSPACE),
    )
    good, bad = [np.array([0, 1]), np.array([0]), np.array([1])], np.array([0.0, 1.0])
    scale = 0.1
    for name, call in (
        ("indptr", lambda: decode.plan(bad, *good[1:], 4, 2, 64, 16)),
        ("last_page_len", lambda: decode.plan(*good[:2], bad, 4, 2, 64, 16)),
        ("qo_indptr", lambda: paged.plan(bad, *good, 4, 2, 64, 16)),
        ("paged_kv_indices", lambda: paged.plan(good[0], good[0], bad, good[2], 4, 2, 64, 16)),
        ("kv_indptr", lambda: ragged.plan(good[0], bad, 4, 2, 64)),
        ("kv_len_arr", lambda: latent.plan(
            good[0], *good[:2], bad, 4, 512, 64, 16, False, scale, "float16", "float16")),
        (r"paged_kv_indptr_arr\[0\]", lambda: levels.plan(
            [good[0]], [bad], [good[1]], [good[2]], 4, 2, 64, 16)),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"plan: {name} must be int32 or int64, got float64"):
            call()


# CUDA-graph mode: buffers keep their place


def test_a_graph_of_decode_reads_fixed_buffers(rng):
    buffers = np.zeros(4, np.int32), np.full(20, 99, np.int32), np.zeros(3, np.int32)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    assert wrapper.is_cuda_graph_enabled
    for lens in ((45, 8, 25), (3, 0, 17)):
        case = PagedCase(lens, page_size=16)
        arrays = case.arrays(rng)
        pages = arrays.indices[: arrays.indptr[-1]]
        wrapper.plan(arrays.indptr, pages, arrays.last_page_len, 4, 2, 64, 16)
        assert buffers[0].tolist() == arrays.indptr.tolist()
        assert buffers[1][: len(pages)].tolist() == pages.tolist()
        q = case.queries(rng, 3, 4)
        got = wrapper.run(q, arrays.data, return_lse=True)
        assert_attends(got, paged(case, arrays, q, np.arange(4)), arrays.v)
    before = [buffer.copy() for buffer in buffers]
    for table, name in {
        ((0, 1), (0,), (1,)): "paged_kv_indptr_buffer holds \\[4\\]",
        ((0, 1, 2, 3), (7,) * 21, (1, 1, 1)): "paged_kv_indices_buffer holds \\[20\\]",
    }.items():
        with pytest.raises(ValueError, match=name):
            wrapper.plan(*table, 4, 2, 64, 16)
    for buffer, was in zip(buffers, before, strict=True):
        assert_same_bits(buffer, was)


@pytest.mark.parametrize("far", [2**32, -(2**32)])
@pytest.mark.parametrize("number", range(3))
def test_a_buffer_holds_what_is_planned_or_is_left_as_it_is(number, far):
    buffers = np.full(3, 9, np.int32), np.full(5, 9, np.int32), np.full(2, 9, np.int32)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    given = [np.array(x) for x in ([0, 1, 2], [3, 1], [4, 4])]
    given[number][1] += far
    with pytest.raises(ValueError, match=r"plan: paged_kv_\w+_buffer: entry 1 is .* int32"):
        wrapper.plan(*given, 4, 2, 64, 16)
    assert all((x == 9).all() for x in buffers)


@no_targets
def test_a_graph_has_buffers_that_can_be_written(spoilt, error, match):
    buffers = [np.zeros(n, np.int32) for n in (3, 5, 2)]
    buffers[1] = spoilt(buffers[1])
    with pytest.raises(error, match=match.format("paged_kv_indices_buffer")):
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)


def test_a_graph_of_masked_prefill_reads_fixed_buffers(rng):
    buffers = {
        "qo_indptr_buf": np.zeros(3, np.int32),
        "paged_kv_indptr_buf": np.zeros(3, np.int32),
        "paged_kv_indices_buf": np.full(20, 99, np.int32),
        "paged_kv_last_page_len_buf": np.zeros(2, np.int32),
        "custom_mask_buf": np.zeros(64, np.uint8),
        "mask_indptr_buf": np.zeros(3, np.int32),
    }
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE, use_cuda_graph=True, **buffers
    )
    for lens, indptr in (((45, 8), [0, 3, 5]), ((17, 20), [0, 1, 5])):
        case = PagedCase(lens, page_size=16)
        arrays = case.arrays(rng)
        pages = arrays.indices[: arrays.indptr[-1]]
        flat = flat_masks(rng, indptr, lens)
        qo_indptr = np.array(indptr, np.int32)
        heads = (4, 2, 64, 16)
        table = arrays.indptr, pages, arrays.last_page_len
        wrapper.plan(qo_indptr, *table, *heads, custom_mask=flat)
        q = case.queries(rng, 5, 4)
        got = wrapper.run(q, arrays.data, return_lse=True)
        assert_attends(got, paged(case, arrays, q, qo_indptr, custom_mask=flat), arrays.v)
    with pytest.raises(ValueError, match="custom_mask_buf holds"):
        many = np.array([0, 100, 200], np.int32)
        wrapper.plan(many, *table, *heads, custom_mask=flat_masks(rng, many, lens))


def test_a_graph_of_mla_keeps_its_page_table(rng):
    names = {"qo_indptr": 3, "kv_indptr": 3, "kv_indices": 9, "kv_len_arr": 2}
    buffers = {name: np.zeros(size, np.int32) for name, size in names.items()}
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, use_cuda_graph=True, **buffers)
    q, q_pe = random_rows(rng, (2, 4, 512), "float16"), random_rows(rng, (2, 4, 64), "float16")
    for lens in ((20, 9), (3, 30)):
        case = MLACase(lens, page_size=8, form="pair")
        arrays = case.arrays(rng)
        pages = arrays.indices[: arrays.indptr[-1]]
        heads = (4, 512, 64, 8, False, 0.1, "float16", "float16")
        wrapper.plan(np.arange(3, dtype=np.int32), arrays.indptr, pages, lens, *heads)
        got = wrapper.run(q, q_pe, *arrays.data, return_lse=True)
        stores = (store[:, :, None] for store in arrays.data)
        want = reference.mla_decode(q, q_pe, np.arange(3), *stores, *csr(arrays), sm_scale=0.1)
        assert_attends(got, want, arrays.k)


def test_a_graph_of_ragged_prefill_reads_fixed_buffers(rng):
    buffers = {name: np.zeros(3, np.int32) for name in ("qo_indptr_buf", "kv_indptr_buf")}
    masks = {"custom_mask_buf": np.zeros(64, np.uint8), "mask_indptr_buf": np.zeros(3, np.int32)}
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        WORKSPACE, use_cuda_graph=True, **buffers, **masks
    )
    q, k, v = (random_rows(rng, (n, h, 64), "float16") for n, h in ((9, 4), (50, 2), (50, 2)))
    for qo_lens, kv_lens in (((3, 2), (40, 10)), ((1, 8), (1, 12))):
        qo_indptr, kv_indptr = (
            np.array([0, *np.cumsum(lens)], np.int32) for lens in (qo_lens, kv_lens)
        )
        flat = flat_masks(rng, qo_indptr, kv_lens)
        wrapper.plan(qo_indptr, kv_indptr, 4, 2, 64, custom_mask=flat)
        assert buffers["qo_indptr_buf"].tolist() == qo_indptr.tolist()
        assert buffers["kv_indptr_buf"].tolist() == kv_indptr.tolist()
        o, lse = wrapper.run(q, k, v, return_lse=True)
        n = sum(qo_lens)
        want = reference.ragged_prefill(q[:n], qo_indptr, k, v, kv_indptr, custom_mask=flat)
        assert_attends((o[:n], lse[:n]), want, v)


def test_a_graph_of_a_cascade_reads_fixed_buffers(rng):
    cache, *levels = cascade_arrays(rng)
    names = "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
    buffers = {
        f"{name}_buf_arr": [np.zeros_like(level) for level in arrays]
        for name, arrays in zip(names, levels, strict=True)
    }
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, WORKSPACE, use_cuda_graph=True, **buffers
    )
    q = random_rows(rng, (4, 4, 64), "float16")
    for last in (levels[3], [np.array([16], np.int32), np.array([1, 16], np.int32)]):
        wrapper.plan(*levels[:3], last, 4, 2, 64, 16)
        for buffer, given in zip(buffers["paged_kv_last_page_len_buf_arr"], last, strict=True):
            assert buffer.tolist() == given.tolist()
        csrs = list(zip(*levels[1:3], last, strict=True))
        want = reference.cascade(q, levels[0], cache[:, 0], cache[:, 1], csrs)
        assert_attends(wrapper.run(q, cache, return_lse=True), want, cache)


def graph_of(cls, sizes):
    """Make a wrapper over buffers of sizes; give it and the buffers, which hold nines."""
    buffers = {
        name: np.full(size, 9, np.uint8 if name == "custom_mask_buf" else np.int32)
        for name, size in sizes.items()
    }
    return cls(WORKSPACE, use_cuda_graph=True, **buffers), list(buffers.values())


TABLE_BUFFERS = {"paged_kv_indptr": 3, "paged_kv_indices": 9, "paged_kv_last_page_len": 2}
MASK_BUFFERS = {"custom_mask_buf": 10, "mask_indptr_buf": 3}
MASKED_TABLE_BUFFERS = {f"{name}_buf": n for name, n in TABLE_BUFFERS.items()} | MASK_BUFFERS
BAD_STEPS = {
    "page size": (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        {f"{name}_buffer": n for name, n in TABLE_BUFFERS.items()},
        lambda plan: plan([0, 1, 2], [3, 1], [4, 4], 4, 2, 64, 0),
        "page_size",
    ),
    "bits": (
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        {"qo_indptr_buf": 3} | MASKED_TABLE_BUFFERS,
        lambda plan: plan(
            [0, 5, 9], [0, 1, 2], [3, 1], [16, 4], 4, 2, 64, 16, custom_mask=np.ones(96, bool)
        ),
        "custom_mask_buf holds",
    ),
    "mask offsets": (
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        {"qo_indptr_buf": 3} | MASKED_TABLE_BUFFERS | {"mask_indptr_buf": 4},
        lambda plan: plan(
            [0, 1, 2], [0, 1, 2], [3, 1], [4, 4], 4, 2, 64, 16, custom_mask=np.ones(8, bool)
        ),
        "mask_indptr_buf must be",
    ),
    "mask": (
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        {"qo_indptr_buf": 3, "kv_indptr_buf": 3} | MASK_BUFFERS,
        lambda plan: plan([0, 1, 2], [0, 4, 8], 4, 2, 64, custom_mask=np.ones(3, bool)),
        "mask",
    ),
    "lengths": (
        flashinfer.BatchMLAPagedAttentionWrapper,
        {"qo_indptr": 3, "kv_indptr": 3, "kv_indices": 9, "kv_len_arr": 2},
        lambda plan: plan(
            [0, 1, 2], [0, 1, 2], [3, 1], [8, 9], 4, 512, 64, 8, True, 0.1, "float16", "float16"
        ),
        r"kv_len_arr\[1\] must be 0 to 8",
    ),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_a_plan_that_raises_leaves_the_buffers_of_a_graph(name):
    cls, sizes, step, match = BAD_STEPS[name]
    wrapper, buffers = graph_of(cls, sizes)
    with pytest.raises(ValueError, match=match):
        step(wrapper.plan)
    assert all((buffer == 9).all() for buffer in buffers)


def test_a_cascade_that_raises_leaves_the_buffers_of_a_graph(rng):
    _, *levels = cascade_arrays(rng)
    names = "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
    buffers = {
        f"{name}_buf_arr": [np.full_like(level, 9) for level in arrays]
        for name, arrays in zip(names, levels, strict=True)
    }
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, WORKSPACE, use_cuda_graph=True, **buffers
    )
    with pytest.raises(ValueError, match="page_size"):
        wrapper.plan(*levels, 4, 2, 64, 0)
    assert all((x == 9).all() for level in buffers.values() for x in level)


@pytest.mark.parametrize("number", [1, 3])
def test_a_cascade_has_one_buffer_per_level(number):
    buffers = [np.zeros(3, np.int32)] * number
    with pytest.raises(ValueError, match=f"qo_indptr_buf_arr must have .* level, 2, got {number}"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, qo_indptr_buf_arr=buffers)


def test_graph_mode_needs_its_buffers():
    with pytest.raises(ValueError, match="needs paged_kv_indptr_buffer"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True)
    with pytest.raises(ValueError, match="needs custom_mask_buf"):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            WORKSPACE,
            use_cuda_graph=True,
            qo_indptr_buf=np.zeros(2, np.int32),
            kv_indptr_buf=np.zeros(2, np.int32),
        )
        wrapper.plan([0, 1], [0, 1], 2, 2, 64, custom_mask=np.ones(1, bool))


# Arguments


def test_index_arrays_may_be_in_cpu_memory_and_of_either_width(rng):
    arrays = CASE.arrays(rng)
    q = CASE.queries(rng, 11, 4)
    want = prefill_wrapper(CASE, arrays).run(q, arrays.data)
    for dtype in (np.int32, np.int64):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        indices = (OnCpu(x.astype(dtype)) for x in (QO_INDPTR, *csr(arrays)))
        wrapper.plan(*indices, 4, 2, 64, 16)
        assert_same_bits(wrapper.run(q, arrays.data), want)


def test_arrays_of_a_subclass_are_of_its_framework():
    class Tensor:
        __module__ = "torch"

    class Weight(Tensor):
        pass

    class Rows(np.ndarray):
        pass

    found = (Tensor(), Weight(), JaxArray(), np.empty(1).view(Rows), OnCpu(np.empty(1)))
    assert [framework(x) for x in found] == ["torch", "torch", "jax", "numpy", "test_flashinfer"]


def test_values_of_another_library_on_the_cpu_raise(rng):
    arrays = CASE.arrays(rng)
    q = CASE.queries(rng, 11, 4)
    with pytest.raises(TypeError, match=r"q is in CPU memory \(OnCpu\)"):
        prefill_wrapper(CASE, arrays).run(OnCpu(q), arrays.data)


class TorchDtype:
    """What torch.bfloat16 looks like."""

    def __str__(self):
        return "torch.bfloat16"


@pytest.mark.parametrize("dtype", [TorchDtype(), "bfloat16", ml_dtypes.bfloat16], ids=str)
def test_dtypes_are_those_of_any_framework(dtype, rng):
    case = PagedCase((5, 9), page_size=4, dtype="bfloat16")
    arrays = case.arrays(rng)
    q = case.queries(rng, 2, 4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*csr(arrays), 4, 2, 64, 4, q_data_type=dtype, o_data_type="float32")
    assert wrapper.run(q, arrays.data).dtype == np.float32


REFUSED_AT_PLAN = [
    ("pos_encoding_mode", "ROPE_LLAMA"),
    ("rope_theta", 1e4),
    ("rope_scale", 1.0),
    ("use_fp16_qk_reduction", True),
    ("prefix_len_ptr", np.zeros(1)),
    ("token_pos_in_items_ptr", np.zeros(1)),
    ("token_pos_in_items_len", 3),
    ("max_item_len_ptr", np.zeros(1)),
    ("seq_lens", np.zeros(1)),
    ("seq_lens_q", np.zeros(1)),
    ("block_tables", np.zeros(1)),
    ("max_token_per_sequence", 7),
    ("max_sequence_kv", 7),
]


@pytest.mark.parametrize(("name", "value"), REFUSED_AT_PLAN, ids=[n for n, _ in REFUSED_AT_PLAN])
def test_options_that_nothing_honours_are_refused_by_name(name, value, rng):
    arrays = CASE.arrays(rng)
    with pytest.raises(NotImplementedError, match=name):
        prefill_wrapper(CASE, arrays, **{name: value})


def latent_plan(rng, **options):
    """Plan latent attention with options; give the wrapper and the arrays of its runs."""
    case = MLACase((20, 5), page_size=16, form="pair")
    arrays = case.arrays(rng)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    table = arrays.indptr, arrays.indices, np.array(case.kv_lens, np.int32)
    wrapper.plan([0, 1, 2], *table, 4, 512, 64, 16, False, 0.1, "float16", "float16", **options)
    q = [random_rows(rng, (2, 4, n), "float16") for n in (512, 64)]
    return wrapper, (*q, *arrays.data)


def test_later_keywords_are_taken_where_they_change_nothing_and_else_refused_by_name(rng):
    arrays, rows = CASE.arrays(rng), CASE.queries(rng, 11, 4)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    paged, ragged = (
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    )
    planned = prefill_wrapper(CASE, arrays)
    latent, given = latent_plan(rng)
    paged(WORKSPACE, max_total_num_rows=7)
    latent_plan(rng, query_layout="split", scale_mode="kv-per-tensor", enable_pdl=True)
    for call, off, on in (
        (functools.partial(decode, WORKSPACE), None, {"jit_kwargs": {"x": 1}}),
        (functools.partial(paged, WORKSPACE), False, {"variant_owns_mask": True}),
        (functools.partial(ragged, WORKSPACE), False, {"variant_owns_mask": True}),
        (
            functools.partial(planned.run, rows, arrays.data),
            None,
            {"use_fp16_softmax": True, "uses_spcompress": True},
        ),
        (
            functools.partial(ragged(WORKSPACE).plan, [0, 1], [0, 1], 2, 2, 64),
            None,
            {"uniform_q_len": 1, "use_token_head_sf": True},
        ),
        (
            functools.partial(latent_plan, rng),
            None,
            {"metadata": 1, "seq_lens": [1], "query_layout": "packed"},
        ),
        (functools.partial(latent_plan, rng), "none", {"output_scale": "per-tensor"}),
        (functools.partial(latent_plan, rng), "default", {"scale_mode": "bmm-scalar"}),
        (functools.partial(latent_plan, rng), False, {"use_sinks": True, "skip_softmax": True}),
        (
            functools.partial(latent.run, *given),
            None,
            {"query": 1, "kv_cache": 1, "ckv_scale_arr": 1, "bmm1_scale": 1, "bmm2_scale": 1},
        ),
    ):
        call(**dict.fromkeys(on, off))
        for name, value in on.items():
            with pytest.raises(NotImplementedError, match=name):
                call(**{name: value})


def test_a_plan_that_raises_leaves_the_one_before(rng):
    arrays, rows = CASE.arrays(rng), CASE.queries(rng, 5, 4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*csr(arrays), 4, 2, 64, 16)
    want = wrapper.run(rows, arrays.data)
    with pytest.raises(ValueError, match="last_page_len"):
        wrapper.plan(*csr(arrays)[:2], [1], 4, 2, 64, 16, q_len_per_req=2)
    assert_same_bits(wrapper.run(rows, arrays.data, q_len_per_req=1), want)
    wrapper, given = latent_plan(rng)
    want = wrapper.run(*given)
    with pytest.raises(ValueError, match="kv_len_arr"):
        heads = 4, 512, 32, 16, True, 1.0, "float16", "float16"
        wrapper.plan([0, 1, 2], [0, 2, 3], [0, 1, 2], [1], *heads)
    assert_same_bits(wrapper.run(*given), want)


def test_latent_results_are_those_that_were_planned(rng):
    wrapper, given = latent_plan(rng, lse_mode="basee")
    for asked, got in (({}, "none"), ({"return_lse": True}, "base2")):
        with pytest.raises(ValueError, match=f"plan was told lse_mode='basee', got '{got}'"):
            wrapper.run(*given, **asked)
    wrapper.run(*given, return_lse=True, return_lse_base_on_e=True)
    wrapper, given = latent_plan(rng, lse_mode="base2")
    wrapper.run(*given, return_lse=True)
    with pytest.raises(ValueError, match="got 'basee'"):
        wrapper.run(*given, return_lse=True, return_lse_base_on_e=True)
    wrapper, given = latent_plan(rng, output_dtype="float32")
    assert wrapper.run(*given).dtype == np.float32
    with pytest.raises(ValueError, match="lse_mode must be one of"):
        latent_plan(rng, lse_mode="base10")


def test_calls_that_were_not_planned_are_refused_by_name(rng):
    arrays = CASE.arrays(rng)
    q = CASE.queries(rng, 11, 4)
    with pytest.raises(ValueError, match="call plan first"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE).run(q, arrays.data)
    wrapper = prefill_wrapper(CASE, arrays, window_left=3)
    for message, call in {
        "window_left=3, got 4": lambda: wrapper.run(q, arrays.data, window_left=4),
        "num_qo_heads=4, got 2": lambda: wrapper.run(q[:, :2], arrays.data),
        "q_data_type=float16": lambda: wrapper.run(q.astype(ml_dtypes.bfloat16), arrays.data),
        "page_size=16, got 8": lambda: wrapper.run(q, arrays.data[:, :, :8]),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    for name in ("kv_cache_sf", "skip_softmax_threshold_scale_factor"):
        with pytest.raises(NotImplementedError, match=name):
            wrapper.run(q, arrays.data, **{name: 1.0})
    with pytest.raises(NotImplementedError, match="args"):
        wrapper.run(q, arrays.data, 1.0)


def test_a_plan_of_options_that_are_none_is_not_made(rng):
    arrays = CASE.arrays(rng)
    q, wrapper = CASE.queries(rng, 11, 4), prefill_wrapper(CASE, arrays)
    want = wrapper.run(q, arrays.data)
    for name, bad, error in (
        ("sm_scale", "x", TypeError), ("window_left", -5, ValueError),
        ("window_left", None, ValueError), ("logits_soft_cap", -1.0, ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match=rf"^BatchPrefill\w+\.plan: {name} must be"):
            wrapper.plan(QO_INDPTR, *csr(arrays), 4, 2, 64, 16, **{name: bad})
        with pytest.raises(error, match=rf"^BatchPrefill\w+\.forward: {name} must be"):
            wrapper.forward(q, arrays.data, **{name: bad})
    assert_same_bits(wrapper.run(q, arrays.data), want)  # by the plan before
    wrapper = prefill_wrapper(CASE, arrays, window_left=2**40)
    assert_same_bits(wrapper.run(q, arrays.data, window_left=2**41), want)  # no request is longer


def test_what_is_no_array_is_named(rng):
    arrays = CASE.arrays(rng)
    q, wrapper = CASE.queries(rng, 11, 4), prefill_wrapper(CASE, arrays)
    for cache in (None, CASE.nouns(arrays)[0], (arrays.data, None)):
        with pytest.raises(TypeError, match=r"\.run: paged_kv_cache must be an? "):
            wrapper.run(q, cache)
    with pytest.raises(ValueError, match=r"\.run: q must be \[nnz, num_qo_heads, head_dim\]"):
        wrapper.run(q[0], arrays.data)
    with pytest.raises(TypeError, match=r"decode_with_kv_cache: q must be a CuPy"):
        flashinfer.single_decode_with_kv_cache([1], q, q)
    with pytest.raises(ValueError, match=r"decode_with_kv_cache: q must be \[num_qo_heads, head"):
        flashinfer.single_decode_with_kv_cache(q, q, q)
    for call in (wrapper.run, functools.partial(flashinfer.single_prefill_with_kv_cache, q)):
        with pytest.raises(TypeError, match="return_lse must be True or False"):
            call(q, arrays.data if call == wrapper.run else q, return_lse="no")


def test_names_of_no_backend_and_no_mode_raise(rng):
    with pytest.raises(ValueError, match="backend"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, backend="fa9")
    with pytest.raises(NotImplementedError, match="jit_args"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, jit_args=["x"])
    with pytest.raises(ValueError, match="pos_encoding_mode"):
        prefill_wrapper(CASE, CASE.arrays(rng), pos_encoding_mode="ROPE")
    with pytest.raises(ValueError, match="layout"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NDH")


def test_index_arrays_go_to_the_home_of_the_workspace():
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(np.empty(1, np.uint8))
    with pytest.raises(TypeError, match="in NumPy"):
        wrapper.plan(fake_cupy((2,), "int32"), [0], [1], 4, 2, 64, 16)


# On the GPU, in torch


@pytest.fixture
def torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torch")


def to_torch(torch, x):
    if isinstance(x, tuple):
        return tuple(to_torch(torch, part) for part in x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(x).cuda()


def from_torch(x):
    return x.float().cpu().numpy()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_torch_scripts_append_and_decode_on_their_own_stream(torch, rng):
    case = PagedCase(DOCUMENTED, page_size=16, dtype="bfloat16", head_dim=64)
    arrays = case.arrays(rng)
    workspace = torch.empty(1024, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        cache = torch.zeros(arrays.data.shape, dtype=torch.bfloat16, device="cuda")
        k, v, q = (to_torch(torch, x) for x in (arrays.k, arrays.v, case.queries(rng, 4, 4)))
        indptr, indices, last = (to_torch(torch, x) for x in csr(arrays))
        append_indptr = torch.tensor([0, 45, 53, 78, 100], dtype=torch.int32, device="cuda")
        lens = flashinfer.get_seq_lens(indptr, last, 16)
        where = flashinfer.get_batch_indices_positions(append_indptr, lens, 100)
        flashinfer.append_paged_kv_cache(k, v, *where, cache, indices, indptr, last)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
        on_cpu = (torch.from_numpy(x) for x in csr(arrays))
        wrapper.plan(*on_cpu, 4, 2, 64, 16, q_data_type=torch.bfloat16)
        o, lse = wrapper.run(q, cache, return_lse=True)
        assert o.dtype == torch.bfloat16
        got = from_torch(o), from_torch(lse)
    want = paged(case, arrays, q.float().cpu().numpy(), np.arange(5))
    assert_attends(got, want, arrays.v, "bfloat16")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_a_graph_of_torch_replays_what_is_planned_anew(torch, rng):
    workspace = torch.empty(1024, dtype=torch.uint8, device="cuda")
    buffers = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 20, 3))
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    cases = [PagedCase(lens, page_size=16) for lens in ((45, 8, 25), (3, 0, 17))]
    arrays = [case.arrays(rng) for case in cases]
    pages = max(len(a.data) for a in arrays)
    cache = torch.zeros((pages, *arrays[0].data.shape[1:]), dtype=torch.float16, device="cuda")
    queries = cases[0].queries(rng, 3, 4)
    q, graph = to_torch(torch, queries), torch.cuda.CUDAGraph()

    def plan(a):
        cache[: len(a.data)] = to_torch(torch, a.data)
        table = a.indptr, a.indices[: a.indptr[-1]], a.last_page_len
        wrapper.plan(*(torch.from_numpy(x) for x in table), 4, 2, 64, 16)

    plan(arrays[0])
    wrapper.run(q, cache)  # compiled from here on
    torch.cuda.synchronize()
    with nothing_collected(), torch.cuda.graph(graph):
        o, lse = wrapper.run(q, cache, return_lse=True)
    for case, a in zip(cases, arrays, strict=True):
        plan(a)
        graph.replay()
        want = paged(case, a, queries, np.arange(4))
        assert_attends((from_torch(o), from_torch(lse)), want, a.v)


@pytest.mark.gpu
def test_masks_and_short_mla_lengths_hold_on_the_device(rng):
    arrays = CASE.arrays(rng)
    q = CASE.queries(rng, 11, 4)
    flat = flat_masks(rng, QO_INDPTR, CASE.kv_lens)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(cp.empty(16, np.uint8))
    wrapper.plan(QO_INDPTR, *csr(arrays), 4, 2, 64, 16, custom_mask=cp.asarray(flat))
    got = wrapper.run(cp.asarray(q), cp.asarray(arrays.data), return_lse=True)
    assert_attends(got, paged(CASE, arrays, q, QO_INDPTR, custom_mask=flat), arrays.v)
    tables = [
        flashinfer.mla._pages_in_use(*(xp.asarray(x) for x in each), 4)
        for xp in (np, cp)
        for each in [(np.array([0, 3, 3, 6]), np.array([9, 7, 5, 3, 1, 2]), np.array([2, 0, 8]))]
    ]
    for host, device in zip(*tables, strict=True):
        assert device.get()[: len(host)].tolist() == host.tolist()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
def test_memory_of_torch_calls_is_torch_memory(torch, rng):
    k = torch.zeros((1000, 2, 64), dtype=torch.float16, device="cuda")
    pool = cp.get_default_memory_pool()
    before = pool.total_bytes(), torch.cuda.memory_allocated()
    o = flashinfer.single_prefill_with_kv_cache(k, k, k)
    assert pool.total_bytes() == before[0]
    assert torch.cuda.memory_allocated() >= before[1] + o.numel() * o.element_size()
