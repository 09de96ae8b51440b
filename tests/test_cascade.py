"""CascadeLevels: attention over levels equals flat prefill; prefixes found in flat page tables."""

import copy
import pickle
from itertools import pairwise

import brute
import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from cases import captured, fake_cupy
from hypothesis import example, given
from hypothesis import strategies as st
from tolerances import ATTENTION, LSE, assert_close, assert_same_bits, max_abs, to_numpy

from cukv import CascadeLevels, PagedKVCache, PageTable, RaggedTensor, _tiles, reference
from cukv._tensor_maps import Copies

BF16 = np.dtype(ml_dtypes.bfloat16)
PAGE = 4


def starts(lens):
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def make_table(pages, last_page_len, page_size=PAGE, dtype=np.int32):
    """Make a table of page lists; what no call may look at is poisoned."""
    indices = [page for request in pages for page in request] + [-1, 2**31 - 1]
    last = [n if request else 77 for request, n in zip(pages, last_page_len, strict=True)]
    arrays = (starts([len(request) for request in pages]), indices, last)
    return PageTable(*(np.asarray(a, dtype) for a in arrays), page_size)


def make_cache(num_pages, page_size, rng, layout="NHD", heads=2, dims=(4, 5), dtype=np.float64):
    k, v = (rng.standard_normal((num_pages, page_size, heads, d)).astype(dtype) for d in dims)
    return PagedKVCache((k, v) if layout == "NHD" else (k.swapaxes(1, 2), v.swapaxes(1, 2)), layout)


def poison(cache, tables):
    """Put NaN wherever no table of a level has a token."""
    owned = np.zeros((cache.max_num_pages, cache.page_size), bool)
    for table in tables:
        for page, length in zip(*page_lengths(table), strict=True):
            owned[page, :length] = True
    for pages in cache._pages:
        pages.array[~owned] = np.nan


def page_lengths(table):
    """Give the pages of all requests, and how many tokens of each are theirs."""
    pages, lengths = [], []
    for b, request in enumerate(page_lists(table)):
        pages += request
        if request:
            lengths += [table.page_size] * (len(request) - 1) + [int(table.last_page_len[b])]
    return pages, lengths


def page_lists(table):
    return [table.indices[a:b].tolist() for a, b in pairwise(table.indptr.tolist())]


def row_pages(levels):
    """Give the pages of every row of q, in q's order, over all levels."""
    rows = int(levels.qo_indptr[-1][-1])
    order = np.arange(rows) if levels.row_order is None else levels.row_order
    found = {}
    for row in range(rows):
        found[int(order[row])] = [
            page
            for indptr, table in zip(levels.qo_indptr, levels.tables, strict=True)
            for page in page_lists(table)[brute.request_of(row, indptr)]
        ]
    return [found[row] for row in range(rows)]


def flat_prefill(q, levels, cache, **options):
    """Attend leaf by leaf to keys that are concatenated first."""
    indptr = levels.qo_indptr[-1]
    order = np.arange(indptr[-1]) if levels.row_order is None else levels.row_order
    packed = [[], []]
    lens = []
    for leaf in range(levels.batch_size):
        path = [
            (table, brute.request_of(int(indptr[leaf]), rows))
            for rows, table in zip(levels.qo_indptr, levels.tables, strict=True)
        ]
        path = path if indptr[leaf] < indptr[leaf + 1] else []
        for rows, pages in zip(packed, cache._pages, strict=True):
            rows += [
                brute.tokens(pages.array, (t.indptr, t.indices, t.last_page_len), request)
                for t, request in path
            ]
        lens.append(sum(len(rows) for rows in packed[0]) - sum(lens))
    none = [pages.array[0, :0] for pages in cache._pages]
    k, v = (np.concatenate([n, *rows]) for n, rows in zip(none, packed, strict=True))
    o, lse = np.zeros((len(q), q.shape[1], v.shape[2])), np.full(q.shape[:2], -np.inf)
    o[order], lse[order] = reference.ragged_prefill(q[order], indptr, k, v, starts(lens), **options)
    return o, lse


def close(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12, atol=1e-13)
    assert got[1].dtype == np.float32
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-6)


def same(levels, others):
    """Say whether all index arrays but row_order have the same bits and dtypes."""
    arrays = [
        [*x.qo_indptr, *(a for t in x.tables for a in (t.indptr, t.indices, t.last_page_len))]
        for x in (levels, others)
    ]
    return len(arrays[0]) == len(arrays[1]) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(*arrays, strict=True)
    )


# ------------------------------------------------------------------------------------ spelled out


# Eight requests under one prompt of pages 20, 21 (8 tokens); 0, 3, 6 go on with 30, 31, 32 and
# 1, 4 with 40; the others branch off at once. They append 1, 2, 1, 3, 1, 1, 5 and 2 rows.
PAGES = [
    [20, 21, 30, 31, 32, 1],
    [20, 21, 40, 2, 3],
    [20, 21, 4],
    [20, 21, 30, 31, 32, 5],
    [20, 21, 40, 6],
    [20, 21, 7],
    [20, 21, 30, 31, 32, 8, 9],
    [20, 21, 10],
]
LAST = [1, 2, 4, 3, 4, 1, 2, 2]
QO_INDPTR = [0, 1, 3, 4, 7, 8, 9, 14, 16]


def eight():
    """The levels of the eight requests, sorted: 2, 5, 7, then 0, 3, 6, then 4, 1."""
    return CascadeLevels(
        (
            [0, 16],
            [0, 4, 13, 16],
            [0, 1, 2, 4, 5, 8, 13, 14, 16],
        ),
        (
            PageTable(np.array([0, 2]), np.array([20, 21]), np.array([4]), 4),
            PageTable(np.array([0, 0, 3, 4]), np.array([30, 31, 32, 40]), np.array([0, 4, 4]), 4),
            PageTable(
                np.array([0, 1, 2, 3, 4, 5, 7, 8, 10]),
                np.array([4, 7, 10, 1, 5, 8, 9, 6, 2, 3]),
                np.array([4, 1, 2, 1, 3, 2, 4, 2]),
                4,
            ),
        ),
        [3, 8, 14, 15, 0, 4, 5, 6, 9, 10, 11, 12, 13, 7, 1, 2],
    )


