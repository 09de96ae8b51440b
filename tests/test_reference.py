"""The definitions against brute force, and against values known from elsewhere."""

import math
from itertools import pairwise

import brute
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cukv import reference

BF16, E4M3, E5M2 = (
    np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
)
FLOATS = [np.dtype(np.float16), np.dtype(np.float32), BF16]

# One token, one full page, one over, an empty request first, amid and last, the batch of
# FlashInfer's documentation.
KV_LENS = [(1,), (4,), (5,), (0, 5, 0, 3, 0), (45, 8, 25, 22)]

lens_lists = st.lists(st.integers(0, 9), max_size=5)
seeds = st.integers(0, 2**32 - 1)
quick = settings(deadline=None, max_examples=50)


@pytest.fixture
def rng():
    return np.random.default_rng(20240)


def exact(got, want):
    """Require the same shape, dtype and bits."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.tobytes() == want.tobytes()


def close(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == np.float64
        np.testing.assert_allclose(g, w, rtol=1e-12, atol=1e-13)


def starts(lens):
    return np.array([sum(lens[:i]) for i in range(len(lens) + 1)], np.int64)


def page_table(lens, page_size, rng, spare=3):
    """Give requests shuffled pages; returns the table and how many pages the cache needs.

    What no kernel may look at is poisoned: the tail of indices, last_page_len of empty requests.
    """
    num_pages = [math.ceil(n / page_size) for n in lens]
    last = [n - (p - 1) * page_size if p else 77 for n, p in zip(lens, num_pages, strict=True)]
    pages = rng.permutation(sum(num_pages) + spare)[: sum(num_pages)]
    indices = np.concatenate([pages, [-1, 2**31 - 1]])
    table = tuple(np.asarray(a, np.int32) for a in (starts(num_pages), indices, last))
    return table, sum(num_pages) + spare


def paged(rows, lens, page_size, rng):
    """Put packed rows into a NaN-filled cache, element by element."""
    table, max_num_pages = page_table(lens, page_size, rng)
    cache = np.full((max_num_pages, page_size, *rows.shape[1:]), np.nan, rows.dtype)
    for t in range(len(rows)):
        request = brute.request_of(t, starts(lens))
        position = t - starts(lens)[request]
        cache[brute.slot(*table[:2], page_size, request, position)] = rows[t]
    return cache, table


def one_head(values):
    """Return values as [len, 1, 1]."""
    return np.asarray(values, np.float64).reshape(-1, 1, 1)


def every_entry(q, k, v, **options):
    """Attend one row to all keys by each entry point; the results must be the same bits."""
    qo, kv = np.array([0, 1]), np.array([0, len(k)])
    pages = (np.array([0, len(k)]), np.arange(len(k)), np.array([1]))
    k_cache, v_cache = k[:, None], v[:, None]
    split = (np.array([0, 1]), np.arange(1), np.array([1]))
    rest = (np.array([0, len(k) - 1]), np.arange(1, len(k)), np.array([1]))
    results = [
        reference.ragged_prefill(q, qo, k, v, kv, **options),
        reference.prefill(q, qo, k_cache, v_cache, *pages, **options),
        reference.decode(q, k_cache, v_cache, *pages, **options),
        reference.cascade(q, [qo], k_cache, v_cache, [pages], **options),
        reference.cascade(q, [qo, qo], k_cache, v_cache, [split, rest], **options),
    ]
    for o, lse in results[1:]:
        exact(o, results[0][0])
        exact(lse, results[0][1])
    return float(results[0][0][0, 0, 0]), float(results[0][1][0, 0])


# Index arithmetic


def test_page_indptr_fills_the_last_page_before_it_starts_another():
    indptr, last_page_len = reference.page_indptr(np.array([0, 16, 17, 32]), 16)
    exact(indptr, np.array([0, 0, 1, 3, 5], np.int64))
    exact(last_page_len, np.array([0, 16, 1, 16], np.int64))


def test_page_indptr_names_a_negative_length():
    with pytest.raises(ValueError, match=r"request 1 .* got -3"):
        reference.page_indptr(np.array([2, -3]), 16)


def test_a_request_without_pages_has_length_zero_whatever_its_last_page_len():
    indptr, last_page_len = np.array([0, 0, 1], np.int32), np.array([7, 3], np.int32)
    exact(reference.seq_lens(indptr, last_page_len, 16), np.array([0, 3], np.int64))
    exact(reference.token_indptr(indptr, last_page_len, 16), np.array([0, 0, 3], np.int64))


@pytest.mark.parametrize("last_page_len", [-1, 0, 17])
def test_a_last_page_len_outside_the_page_raises_and_names_the_request(last_page_len):
    with pytest.raises(ValueError, match=rf"request 1 .* got {last_page_len}"):
        reference.seq_lens(np.array([0, 1, 2]), np.array([16, last_page_len]), 16)


@quick
@given(lens=lens_lists, page_size=st.integers(1, 5))
def test_lengths_survive_the_way_to_pages_and_back(lens, page_size):
    indptr, last_page_len = reference.page_indptr(np.array(lens, np.int32), page_size)
    np.testing.assert_array_equal(reference.seq_lens(indptr, last_page_len, page_size), lens)
    want = [brute.kv_len(indptr, last_page_len, page_size, b) for b in range(len(lens))]
    assert want == lens
    exact(reference.token_indptr(indptr, last_page_len, page_size), starts(lens))


def test_block_table_pads_each_request_with_minus_one():
    table = reference.block_table(np.array([0, 2, 2, 3]), np.array([7, 5, 9, 1, 1]), 3)
    exact(table, np.array([[7, 5, -1], [-1, -1, -1], [9, -1, -1]], np.int64))


def test_a_block_table_too_narrow_raises_and_names_the_request():
    with pytest.raises(ValueError, match=r"width .* 2 pages for request 1, got 1"):
        reference.block_table(np.array([0, 1, 3]), np.arange(3), 1)
    with pytest.raises(ValueError, match=r"width .* 2 pages for request 1, got 1"):
        reference.page_indices(np.zeros((2, 1), np.int32), np.array([0, 1, 3]))


@quick
@given(lens=lens_lists, seed=seeds)
def test_page_ids_survive_the_way_to_a_block_table_and_back(lens, seed):
    (indptr, indices, _), _ = page_table(lens, 2, np.random.default_rng(seed))
    table = reference.block_table(indptr, indices, 6)
    exact(reference.page_indices(table, indptr), indices[: indptr[-1]].astype(np.int64))


def test_batch_indices_positions_pads_rows_past_the_end():
    got = reference.batch_indices_positions(np.array([0, 2]), np.array([2]), 4)
    exact(got[0], np.array([0, 0, -1, -1], np.int64))
    exact(got[1], np.array([0, 1, 0, 0], np.int64))


@quick
@given(appended=lens_lists, seed=seeds, nnz=st.integers(0, 50))
def test_appended_rows_are_the_last_of_their_sequences(appended, seed, nnz):
    before = np.random.default_rng(seed).integers(0, 6, len(appended))
    indptr = starts(appended)
    requests, positions = reference.batch_indices_positions(indptr, before + appended, nnz)
    for row in range(nnz):
        request = brute.request_of(row, indptr)
        if request is None:
            assert (requests[row], positions[row]) == (-1, 0)
        else:
            assert requests[row] == request
            assert positions[row] == before[request] + row - indptr[request]


def test_slots_are_minus_one_where_a_row_names_none(rng):
    (indptr, indices, _), _ = page_table((5, 0, 3), 4, rng)
    rows = [(b, p) for b in range(-2, 5) for p in range(-2, 11)]
    requests, positions = np.array(rows, np.int32).T
    got = reference.slot_mapping(indptr, indices, 4, requests, positions)
    assert got.dtype == np.int64
    for row, (request, position) in enumerate(rows):
        slot = brute.slot(indptr, indices, 4, request, position)
        assert got[row] == (-1 if slot is None else slot[0] * 4 + slot[1])


def test_slots_of_a_padded_batch():
    rows = reference.batch_indices_positions(np.array([0, 2]), np.array([2]), 4)
    slots = reference.slot_mapping(np.array([0, 1]), np.array([3]), 4, *rows)
    exact(slots, np.array([12, 13, -1, -1], np.int64))


def test_slots_pass_two_to_the_32():
    slot = reference.slot_mapping(
        *(np.array(a, np.int32) for a in ([0, 1], [2**31 - 2])), 16, *np.zeros((2, 1), np.int32)
    )
    assert slot[0] == (2**31 - 2) * 16


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
@pytest.mark.parametrize("step", [1, 2, -1])
def test_index_arrays_of_any_width_and_stride_mean_the_same(dtype, step, rng):
    def restride(a):
        wide = np.full(len(a) * abs(step), 99, dtype)[::step]
        wide[:] = a
        return wide

    rows = rng.standard_normal((8, 1, 2))
    cache, (indptr, indices, last) = paged(rows, (5, 0, 3), 4, rng)
    table = [restride(a) for a in (indptr, indices[: indptr[-1]], last)]
    exact(reference.gather(cache, *table), rows)
    requests, positions = np.array([0, 2]), np.array([4, 1])
    exact(
        reference.slot_mapping(*table[:2], 4, restride(requests), restride(positions)),
        reference.slot_mapping(indptr, indices, 4, requests, positions),
    )


@pytest.mark.parametrize(
    ("indptr", "message"),
    [([1, 2], "start at 0"), ([], "start at 0"), ([0, 2, 1], "for request 1")],
)
def test_a_bad_indptr_raises(indptr, message):
    with pytest.raises(ValueError, match=message):
        reference.seq_lens(np.array(indptr, np.int32), np.ones(2, np.int32), 4)


# Conversion


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5, 3.0, np.array([0.25], np.float32)], ids=str)
def test_fp8_is_the_nearest_value_of_the_quotient(dtype, scale, rng):
    x = (rng.standard_normal(300) * np.exp(rng.uniform(-12, 14, 300))).astype(np.float32)
    x = np.concatenate([x, np.float32([0, 500, -1e4, 464, 448, 17, 19, 1e8, -1e8])])
    got = reference.convert(x, dtype, scale)
    assert got.dtype == dtype
    quotient = x / np.float32(np.asarray(scale).item())
    want = [brute.nearest_fp8(float(value), dtype) for value in quotient]
    np.testing.assert_array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "want"),
    [(E4M3, [448, -448, 448, -448, np.nan, 0]), (E5M2, [512, -10240, 57344, -57344, np.nan, 0])],
    ids=str,
)
def test_fp8_saturates_and_keeps_nan(source, dtype, want):
    x = np.array([500, -1e4, np.inf, -np.inf, np.nan, 1e-6], np.float32).astype(source)
    np.testing.assert_array_equal(reference.convert(x, dtype).astype(np.float32), want)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_stored_fp8_times_scale_is_the_input_within_half_a_step(scale, rng):
    x = rng.uniform(-200, 200, 500).astype(np.float32)
    back = reference.convert(x, E4M3, scale).astype(np.float32) * scale
    np.testing.assert_allclose(back, x, rtol=2**-4, atol=2**-10)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16, E4M3, E5M2], ids=str)
def test_the_same_dtype_is_a_bit_copy_even_with_a_scale(dtype):
    codes = np.arange(256 if dtype.itemsize == 1 else 65536, dtype=f"u{dtype.itemsize}")
    x = codes.view(dtype)
    got = reference.convert(x, dtype, 4.0)
    exact(got, x)
    assert not np.shares_memory(got, x)


@pytest.mark.parametrize(
    ("dtype", "x", "want"),
    [
        (np.float16, [2049.0, 2051.0, 7e4], [2048.0, 2052.0, np.inf]),
        (BF16, [257.0, 259.0, 7e4], [256.0, 260.0, 70144.0]),
    ],
    ids=str,
)
def test_wider_types_round_to_even_and_ignore_the_scale(dtype, x, want):
    got = reference.convert(np.array(x, np.float32), dtype, 2.0)
    np.testing.assert_array_equal(got.astype(np.float64), want)


# Caches


def test_append_writes_its_rows_and_nothing_else():
    cache = np.full((6, 4, 2, 3), 7.0, np.float32)
    rows = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    where = reference.batch_indices_positions(np.array([0, 2]), np.array([2]), 4)
    want = cache.copy()
    want[3, 0], want[3, 1] = rows[0], rows[1]
    reference.append(cache, rows, np.array([0, 1]), np.array([3]), *where)
    exact(cache, want)


@pytest.mark.parametrize("kv_lens", KV_LENS, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_append_puts_each_row_at_its_position(kv_lens, page_size, rng):
    rows = rng.standard_normal((sum(kv_lens), 2, 3)).astype(np.float16)
    want, table = paged(rows, kv_lens, page_size, rng)
    cache = np.full_like(want, np.nan)
    where = reference.batch_indices_positions(starts(kv_lens), np.array(kv_lens), len(rows))
    shuffled = rng.permutation(len(rows))
    reference.append(cache, rows[shuffled], *table[:2], *(a[shuffled] for a in where))
    exact(cache, want)


def test_of_several_rows_for_one_slot_the_last_wins(rng):
    cache = np.zeros((2, 2, 1, 1))
    where = np.zeros(100, np.int32), rng.integers(0, 2, 100)
    reference.append(cache, one_head(range(100)), np.array([0, 1]), np.array([1]), *where)
    want = [np.flatnonzero(where[1] == position)[-1] for position in (0, 1)]
    np.testing.assert_array_equal(cache[1, :, 0, 0], want)
    assert not cache[0].any()


def test_append_writes_through_any_view(rng):
    rows = rng.standard_normal((5, 2, 3))
    whole = np.zeros((6, 3, 2, 2, 4, 8))
    hnd_layer = whole[::-1, 1, 0, :, :, 2:5]
    cache = hnd_layer.swapaxes(1, 2)
    table = np.array([0, 2]), np.array([4, 1]), np.array([1])
    reference.append(cache, rows, *table[:2], np.zeros(5, int), np.arange(5))
    exact(reference.gather(cache, *table), rows)
    hnd_layer[:] = 0
    assert not whole.any()


def test_append_to_fp8_divides_by_the_scale_and_gather_multiplies(rng):
    cache = np.zeros((1, 4, 1, 1), E4M3)
    table = np.array([0, 1]), np.array([0]), np.array([4])
    rows = np.array([3.0, -1e4, np.nan, 0.5], np.float16).reshape(4, 1, 1)
    reference.append(cache, rows, *table[:2], np.zeros(4, int), np.arange(4), 0.5)
    np.testing.assert_array_equal(cache[0, :, 0, 0].astype(np.float32), [6, -448, np.nan, 1])
    got = reference.gather(cache, *table, BF16, 0.5)
    assert got.dtype == BF16
    np.testing.assert_array_equal(got[:, 0, 0].astype(np.float32), [3, -224, np.nan, 0.5])


@pytest.mark.parametrize("page", [-1, 2, 2**31 - 1])
def test_a_page_the_cache_lacks_raises_before_anything_is_written(page):
    cache = np.zeros((2, 2, 1, 1))
    indptr, indices = np.array([0, 1, 2]), np.array([0, page])
    with pytest.raises(ValueError, match=rf"got {page} for request 1"):
        reference.append(cache, one_head([1]), indptr, indices, np.array([0]), np.array([0]))
    assert not cache.any()
    with pytest.raises(ValueError, match=rf"got {page} for request 1"):
        reference.gather(cache, indptr, indices, np.array([1, 1]))


def test_too_few_indices_raise():
    with pytest.raises(ValueError, match="indices must hold 2 pages, got 1"):
        reference.gather(np.zeros((2, 2, 1, 1)), np.array([0, 2]), np.array([0]), np.array([1]))


@quick
@given(lens=lens_lists, page_size=st.integers(1, 5), seed=seeds, dtype=st.sampled_from(FLOATS))
def test_gather_of_append_returns_the_rows_bit_for_bit(lens, page_size, seed, dtype):
    rng = np.random.default_rng(seed)
    table, max_num_pages = page_table(lens, page_size, rng)
    codes = rng.integers(0, 2 ** (8 * dtype.itemsize), (sum(lens), 2, 3))
    rows = codes.astype(f"u{dtype.itemsize}").view(dtype)
    cache = np.zeros((max_num_pages, page_size, 2, 3), dtype)
    where = reference.batch_indices_positions(starts(lens), np.array(lens, int), len(rows))
    reference.append(cache, rows, *table[:2], *where)
    exact(reference.gather(cache, *table), rows)
    exact(reference.gather(cache, *table, dtype, 3.0), rows)


def test_gather_to_another_dtype_rounds_the_float32_product_once(rng):
    rows = rng.standard_normal((9, 2, 3)).astype(np.float16)
    cache, table = paged(rows, (4, 5), 2, rng)
    product = rows.astype(np.float32) * np.float32(0.3)
    exact(reference.gather(cache, *table, np.float32, 0.3), product)
    exact(reference.gather(cache, *table, BF16, 0.3), product.astype(BF16))
    saturated = reference.gather(cache, *table, E4M3, 1e6).astype(np.float32)
    np.testing.assert_array_equal(saturated, np.where(rows > 0, 448, -448))


def test_copy_pages_reads_all_sources_first_and_skips_negative_ids(rng):
    cache = rng.standard_normal((5, 2, 1, 3))
    before = cache.copy()
    reference.copy_pages(cache, np.array([0, 1, 1, -1, 3]), np.array([1, 0, 2, 3, -7]))
    exact(cache, before[[1, 0, 1, 3, 4]])


@pytest.mark.parametrize(("src", "dst"), [(5, 0), (0, 5)])
def test_copy_pages_beyond_the_cache_raise(src, dst):
    cache = np.arange(5.0).reshape(5, 1, 1, 1)
    with pytest.raises(ValueError, match=rf"max_num_pages=5, got {src} to {dst}"):
        reference.copy_pages(cache, np.array([1, src]), np.array([2, dst]))
    np.testing.assert_array_equal(cache.ravel(), np.arange(5.0))


# Masks


@quick
@given(bits=st.lists(st.booleans(), max_size=40), bitorder=st.sampled_from(["little", "big"]))
def test_packed_bits_unpack_to_the_truth_values(bits, bitorder):
    packed = reference.packbits(np.array(bits, bool), bitorder)
    exact(packed, np.array(brute.pack(bits, bitorder), np.uint8))
    unpacked = np.unpackbits(packed, bitorder=bitorder)
    assert unpacked[: len(bits)].tolist() == bits
    assert not unpacked[len(bits) :].any()


@pytest.mark.parametrize("dtype", [np.int8, np.float32, BF16, E4M3, np.complex64, bool], ids=str)
def test_packbits_takes_truth_values_of_any_type_and_shape(dtype):
    x = np.array([[0, 2, 0], [1, 0, 1]]).astype(dtype)
    exact(reference.packbits(x), np.array([0b101010], np.uint8))


def test_packbits_takes_nan_for_true_and_negative_zero_for_false():
    x = np.array([np.nan, 0.0, -0.0, np.inf])
    exact(reference.packbits(x), np.array([0b1001], np.uint8))


def test_each_segment_starts_on_a_byte():
    x, indptr = np.zeros(14, bool), np.array([0, 5, 14])
    x[[0, 5 + 8]] = True
    for bitorder, want in [("little", [0x01, 0x00, 0x01]), ("big", [0x80, 0x00, 0x80])]:
        packed, byte_indptr = reference.segment_packbits(x, indptr, bitorder)
        exact(packed, np.array(want, np.uint8))
        exact(byte_indptr, np.array([0, 1, 3], np.int64))


@quick
@given(qo_lens=lens_lists, seed=seeds)
def test_a_packed_mask_unpacks_to_itself(qo_lens, seed):
    rng = np.random.default_rng(seed)
    kv_lens = rng.integers(0, 9, len(qo_lens))
    indptr = reference.mask_indptr(starts(qo_lens), starts(list(kv_lens)))
    exact(indptr, starts([a * int(b) for a, b in zip(qo_lens, kv_lens, strict=True)]))
    mask = rng.random(indptr[-1]) < 0.5
    padded = np.concatenate([mask, np.ones(3, bool)])
    packed, byte_indptr = reference.segment_packbits(padded, indptr)
    lists = [brute.pack(mask[a:b], "little") for a, b in pairwise(indptr)]
    assert packed.tolist() == [byte for part in lists for byte in part]
    exact(byte_indptr, starts([len(part) for part in lists]))
    tail = np.concatenate([packed, np.full(2, 255, np.uint8)])
    got = reference.unpack_mask(tail, byte_indptr, starts(qo_lens), starts(list(kv_lens)))
    exact(got, mask)


def test_masks_too_short_raise():
    qo, kv = np.array([0, 1, 2]), np.array([0, 5, 14])
    with pytest.raises(ValueError, match="at most 13 rows, got 14"):
        reference.segment_packbits(np.ones(13, bool), np.array([0, 5, 14]))
    with pytest.raises(ValueError, match="at most 2 rows, got 3"):
        reference.unpack_mask(np.zeros(2, np.uint8), np.array([0, 1, 3]), qo, kv)
    with pytest.raises(ValueError, match="request 1 2 bytes, got 1"):
        reference.unpack_mask(np.zeros(9, np.uint8), np.array([0, 1, 2]), qo, kv)
    with pytest.raises(ValueError, match="custom_mask must hold 14 elements, got 13"):
        x = np.zeros((14, 1, 1))
        reference.ragged_prefill(x[:2], qo, x, x, kv, custom_mask=np.ones(13, bool))
    with pytest.raises(ValueError, match=r"kv_indptr must be \[batch_size \+ 1 = 3\], got \[2\]"):
        reference.mask_indptr(qo, kv[:2])


# More keys than queries, fewer, equal, one query, none of either; windows of no key to the left up
# to more than there are.
@pytest.mark.parametrize("window_left", [-1, 0, 1, 3, 2**31 - 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("qo_len", "kv_len"), [(2, 5), (5, 3), (4, 4), (1, 9), (0, 3), (3, 0)])
def test_visible_keys_are_counted_from_the_end(qo_len, kv_len, causal, masked, window_left, rng):
    mask = rng.random((qo_len, kv_len)) < 0.6 if masked else None
    options = {"causal": causal, "window_left": window_left, "mask": mask}
    got = reference.visible(qo_len, kv_len, **options)
    want = [
        [brute.sees(i, j, qo_len, kv_len, **options) for j in range(kv_len)] for i in range(qo_len)
    ]
    exact(got, np.array(want, bool).reshape(qo_len, kv_len))


def test_causal_rows_of_a_chunk_see_the_past_and_themselves():
    assert reference.visible(2, 5, causal=True).sum(1).tolist() == [4, 5]
    assert reference.visible(1, 9, causal=True).sum(1).tolist() == [9]
    assert reference.visible(5, 3, causal=True).sum(1).tolist() == [0, 0, 1, 2, 3]
    assert reference.visible(1, 1, causal=True).tolist() == [[True]]


# Attention


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("cap", [None, 0, 1.5])
@pytest.mark.parametrize("scale", [0.4, -0.4, 0.0])
# One group, one head per group, several groups of an odd size; K and V of other widths.
@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(3, 1), (2, 2), (6, 2)])
def test_attend_is_a_softmax_over_visible_keys(num_qo_heads, num_kv_heads, scale, cap, sinks, rng):
    q = rng.standard_normal((3, num_qo_heads, 4))
    k = rng.standard_normal((5, num_kv_heads, 4))
    v = rng.standard_normal((5, num_kv_heads, 2))
    seen = rng.random((3, 5)) < 0.6
    seen[1] = False
    sink = rng.standard_normal(num_qo_heads) if sinks else None
    got = reference.attend(q, k, v, seen, sm_scale=scale, logits_soft_cap=cap, sinks=sink)
    close(got, brute.attention(q, k, v, lambda i, j: seen[i, j], scale, cap, sink))


def test_a_row_without_keys_is_zero_and_minus_infinity(rng):
    q, k = rng.standard_normal((2, 3, 4)), rng.standard_normal((5, 1, 4))
    seen = np.array([[False] * 5, [True] * 5])
    o, lse = reference.attend(q, k, k, seen, sm_scale=1.0)
    exact(o[0], np.zeros((3, 4)))
    exact(lse[0], np.full(3, -np.inf))
    assert np.isfinite(lse[1]).all()
    sinks = np.array([0.0, 1.5, -np.inf])
    o, lse = reference.attend(q, k, k, seen, sm_scale=1.0, sinks=sinks)
    exact(o[0], np.zeros((3, 4)))
    np.testing.assert_array_equal(lse[0], sinks * math.log2(math.e))


@pytest.mark.parametrize("group_size", [1, 4, 5, 7, 71, 128])
def test_a_query_head_reads_the_kv_head_of_its_group(group_size):
    v = np.zeros((3, 2, 1)) + np.arange(2)[:, None]
    q = np.ones((1, 2 * group_size, 1))
    o, _ = reference.attend(q, v, v, np.ones((1, 3), bool), sm_scale=1.0)
    np.testing.assert_array_equal(o[0, :, 0], np.arange(2 * group_size) // group_size)


def test_lse_is_base_two():
    o, lse = every_entry(one_head([0]), one_head([3, 4]), one_head([2, 6]))
    assert (o, lse) == (4.0, 1.0)


@pytest.mark.parametrize("empty", [(5, 0, 3), (0, 0, 0), (0, 2, 0)], ids=str)
def test_an_empty_request_leaves_its_neighbours_alone(empty, rng):
    rows = rng.standard_normal((sum(empty), 1, 4))
    cache, table = paged(rows, empty, 2, rng)
    q = rng.standard_normal((3, 2, 4))
    o, lse = reference.decode(q, cache, cache, *table)
    for request, kv_len in enumerate(empty):
        if kv_len == 0:
            exact(o[request], np.zeros((2, 4)))
            exact(lse[request], np.full(2, -np.inf))
        else:
            k = brute.tokens(cache, table, request)
            want = brute.attention(q[request][None], k, k, lambda i, j: True, 0.5)
            close((o[request][None], lse[request][None]), want)


def test_causal_attention_is_aligned_to_the_end():
    v = one_head(range(5))
    o, lse = reference.ragged_prefill(
        one_head([0, 0]), np.array([0, 2]), v, v, np.array([0, 5]), causal=True
    )
    np.testing.assert_allclose(o.ravel(), [1.5, 2.0], rtol=1e-15)
    np.testing.assert_allclose(lse.ravel(), np.log2([4, 5]), rtol=1e-15)
    v = one_head(range(3))
    o, lse = reference.ragged_prefill(
        one_head([0] * 5), np.array([0, 5]), v, v, np.array([0, 3]), causal=True
    )
    np.testing.assert_allclose(o.ravel(), [0, 0, 0, 0.5, 1], rtol=1e-15)
    np.testing.assert_allclose(lse.ravel(), [-np.inf, -np.inf, 0, 1, math.log2(3)], rtol=1e-15)


def test_very_negative_logits_are_ordinary():
    q = np.ones((1, 1, 128))
    k = np.full((64, 1, 128), -2.45e5 / 128)
    k[0] = -2.40e5 / 128
    v = one_head([1] + [0] * 63)
    o, lse = every_entry(q, k, v)
    assert o == 1.0
    assert lse == pytest.approx(-30604.183, abs=1e-3)


def test_a_masked_key_never_beats_a_very_negative_one():
    o, _ = reference.ragged_prefill(
        one_head([1]),
        np.array([0, 1]),
        one_head([-2e4, 0]),
        one_head([1, 100]),
        np.array([0, 2]),
        custom_mask=np.array([True, False]),
    )
    assert o.item() == 1.0


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("page_size", [4, 64])
def test_stale_slots_never_matter(poison, page_size, rng):
    rows = rng.standard_normal((14, 1, 4))
    cache, table = paged(rows, (13, 1), page_size, rng)
    q = rng.standard_normal((2, 2, 4))
    qo = np.array([0, 1, 2])
    poisoned, zeroed = (np.where(np.isnan(cache), fill, cache) for fill in (poison, 0.0))
    for call in (
        lambda c: reference.decode(q, c, c, *table),
        lambda c: reference.prefill(q, qo, c, c, *table, causal=True),
        lambda c: reference.mla_decode(q, q, qo, c, c, *table, sm_scale=1.0),
        lambda c: reference.cascade(q, [qo], c, c, [table]),
    ):
        for got, want in zip(call(poisoned), call(zeroed), strict=True):
            exact(got, want)


def test_keys_that_no_row_sees_may_hold_anything(rng):
    rows = rng.standard_normal((9, 1, 4))
    q, ends = rng.standard_normal((2, 2, 4)), (np.array([0, 2]), np.array([0, 9]))
    want = reference.ragged_prefill(q, ends[0], rows, rows, ends[1], window_left=3)
    rows[:4] = np.nan
    got = reference.ragged_prefill(q, ends[0], rows, rows, ends[1], window_left=3)
    for g, w in zip(got, want, strict=True):
        exact(g, w)


@pytest.mark.parametrize("short", ["q", "k", "v"])
def test_fewer_rows_than_an_indptr_names_raise(short):
    rows = {name: np.zeros((2 if name == short else 3, 1, 1)) for name in "qkv"}
    ends = np.array([0, 3])
    with pytest.raises(ValueError, match="at most 2 rows, got 3"):
        reference.ragged_prefill(rows["q"], ends, rows["k"], rows["v"], ends)


def test_soft_cap_comes_before_the_mask():
    arguments = (one_head([1]), np.array([0, 1]), one_head([0, 100]), one_head([1, 5]))
    mask = np.array([True, False])
    o, _ = reference.ragged_prefill(
        *arguments, np.array([0, 2]), custom_mask=mask, logits_soft_cap=2.0
    )
    assert o.item() == 1.0


def test_soft_cap_reaches_every_entry_point():
    k, v = one_head([0, 100]), one_head([1, 5])
    o, lse = every_entry(one_head([1]), k, v, logits_soft_cap=2.0)
    assert o == pytest.approx(4.52319, abs=1e-5)
    assert lse * math.log(2) == pytest.approx(2.12693, abs=1e-5)
    assert every_entry(one_head([1]), k, v)[0] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("window_left", "want"),
    [(2, 8.0), (3, 7.5), (4, 7.0), (0, 9.0), (-1, 4.5), (9, 4.5), (10, 4.5), (2**31 - 1, 4.5)],
)
def test_a_window_holds_the_key_itself_and_window_left_before_it(window_left, want):
    o, _ = every_entry(
        one_head([1]), one_head([0] * 10), one_head(range(10)), window_left=window_left
    )
    assert o == pytest.approx(want, rel=1e-15)


@pytest.mark.parametrize("window_left", [63, 64, 65])
def test_a_causal_row_is_a_decode_at_its_length(window_left, rng):
    x = rng.standard_normal((200, 1, 4))
    ends = np.array([0, 200])
    o, lse = reference.ragged_prefill(x, ends, x, x, ends, causal=True, window_left=window_left)
    for row in (0, 1, 62, 63, 64, 65, 66, 127, 128, 199):
        table = np.array([0, row + 1]), np.arange(row + 1), np.array([1])
        paged_x = x[:, None]
        want = reference.decode(x[row : row + 1], paged_x, paged_x, *table, window_left=window_left)
        close((o[row : row + 1], lse[row : row + 1]), want)


def test_custom_masks_of_a_batch_pick_their_keys():
    v = one_head(range(14))
    mask = np.zeros(14, bool)
    mask[[0, 5 + 8]] = True
    qo, kv = np.array([0, 1, 2]), np.array([0, 5, 14])
    for data in (mask, reference.unpack_mask(*reference.segment_packbits(mask, kv), qo, kv)):
        o, lse = reference.ragged_prefill(one_head([3, 3]), qo, v, v, kv, custom_mask=data)
        assert o.ravel().tolist() == [0.0, 13.0]
        np.testing.assert_allclose(lse.ravel(), [0.0, 39 * math.log2(math.e)], rtol=1e-15)


# A batch with no queries, no keys and both; head dims of K and V that differ; padding rows in q.
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_left": 1}])
def test_ragged_prefill_is_attention_request_by_request(masked, options, rng):
    qo, kv = starts((2, 0, 3, 1)), starts((3, 4, 0, 6))
    q, k = rng.standard_normal((9, 4, 3)), rng.standard_normal((15, 2, 3))
    v = rng.standard_normal((15, 2, 5))
    q[6:], k[13:], v[13:] = np.nan, np.nan, np.inf
    indptr = reference.mask_indptr(qo, kv)
    mask = np.concatenate([rng.random(indptr[-1]) < 0.5, [True] * 4]) if masked else None
    scales = {"q_scale": 0.5, "k_scale": np.float32(3.0), "v_scale": np.array([2.0])}
    sinks = rng.standard_normal(4)
    o, lse = reference.ragged_prefill(
        q, qo, k, v, kv, custom_mask=mask, sinks=sinks, **scales, **options
    )
    for b in range(4):
        rows, keys = slice(*qo[b : b + 2]), slice(*kv[b : b + 2])
        shape = (qo[b + 1] - qo[b], kv[b + 1] - kv[b])
        own = None if mask is None else mask[indptr[b] : indptr[b + 1]].reshape(shape)

        def seen(i, j, shape=shape, own=own):
            return brute.sees(i, j, *shape, mask=own, **options)

        want = brute.attention(q[rows], k[keys], v[keys], seen, 1.5 / math.sqrt(3), sinks=sinks)
        close((o[rows], lse[rows]), (2 * want[0], want[1]))
    exact(o[6:], np.zeros((3, 4, 5)))
    exact(lse[6:], np.full((3, 4), -np.inf))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("kv_lens", KV_LENS, ids=str)
def test_paged_attention_is_ragged_attention_over_the_pages(kv_lens, page_size, dtype, rng):
    k, v = (rng.standard_normal((sum(kv_lens), 2, d)).astype(dtype) for d in (4, 3))
    qo = starts([n // 2 + 1 for n in kv_lens])
    q = rng.standard_normal((qo[-1] + 2, 4, 4)).astype(dtype)
    k_cache, table = paged(k, kv_lens, page_size, np.random.default_rng(1))
    v_cache, _ = paged(v, kv_lens, page_size, np.random.default_rng(1))
    options = {"causal": True, "window_left": 5, "logits_soft_cap": 3.0}
    got = reference.prefill(q, qo, k_cache, v_cache, *table, **options)
    want = reference.ragged_prefill(q, qo, k, v, starts(kv_lens), **options)
    for g, w in zip(got, want, strict=True):
        exact(g, w)


def test_decode_is_prefill_with_one_row_each_and_takes_padding_rows(rng):
    cache, table = paged(rng.standard_normal((8, 1, 4)), (5, 0, 3), 2, rng)
    q = rng.standard_normal((5, 2, 4))
    q[3:] = np.nan
    o, lse = reference.decode(q, cache, cache, *table, window_left=2)
    want = reference.prefill(q[:3], np.arange(4), cache, cache, *table, window_left=2, causal=True)
    exact(o[:3], want[0])
    exact(lse[:3], want[1])
    exact(o[3:], np.zeros((2, 2, 4)))
    exact(lse[3:], np.full((2, 2), -np.inf))


def test_a_page_listed_twice_counts_twice(rng):
    cache = rng.standard_normal((3, 2, 1, 4))
    q = rng.standard_normal((2, 1, 4))
    table = np.array([0, 2, 3]), np.array([2, 2, 2]), np.array([1, 2])
    o, lse = reference.decode(q, cache, cache, *table)
    k = np.concatenate([cache[2], cache[2, :1]])
    close((o[:1], lse[:1]), brute.attention(q[:1], k, k, lambda i, j: True, 0.5))
    close((o[1:], lse[1:]), brute.attention(q[1:], cache[2], cache[2], lambda i, j: True, 0.5))


def test_scales_reach_every_entry_point():
    k, v = one_head([0, 8]).astype(E4M3), one_head([2, 4]).astype(E4M3)
    q = one_head([1]).astype(BF16)
    o, lse = every_entry(q, k, v, sm_scale=1.0, k_scale=0.25, v_scale=0.5)
    assert o == pytest.approx(1.880797, abs=1e-6)
    assert lse * math.log(2) == pytest.approx(2.126928, abs=1e-6)
    assert every_entry(q, k, v, sm_scale=1.0)[0] == pytest.approx(3.99933, abs=1e-5)
    assert every_entry(q, k, v, sm_scale=0.5, q_scale=0.5) == every_entry(q, k, v, sm_scale=0.25)


def test_sinks_are_natural_unscaled_logits_at_every_entry_point():
    q, k, v = one_head([1]), one_head([0, 0]), one_head([3, 3])
    sinks = np.array([math.log(2)])
    o, lse = every_entry(q, k, v, sm_scale=7.0, logits_soft_cap=0.1, v_scale=2.0, sinks=sinks)
    assert o == pytest.approx(3.0, rel=1e-15)
    assert lse == pytest.approx(2.0, rel=1e-15)


def test_a_request_of_one_key_returns_its_value():
    v = one_head(np.arange(500.0))
    table = np.arange(501), np.arange(500)[::-1], np.ones(500, int)
    o, lse = reference.decode(np.ones_like(v), v[:, None], v[:, None], *table)
    exact(o, v[::-1])
    np.testing.assert_allclose(lse[:, 0], np.arange(500)[::-1] * math.log2(math.e), rtol=1e-15)


def test_empty_batches_and_axes_have_the_right_shapes(rng):
    cache = np.zeros((0, 4, 2, 8), np.float16)
    table = np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)
    q, qo = np.zeros((0, 4, 8), np.float16), np.zeros(1, np.int32)
    for o, lse in (
        reference.decode(q, cache, cache[..., :6], *table),
        reference.prefill(q, qo, cache, cache[..., :6], *table, causal=True),
        reference.cascade(q, [qo, qo], cache, cache[..., :6], [table, table]),
        reference.mla_decode(
            q[..., :6], q[..., :2], qo, cache[:, :, :1, :6], cache[:, :, :1, :2], *table, sm_scale=1
        ),
    ):
        assert o.shape == (0, 4, 6)
        assert lse.shape == (0, 4)
    reference.append(cache, q[:, :2], *table[:2], table[1], table[1])
    assert reference.gather(cache, *table).shape == (0, 2, 8)
    reference.copy_pages(cache, table[1], table[1])
    assert reference.packbits(np.zeros(0)).shape == (0,)
    packed, byte_indptr = reference.segment_packbits(np.zeros(0), np.zeros(3, int))
    assert (packed.shape, byte_indptr.tolist()) == ((0,), [0, 0, 0])
    assert reference.block_table(*table[:2], 3).shape == (0, 3)


def test_a_million_equal_keys_average_exactly():
    length = 2**20
    q, ends = one_head([1]), (np.array([0, 1]), np.array([0, length]))
    zeros, v = np.zeros((length, 1, 1)), np.arange(length).reshape(-1, 1, 1) % 2
    o, lse = reference.ragged_prefill(q, ends[0], zeros, v.astype(np.float16), ends[1])
    assert (o.item(), lse.item()) == (0.5, 20.0)
    o, _ = reference.ragged_prefill(
        q, ends[0], zeros, np.full_like(zeros, 60000, np.float16), ends[1]
    )
    assert o.item() == 60000.0
    zeros[-1] = 10
    one_hot = np.zeros_like(zeros)
    one_hot[-1] = 1
    o, _ = reference.ragged_prefill(q, ends[0], zeros, one_hot, ends[1])
    assert o.item() == pytest.approx(0.020573, abs=1e-6)


# MLA


def test_mla_takes_its_scale_and_has_no_default():
    ckv = np.zeros((1, 2, 1, 512), np.float32)
    ckv[0, 0] = 0.05
    q_nope, q_pe = np.ones((1, 1, 512)), np.zeros((1, 1, 64))
    table = np.array([0, 1]), np.array([0]), np.array([2])
    arguments = (q_nope, q_pe, np.array([0, 1]), ckv, np.zeros((1, 2, 1, 64)), *table)
    o, lse = reference.mla_decode(*arguments, sm_scale=192**-0.5)
    assert o[0, 0, 0] / 0.05 == pytest.approx(0.863836, abs=1e-6)
    assert lse.item() * math.log(2) == pytest.approx(1.993893, abs=1e-6)
    with pytest.raises(TypeError):
        reference.mla_decode(*arguments)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim_kpe", [0, 2])
def test_mla_is_attention_with_one_shared_latent_head(dim_kpe, causal, rng):
    lens, qo = (10, 0, 7), np.array([0, 3, 4, 6])
    rows = rng.standard_normal((17, 1, 5 + dim_kpe))
    whole, table = paged(rows, lens, 3, rng)
    q = rng.standard_normal((6, 4, 5 + dim_kpe))
    got = reference.mla_decode(
        q[..., :5],
        q[..., 5:],
        qo,
        whole[..., :5],
        whole[..., 5:],
        *table,
        sm_scale=0.3,
        causal=causal,
        ckv_scale=2.0,
        kpe_scale=np.float32(0.5),
    )
    for b in range(3):
        k = brute.tokens(whole, table, b) * np.array([2.0] * 5 + [0.5] * dim_kpe)
        shape = (int(qo[b + 1] - qo[b]), lens[b])

        def seen(i, j, shape=shape):
            return brute.sees(i, j, *shape, causal=causal)

        own = slice(qo[b], qo[b + 1])
        want = brute.attention(q[own], k, k[..., :5], seen, 0.3)
        close((got[0][own], got[1][own]), want)


# Cascade


def cascade_case(qo_lens, kv_lens, rng, page_size=3, num_rows=None):
    """Build levels over one cache: lens of rows and of keys for each level."""
    lens = [n for level in kv_lens for n in level]
    k_cache, (indptr, indices, last) = paged(
        rng.standard_normal((sum(lens), 2, 4)), lens, page_size, rng
    )
    v_cache = rng.standard_normal((*k_cache.shape[:3], 5))
    tables, first = [], 0
    for level in kv_lens:
        part = indptr[first : first + len(level) + 1]
        pages = indices[part[0] : part[-1]]
        tables.append((part - part[0], pages, last[first : first + len(level)]))
        first += len(level)
    rows = sum(qo_lens[-1]) if num_rows is None else num_rows
    q = rng.standard_normal((rows, 4, 4))
    return q, [starts(level) for level in qo_lens], k_cache, v_cache, tables


# Flat, shared root, three levels with an empty one amid, more rows than leaf keys, a request of one
# level inside two of another, a root that ends before the leaves, one that ends after them.
CASCADES = [
    ([(2, 3)], [(4, 7)]),
    ([(6,), (1, 2, 3)], [(7,), (2, 4, 3)]),
    ([(6,), (3, 3), (1, 2, 3)], [(5,), (0, 4), (1, 2, 3)]),
    ([(6,), (4, 2)], [(5,), (2, 0)]),
    ([(3, 3), (2, 3, 1)], [(4, 2), (3, 5, 1)]),
    ([(2,), (2, 2)], [(4,), (3, 0)]),
    ([(5,), (1, 2)], [(4,), (3, 2)]),
]


@pytest.mark.parametrize("window_left", [-1, 0, 2, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("qo_lens", "kv_lens"), CASCADES, ids=str)
def test_cascade_attends_to_the_keys_of_every_level(qo_lens, kv_lens, causal, window_left, rng):
    case = cascade_case(qo_lens, kv_lens, rng, num_rows=8)
    order = rng.permutation(8)
    got = reference.cascade(
        *case, row_order=order, causal=causal, window_left=window_left, sm_scale=0.5
    )
    close(got, brute.cascade(*case, order, causal, window_left, 0.5))


@pytest.mark.parametrize("window_left", [-1, 3])
def test_cascade_is_flat_prefill_where_leaves_hold_their_rows(window_left, rng):
    qo_lens, kv_lens = [(6,), (1, 2, 3)], [(7,), (2, 4, 3)]
    q, qo_indptrs, k_cache, v_cache, tables = cascade_case(qo_lens, kv_lens, rng)
    options = {"causal": True, "window_left": window_left, "sinks": rng.standard_normal(4)}
    got = reference.cascade(q, qo_indptrs, k_cache, v_cache, tables, **options)
    flat = [
        np.concatenate(
            [
                np.concatenate([brute.tokens(c, tables[0], 0), brute.tokens(c, tables[1], leaf)])
                for leaf in range(3)
            ]
        )
        for c in (k_cache, v_cache)
    ]
    close(
        got,
        reference.ragged_prefill(q, qo_indptrs[-1], *flat, starts((9, 11, 10)), **options),
    )


def test_rows_beyond_a_leaf_see_the_prefix_only(rng):
    case = cascade_case([(4,), (4,)], [(5,), (2,)], rng)
    q, _, k_cache, v_cache, tables = case
    o, lse = reference.cascade(*case, causal=True, sm_scale=0.5)
    k, v = (brute.tokens(c, tables[0], 0) for c in (k_cache, v_cache))
    close((o[:2], lse[:2]), brute.attention(q[:2], k, v, lambda i, j: True, 0.5))


def test_rows_no_level_covers_are_zero_and_minus_infinity(rng):
    q, *case = cascade_case([(2,), (1, 1)], [(5,), (2, 3)], rng, num_rows=4)
    q[[0, 3]] = np.nan
    o, lse = reference.cascade(q, *case, row_order=np.array([2, 1, 99, -1]))
    exact(o[[0, 3]], np.zeros((2, 4, 5)))
    exact(lse[[0, 3]], np.full((2, 4), -np.inf))
    assert np.isfinite(lse[1:3]).all()


@pytest.mark.parametrize("order", [[0, 0], [0, 2], [0, -1], [0]], ids=str)
def test_a_row_order_that_is_no_order_raises(order, rng):
    case = cascade_case([(2,)], [(3,)], rng)
    with pytest.raises(ValueError, match="cascade: row"):
        reference.cascade(*case, row_order=np.array(order))


# Merging


def states(*pairs):
    """Return o [1, k, 1, 1] and lse [1, k, 1] of (o, lse) pairs."""
    o, lse = np.array(pairs, np.float64).reshape(-1, 2).T
    return o[None, :, None, None], lse[None, :, None]


@pytest.mark.parametrize(
    ("pairs", "want"),
    [
        ([], (0, -np.inf)),
        ([(0, -np.inf)] * 2, (0, -np.inf)),
        ([(np.nan, -np.inf)] * 3, (0, -np.inf)),
        ([(np.nan, -np.inf), (1, 0)], (1, 0)),
        ([(np.inf, -np.inf), (0.1, -5e4), (7, -np.inf)], (0.1, -5e4)),
        ([(3, 1e9), (5, 1e9)], (4, 1e9 + 1)),
    ],
)
def test_an_empty_state_adds_nothing_to_a_merge(pairs, want):
    o, lse = reference.merge_states(*states(*pairs))
    exact(o, np.full((1, 1, 1), want[0], np.float64))
    exact(lse, np.full((1, 1), want[1], np.float64))


def test_merging_weighs_by_powers_of_two():
    o, lse = reference.merge_states(*states((0, 1), (1, 3)))
    assert o.item() == pytest.approx(0.8, rel=1e-15)
    assert lse.item() == pytest.approx(math.log2(10), rel=1e-15)


@pytest.mark.parametrize("lse", [np.inf, np.nan])
def test_an_lse_of_infinity_or_nan_is_no_lse(lse):
    with pytest.raises(ValueError, match=f"lse must be below \\+inf, got {lse}"):
        reference.merge_states(*states((0, 1), (1, lse)))


@quick
@given(cuts=st.lists(st.integers(0, 12), max_size=4), seed=seeds)
def test_merging_parts_of_the_keys_gives_the_whole(cuts, seed):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((3, 4, 5)) * 8, rng.standard_normal((12, 2, 5))
    v, seen = rng.standard_normal((12, 2, 3)), rng.random((3, 12)) < 0.4
    ends = [0, *sorted(cuts), 12]
    parts = [
        reference.attend(q, k[a:b], v[a:b], seen[:, a:b], sm_scale=1.0) for a, b in pairwise(ends)
    ]
    o, lse = (np.stack(x, 1) for x in zip(*parts, strict=True))
    whole = reference.attend(q, k, v, seen, sm_scale=1.0)
    close(reference.merge_states(o, lse), whole)
    one_by_one = parts[0]
    for part in parts[1:]:
        one_by_one = reference.merge_state(*one_by_one, *part)
    close(one_by_one, whole)
