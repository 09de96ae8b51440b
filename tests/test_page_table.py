"""PageTable: constructors, what is derived from a table, and what is refused.

Tests with the ``xp`` fixture run on both homes: against tables walked page by page.
"""

import re

import brute
import cupy as cp
import numpy as np
import pytest
from cases import PagedCase, captured, fake_cupy, indptr_of, on
from tolerances import to_numpy

from cukv import PageTable, batch_indices_positions
from cukv._arrays import INDEX_DTYPES

# Empty requests at the ends and between, one token, a full page, one over, many pages.
LENS = [(), (0,), (0, 0, 0), (1,), (16, 17, 0, 15), (0, 45, 8, 25, 22, 0), (300, 1, 0, 5)]
PAGE_SIZES = [1, 3, 16, 17, 64]


def equal(got, want, dtype=None):
    got = to_numpy(got)
    if dtype is not None:
        assert got.dtype == dtype
    assert got.shape == np.shape(want)
    np.testing.assert_array_equal(got, want)


def make(xp, indptr, indices, last_page_len, page_size, dtype="int32"):
    arrays = (on(xp, np.array(x, dtype)) for x in (indptr, indices, last_page_len))
    return PageTable(*arrays, page_size)


def random_table(rng, dtype, batch_size=200, page_size=5):
    """Make host arrays of a table: requests without pages and with many, ids with gaps."""
    counts = rng.integers(0, 9, batch_size) * (rng.random(batch_size) < 0.8)
    indptr = indptr_of(counts, dtype)
    indices = rng.integers(0, 10**6, indptr[-1] + 7).astype(dtype)
    indices[indptr[-1] :] = -1
    last = rng.integers(1, page_size + 1, batch_size).astype(dtype)
    last[counts == 0] = 99  # ignored
    return indptr, indices, last


# From lengths


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("lens", LENS, ids=str)
def test_a_table_of_lengths_has_those_lengths(xp, lens, page_size, dtype):
    counts = [-(-n // page_size) for n in lens]
    pages = np.arange(sum(counts) + 3)[::-1].astype(dtype)
    given = on(xp, np.array(lens, np.int64))
    for table, indices in (
        (PageTable.from_seq_lens(given, page_size, on(xp, pages)), pages),
        (PageTable.from_seq_lens(given, page_size, num_pages=sum(counts) + 3), None),
        (PageTable.from_seq_lens(list(lens), page_size, on(xp, pages)), pages),
        (PageTable.from_seq_lens(lens, page_size, xp=xp), None),
    ):
        equal(table.indptr, np.cumsum([0, *counts]))
        equal(table.last_page_len, [n - (c - 1) * page_size if n else 0
                                    for n, c in zip(lens, counts, strict=True)])  # fmt: skip
        indices = np.arange(len(table.indices)) if indices is None else indices
        equal(table.indices, indices[: len(table.indices)])
        assert len(table.indices) >= sum(counts)
        assert isinstance(table.indptr, xp.ndarray)
        assert {a.dtype for a in (table.indptr, table.last_page_len)} == {table.indices.dtype}
        assert table.page_size == page_size
        assert table.batch_size == len(lens)
        equal(table.seq_lens, lens)
        assert table.seq_lens_list() == list(lens)
        table.validate(max(sum(counts) + 3, 1))


def test_the_lengths_of_a_full_last_page_are_not_zero(xp):
    table = PageTable.from_seq_lens([0, 16, 17, 32], 16, xp=xp)
    equal(table.last_page_len, [0, 16, 1, 16], np.int32)
    equal(table.indptr, [0, 0, 1, 3, 5], np.int32)
    equal(table.indices, [0, 1, 2, 3, 4], np.int32)


def test_pages_are_handed_out_in_order_and_not_copied(xp):
    pages = on(xp, np.array([7, 3, 9, 1, 5]))
    table = PageTable.from_seq_lens(on(xp, np.array([17, 3])), 16, pages)
    assert xp.shares_memory(table.indices, pages)
    equal(table.indices[:3], [7, 3, 9], np.int64)
    assert len(PageTable.from_seq_lens([17, 3], 16, pages, num_pages=4).indices) == 4
    # Lengths on the host need no more than they need; on the device every page may be needed.
    assert len(PageTable.from_seq_lens([17, 3], 16, pages).indices) == 3


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([2**70], "got 1180591620717411303424, which int64 does not hold"),
        (["a"], "got "),
        ([None], "got object"),
        ([1.5], "got float64"),
        ([[1], [2, 3]], "got sequences among them"),
    ],
)
def test_lengths_that_are_no_integers_are_named(lens, message):
    with pytest.raises(
        TypeError, match=f"^PageTable.from_seq_lens: lens must be integers, {message}"
    ):
        PageTable.from_seq_lens(lens, 4, xp=np)