@pytest.mark.parametrize("window_left", [-1, 0, 2, 7, 13, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_eight_requests_in_three_levels_attend_as_a_flat_batch(causal, window_left, rng):
    levels, table = eight(), make_table(PAGES, LAST)
    cache = make_cache(50, 4, rng)
    poison(cache, [table])
    q = rng.standard_normal((16, 6, 4))
    options = {"causal": causal, "window_left": window_left}
    k, v = (pages.array for pages in cache._pages)
    csr = (table.indptr, table.indices, table.last_page_len)
    want = reference.prefill(q, np.array(QO_INDPTR), k, v, *csr, **options)
    close(levels.attend(q, cache, return_lse=True, **options), want)


def test_eight_requests_are_found_in_their_flat_table():
    levels = CascadeLevels.from_prefixes(
        make_table(PAGES, LAST, dtype=np.int64), qo_indptr=QO_INDPTR, min_saved_bytes=0
    )
    want = eight()
    assert levels.num_levels == 3
    for got, indptr in zip(levels.qo_indptr, want.qo_indptr, strict=True):
        assert got.tolist() == indptr.tolist()
    for got, table in zip(levels.tables, want.tables, strict=True):
        assert got.indptr.tolist() == table.indptr.tolist()
        assert got.indices.tolist() == table.indices.tolist()
        assert got.last_page_len.tolist() == table.last_page_len.tolist()
    assert levels.row_order.tolist() == want.row_order.tolist()


def test_levels_say_their_sizes():
    levels = eight()
    assert (levels.num_levels, levels.page_size, levels.batch_size) == (3, 4, 8)
    assert levels.batch_sizes == (1, 3, 8)


# -------------------------------------------------------------------------------------- attention


@st.composite
def trees(draw):
    """Levels whose leaves have at least as many tokens as rows, over prefixes of any length.

    Lengths above are 0, 1, one less than a page, a page, one more, many pages; requests may have no
    rows; the batch is scrambled, and q may have more rows than the levels.
    """
    page_size = draw(st.sampled_from([1, 3, 4]))
    qo_lens = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    bounds, lens = [list(range(len(qo_lens) + 1))], []
    lens.append([n + draw(st.integers(0, 2 * page_size)) for n in qo_lens])
    upper = st.sampled_from([0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size])
    for _ in range(draw(st.integers(0, 3))):
        inner = [b for b in bounds[0][1:-1] if draw(st.booleans())]
        bounds.insert(0, [0, *inner, len(qo_lens)])
        lens.insert(0, [draw(upper) for _ in bounds[0][1:]])
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    total = sum(-(-n // page_size) for level in lens for n in level)
    pages = rng.permutation(total + 3).astype(np.int32)
    tables, first = [], 0
    for level in lens:
        tables.append(PageTable.from_seq_lens(level, page_size, pages[first:]))
        first += len(tables[-1].indices)
    rows = starts(qo_lens)
    nnz = int(rows[-1]) + draw(st.integers(0, 2))
    order = rng.permutation(nnz)[: rows[-1]] if draw(st.booleans()) else None
    levels = CascadeLevels([rows[b] for b in bounds], tables, order)
    return levels, nnz, total + 3, rng


OPTIONS = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window_left": st.sampled_from([-1, 0, 1, 3, 8, 30]),
        "logits_soft_cap": st.sampled_from([None, 0.7]),
        "sm_scale": st.sampled_from([None, 0.9, -0.4, 0.0]),
        "k_scale": st.sampled_from([1.0, 0.5]),
        "v_scale": st.sampled_from([1.0, 3.0]),
    }
)


@given(trees(), OPTIONS, st.sampled_from([1, 3]), st.sampled_from(["NHD", "HND"]), st.booleans())
def test_attend_equals_flat_prefill_over_the_concatenation(tree, options, group, layout, sink):
    levels, nnz, num_pages, rng = tree
    cache = make_cache(num_pages, levels.page_size, rng, layout)
    poison(cache, levels.tables)
    q = rng.standard_normal((nnz, 2 * group, 4))
    if levels.row_order is None:
        q[int(levels.qo_indptr[0][-1]) :] = np.nan
    if sink:
        options["sinks"] = rng.standard_normal(2 * group)
    close(
        levels.attend(q, cache, return_lse=True, **options),
        flat_prefill(q, levels, cache, **options),
    )


# Windows that end in the leaf, at its start, in the prefix, at the first key, beyond it.
@pytest.mark.parametrize("window_left", [0, 2, 3, 4, 7, 8, 50])
def test_a_window_counts_positions_over_all_levels(window_left):
    cache = PagedKVCache(np.zeros((3, 2, 4, 1, 1)))
    cache.v[...] = np.arange(12).reshape(3, 4, 1, 1)
    tables = [PageTable.from_seq_lens(n, 4, pages=p, xp=np) for n, p in (([5], [0, 1]), ([4], [2]))]
    o = CascadeLevels(([0, 1], [0, 1]), tables).attend(
        np.zeros((1, 1, 1)), cache, window_left=window_left
    )
    keys = [0, 1, 2, 3, 4, 8, 9, 10, 11]
    assert o.item() == pytest.approx(np.mean(keys[max(0, 8 - window_left) :]))


def test_rows_beyond_a_leaf_see_all_of_the_prefix_only(rng):
    cache = make_cache(3, 4, rng)
    tables = [PageTable.from_seq_lens(n, 4, pages=p, xp=np) for n, p in (([5], [0, 1]), ([2], [2]))]
    levels, q = CascadeLevels(([0, 4], [0, 4]), tables), rng.standard_normal((4, 2, 4))
    k, v = (pages.array.reshape(12, 2, -1) for pages in cache._pages)
    want = brute.attention(
        q, k[[0, 1, 2, 3, 4, 8, 9]], v[[0, 1, 2, 3, 4, 8, 9]], lambda i, j: j < 5 or j <= i + 3, 0.5
    )
    close(levels.attend(q, cache, causal=True, return_lse=True), want)


def test_rows_without_keys_are_zero_and_their_lse_is_minus_infinity(rng):
    empty = PageTable.from_seq_lens([0, 0], 4, xp=np)
    levels, cache = CascadeLevels([[0, 1, 2]] * 2, [empty] * 2), make_cache(1, 4, rng)
    q = rng.standard_normal((3, 2, 4))
    o, lse = levels.attend(q, cache, return_lse=True)
    assert not o.any()
    assert (lse == -np.inf).all()
    sinks = np.array([0.5, -2.0])
    o, lse = levels.attend(q, cache, sinks=sinks, return_lse=True)
    assert not o.any()
    np.testing.assert_allclose(lse[:2], [sinks * reference.LOG2_E] * 2, rtol=1e-6)


def test_levels_without_rows_or_requests_attend_to_nothing(rng):
    cache, none = make_cache(1, 4, rng), PageTable.from_seq_lens([], 4, xp=np)
    levels = CascadeLevels([[0], [0]], [none, none])
    assert levels.attend(np.zeros((0, 2, 4)), cache).shape == (0, 2, 5)
    assert CascadeLevels.from_prefixes(none).tables == (none,)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_results_have_the_dtype_of_q_or_go_where_told(dtype, rng):
    levels = eight()
    cache = make_cache(50, 4, rng, dtype=dtype)
    q = rng.standard_normal((16, 2, 4)).astype(dtype)
    want = flat_prefill(q, levels, cache, causal=True)
    o, lse = levels.attend(q, cache, causal=True, return_lse=True)
    assert (o.dtype, lse.dtype) == (np.dtype(dtype), np.float32)
    np.testing.assert_array_equal(o, want[0].astype(np.float32).astype(dtype))
    out, lse_out = np.full((16, 2, 5), 9, np.float32), np.full((16, 2), 9, np.float32)
    got = levels.attend(q, cache, causal=True, out=out, lse=lse_out, return_lse=True)
    assert got[0] is out
    assert got[1] is lse_out
    np.testing.assert_array_equal(out, want[0].astype(np.float32))
    np.testing.assert_array_equal(lse_out, lse)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_q_may_be_a_ragged_tensor(layout, rng):
    levels, cache = eight(), make_cache(50, 4, rng)
    q = rng.standard_normal((16, 2, 4))
    ragged = RaggedTensor(q if layout == "NHD" else q.swapaxes(0, 1), QO_INDPTR, layout)
    np.testing.assert_array_equal(levels.attend(ragged, cache), levels.attend(q, cache))


def test_a_plan_serves_the_calls_it_was_made_for_and_no_others(rng):
    levels, cache = eight(), make_cache(50, 4, rng)
    q = rng.standard_normal((16, 2, 4))
    plan = levels.plan(q, cache, causal=True, window_left=3)
    plan.update()
    got = levels.attend(q, cache, causal=True, window_left=3, plan=plan)
    np.testing.assert_array_equal(got, levels.attend(q, cache, causal=True, window_left=3))
    with pytest.raises(ValueError, match="made for causal=True, got False"):
        levels.attend(q, cache, window_left=3, plan=plan)
    with pytest.raises(ValueError, match="made for window_left=3, got -1"):
        levels.attend(q, cache, causal=True, plan=plan)
    with pytest.raises(ValueError, match="made for q="):
        levels.attend(q[:, :1].repeat(4, 1), cache, causal=True, window_left=3, plan=plan)
    flat = CascadeLevels(levels.qo_indptr[-1:], levels.tables[-1:], levels.row_order)
    with pytest.raises(ValueError, match="made for levels="):
        flat.attend(q, cache, causal=True, window_left=3, plan=plan)
    unordered = CascadeLevels(levels.qo_indptr, levels.tables)
    with pytest.raises(ValueError, match="made for row_order="):
        unordered.attend(q, cache, causal=True, window_left=3, plan=plan)
    ragged = RaggedTensor(q, [0, 16])
    other = cache.plan(ragged, PageTable.from_seq_lens([16], 4, xp=np))
    with pytest.raises(ValueError, match=r"was made for PagedKVCache\.prefill"):
        levels.attend(q, cache, plan=other)


# ------------------------------------------------------------------------------- prefixes: results


def trie(paths, rng):
    """Give a page of its own to each prefix of the paths; a request's pages are its prefixes."""
    prefixes = sorted({tuple(path[: i + 1]) for path in paths for i in range(len(path))})
    ids = dict(zip(prefixes, rng.permutation(len(prefixes) + 3).tolist(), strict=False))
    return [[ids[tuple(path[: i + 1])] for i in range(len(path))] for path in paths]


# Requests of up to six pages that go one of two ways at each page, with or without rows.
REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=6), st.integers(1, PAGE), st.integers(0, PAGE + 2)
    ),
    max_size=8,
)
SEEDS = st.integers(0, 2**32 - 1)


def flat_case(requests, seed):
    rng = np.random.default_rng(seed)
    pages = trie([path for path, _, _ in requests], rng)
    return pages, [last for _, last, _ in requests], [rows for _, _, rows in requests], rng


def limits_of(pages, last, qo_lens):
    """Count, page by page, what each request may share."""
    limits = []
    for request, n, qo_len in zip(pages, last, qo_lens, strict=True):
        kv_len = (len(request) - 1) * PAGE + n if request else 0
        limits.append(
            sum((i + 1) * PAGE <= kv_len - qo_len for i in range(len(request))) if qo_len else 0
        )
    return limits


def common(a, b):
    same = [x == y for x, y in zip(a, b, strict=False)]
    return same.index(False) if False in same else len(same)


@given(REQUESTS, SEEDS, st.sampled_from([0, 1, 50_000, 200_000, None]))
def test_the_levels_of_each_row_concatenate_to_its_flat_pages(requests, seed, min_saved_bytes):
    pages, last, qo_lens, _ = flat_case(requests, seed)
    levels = CascadeLevels.from_prefixes(
        make_table(pages, last), qo_indptr=starts(qo_lens), min_saved_bytes=min_saved_bytes
    )
    levels.validate()
    assert row_pages(levels) == [p for p, n in zip(pages, qo_lens, strict=True) for _ in range(n)]
    assert levels.batch_size == len(pages)
    for upper, lower in pairwise(levels.qo_indptr):
        assert set(upper.tolist()) <= set(lower.tolist())
    for table in levels.tables[:-1]:
        assert len(table.indices)
        lens = np.diff(table.indptr)
        np.testing.assert_array_equal(table.last_page_len, np.where(lens, PAGE, 0))
    rows = np.diff(levels.qo_indptr[-1])
    kv_lens = levels.tables[-1].seq_lens
    flat_lens = make_table(pages, last).seq_lens
    assert sorted(rows.tolist()) == sorted(qo_lens)
    if levels.num_levels > 1 and (flat_lens >= qo_lens).all():
        assert (kv_lens >= rows).all()


@given(REQUESTS, SEEDS)
@example([([0, 0, 0], 4, 1), ([0, 0, 1], 4, 1), ([0, 0, 1, 0], 1, 5), ([0, 0, 1, 1], 1, 1)], 0)
def test_everything_that_can_be_shared_is_stored_once(requests, seed):
    pages, last, qo_lens, _ = flat_case(requests, seed)
    levels = CascadeLevels.from_prefixes(
        make_table(pages, last), qo_indptr=starts(qo_lens), min_saved_bytes=0
    )
    limits = limits_of(pages, last, qo_lens)
    whole = [request[:n] for request, n in zip(pages, limits, strict=True)]
    shared = [
        max((common(a, b) for j, b in enumerate(whole) if j != i), default=0)
        for i, a in enumerate(whole)
    ]
    leaves = sorted(request[n:] for request, n in zip(pages, shared, strict=True))
    runs = {page for request, n in zip(pages, shared, strict=True) for page in request[:n]}
    if not runs:
        assert levels.num_levels == 1
        return
    assert sorted(page_lists(levels.tables[-1])) == leaves
    upper = [page for table in levels.tables[:-1] for page in page_lengths(table)[0]]
    assert sorted(upper) == sorted(runs)


@given(REQUESTS, SEEDS, st.sampled_from([0, 100_000]))
@example([([0, 0], 3, 1), ([0, 0], 1, 1), ([0, 0], 2, 1)], 1, 0)
@example([([0, 0], 3, 2), ([0, 0], 3, 1), ([0, 0], 3, 3)], 1, 0)
def test_permuting_the_batch_changes_nothing_but_the_row_order(requests, seed, min_saved_bytes):
    pages, last, qo_lens, rng = flat_case(requests, seed)
    permutation = rng.permutation(len(pages))

    def levels_of(order):
        mixed = [[x[b] for b in order] for x in (pages, last, qo_lens)]
        found = CascadeLevels.from_prefixes(
            make_table(*mixed[:2]), qo_indptr=starts(mixed[2]), min_saved_bytes=min_saved_bytes
        )
        assert row_pages(found) == [
            p for p, n in zip(mixed[0], mixed[2], strict=True) for _ in range(n)
        ]
        return found

    plain, mixed = levels_of(range(len(pages))), levels_of(permutation)
    assert plain.num_levels == mixed.num_levels
    if plain.num_levels > 1:
        assert same(plain, mixed)
    else:
        assert plain.row_order is mixed.row_order is None


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(1, PAGE)),
        min_size=1,
        max_size=6,
    ),
    SEEDS,
    OPTIONS,
)
def test_attend_over_found_levels_equals_flat_prefill(requests, seed, options):
    pages, last, _, rng = flat_case([(*r, 0) for r in requests], seed)
    table = make_table(pages, last)
    qo_lens = [int(rng.integers(0, min(n, PAGE + 2) + 1)) for n in table.seq_lens]
    levels = CascadeLevels.from_prefixes(table, qo_indptr=starts(qo_lens), min_saved_bytes=0)
    cache = make_cache(max([0, *(p for request in pages for p in request)]) + 1, PAGE, rng)
    poison(cache, [table])
    q = rng.standard_normal((sum(qo_lens), 4, 4))
    k, v = (pages.array for pages in cache._pages)
    csr = (table.indptr, table.indices, table.last_page_len)
    want = reference.prefill(q, starts(qo_lens), k, v, *csr, **options)
    close(levels.attend(q, cache, return_lse=True, **options), want)


def test_sharers_are_found_wherever_they_stand():
    pages = [[9, 8, 1], [5, 4, 2], [9, 8, 3], [5, 4, 6], [9, 8, 7]]
    levels = CascadeLevels.from_prefixes(make_table(pages, [1] * 5), min_saved_bytes=0)
    assert page_lists(levels.tables[0]) == [[5, 4], [9, 8]]
    assert levels.qo_indptr[0].tolist() == [0, 2, 5]
    assert levels.row_order.tolist() == [1, 3, 0, 2, 4]


def test_page_ids_are_ordered_as_numbers():
    ids = [1, 255, 256, 65536, 2**31 - 1]
    table = make_table([[i, i] for i in ids for _ in range(2)], [1] * 10)
    levels = CascadeLevels.from_prefixes(table, min_saved_bytes=0)
    assert levels.tables[0].indices.tolist() == ids
    assert levels.row_order is None
    wide = make_table([[i, 0] for i in (2**40 + 1, 1, 2**40 + 1, 1)], [1] * 4, dtype=np.int64)
    levels = CascadeLevels.from_prefixes(wide, min_saved_bytes=0)
    assert levels.tables[0].indices.tolist() == [1, 2**40 + 1]
    assert levels.row_order.tolist() == [1, 3, 0, 2]