def test_lengths_that_need_too_many_pages_raise(xp):
    for lens, options, message in (
        ([17, 3], {"pages": [1, 2]}, "the lengths need 3 pages, got 2"),
        ([17, 3], {"num_pages": 2}, "the lengths need 3 pages, got 2"),
        ([17, 3], {"pages": [1, 2, 3, 4], "num_pages": 2}, "the lengths need 3 pages, got"),
        ([3, -1], {}, "length of request 1 must be 0 or more, got -1"),
    ):
        with pytest.raises(ValueError, match=r"^PageTable.from_seq_lens: " + message):
            PageTable.from_seq_lens(np.array(lens), 16, **options)
        if xp is np:
            with pytest.raises(ValueError, match=r"^PageTable.from_seq_lens: " + message):
                PageTable.from_seq_lens(lens, 16, **options, xp=xp)


def test_what_is_no_array_of_pages_is_named():
    for pages in (7, "12"):
        with pytest.raises(TypeError, match=r"^PageTable.from_seq_lens: pages must be a CuPy, "):
            PageTable.from_seq_lens([5], 4, pages=pages, xp=np)


def test_lengths_on_the_device_need_a_capacity():
    with pytest.raises(ValueError, match=r"lens is on the device: give pages or num_pages"):
        PageTable.from_seq_lens(fake_cupy(3, "int32"), 16)