def test_equal_pages_at_other_places_or_behind_other_pages_are_not_shared():
    pages = [[1, 2, 3, 9], [2, 3, 9], [5, 2, 3, 9]]
    table = make_table(pages, [4] * 3)
    assert CascadeLevels.from_prefixes(table, min_saved_bytes=0).num_levels == 1


def test_a_last_page_that_is_not_full_is_not_shared():
    table = make_table([[1, 2]] * 3, [3] * 3)
    levels = CascadeLevels.from_prefixes(table, min_saved_bytes=0)
    assert [page_lists(t) for t in levels.tables] == [[[1]], [[2]] * 3]
    partial = make_table([[1]] * 3, [3] * 3)
    assert CascadeLevels.from_prefixes(partial, min_saved_bytes=0).tables == (partial,)


def test_a_full_last_page_that_another_request_goes_on_from_is_shared_up_to_its_rows():
    pages, last = [[1, 2], [1, 2, 3], [1, 2, 4]], [4, 1, 1]
    levels = CascadeLevels.from_prefixes(make_table(pages, last), min_saved_bytes=0)
    assert [page_lists(t) for t in levels.tables] == [[[1]], [[], [2]], [[2], [3], [4]]]


# The last row's page is always the request's own; five rows and one token in the last page need two
# pages; no more is kept than the request has.
@pytest.mark.parametrize(
    ("qo_len", "last", "own"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (1, 1, 1), (2, 1, 2), (99, 1, 4)]
)
def test_leaves_keep_as_many_tokens_as_they_have_rows(qo_len, last, own):
    table = make_table([[1, 2, 3, 4]] * 2, [last] * 2)
    levels = CascadeLevels.from_prefixes(
        table, qo_indptr=[0, qo_len, 2 * qo_len], min_saved_bytes=0
    )
    assert page_lists(levels.tables[-1]) == [[1, 2, 3, 4][4 - own :]] * 2
    assert levels.tables[-1].last_page_len.tolist() == [last] * 2


def test_requests_without_rows_share_nothing_and_keep_their_pages():
    pages = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    table = make_table(pages, [1] * 3)
    two = CascadeLevels.from_prefixes(table, qo_indptr=[0, 1, 1, 2], min_saved_bytes=0)
    assert sorted(page_lists(two.tables[-1])) == [[1, 2, 4], [3], [5]]
    assert row_pages(two) == [pages[0], pages[2]]
    one = CascadeLevels.from_prefixes(table, qo_indptr=[0, 1, 1, 1], min_saved_bytes=0)
    assert one.tables == (table,)


def test_where_nothing_is_shared_the_table_itself_is_the_only_level():
    table = make_table([[3, 4], [1, 2], [], [7]], [1, 4, 1, 2])
    levels = CascadeLevels.from_prefixes(table)
    assert levels.tables == (table,)
    assert levels.qo_indptr[0].tolist() == [0, 1, 2, 3, 4]
    assert levels.row_order is None


def test_a_chain_of_prefixes_has_a_level_for_each():
    pages = [[*range(n), 100 + n] for n in range(40)]
    levels = CascadeLevels.from_prefixes(make_table(pages, [1] * 40), min_saved_bytes=0)
    assert levels.num_levels == 39
    assert sum(len(t.indices) for t in levels.tables) == 38 + 40 + 1
    assert row_pages(levels) == pages


def test_long_lists_are_compared_to_their_ends(rng):
    """Lists that part at every distance, windows of comparison ending before, at and after it."""
    pages = [list(range(1000)) for _ in range(60)]
    places = [0, 1, 15, 16, 17, 47, 48, 49, 111, 112, 113, 998, 999, *rng.integers(0, 1000, 47)]
    for i, place in enumerate(places):
        pages[i] = pages[i][:place] + [2000 + 1000 * i + j for j in range(1000 - place)]
    levels = CascadeLevels.from_prefixes(make_table(pages, [4] * 60), min_saved_bytes=0)
    assert row_pages(levels) == pages
    for i, request in enumerate(page_lists(levels.tables[-1])):
        row = i if levels.row_order is None else int(levels.row_order[i])
        others = [common(pages[row][:999], p[:999]) for j, p in enumerate(pages) if j != row]
        assert request == pages[row][max(others) :]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_results_have_the_index_dtypes_of_the_table(dtype):
    table = make_table([[1, 2], [3, 4], [1, 5]], [1] * 3, dtype=dtype)
    levels = CascadeLevels.from_prefixes(table, min_saved_bytes=0, qo_indptr=np.arange(4))
    arrays = [*levels.qo_indptr, levels.row_order]
    arrays += [a for t in levels.tables for a in (t.indptr, t.indices, t.last_page_len)]
    assert {a.dtype for a in arrays} == {np.dtype(dtype)}


# ---------------------------------------------------------------------------- prefixes: what pays


def family(*, sharers, pages, groups=1, page_size=16):
    """Make groups of requests, each with a common run and one page of its own."""
    lists, page = [], 10**6
    for group in range(groups):
        run = list(range(group * pages, (group + 1) * pages))
        for _ in range(sharers):
            lists.append([*run, page])
            page += 1
    return make_table(lists, [1] * len(lists), page_size)


def test_a_run_that_saves_the_asked_bytes_is_shared_and_one_that_saves_less_is_not():
    table = family(sharers=3, pages=5)
    saved = (3 - 1) * 5 * 16 * 1000
    for min_saved_bytes, num_levels in ((0, 2), (saved, 2), (saved + 1, 1), (10**18, 1)):
        levels = CascadeLevels.from_prefixes(
            table, min_saved_bytes=min_saved_bytes, bytes_per_token=1000
        )
        assert levels.num_levels == num_levels
    assert levels.tables == (table,)


def test_bytes_are_counted_at_4096_a_token_unless_told():
    table = family(sharers=2, pages=1)
    assert CascadeLevels.from_prefixes(table, min_saved_bytes=16 * 4096).num_levels == 2
    assert CascadeLevels.from_prefixes(table, min_saved_bytes=16 * 4096 + 1).num_levels == 1


def test_a_run_that_does_not_pay_falls_to_the_runs_below_it():
    # 1, 2 | 3 to 12: the pairs' common pages save too little on their own.
    pages = [[1, 2, *range(3, 13), 20], [1, 2, *range(3, 13), 21]]
    pages += [[1, 2, *range(30, 40), 22], [1, 2, *range(30, 40), 23]]
    table = make_table(pages, [1] * 4)
    levels = CascadeLevels.from_prefixes(table, min_saved_bytes=9, bytes_per_token=1)
    assert page_lists(levels.tables[0]) == [[1, 2, *range(3, 13)], [1, 2, *range(30, 40)]]
    assert page_lists(levels.tables[1]) == [[20], [21], [22], [23]]
    levels = CascadeLevels.from_prefixes(table, min_saved_bytes=8, bytes_per_token=1)
    assert page_lists(levels.tables[0]) == [[1, 2]]


def test_a_run_that_does_not_pay_falls_to_the_leaves_and_counts_as_readers_above():
    # Two pairs share one page each; without these runs all four read 1, 2 from level 0.
    pages = [[1, 2, 3, 20], [1, 2, 3, 21], [1, 2, 4, 22], [1, 2, 4, 23]]
    table = make_table(pages, [1] * 4)
    saved = (4 - 1) * 2 * PAGE
    levels = CascadeLevels.from_prefixes(table, min_saved_bytes=saved, bytes_per_token=1)
    assert [page_lists(t) for t in levels.tables] == [
        [[1, 2]],
        [[3, 20], [3, 21], [4, 22], [4, 23]],
    ]
    none = CascadeLevels.from_prefixes(table, min_saved_bytes=saved + 1, bytes_per_token=1)
    assert none.num_levels == 1


def test_a_run_saves_the_pages_that_the_sharers_around_it_do_not_share():
    # The pair's own run is page 3 alone, also where the run of 1, 2 is found after it.
    table = make_table([[1, 2, 3, 20], [1, 2, 3, 21], [1, 2, 9, 22]], [1] * 3)
    levels = CascadeLevels.from_prefixes(table, min_saved_bytes=PAGE + 1, bytes_per_token=1)
    assert [page_lists(t) for t in levels.tables] == [[[1, 2]], [[3, 20], [3, 21], [9, 22]]]


# The benchmarks' prefixes, many pairs with a long prompt each, one such pair, the fewest pages that
# pay for two and one less, a page that many share, so many rows that their states outweigh it.
@pytest.mark.parametrize(
    ("sharers", "pages", "groups", "qo_len", "num_levels"),
    [
        (64, 512, 1, 1, 2),
        (256, 128, 1, 1, 2),
        (2, 100, 128, 1, 2),
        (2, 100, 1, 1, 1),
        (2, 3695, 1, 1, 2),
        (2, 3694, 1, 1, 1),
        (100, 1, 1, 1, 1),
        (2, 512, 1, 1024, 1),
    ],
)
def test_by_default_runs_are_shared_where_they_save_time(
    sharers, pages, groups, qo_len, num_levels
):
    table = family(sharers=sharers, pages=pages + qo_len // 16, groups=groups)
    levels = CascadeLevels.from_prefixes(table, qo_indptr=np.arange(sharers * groups + 1) * qo_len)
    assert levels.num_levels == num_levels


def test_by_default_runs_that_pay_are_kept_without_those_that_do_not():
    table = family(sharers=64, pages=512)
    lists = page_lists(table)
    lists[0].insert(512, 10**7)
    lists[1].insert(512, 10**7)
    levels = CascadeLevels.from_prefixes(make_table(lists, [1] * 64, 16))
    assert levels.num_levels == 2
    assert page_lists(levels.tables[0]) == [list(range(512))]


def test_by_default_nested_runs_count_each_page_once():
    # (4 - 1) * 1227 + 2 * 40 = 3761 pages saved, 1 less than pay for the split, 3 runs, 8 states.
    pages = [
        [*range(1227), *range(1227 + 40 * (b // 2), 1267 + 40 * (b // 2)), 2000 + b]
        for b in range(4)
    ]
    assert CascadeLevels.from_prefixes(make_table(pages, [1] * 4, 16)).num_levels == 1
    longer = [[3000, *request] for request in pages]
    levels = CascadeLevels.from_prefixes(make_table(longer, [1] * 4, 16))
    assert [t.batch_size for t in levels.tables] == [1, 2, 4]


# ------------------------------------------------------------------------------------- bad values


def two(**changes):
    table = PageTable.from_seq_lens([4, 4], 4, xp=np)
    fields = {"qo_indptr": ([0, 2], [0, 1, 2]), "tables": (root(), table), "row_order": None}
    return CascadeLevels(**(fields | changes))


def root(page_size=4):
    return PageTable.from_seq_lens([4], page_size, xp=np)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"qo_indptr": np.array([0, 2])},
            TypeError,
            "qo_indptr must be a tuple with one entry per level, got .*ndarray",
        ),
        ({"tables": root()}, TypeError, "tables must be a tuple with one entry per level"),
        (
            {"tables": (root(),)},
            ValueError,
            "qo_indptr and tables must have one entry per level, .* got 2 and 1",
        ),
        ({"tables": (), "qo_indptr": ()}, ValueError, ".* one level or more, got 0 and 0"),
        ({"tables": (root(), 3)}, TypeError, r"tables\[1\] must be a PageTable, got .*int"),
        (
            {"tables": (root(), root(8))},
            ValueError,
            r"tables\[1\] must have page_size=4 as tables\[0\] has, got 8",
        ),
        ({"qo_indptr": ([0, 2], [0, 2])}, ValueError, r"qo_indptr\[1\] must be \[n=3\], got \[2\]"),
        (
            {"qo_indptr": ([0, 2], np.zeros(3))},
            TypeError,
            r"qo_indptr\[1\] must be int32 or int64, got float64",
        ),
        ({"row_order": np.zeros(2, np.int16)}, TypeError, "row_order must be int32 or int64"),
        ({"row_order": np.zeros((2, 1), np.int32)}, ValueError, r"row_order must be \[n\]"),
    ],
)
def test_a_wrong_structure_raises_and_says_why(changes, error, message):
    with pytest.raises(error, match=f"^CascadeLevels: {message}"):
        two(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qo_indptr": ([1, 2], [0, 1, 2])}, r"qo_indptr\[0\]\[0\] must be 0, got 1"),
        ({"qo_indptr": ([0, 2], [0, 3, 2])}, r"qo_indptr\[1\] falls at request 1: .* = 3, .* = 2"),
        (
            {"qo_indptr": ([0, 3], [0, 1, 2])},
            r"all levels must have the same rows, but qo_indptr\[0\] ends at 3 and qo_indptr\[1\] "
            "at 2",
        ),
        (
            {"tables": (root(), PageTable(np.array([0, 1, 2]), [5, 6], [4, 5], 4))},
            r"tables\[1\]: last_page_len of request 1 must be 1 to page_size=4, got 5",
        ),
        (
            {"tables": (PageTable(np.array([0, 1]), [-3], [4], 4), two().tables[1])},
            r"tables\[0\]: page 0 of request 0 must be 0 or more, got -3",
        ),
        ({"row_order": [0]}, r"row_order must be \[rows=2\], got \[1\]"),
        ({"row_order": [0, 2]}, r"row_order\[1\] must be a row of 2, got 2"),
        ({"row_order": [-1, 0]}, r"row_order\[0\] must be a row of 2, got -1"),
        ({"row_order": [1, 1]}, r"row_order\[1\] names row 1 a second time"),
    ],
)
def test_validate_names_the_level_the_request_and_the_value(changes, message, rng):
    levels = two(**changes)
    with pytest.raises(ValueError, match=f"^CascadeLevels.validate: {message}$"):
        levels.validate()
    with pytest.raises(ValueError, match=r"^CascadeLevels\.validate: "):
        levels.attend(np.zeros((2, 2, 4)), make_cache(9, 4, rng))


def test_validate_checks_against_the_cache_and_the_rows_it_is_told():
    levels = two()
    levels.validate(max_num_pages=2, nnz=2)
    with pytest.raises(ValueError, match=r"tables\[1\]: page 0 of request 1 .*max_num_pages=1.*1"):
        levels.validate(max_num_pages=1)
    with pytest.raises(ValueError, match=r"qo_indptr\[0\] ends at 2, but there are 1 rows"):
        levels.validate(nnz=1)
    for nnz in (2.0, "2", True):
        with pytest.raises(TypeError, match=r"CascadeLevels\.validate: nnz must be an integer"):
            levels.validate(nnz=nnz)
        with pytest.raises(TypeError, match=r"CascadeLevels\.validate: max_num_pages must be an"):
            levels.validate(max_num_pages=nnz)
    two(row_order=[5, 1, -7, 99]).validate(nnz=6)
    with pytest.raises(ValueError, match=r"row_order\[0\] must be a row of 5, got 5"):
        two(row_order=[5, 1]).validate(nnz=5)
    two(row_order=[1, 0, 0]).validate()
    three = two(qo_indptr=([0, 3], [0, 1, 3]), row_order=[2, 2, 2])
    with pytest.raises(ValueError, match=r"row_order\[1\] names row 2 a second time"):
        three.validate()