# From and to dense tables


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_block_table_gives_the_pages_its_lengths_count(xp, page_size, dtype, rng):
    lens = rng.integers(0, 100, 70)
    lens[::9] = 0
    width = -(-100 // page_size) + 2
    dense = rng.integers(0, 10**6, (70, width)).astype(dtype)
    table = PageTable.from_block_table(on(xp, dense), on(xp, lens), page_size)
    counts = -(-lens // page_size)
    equal(table.indptr, np.cumsum([0, *counts]), dtype)
    want = np.concatenate([row[:n] for row, n in zip(dense, counts, strict=True)])
    assert len(table.indices) == 70 * width
    equal(table.indices[: len(want)], want, dtype)
    equal(table.indices[len(want) :], np.full(70 * width - len(want), -1))
    equal(table.seq_lens, lens)
    back = np.where(np.arange(width) < counts[:, None], dense, -1)
    equal(table.block_table(width), back, dtype)
    equal(table.block_table(width + 5)[:, :width], back)


def test_a_block_table_may_be_any_view(xp, rng):
    wide = on(xp, rng.integers(0, 1000, (8, 30)).astype(np.int32))
    for view in (wide[::-1], wide[:, ::-1], wide[::2, 3:20:3], wide.T[:8]):
        lens = [5, 0, 16, 17] + [3] * (len(view) - 4)
        table = PageTable.from_block_table(view, lens, 8)
        host = to_numpy(view)
        want = np.concatenate([row[: -(-n // 8)] for row, n in zip(host, lens, strict=True)])
        equal(table.indices[: len(want)], want)


def test_empty_block_tables(xp):
    for shape in ((0, 4), (3, 0), (0, 0)):
        table = PageTable.from_block_table(on(xp, np.zeros(shape, np.int32)), [0] * shape[0], 8)
        equal(table.indptr, [0] * (shape[0] + 1))
        assert table.indices.shape == (0,)
        equal(table.block_table(2), np.full((shape[0], 2), -1))
        equal(table.block_table(0), np.zeros((shape[0], 0)))


def test_a_row_too_short_raises_on_numpy_and_is_cut_on_the_device(xp):
    dense = on(xp, np.arange(8, dtype=np.int32).reshape(2, 4))
    lens = on(xp, np.array([5, 33]))
    if xp is np:
        with pytest.raises(ValueError, match="request 1 of 33 tokens needs more than width=4"):
            PageTable.from_block_table(dense, lens, 8)
        with pytest.raises(ValueError, match="length of request 0 must be 0 or more, got -1"):
            PageTable.from_block_table(dense, [-1, 3], 8)
    else:
        equal(PageTable.from_block_table(dense, lens, 8).indices, [0, 4, 5, 6, 7, -1, -1, -1])
    table = make(xp, [0, 1, 4], [5, 1, 2, 3], [1, 1], 8)
    if xp is np:
        with pytest.raises(
            ValueError,
            match=r"^PageTable.block_table: width must be at least 3 pages for request 1, got 2",
        ):
            table.block_table(2)
    else:
        equal(table.block_table(2), [[5, -1], [1, 2]], np.int32)


def test_block_tables_name_what_they_refuse(xp):
    good = xp.zeros((2, 4), np.int32)
    for dense, lens, size, error, message in (
        (good[0], [1, 2], 8, ValueError, r"block_table must be \[batch_size, width\], got \[4\]"),
        (
            good.astype(np.float32),
            [1, 2],
            8,
            TypeError,
            "block_table must be int32 or int64, got fl",
        ),
        (good, [1, 2, 3], 8, ValueError, r"seq_lens must be \[n=2\], got \[3\]"),
        (good, [1.0, 2.5], 8, TypeError, "seq_lens must be integers, got float64"),
        (good, [1, 2], 0, ValueError, "page_size must be a whole number of 1 or more, got 0"),
        ([[1, 2]], [1], 8, TypeError, "block_table must be a CuPy, NumPy or DLPack array"),
    ):
        with pytest.raises(error, match=r"^PageTable.from_block_table: " + message):
            PageTable.from_block_table(dense, lens, size)
    with pytest.raises(
        ValueError, match=r"^PageTable.block_table: width must be 0 or more, got -1"
    ):
        make(xp, [0, 1], [5], [1], 8).block_table(-1)


# What a table says


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("batch_size", [0, 1, 31, 200, 1023, 1024, 3000])
def test_lengths_are_those_of_the_pages(xp, batch_size, dtype, rng):
    arrays = random_table(rng, dtype, batch_size)
    table = PageTable(*(on(xp, x) for x in arrays), 5)
    indptr, _, last = arrays
    want = [brute.kv_len(indptr, last, 5, b) for b in range(batch_size)]
    equal(table.seq_lens, want, dtype)
    equal(table.token_indptr, np.cumsum([0, *want]), np.int64)
    assert table.seq_lens_list() == want


def test_a_request_without_pages_has_no_tokens_whatever_its_last_page_len(xp):
    table = make(xp, [0, 0, 1], [4], [7, 3], 16)
    equal(table.seq_lens, [0, 3])
    equal(table.token_indptr, [0, 0, 3])
    table.validate(5)


def test_lengths_follow_the_contents(xp):
    table = make(xp, [0, 1, 2], [4, 5], [7, 3], 16)
    equal(table.seq_lens, [7, 3])
    table.last_page_len[0] = 9
    table.indptr[1] = 2
    equal(table.seq_lens, [25, 0])
    equal(table.token_indptr, [0, 25, 25])


def test_token_counts_are_64_bit(xp):
    table = make(xp, [0, 1, 2, 3], [0, 1, 2], [2**30] * 3, 2**30)
    equal(table.token_indptr, [0, 2**30, 2**31, 3 * 2**30], np.int64)
    equal(table.slot_mapping(*(on(xp, np.array([x])) for x in (2, 5))), [2 * 2**30 + 5], np.int64)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_slots_are_found_by_walking_pages(xp, dtype, index_dtype, rng):
    arrays = random_table(rng, dtype)
    table = PageTable(*(on(xp, x) for x in arrays), 5)
    request = rng.integers(-3, 205, 3000).astype(index_dtype)
    position = rng.integers(-3, 50, 3000).astype(index_dtype)
    position[::100] = np.iinfo(index_dtype).max
    request[5::100] = np.iinfo(index_dtype).min
    want = [brute.slot(*arrays[:2], 5, b, t) for b, t in zip(request, position, strict=True)]
    want = [-1 if w is None else w[0] * 5 + w[1] for w in want]
    assert 500 < want.count(-1) < 2500
    equal(table.slot_mapping(on(xp, request), on(xp, position)), want, np.int64)
    views = (on(xp, np.repeat(x, 2)[::-1].copy())[::-2] for x in (request, position))
    equal(table.slot_mapping(*views), want)


def test_slots_of_sequences_and_of_nothing(xp):
    table = make(xp, [0, 1, 3], [4, 9, 2], [1, 1], 4)
    equal(table.slot_mapping([1, 0, -1, 1], (5, 3, 0, 8)), [9, 19, -1, -1], np.int64)
    equal(table.slot_mapping([], []), [], np.int64)


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_index_arrays_of_any_stride_make_the_same_table(xp, dtype, rng):
    arrays = random_table(rng, dtype)
    plain = PageTable(*(on(xp, x) for x in arrays), 5)
    column = np.full((400, 3), 77, dtype)
    views = []
    for step, x in zip((2, -1, -3), arrays, strict=True):
        wide = on(xp, np.full(abs(step) * len(x), 10**8, dtype))
        view = wide[::step]
        view[...] = on(xp, x)
        views.append(view)
    table = PageTable(*views, 5)
    assert column.ndim == 2
    for name in ("seq_lens", "token_indptr"):
        equal(getattr(table, name), to_numpy(getattr(plain, name)))
    equal(table.block_table(9), to_numpy(plain.block_table(9)))


# Rows to append


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("batch_size", [0, 1, 33, 1000])
def test_appended_rows_are_the_last_of_their_sequences(xp, batch_size, dtype, rng):
    counts = rng.integers(0, 5, batch_size) * (rng.random(batch_size) < 0.7)
    lens = counts + rng.integers(0, 100, batch_size)
    indptr = indptr_of(counts, dtype)
    nnz = int(indptr[-1]) + 4
    request = [brute.request_of(row, indptr) for row in range(nnz)]
    got = batch_indices_positions(on(xp, indptr), on(xp, lens), nnz)
    equal(got[0], [-1 if b is None else b for b in request], np.int32)
    equal(got[1], [0 if b is None else lens[b] - (indptr[b + 1] - row)
                   for row, b in enumerate(request)], np.int32)  # fmt: skip


def test_padding_rows_have_no_request(xp):
    got = batch_indices_positions(on(xp, np.array([0, 2])), [2], 4)
    equal(got[0], [0, 0, -1, -1])
    equal(got[1], [0, 1, 0, 0])
    for nnz in (0, 3):
        got = batch_indices_positions(on(xp, np.array([0])), [], nnz)
        equal(got[0], [-1] * nnz)


def test_rows_to_append_name_what_they_refuse(xp):
    indptr = xp.array([0, 2])
    for arguments, error, message in (
        ((indptr, [2, 3], 4), ValueError, r"append_indptr must be \[n=3\], got \[2\]"),
        ((indptr, [2], -1), ValueError, "nnz must be 0 or more, got -1"),
        ((indptr.astype(np.float32), [2], 4), TypeError, "append_indptr must be int32 or int64"),
    ):
        with pytest.raises(error, match=r"^batch_indices_positions: " + message):
            batch_indices_positions(*arguments)
    for lens in (5, "ab"):
        message = r"^batch_indices_positions: seq_lens must be a CuPy, NumPy or DLPack array, got"
        with pytest.raises(TypeError, match=message):
            batch_indices_positions([0, 2], lens, 2)
    if xp is np:
        for bad, message in (
            ([0, 5], r"append_indptr ends at 5, but there are 4 rows \(nnz\)"),
            ([1, 2], r"append_indptr\[0\] must be 0, got 1"),
        ):
            with pytest.raises(ValueError, match=r"^batch_indices_positions: " + message):
                batch_indices_positions(np.array(bad), [2], 4)


# Validation


def test_validate_names_the_request_and_the_value(xp):
    for arrays, options, message in (
        (([0, 1, 2], [3, 4], [5, 17]), {}, "last_page_len of request 1 must be 1 to .*=16, got 17"),
        (([0, 1, 2], [3, 4], [0, 5]), {}, "last_page_len of request 0 must be 1 to .*=16, got 0"),
        (([1, 2], [3, 4], [5]), {}, r"indptr\[0\] must be 0, got 1"),
        (([0, 2, 1], [3, 4], [5, 5]), {}, r"indptr falls at request 1: indptr\[1\] = 2, "),
        (([0, 3], [3, 4], [5]), {}, "indptr ends at 3, but there are 2 indices"),
        (([0, 1, 3], [3, 4, -2], [5, 5]), {}, "page 1 of request 1 must be 0 or more, got -2"),
        (([0, 1, 3], [3, 9, 2], [5, 5]), {"max_num_pages": 9},
         "page 0 of request 1 must be 0 or more and below max_num_pages=9, got 9"),
        (([0, 1, 2], [3, 4], [5, 5]), {"indptr": [0, 5, 11]},
         "request 1 has 5 tokens but 6 rows to append"),
        (([0, 1, 2], [3, 4], [5, 5]), {"indptr": [0, 5]}, r"indptr must be \[n=3\], got \[2\]"),
        (([0, 1, 2], [3, 4], [5, 5]), {"indptr": [0, 5, 4]}, "indptr falls at request 1"),
    ):  # fmt: skip
        table = make(xp, *arrays, 16)
        if "indptr" in options:
            options["indptr"] = on(xp, np.array(options["indptr"]))
        with pytest.raises(ValueError, match=r"^PageTable.validate: " + message):
            table.validate(**options)


def test_validate_names_what_it_is_wrongly_asked_for():
    table = make(np, [0, 1, 2], [3, 4], [5, 5], 16)
    for options, error, message in (
        ({"max_num_pages": "9"}, TypeError, "max_num_pages must be an integer, got '9'"),
        ({"max_num_pages": 4.5}, TypeError, "max_num_pages must be an integer, got 4.5"),
        ({"indptr": [0, 0.5, 1]}, TypeError, "indptr must be integers, got float64"),
        ({"indptr": np.array([0, 0.5, 1])}, TypeError, "indptr must be int32 or int64, got float"),
        ({"indptr": 3}, ValueError, r"indptr must be \[n=3\], got \[\]"),
        ({"indptr": [[0, 1, 2]]}, ValueError, r"indptr must be \[n=3\], got \[1, 3\]"),
    ):
        with pytest.raises(error, match=r"^PageTable.validate: " + message):
            table.validate(**options)


@pytest.mark.parametrize(
    "size", ["16", None, np.nan, np.inf, 1j, [16], np.array([16, 16]), 1.5, True]
)
def test_a_page_size_that_is_no_whole_number_is_named(size):
    message = r": page_size must be a whole number of 1 or more, got " + re.escape(repr(size))
    for make_table in (
        lambda: PageTable(np.array([0, 1]), [0], [1], size),
        lambda: PageTable.from_seq_lens([1], size, xp=np),
        lambda: PageTable.from_block_table(np.zeros((1, 1), np.int32), [1], size),
    ):
        with pytest.raises(ValueError, match=message):
            make_table()


@pytest.mark.parametrize("number", [3.5, "4", True])
def test_counts_of_pages_that_are_no_integers_are_named(number):
    with pytest.raises(TypeError, match=r"from_seq_lens: num_pages must be an integer, got"):
        PageTable.from_seq_lens([33], 16, num_pages=number, xp=np)
    with pytest.raises(TypeError, match=r"^PageTable.block_table: width must be an integer, got"):
        make(np, [0, 1], [5], [1], 16).block_table(number)


def test_lengths_whose_pages_no_integer_counts_are_refused_and_do_not_wrap():
    with pytest.raises(ValueError, match="the lengths need 9223372036854775808 pages, got 2"):
        PageTable.from_seq_lens(np.array([2**62, 2**62]), 1, pages=[1, 2])
    large = PageTable([0, 2], np.array([0, 1]), [2**31 - 1], 2**31 - 1)
    with pytest.raises(ValueError, match=r"entry 0 is 4294967294, which int32 does not hold"):
        _ = large.seq_lens
    assert large.token_indptr.tolist() == [0, 2**32 - 2]
    for size in (2**31, 2**63 - 1, 2**64):
        message = rf"^PageTable: page_size must be .* of 1 or more, below 2147483648, got {size}$"
        with pytest.raises(ValueError, match=message):
            PageTable([0, 2], np.array([0, 1]), [1], size)
    with pytest.raises(ValueError, match=r"width must be 0 or more, below 2\*\*63, got 9223372036"):
        large.block_table(2**63)


@pytest.mark.parametrize("name", ["seq_lens", "token_indptr"])
def test_lengths_of_bad_values_raise_on_numpy_in_their_own_name(name):
    indices, last = np.zeros(9, np.int32), np.ones(2, np.int32)
    for indptr, last_page_len, message in (
        ([0, 2, 1], last, "indptr falls at request 1"),
        ([1, 2, 3], last, r"indptr\[0\] must be 0, got 1"),
        ([0, 1, 2], 5 * last, "last_page_len of request 0 must be 1 to page_size=4, got 5"),
    ):
        table = PageTable(np.array(indptr, np.int32), indices, last_page_len, 4)
        with pytest.raises(ValueError, match=f"^PageTable.{name}: {message}"):
            getattr(table, name)


def test_validate_reads_no_padding(xp):
    table = make(xp, [0, 0, 1], [3, -1, 10**9], [99, 5], 16)
    table.validate(4, on(xp, np.array([0, 0, 5])))


# Structure


def test_a_table_names_what_it_refuses(xp):
    good = [xp.array(x) for x in ([0, 1, 2], [3, 4], [5, 5])]
    for place, value, error, message in (
        (0, xp.zeros(0, np.int32), ValueError, r"indptr must be \[batch_size \+ 1\], got \[0\]"),
        (0, xp.zeros((2, 1), np.int32), ValueError, r"indptr must be \[n\], got \[2, 1\]"),
        (0, xp.zeros(4, np.int32), ValueError, r"last_page_len must be \[n=3\], got \[2\]"),
        (0, xp.zeros(3, np.uint32), TypeError, "indptr must be int32 or int64, got uint32"),
        (1, xp.zeros(3, np.float32), TypeError, "indices must be int32 or int64, got float32"),
        (1, xp.zeros((1, 2), np.int64), ValueError, r"indices must be \[n\], got \[1, 2\]"),
        (2, xp.zeros(2, np.uint64), TypeError, "last_page_len must be int32 or int64, got uint64"),
        (2, xp.zeros(2, bool), TypeError, "last_page_len must be int32 or int64, got bool"),
        (2, [5.0, 5.5], TypeError, "last_page_len must be integers, got float64"),
        (2, None, TypeError, "last_page_len must be a CuPy, NumPy or DLPack array"),
        (3, 0, ValueError, "page_size must be a whole number of 1 or more, got 0"),
        (3, -16, ValueError, "page_size must be a whole number of 1 or more, got -16"),
        (3, 1.5, ValueError, "page_size must be a whole number of 1 or more, got 1.5"),
    ):
        arguments = [*good, 16]
        arguments[place] = value
        with pytest.raises(error, match=r"^PageTable: " + message):
            PageTable(*arguments)


def test_homes_and_devices_of_a_table_do_not_mix():
    h, d, there = (np.zeros(1, np.int32), fake_cupy(1, "int32"), fake_cupy(1, "int32", 1))
    with pytest.raises(
        TypeError, match=r"^PageTable: indptr is in NumPy but indices is on the GPU"
    ):
        PageTable(h, d, h, 16)
    with pytest.raises(ValueError, match="indptr is on device 0 but indices is on device 1"):
        PageTable(d, there, fake_cupy(0, "int32"), 16)
    table = PageTable(d, d, fake_cupy(0, "int32"), 16)
    for call in (
        lambda: table.slot_mapping(h, h),
        lambda: table.slot_mapping(d, h),
        lambda: PageTable.from_seq_lens(h, 16, d),
        lambda: PageTable.from_block_table(fake_cupy((1, 2), "int32"), h, 16),
        lambda: batch_indices_positions(d, np.zeros(0, np.int32), 3),
    ):
        with pytest.raises(TypeError, match=r"on the GPU but .* in NumPy|in NumPy but .* GPU"):
            call()
    with pytest.raises(ValueError, match=r"slot_mapping: .*device 0 .*device 1"):
        table.slot_mapping(there, there)


def test_sequences_go_to_the_home_of_the_arrays_beside_them(xp):
    table = PageTable(on(xp, np.array([0, 1, 2])), [3, 4], (5, 6), 16)
    assert isinstance(table.indices, xp.ndarray)
    assert isinstance(table.last_page_len, xp.ndarray)
    equal(table.seq_lens, [5, 6])
    assert isinstance(PageTable([0, 1], [3], [5], 16).indptr, np.ndarray)


def test_a_page_size_may_be_any_whole_number():
    for size in (np.int16(16), np.int64(16), 16.0, np.array(16)):
        table = PageTable([0, 1], [3], [5], size)
        assert type(table.page_size) is int
        assert table.page_size == 16


def test_a_table_shows_its_structure_without_reading_it():
    sizes = (3, 5, 2)
    table = PageTable(*(fake_cupy(n, "int64") for n in sizes), 16)
    shown = "indptr=int64[3], indices=int64[5], last_page_len=int64[2], page_size=16"
    assert repr(table) == f"PageTable({shown}, device=cuda:0)"
    assert table.batch_size == 2


# On the device


GARBAGE = ["any bits", "near", "extremes"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_in_a_table_is_harmless(kind, dtype, rng):
    info = np.iinfo(dtype)

    def index(n):
        if kind == "any bits":
            return cp.asarray(rng.integers(info.min, info.max, n, dtype, endpoint=True))
        if kind == "near":
            return cp.asarray(rng.integers(-9, 60, n).astype(dtype))
        return cp.asarray(rng.choice(np.array([info.min, -1, 0, 1, info.max], dtype), n))

    for _ in range(20):
        table = PageTable(index(301), index(40), index(300), 16)
        assert table.seq_lens.shape == (300,)
        assert (cp.diff(table.token_indptr) >= 0).all() or dtype == np.int64
        pages = to_numpy(table.indices)
        dense = to_numpy(table.block_table(7))
        assert np.isin(dense, [-1, *pages]).all()
        table.slot_mapping(index(1000), index(1000))
        made = PageTable.from_block_table(index(2100).reshape(300, 7), index(300), 16)
        assert made.indices.shape == (2100,)
        PageTable.from_seq_lens(index(300), 16, index(50)).block_table(3)
        request, _ = batch_indices_positions(index(301), index(300), 500)
        assert ((request >= -1) & (request < 300)).all()
    cp.cuda.Device().synchronize()


@pytest.mark.gpu
def test_a_batch_of_three_hundred_thousand(rng):
    lens = rng.integers(0, 4, 300_000)
    table = PageTable.from_seq_lens(cp.asarray(lens), 1, num_pages=int(lens.sum()))
    equal(table.indptr, np.cumsum([0, *lens]))
    equal(table.token_indptr, np.cumsum([0, *lens]))
    equal(table.seq_lens, lens)
    nnz = int(lens.sum()) + 1
    request, position = batch_indices_positions(table.indptr, table.seq_lens, nnz)
    want = np.repeat(np.arange(300_000), lens)
    equal(request, [*want, -1])
    equal(position[:-1], np.arange(nnz - 1) - np.cumsum([0, *lens])[want])
    equal(table.slot_mapping(request, position), [*range(nnz - 1), -1])


@pytest.mark.gpu
def test_captured_tables_follow_their_arrays(rng):
    before, after = PagedCase((45, 0, 8, 25)), PagedCase((3, 80, 0, 17))
    table = PageTable(*(cp.zeros(n, np.int32) for n in (5, 20, 4)), 16)
    lens, dense = cp.zeros(4, np.int32), cp.zeros((4, 6), np.int32)
    batch_indices, positions, append_indptr = (cp.zeros(n, np.int64) for n in (9, 9, 5))

    def call():
        made = PageTable.from_block_table(dense, lens, 16)
        counted = PageTable.from_seq_lens(lens, 16, num_pages=30)
        handed = PageTable.from_seq_lens(lens, 16, dense[0])
        return (
            table.seq_lens,
            table.token_indptr,
            table.block_table(6),
            table.slot_mapping(batch_indices, positions),
            *batch_indices_positions(append_indptr, lens, 9),
            *(x for t in (made, counted, handed) for x in (t.indptr, t.indices, t.last_page_len)),
        )

    with captured(call) as (stream, graph, results):
        for case in (after, before):
            indices = np.full(len(table.indices), -1, np.int32)
            indices[: sum(case.pages)] = rng.permutation(40)[: sum(case.pages)]
            for array, values in (
                (table.indptr, indptr_of(case.pages)),
                (table.indices, indices),
                (table.last_page_len, case.last_page_len),
                (lens, case.kv_lens),
                (dense, rng.integers(0, 99, (4, 6))),
                (batch_indices, rng.integers(-1, 5, 9)),
                (positions, rng.integers(-1, 50, 9)),
                (append_indptr, [0, 1, 1, 3, 8]),
            ):
                array.set(np.asarray(values).astype(array.dtype), stream)
            graph.launch(stream)
            eager = call()
            stream.synchronize()
            for got, want in zip(results, eager, strict=True):
                equal(got, to_numpy(want), want.dtype)
            equal(results[0], case.kv_lens)


def test_lengths_beyond_the_dtype_are_refused():
    with pytest.raises(ValueError, match="int32 does not hold"):
        PageTable.from_seq_lens([2**33], 2**20, xp=np).seq_lens  # noqa: B018
    with pytest.raises(ValueError, match="int32 does not hold"):
        batch_indices_positions(np.array([0, 1]), np.array([2**40]), 1)


def test_builders_refuse_pages_that_cannot_be():
    with pytest.raises(ValueError, match="page 1 of request 0"):
        PageTable.from_seq_lens([33], 16, pages=[1, -2, 3], xp=np)
    with pytest.raises(ValueError, match="page 1 of request 0"):
        PageTable.from_block_table(np.array([[0, -1]]), [17], 16)
    with pytest.raises(ValueError, match="need 3 pages, got 2"):
        PageTable.from_seq_lens([12], 4, pages=range(10), num_pages=2, xp=np)
    for lens in ([12], np.array([12])):
        with pytest.raises(ValueError, match="num_pages=9, but pages names 4"):
            PageTable.from_seq_lens(lens, 4, pages=np.arange(4), num_pages=9)


def test_more_rows_than_tokens_are_refused():
    with pytest.raises(ValueError, match="request 0 has 2 tokens but 3 rows"):
        batch_indices_positions(np.array([0, 3]), np.array([2]), 3)
    assert batch_indices_positions([0, 2], np.array([2]), 2)[1].tolist() == [0, 1]