def test_attend_checks_its_arguments(rng):
    levels, cache, q = two(), make_cache(9, 4, rng), np.zeros((2, 2, 4))
    with pytest.raises(
        ValueError, match=r"attend: q must be \[nnz, .* head_dim=4\], got \[2, 2, 3\]"
    ):
        levels.attend(q[..., :3], cache)
    with pytest.raises(ValueError, match="num_qo_heads must be a multiple of num_kv_heads=2"):
        levels.attend(q[:, :1].repeat(3, 1), cache)
    with pytest.raises(ValueError, match="the levels' page_size is 4, the cache's 8"):
        levels.attend(q, make_cache(9, 8, rng))
    with pytest.raises(TypeError, match="q must be float16"):
        levels.attend(q.astype(np.int32), cache)
    with pytest.raises(ValueError, match="window_left must be"):
        levels.attend(q, cache, window_left=-2)
    with pytest.raises(ValueError, match=r"qo_indptr\[0\] ends at 2, but there are 1 rows"):
        levels.attend(q[:1], cache)
    with pytest.raises(ValueError, match=r"validate: tables\[1\]: .* below max_num_pages=1"):
        levels.attend(q, make_cache(1, 4, rng))
    with pytest.raises(TypeError, match="plan must be a Plan"):
        levels.attend(q, cache, plan=3)
    out = np.full((2, 2, 4), 7.0)
    with pytest.raises(ValueError, match="out must be"):
        levels.attend(q, cache, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"qo_indptr": [0, 1]}, ValueError, r"from_prefixes: qo_indptr must be \[n=3\], got \[2\]"),
        ({"qo_indptr": [0, 2, 1]}, ValueError, "from_prefixes: qo_indptr falls at request 1"),
        ({"qo_indptr": [1, 2, 3]}, ValueError, r"qo_indptr\[0\] must be 0, got 1"),
        ({"qo_indptr": [2**32, 1, 2]}, ValueError, r"qo_indptr\[0\] must be 0, got 4294967296"),
        ({"qo_indptr": [0, 2**32 + 2, 2]}, ValueError, "qo_indptr falls at request 1"),
        ({"qo_indptr": [0, 1, 2**32 + 2]}, ValueError, "qo_indptr: entry 2 is .* int32 does not"),
        ({"qo_indptr": np.zeros(3)}, TypeError, "qo_indptr must be int32 or int64, got float64"),
        ({"min_saved_bytes": -1}, ValueError, "min_saved_bytes must be 0 or more, got -1"),
        ({"bytes_per_token": 0}, ValueError, "bytes_per_token must be 1 or more, got 0"),
        ({"min_saved_bytes": "1"}, TypeError, "min_saved_bytes must be an integer, got '1'"),
        ({"bytes_per_token": 4.5}, TypeError, "bytes_per_token must be an integer, got 4.5"),
    ],
)
def test_from_prefixes_checks_its_arguments(options, error, message):
    with pytest.raises(error, match=message):
        CascadeLevels.from_prefixes(PageTable.from_seq_lens([3, 3], 4, xp=np), **options)


def test_from_prefixes_takes_a_page_table():
    with pytest.raises(TypeError, match="from_prefixes: table must be a PageTable, got <class 'n"):
        CascadeLevels.from_prefixes(np.zeros(3))


def test_from_prefixes_checks_the_values_of_the_table():
    with pytest.raises(ValueError, match="page 1 of request 0 must be 0 or more, got -1"):
        CascadeLevels.from_prefixes(make_table([[1, -1], [1, 2]], [1, 1]))
    with pytest.raises(ValueError, match="last_page_len of request 1 must be 1 to page_size=4"):
        CascadeLevels.from_prefixes(make_table([[1, 3], [1, 2]], [1, 5]))


# -------------------------------------------------------------------------------- what nouns share


def test_levels_take_lists_and_keep_tuples():
    levels = two(qo_indptr=[[0, 2], [0, 1, 2]], tables=list(two().tables), row_order=[1, 0])
    assert isinstance(levels.qo_indptr, tuple)
    assert isinstance(levels.tables, tuple)
    assert [a.dtype for a in (*levels.qo_indptr, levels.row_order)] == [np.int32] * 3


def test_levels_show_their_structure():
    assert repr(two(row_order=[1, 0])).startswith(
        "CascadeLevels(qo_indptr=(int32[2], int32[3]), tables=(PageTable("
    )
    assert repr(two(row_order=[1, 0])).endswith("row_order=int32[2], device=numpy)")


def test_equality_is_identity_and_copies_own_their_arrays():
    levels = eight()
    for twin in (copy.deepcopy(levels), pickle.loads(pickle.dumps(levels))):
        assert twin != levels
        assert same(twin, levels)
        twin.qo_indptr[1][1] = 5
        twin.tables[2].indices[0] = 5
        twin.row_order[0] = 5
        assert same(levels, eight())
        assert levels.row_order[0] == 3
    assert levels == levels
    assert len({levels, levels, eight()}) == 2
    assert levels.to_host() is levels


# ----------------------------------------------------------------------------------------- the GPU


def fake(*values):
    """Give a CuPy index array at an address that nothing may look at: it needs no GPU."""
    memory = cp.cuda.UnownedMemory(1 << 20, 4 * len(values), None, device_id=0)
    return cp.ndarray((len(values),), np.int32, memptr=cp.cuda.MemoryPointer(memory, 0))


def test_levels_do_not_mix_homes():
    there = PageTable(fake(0, 1), fake(0), fake(4), 4)
    with pytest.raises(TypeError, match=r"tables\[0\] is on the GPU but tables\[1\] is in NumPy"):
        CascadeLevels((fake(0, 2), np.arange(2)), (there, root()))
    with pytest.raises(TypeError, match=r"is in NumPy but qo_indptr\[0\] is on the GPU"):
        CascadeLevels((fake(0, 2),), (root(),))
    with pytest.raises(TypeError, match="is in NumPy but row_order is on the GPU"):
        two(row_order=fake(1, 0))
    with pytest.raises(TypeError, match="table is on the GPU but qo_indptr is in NumPy"):
        CascadeLevels.from_prefixes(there, qo_indptr=np.arange(2))
    levels = CascadeLevels((fake(0, 2),), (there,))
    with pytest.raises(TypeError, match="q is in NumPy but levels is on the GPU"):
        levels.attend(np.zeros((2, 2, 4)), PagedKVCache(np.zeros((9, 2, 4, 2, 4))))


@pytest.mark.parametrize(
    ("arch", "copies", "shared_by"),
    [("sm_90a", Copies(True, True), "prefill_sm90"),
     ("sm_90a", Copies(True, False), "prefill_sm90"),
     ("sm_90a", None, "prefill_sm80"), ("sm_80", Copies(True, True), "prefill_sm80")],
)  # fmt: skip
def test_leaves_are_decoded_and_what_they_share_has_the_widest_tiles(
    arch, copies, shared_by, monkeypatch
):
    monkeypatch.setattr(_tiles, "arch_of", lambda device: arch)
    monkeypatch.setattr(_tiles, "num_sms", lambda device: 108)
    monkeypatch.setattr(_tiles, "smem_limits", lambda device: (163 << 10, 164 << 10))
    cache = PagedKVCache(fake_cupy((9, 2, 16, 2, 128), "bfloat16"))
    sizes = {"num_rows": 64, "group_size": 4, "batch_size": 64, "num_tokens": 64 * 300}
    shared, leaves = _tiles.choose_level_tiles("op", cache._pages, True, **sizes, copies=copies)
    assert (shared.tile.kernel, shared.tile.rows) == (shared_by, 128)
    assert (leaves.tile.kernel, leaves.tile.rows) == ("decode", 8)
    monkeypatch.setattr(_tiles, "smem_limits", lambda device: (40 << 10, 64 << 10))
    with pytest.raises(NotImplementedError, match=r"op: head_dim=128 needs .* this GPU has 40960"):
        _tiles.choose_level_tiles("op", cache._pages, True, **sizes, copies=copies)


@pytest.mark.parametrize(
    ("tokens", "heads", "dtype", "smem_kb", "brief"),
    [
        (300, 8, "bfloat16", 228, True),
        (1024, 8, "float16", 228, True),
        (1025, 8, "bfloat16", 228, False),  # long ones
        (300, 4, "bfloat16", 228, False),  # no more tiles than an SM works on anyway
        (300, 8, "bfloat16", 164, False),  # an SM has no room for four CTAs
        (300, 8, "float8_e4m3fn", 228, False),
    ],
)
def test_many_short_leaves_have_a_tile_of_their_own(
    tokens, heads, dtype, smem_kb, brief, monkeypatch
):
    monkeypatch.setattr(_tiles, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(_tiles, "num_sms", lambda device: 132)
    monkeypatch.setattr(_tiles, "smem_limits", lambda device: ((smem_kb - 1) << 10, smem_kb << 10))
    cache = PagedKVCache(fake_cupy((9, 2, 16, heads, 128), dtype))
    sizes = (64, 4, 64, 64 * tokens, None)  # rows, heads of a group, leaves, tokens; no copies
    _, leaves = _tiles.choose_level_tiles("op", cache._pages, True, *sizes)
    assert (leaves.tile.brief, leaves.tile.rows) == (brief, 8)
    grid = _tiles.choose_grid(leaves.tile, heads, 0)
    assert (grid.num_ctas == 4 * 132 // heads * heads) == brief


@pytest.mark.gpu
def test_attend_on_the_gpu_checks_its_arguments():
    levels = two().to_device()
    cache = PagedKVCache(cp.zeros((9, 2, 4, 2, 64), np.float16))
    q = cp.zeros((2, 2, 64), np.float16)
    with pytest.raises(ValueError, match="the plan was made for window_left=-1, got 3"):
        levels.attend(q, cache, window_left=3, plan=levels.plan(q, cache))
    with pytest.raises(ValueError, match="head_dim=64"):
        levels.attend(q[..., :32], cache)
    with pytest.raises(TypeError, match="is on the GPU but levels is in NumPy"):
        two().attend(q, cache)
    with pytest.raises(ValueError, match="the plan was made for causal=False, got True"):
        levels.attend(q, cache, causal=True, plan=levels.plan(q, cache))
    with pytest.raises(TypeError, match="sinks is in NumPy"):
        levels.attend(q, cache, sinks=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="the plan was made from other levels; when it is updated"):
        levels.attend(q, cache, plan=two().to_device().plan(q, cache))
    twin = CascadeLevels(levels.qo_indptr, levels.tables)
    assert levels.attend(q, cache, plan=twin.plan(q, cache)).shape == q.shape


class Tree:
    """Requests over levels of shared pages on the host, and rows of q."""

    def __init__(
        self, rng, levels, *, heads=(4, 2), dim=64, layout="NHD", dtype=BF16, kv_dtype=None
    ):
        self.levels, self.dtype = levels, dtype
        num_pages = 2 + max(max(page_lengths(t)[0], default=0) for t in levels.tables)
        sizes = (num_pages, levels.page_size, rng, layout, heads[1], (dim, dim))
        cache = make_cache(*sizes, kv_dtype or dtype)
        poison(cache, levels.tables)
        self.cache = cache
        rows = int(levels.qo_indptr[-1][-1])
        self.q = rng.standard_normal((rows, heads[0], dim)).astype(dtype)

    def attend(self, planned=False, **options):
        """Attend on the GPU: (o, lse)."""
        levels, cache, q = self.levels.to_device(), self.cache.to_device(), cp.asarray(self.q)
        planning = {n: options[n] for n in ("causal", "window_left") if n in options}
        plan = levels.plan(q, cache, **planning) if planned else None
        return levels.attend(q, cache, plan=plan, return_lse=True, **options)

    def define(self, **options):
        """Attend by definition: (o, lse)."""
        levels = self.levels
        return reference.cascade(
            self.q,
            levels.qo_indptr,
            *(pages.array for pages in self.cache._pages),
            [(t.indptr, t.indices, t.last_page_len) for t in levels.tables],
            row_order=levels.row_order,
            **{"sm_scale": self.q.shape[2] ** -0.5, **options},
        )

    def check(self, **options):
        """Compare an eager call and a planned one with the definition."""
        on_host = {n: to_numpy(x) if isinstance(x, cp.ndarray) else x for n, x in options.items()}
        want = self.define(**on_host)
        for planned in (False, True):
            o, lse = self.attend(planned, **options)
            assert o.dtype == self.dtype
            self.compare((o, lse), want, options.get("v_scale", 1.0))

    def compare(self, got, want, v_scale=1.0):
        """Compare (o, lse) with the definition's: a row without keys is 0 and -inf exactly."""
        assert_close(got[1], want[1], LSE)
        scale = v_scale * max_abs(self.cache._pages.second.array)
        assert_close(got[0], want[0], ATTENTION[self.dtype.name], scale=scale)
        assert (to_numpy(got[0])[np.isneginf(want[1])] == 0).all()


def two_levels(prefix_len, leaf_lens, qo_lens, page_size=PAGE):
    """Make a prefix of all requests and their leaves, of these lengths."""
    first, tables = 0, []
    for lens in ([prefix_len], leaf_lens):
        pages = []
        for n in lens:
            pages.append(list(range(first, first + -(-n // page_size))))
            first += len(pages[-1])
        tables.append(make_table(pages, [(n - 1) % page_size + 1 for n in lens], page_size))
    rows = starts(qo_lens)
    return CascadeLevels((rows[[0, -1]], rows), tuple(tables))


def chain(rng, depth, *, page_size=PAGE, prefix_pages=3, batch=7, qo_lens=(1,), order=True):
    """Make levels in which the groups of each level are halves of those above it."""
    lens = np.array([qo_lens[b % len(qo_lens)] for b in range(batch)])
    rows = starts(lens)
    page, tables, qo_indptr = 0, [], []
    for level in range(depth):
        leaf = level == depth - 1
        bounds = np.arange(batch + 1) if leaf else _groups(batch, 2**level)
        pages, last = [], []
        for i in range(len(bounds) - 1):
            n = int(rng.integers(0, prefix_pages + 1)) if not leaf or i % 3 else prefix_pages
            pages.append(list(range(page, page + n)))
            page += n
            last.append(int(rng.integers(1, page_size + 1)))
        tables.append(make_table(pages, last, page_size))
        qo_indptr.append(rows[bounds])
    row_order = rng.permutation(int(rows[-1])).astype(np.int32) if order else None
    return CascadeLevels(tuple(qo_indptr), tuple(tables), row_order)


def _groups(batch, parts):
    return np.unique(np.linspace(0, batch, parts + 1).astype(int))


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("order", [False, True])
def test_levels_of_any_depth_attend_as_defined(depth, order, rng):
    Tree(rng, chain(rng, depth, order=order)).check()


# Eight levels are put into one batch at a time: one more, and one more than twice as many.
@pytest.mark.gpu
@pytest.mark.parametrize("depth", [9, 17])
@pytest.mark.parametrize("window_left", [-1, 30])
def test_more_levels_than_are_put_together_at_a_time_attend_as_defined(depth, window_left, rng):
    levels = chain(rng, depth, batch=12, qo_lens=(1, 2))
    Tree(rng, levels).check(window_left=window_left)


# Empty, a token, and around the ends of pages of the cache and of tiles of keys.
@pytest.mark.gpu
@pytest.mark.parametrize("prefix_len", [0, 1, PAGE - 1, PAGE, 127, 128, 40 * PAGE + 1])
@pytest.mark.parametrize("causal", [False, True])
def test_prefixes_of_any_length_attend_as_defined(prefix_len, causal, rng):
    levels = two_levels(prefix_len, leaf_lens=(3, 0, 1, PAGE, 9), qo_lens=(1, 2, 1, 0, 3))
    Tree(rng, levels).check(causal=causal)


# Requests of few packed rows and of many, whose leaves are not the same launch's.
@pytest.mark.gpu
@pytest.mark.parametrize("qo_len", [5, 70])
@pytest.mark.parametrize("window_left", [-1, 20])
def test_more_rows_than_the_leaf_has_tokens_attend_as_defined(qo_len, window_left, rng):
    levels = two_levels(30, leaf_lens=(0, 1, 3, 5, 69, 70), qo_lens=(qo_len,) * 6)
    Tree(rng, levels).check(causal=True, window_left=window_left)


@pytest.mark.gpu
def test_levels_that_have_equally_many_requests_and_pages_are_told_apart(rng):
    cache = make_cache(11, PAGE, rng, dims=(64, 64), dtype=BF16)
    on_gpu = cache.to_device()
    for page_counts, qo_indptr in (
        (([1, 1, 1], [1] * 8), ([0, 3, 6, 8], range(9))),
        (([2], [1], [1] * 8), ([0, 8], [0, 8], range(9))),
    ):
        pages, tables = iter(range(11)), []
        for counts in page_counts:
            lists = [[next(pages) for _ in range(n)] for n in counts]
            last = np.full(len(counts), PAGE, np.int32)
            tables.append(PageTable(starts(counts), np.concatenate(lists), last, PAGE))
        tree = Tree(rng, CascadeLevels(tuple(map(np.array, qo_indptr)), tuple(tables)))
        tree.cache = cache
        got = tree.levels.to_device().attend(cp.asarray(tree.q), on_gpu, return_lse=True)
        tree.compare(got, tree.define())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_caches_of_fp8_attend_as_defined(dtype, rng):
    levels = chain(rng, 3, page_size=16, prefix_pages=12, batch=9, qo_lens=(1, 3, 40))
    Tree(rng, levels, dim=128, kv_dtype=np.dtype(dtype)).check(causal=True, k_scale=0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_the_eight_requests_of_three_levels_attend_as_defined(causal, rng):
    tree = Tree(rng, eight(), heads=(8, 2), dim=128)
    tree.check(causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (12, 2)])
def test_layouts_and_groups_of_heads_attend_as_defined(layout, heads, rng):
    levels = chain(rng, 3, qo_lens=(1, 3, 0, 5), page_size=16)
    Tree(rng, levels, heads=heads, layout=layout, dtype=np.dtype(np.float16)).check(causal=True)


@pytest.mark.gpu
def test_many_rows_of_a_long_prefix_attend_as_defined(rng):
    levels = chain(rng, 2, page_size=16, prefix_pages=60, batch=150)
    Tree(rng, levels, dim=128).check()
    levels = chain(rng, 2, page_size=16, prefix_pages=12, batch=9, qo_lens=(40, 1, 70))
    Tree(rng, levels, dim=128).check(causal=True)


# More tiles than an SM works on at a time, on any GPU: several items of a CTA, with and without a
# call's options.
@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("order", [False, True])
def test_many_short_leaves_attend_as_defined(dim, order, rng):
    tree = Tree(rng, chain(rng, 2, page_size=16, prefix_pages=4, batch=300, order=order), dim=dim)
    tree.check()
    sinks = cp.asarray(rng.standard_normal(4).astype(np.float32))
    tree.check(sinks=sinks, logits_soft_cap=5.0, window_left=20)


@pytest.mark.gpu
def test_options_count_once_over_all_levels(rng):
    tree = Tree(rng, chain(rng, 3, qo_lens=(1, 2)))
    sinks = cp.asarray(rng.standard_normal(4).astype(np.float32))
    tree.check(sinks=sinks, sm_scale=0.3)
    tree.check(q_scale=0.5, k_scale=2.0, v_scale=3.0)
    for depth in (1, 2):
        empty = chain(rng, depth, prefix_pages=0)
        assert not any(len(t.indices) > 2 for t in empty.tables)
        Tree(rng, empty).check(sinks=sinks)
        Tree(rng, empty).check()


# Leaves have up to 12 tokens, and each level above them as many: windows end in the leaf, at its
# first token or in a level above it, of a row's whole past and beyond.
@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("window_left", [0, 3, 9, 17, 100])
def test_windows_count_positions_over_all_levels(depth, window_left, rng):
    tree = Tree(rng, chain(rng, depth, qo_lens=(1, 2, 0, 5)))
    sinks = cp.asarray(rng.standard_normal(4).astype(np.float32))
    tree.check(window_left=window_left, causal=window_left % 2 == 0, sinks=sinks)


# Tiles of many rows and of few, whose rows see a shared level from different tokens on.
@pytest.mark.gpu
@pytest.mark.parametrize("window_left", [20, 100, 300])
def test_windows_of_many_rows_attend_as_defined(window_left, rng):
    levels = chain(rng, 2, page_size=16, prefix_pages=60, batch=150)
    Tree(rng, levels, dim=128).check(window_left=window_left)
    levels = chain(rng, 3, page_size=16, prefix_pages=12, batch=9, qo_lens=(40, 1, 70))
    Tree(rng, levels, dim=128).check(window_left=window_left, causal=True)


@pytest.mark.gpu
def test_results_go_where_told_and_rows_past_the_levels_are_left_alone(rng):
    tree = Tree(rng, chain(rng, 2))
    levels, cache = tree.levels.to_device(), tree.cache.to_device()
    rows = len(tree.q)
    q = cp.asarray(np.concatenate([tree.q, np.full_like(tree.q[:3], np.nan)]))
    padded = cp.asarray(np.concatenate([tree.levels.row_order, [-9, 1 << 30, 0]]).astype(np.int32))
    levels = CascadeLevels(levels.qo_indptr, levels.tables, padded)
    out, lse = cp.full(q.shape, 7, np.float32), cp.full(q.shape[:2], 7, np.float32)
    given = levels.attend(q, cache, out=out, lse=lse, return_lse=True)
    assert given[0] is out
    assert given[1] is lse
    tree.compare((out[:rows], lse[:rows]), tree.define())
    assert (out[rows:] == 7).all()
    assert (lse[rows:] == 7).all()

    lost = tree.levels.row_order[:2]
    levels.row_order[:2] = cp.asarray([-5, rows + 99], np.int32)  # name no row
    for result in (out, lse):
        result[...] = 7
    levels.attend(q, cache, out=out, lse=lse)
    results = to_numpy(out), to_numpy(lse)
    kept = np.setdiff1d(np.arange(rows), lost)
    tree.compare([x[kept] for x in results], [x[kept] for x in tree.define()])
    assert all((x[lost] == 7).all() for x in results)


@pytest.mark.gpu
@pytest.mark.parametrize("window_left", [-1, 30])
def test_a_replayed_graph_follows_changed_lengths(window_left, rng):
    tree = Tree(rng, chain(rng, 3, page_size=16))
    levels, cache, q = tree.levels.to_device(), tree.cache.to_device(), cp.asarray(tree.q)
    out, lse = cp.empty_like(q), cp.empty(q.shape[:2], np.float32)
    plan = levels.plan(q, cache, window_left=window_left)

    def step():
        plan.update()
        levels.attend(q, cache, window_left=window_left, plan=plan, out=out, lse=lse)

    last = [table.last_page_len.copy() for table in levels.tables]
    with captured(step) as (stream, graph, _):
        for shorter in (0, 3, 9):
            for table, full in zip(levels.tables, last, strict=True):
                table.last_page_len[...] = cp.maximum(full - shorter, 1)
            out[...], lse[...] = np.nan, np.nan
            graph.launch(stream)
            want = levels.attend(q, cache, window_left=window_left, return_lse=True)
            assert_same_bits(out, want[0])
            assert_same_bits(lse, want[1])


@pytest.mark.gpu
def test_prefixes_of_a_table_on_the_gpu_are_levels_there():
    table = make_table(PAGES, LAST)
    want = CascadeLevels.from_prefixes(table, qo_indptr=QO_INDPTR, min_saved_bytes=0)
    levels = CascadeLevels.from_prefixes(table.to_device(), qo_indptr=QO_INDPTR, min_saved_bytes=0)
    arrays = [*levels.qo_indptr, *(t.indices for t in levels.tables), levels.row_order]
    assert all(isinstance(a, cp.ndarray) for a in arrays)
    levels.validate()
    assert same(levels.to_host(), want)
    np.testing.assert_array_equal(levels.row_order.get(), want.row_order)
