"""PagedKVCache: append, gather and copy_pages bit for bit; attention on NumPy; messages.

Tests with the ``xp`` fixture run on both homes: against rows placed by hand.
"""

import threading

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from cases import (
    WAYS,
    DLPackOnly,
    PagedCase,
    captured,
    fake_cupy,
    indptr_of,
    on,
    poison,
    random_rows,
)
from tolerances import (
    ATTENTION_TANH,
    LSE,
    LSE_TANH,
    assert_close,
    assert_same_bits,
    bits,
    to_numpy,
)

from cukv import (
    PackedMask,
    PagedKVCache,
    PageTable,
    Plan,
    RaggedMask,
    RaggedTensor,
    batch_indices_positions,
    reference,
)
from cukv._arrays import as_dtype

FLOATS = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
BF16 = np.dtype(ml_dtypes.bfloat16)
INF = np.inf
# Empty requests, one token, a full page of 16, one over, FlashInfer's documented batch.
LENS = (45, 0, 8, 25, 22, 1, 16, 17, 0)


@pytest.fixture
def no_launch(monkeypatch):
    """Keep calls on arrays that are not there from asking a driver how large the GPU is."""
    monkeypatch.setattr("cukv._rows.num_sms", lambda device: 132)


def check_append(xp, case, way, rng, *, rows_of=lambda x: x, index_of=lambda x: x, **options):
    """Append rows in a way and compare all storage, poison included, with rows placed by hand."""
    arrays = case.arrays(rng)
    want = [store.copy() for store in case.stores(arrays.data)]
    rows = case.rows(way, rng)
    new = [random_rows(rng, (len(rows.at), *store.shape[2:]), store.dtype) for store in want]
    for store, values in zip(want, new, strict=True):
        case.write(arrays, store, values, rows.at)
    cache, table = case.nouns(arrays, xp)
    table = PageTable(*(index_of(x) for x in (table.indptr, table.indices, table.last_page_len)),
                      table.page_size)  # fmt: skip
    given = [rows_of(on(xp, x)) for x in new]
    where = case.where(rows, given[0])
    arguments = {name: index_of(on(xp, x)) for name, x in where.items()}
    cache.append(*given, table, **arguments, **options)
    for got, expected in zip(case.stores(cache.data), want, strict=True):
        assert_same_bits(got, expected)


# Append: every page size with both layouts and forms; index dtypes alternate.
PAGE_CASES = [
    PagedCase(LENS, page_size, layout=layout, form=form, index_dtype=index_dtype, head_dim=32)
    for page_size in (1, 3, 5, 16, 17, 48, 64, 256)
    for layout, form, index_dtype in (
        ("NHD", "5d", "int32"),
        ("NHD", "pair", "int64"),
        ("HND", "5d", "int64"),
        ("HND", "pair", "int32"),
    )
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", PAGE_CASES, ids=str)
def test_append_writes_its_rows_and_nothing_else(xp, case, way, rng):
    check_append(xp, case, way, rng)


# One element, odd and even dims that no vector divides, MLA's widths, many heads; two head dims.
DIMS: list[tuple[int, ...]] = [
    (1, 1),
    (3, 1),
    (2, 20),
    (3, 46),
    (5, 80),
    (2, 99),
    (1, 512),
    (1, 576),
    (8, 128),
    (128, 256),
]
DIMS += [(2, 192, 128), (4, 64, 128), (1, 576, 512), (2, 99, 20), (1, 1, 8), (7, 8, 16)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dims", DIMS, ids=lambda d: "x".join(map(str, d)))
def test_append_takes_any_heads_and_dims(xp, dims, layout, way, rng):
    form = "pair" if len(dims) == 3 else "5d"
    case = PagedCase((9, 0, 4, 1), 4, *dims, dtype="bfloat16", layout=layout, form=form)
    check_append(xp, case, way, rng)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [64, 33])
def test_append_copies_bits_of_every_dtype(xp, head_dim, dtype, rng):
    case = PagedCase((7, 3, 12), 4, 3, head_dim, dtype=dtype)
    for way in WAYS:
        check_append(xp, case, way, rng)


def strided(step, dtype=None):
    """Give a function that makes an index array a view of another with a stride."""

    def view(array):
        xp = np if isinstance(array, np.ndarray) else cp
        wide = xp.full((len(array), abs(step) + 1), 10**9, array.dtype if dtype is None else dtype)
        wide[:, 1] = array if step > 0 else array[::-1]
        return wide[:, 1][:: 1 if step > 0 else -1]

    return view


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("step", [1, 4, -1, -3])
def test_append_reads_index_arrays_of_any_stride(xp, step, index_dtype, way, rng):
    case = PagedCase((45, 8, 25, 22), index_dtype=index_dtype, head_dim=16)
    check_append(xp, case, way, rng, index_of=strided(step))


def test_index_arrays_of_one_call_may_differ(xp, rng):
    case = PagedCase((45, 8, 25, 22), head_dim=16)
    dtypes = iter(["int64", "int32", "int64", "int64", "int32"])
    for way in ("positions", "indptr"):
        check_append(xp, case, way, rng, index_of=lambda x: strided(2, next(dtypes, "int32"))(x))


def test_sequences_say_where_rows_go(xp, rng):
    case = PagedCase((45, 0, 25, 22), head_dim=16)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    rows = random_rows(rng, (4, 2, 16), "float16")
    there = on(xp, rows)
    cache.append(there, there, table, batch_indices=[3, 0, 2, 0], positions=(0, 5, 7, 44))
    for row, (request, position) in zip(rows, [(3, 0), (0, 5), (2, 7), (0, 44)], strict=True):
        page = arrays.indices[arrays.indptr[request] + position // 16]
        assert_same_bits(cache.k[int(page), position % 16], row)
        assert_same_bits(cache.v[int(page), position % 16], row)
    cache.append(there, there, table, indptr=[0, 1, 1, 3, 4])
    page = arrays.indices[arrays.indptr[2] + 1]
    assert_same_bits(cache.k[int(page), 7:9], rows[1:3])


# Padding of a batch padded for a graph: request -1, and rows past the last one.
@pytest.mark.parametrize("way", ["indptr", "positions"])
def test_padding_rows_are_written_nowhere(xp, way):
    data = np.full((6, 2, 4, 1, 8), 7, np.float16)
    cache = PagedKVCache(on(xp, data))
    table = PageTable(*(on(xp, np.array(x, np.int32)) for x in ([0, 1], [3], [2])), 4)
    rows = on(xp, np.arange(32, dtype=np.float16).reshape(4, 1, 8))
    if way == "indptr":
        cache.append(rows, rows, table, indptr=[0, 2])
    else:
        cache.append(
            rows,
            rows,
            table,
            batch_indices=[0, 0, -1, -1],
            positions=on(xp, np.array([0, 1, 0, 0])),
        )
    want = np.full((6, 2, 4, 1, 8), 7, np.float16)
    want[3, :, :2, 0] = np.arange(16).reshape(2, 8)
    assert_same_bits(cache.data, want)


def test_batch_indices_and_positions_are_those_of_the_helper(xp, rng):
    case = PagedCase((45, 0, 25, 22), head_dim=16)
    append_indptr, nnz = [0, 7, 7, 8, 30], 33
    filled = []
    for explicit in (False, True):
        cache, table = case.nouns(case.arrays(np.random.default_rng(1)), xp)
        rows = on(xp, random_rows(np.random.default_rng(2), (nnz, 2, 16), "float16"))
        where = {"indptr": append_indptr}
        if explicit:
            indptr = on(xp, np.array(append_indptr))
            pair = batch_indices_positions(indptr, table.seq_lens, nnz)
            where = dict(zip(("batch_indices", "positions"), pair, strict=True))
        cache.append(rows, rows, table, **where)
        filled.append(cache.data)
    assert_same_bits(filled[0], to_numpy(filled[1]))


# Even batches, where the guess of a row's request is right, and ones where it is far off.
COUNTS = {
    "even": [3] * 400,
    "one each": [1] * 1000,
    "one long among short ones": [1] * 500 + [3000] + [1] * 500,
    "all in the last": [0] * 700 + [900],
    "all in the first": [900] + [0] * 700,
    "growing": list(range(60)),
    "empty between": [0, 5, 0, 0] * 100,
}


@pytest.mark.parametrize("name", COUNTS)
def test_rows_find_their_requests_however_they_are_spread(xp, name, rng):
    counts = np.array(COUNTS[name])
    lens = counts + rng.integers(0, 9, len(counts))
    host = PageTable.from_seq_lens(lens, 4, rng.permutation(int((-(-lens // 4)).sum())), xp=np)
    nnz = int(counts.sum())
    request = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(nnz) - np.cumsum(counts)[request] + lens[request]
    page = host.indices[host.indptr[request] + position // 4]
    rows = rng.integers(0, 2**16, (nnz + 2, 1, 8), np.uint16).view(np.float16)
    want = poison((len(host.indices), 2, 4, 1, 8), np.dtype(np.float16))
    want[page, :, position % 4] = rows[:nnz, None]
    table = host if xp is np else host.to_device()
    cache = PagedKVCache(on(xp, poison(want.shape, want.dtype)))
    cache.append(on(xp, rows), on(xp, rows), table, indptr=on(xp, indptr_of(counts)))
    assert_same_bits(cache.data, want)


# Rows: the views that callers have.


def test_append_reads_slices_of_a_fused_projection(xp, rng):
    qkv = random_rows(rng, (5, (4 + 2 + 2) * 64), "bfloat16")
    case = PagedCase((5, 1), 4, 2, 64, dtype="bfloat16")
    for start in (0, 1, 3):  # the second and third start off a multiple of 16 bytes
        there = on(xp, np.concatenate([np.zeros((5, start), BF16), qkv], 1))[:, start:]
        k, v = (there[:, a : a + 128].reshape(5, 2, 64) for a in (256, 384))
        if xp is cp:
            assert cp.may_share_memory(k, there)
        cache, table = case.nouns(case.arrays(rng), xp)
        cache.append(k, v, table, indptr=[0, 4, 5])
        indices, indptr = to_numpy(table.indices), to_numpy(table.indptr)
        for store, at in ((cache.k, 256), (cache.v, 384)):
            rows = qkv[:, at : at + 128].reshape(5, 2, 64)
            first, second, third = (int(indices[i]) for i in (0, 1, indptr[1]))
            assert_same_bits(store[first, 1:4], rows[:3])
            assert_same_bits(store[second, :1], rows[3:4])
            assert_same_bits(store[third, :1], rows[4:])


def backwards(x):
    return x[::-1, ::-1].copy()[::-1, ::-1]


def padded(x):
    """Give rows one element into rows that are one element longer."""
    xp = np if isinstance(x, np.ndarray) else cp
    wide = xp.zeros((*x.shape[:2], x.shape[2] + 1), x.dtype)
    wide[..., 1:] = x
    return wide[..., 1:]


def shifted(x):
    """Give packed rows that start one element past a multiple of 16 bytes."""
    xp = np if isinstance(x, np.ndarray) else cp
    flat = xp.zeros(x.size + 1, x.dtype)
    flat[1:] = x.reshape(-1)
    return flat[1:].reshape(x.shape)


def every_other(x):
    xp = np if isinstance(x, np.ndarray) else cp
    wide = xp.zeros((2 * x.shape[0], 2 * x.shape[1], x.shape[2]), x.dtype)
    wide[::2, 1::2] = x
    return wide[::2, 1::2]


def heads_first(x):
    return RaggedTensor(x.swapaxes(0, 1).copy(), [0, x.shape[0]], "HND")


def ragged(x):
    return RaggedTensor(x, [0, x.shape[0]])


VIEWS = [backwards, padded, shifted, every_other, heads_first, ragged]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows_of", VIEWS, ids=lambda f: f.__name__)
def test_append_reads_rows_of_any_stride_and_alignment(xp, rows_of, layout, way, rng):
    for head_dim in (64, 20):
        case = PagedCase((9, 0, 4, 1), 4, 3, head_dim, layout=layout)
        check_append(xp, case, way, rng, rows_of=rows_of)


def appended(k, v, **where):
    """Append rows to three requests; give what the cache holds."""
    cache = PagedKVCache.empty(2, 16, 1, 8, "float64", xp=np)
    cache.data[...] = 0
    cache.append(k, v, PageTable.from_seq_lens([5, 0, 3], 16, xp=np), **where)
    return cache.data


def test_append_goes_by_the_offsets_of_ragged_rows(rng):
    k, v = rng.standard_normal((2, 4, 1, 8))
    ragged_k, ragged_v = (RaggedTensor(x, [0, 3, 3, 4]) for x in (k, v))
    want = appended(k, v, indptr=[0, 3, 3, 4])
    for rows in ((ragged_k, ragged_v), (ragged_k, v), (k, ragged_v)):
        assert_same_bits(appended(*rows), want)
    where = {"batch_indices": [2, 2, 0, 0], "positions": [0, 2, 1, 3]}
    for way in ({"indptr": [0, 2, 2, 4]}, where):  # and what is given comes first
        assert_same_bits(appended(ragged_k, ragged_v, **way), appended(k, v, **way))
    with pytest.raises(ValueError, match=r"append: k.indptr must be \[n=4\], got \[2\]"):
        appended(RaggedTensor(k, [0, 4]), v)
    with pytest.raises(ValueError, match=r"append: v.indptr must be \[n=4\], got \[2\]"):
        appended(ragged_k, RaggedTensor(v, [0, 4]))
    with pytest.raises(ValueError, match=r"append: k.indptr and v.indptr must be the same"):
        appended(ragged_k, RaggedTensor(v, [0, 1, 1, 4]))


def test_a_row_repeated_by_a_stride_of_zero_is_written_everywhere(xp, rng):
    case = PagedCase((3, 1), 4)
    cache, table = case.nouns(case.arrays(rng), xp)
    row = random_rows(rng, (1, 1, 64), "float16")
    rows = xp.broadcast_to(on(xp, row), (4, 2, 64))
    cache.append(rows, rows, table, indptr=[0, 3, 4])
    k, v = cache.gather(table, nnz=4)
    for got in (k, v):
        assert_same_bits(got.data, np.broadcast_to(row, (4, 2, 64)).copy())


# The same strides with one row, where the row stride does not count, and with more.
def test_many_rows_after_one_row_of_the_same_strides(xp, rng):
    case = PagedCase((5, 1), 8, 1, 64)
    buffer = random_rows(rng, (6, 65), "float16")
    cache, table = case.nouns(case.arrays(rng), xp)
    rows = on(xp, buffer)[:, None, :64]
    cache.append(rows[:1], rows[:1], table, indptr=[0, 1, 1])
    cache.append(rows, rows, table, indptr=[0, 5, 6])
    for got in cache.gather(table, nnz=6):
        assert_same_bits(got.data, buffer[:, None, :64].copy())


def test_rows_that_are_not_contiguous_raise_after_none_of_the_same_strides(no_launch):
    cache = PagedKVCache(fake_cupy((3, 2, 16, 2, 8)))
    table = PageTable(*(fake_cupy(n, "int32") for n in (2, 1, 1)), 16)
    rows = fake_cupy((5, 2, 16))[..., ::2]
    cache.append(rows[:0], rows[:0], table, indptr=fake_cupy(2, "int32"))
    with pytest.raises(ValueError, match="k must have a contiguous last axis, got strides"):
        cache.append(rows, rows, table, indptr=fake_cupy(2, "int32"))


def test_of_rows_for_one_slot_each_head_is_that_of_one_row(xp, rng):
    case = PagedCase((5,), 8)
    cache, table = case.nouns(case.arrays(rng), xp)
    rows = random_rows(rng, (200, 2, 64), "float16")
    where = {"batch_indices": np.zeros(200, np.int32), "positions": np.full(200, 3)}
    cache.append(*[on(xp, rows)] * 2, table, **{n: on(xp, x) for n, x in where.items()})
    k, _ = cache.gather(table, nnz=5)
    got = bits(k.data)[3]
    matches = [(got[head] == bits(rows)[:, head]).all(-1) for head in range(2)]
    assert all(m.any() for m in matches)


def test_requests_may_share_pages(xp, rng):
    # Two requests on one partly filled page, and a page that one request has twice.
    data = on(xp, poison((5, 2, 4, 2, 8), np.dtype(np.float16)))
    cache = PagedKVCache(data)
    shared = [on(xp, np.array(x, np.int32)) for x in ([0, 1, 2, 4], [3, 3, 2, 2], [3, 4, 4])]
    rows = random_rows(rng, (12, 2, 8), "float16")
    there = on(xp, rows)
    cache.append(
        there, there, PageTable(*shared, 4),
        batch_indices=[0, 0, 0, 1, 2, 2, 2, 2, -1, -1, -1, -1],
        positions=[0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0, 0],
    )  # fmt: skip
    k, _ = cache.gather(PageTable(*shared, 4), nnz=15)
    want = np.concatenate([rows[:3], rows[:4], rows[4:8], rows[4:8]])
    assert_same_bits(k.data, want)


# Storage: the views that engines have. What lies beside the view must stay as it is.
STORAGE = {  # name: (shape of the whole, view of it, layout)
    "a layer of each page": ((6, 3, 2, 4, 2, 8), lambda big: big[:, 1], "NHD"),
    "the first layer": ((6, 3, 2, 4, 2, 8), lambda big: big[:, 0], "NHD"),
    "a layer, heads first": ((6, 3, 2, 2, 4, 8), lambda big: big[:, 2], "HND"),
    "some pages": ((11, 2, 4, 2, 8), lambda big: big[2:8], "NHD"),
    "every other page": ((12, 2, 4, 2, 8), lambda big: big[::2], "NHD"),
    "pages backwards": ((6, 2, 4, 2, 8), lambda big: big[::-1], "NHD"),
    "some heads": ((6, 2, 4, 5, 8), lambda big: big[:, :, :, 1:5:2], "NHD"),
    "some columns": ((6, 2, 4, 2, 20), lambda big: big[..., 8:16], "NHD"),
    "columns off a vector": ((6, 2, 4, 2, 20), lambda big: big[..., 3:11], "NHD"),
    "page_size equal to heads": ((6, 2, 4, 4, 8), lambda big: big, "NHD"),
    "page_size equal to heads, heads first": ((6, 2, 4, 4, 8), lambda big: big, "HND"),
    "a pair of layers": ((6, 3, 4, 2, 8), lambda big: (big[:, 0], big[:, 2]), "NHD"),
    "K and V side by side": ((6, 4, 2, 24), lambda big: (big[..., :8], big[..., 8:]), "NHD"),
}


@pytest.mark.parametrize("name", STORAGE)
def test_append_gather_and_copy_stay_inside_views_of_larger_memory(xp, name, rng):
    shape, view_of, layout = STORAGE[name]
    whole = random_rows(rng, shape, "float16")
    want = whole.copy()
    memory = on(xp, whole.copy())
    cache = PagedKVCache(view_of(memory), layout)
    host = PagedKVCache(view_of(want), layout)
    host_stores = [s if layout == "NHD" else s.swapaxes(1, 2) for s in (host.k, host.v)]
    page_size, heads = host_stores[0].shape[1:3]
    lens, pages = np.array([2 * page_size + 1, 1]), np.array([4, 0, 5, 2])
    table = PageTable.from_seq_lens(on(xp, lens), page_size, on(xp, pages))
    nnz = int(lens.sum())
    new = [random_rows(rng, (nnz, heads, s.shape[-1]), "float16") for s in host_stores]
    cache.append(*(on(xp, x) for x in new), table, indptr=on(xp, indptr_of(lens)))
    for store, rows in zip(host_stores, new, strict=True):
        at = np.arange(nnz - 1)
        store[pages[at // page_size], at % page_size] = rows[:-1]
        store[2, 0] = rows[-1]
    for got, rows in zip(cache.gather(table, nnz=nnz), new, strict=True):
        assert_same_bits(got.data, rows)
    cache.copy_pages([4, 0, -1], [1, 4, 3])
    for store in host_stores:
        store[1], store[4] = store[4].copy(), store[0].copy()
    assert_same_bits(memory, want)


# Conversion: value / scale to fp8, saturating; NaN stays NaN, whichever NaN that is.
VALUES = [0.0, -0.0, 1.0, -1.5, 464.0, 500.0, -1e4, 1e-5, -1e-5, 448.0, 57344.0, 61440.0, 1e30]
VALUES += [INF, -INF, np.nan, 2.0**-9, 2.0**-10, 3 * 2.0**-11, 2.0**-16, 2.0**-24, 2.0**-25]
VALUES += [6e-8, 1.0 + 2.0**-11, 1.0 + 3 * 2.0**-9, 240.5, 65504.0, 65520.0, 1e-40, 0.3, 17.0]


def values_of(rng, shape, dtype):
    """Draw rows with every kind of value: special ones, subnormals, and any bits."""
    dtype = as_dtype("test", "dtype", dtype)
    with np.errstate(all="ignore"):
        flat = rng.choice(np.array(VALUES, np.float32), int(np.prod(shape))).astype(dtype)
    some = rng.random(flat.size) < 0.3
    unsigned = f"u{dtype.itemsize}"
    high = int(np.iinfo(unsigned).max)
    flat.view(unsigned)[some] = rng.integers(0, high, some.sum(), unsigned, endpoint=True)
    return flat.reshape(shape)


def assert_same_values(got, want):
    """Compare bit for bit, but for which NaN a NaN is."""
    got, want = to_numpy(got), to_numpy(want)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    assert_same_bits(np.where(nan, 0, bits(got)), np.where(nan, 0, bits(want)))


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("head_dim", [16, 9])
@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_append_converts_between_all_dtypes(xp, dtype, to, head_dim, scale, rng):
    case = PagedCase((64, 0, 65), 16, 2, head_dim, dtype=to)
    arrays = case.arrays(rng)
    new = [values_of(rng, (129, 2, head_dim), dtype) for _ in range(2)]
    want = [store.copy() for store in case.stores(arrays.data)]
    at = [(0, t) for t in range(64)] + [(2, t) for t in range(65)]
    scales = {"k_scale": scale, "v_scale": 1.0} if to.startswith("float8") else {}
    for store, rows, k in zip(want, new, (scale if scales else 1.0, 1.0), strict=True):
        case.write(arrays, store, reference.convert(rows, store.dtype, k), at)
    cache, table = case.nouns(arrays, xp)
    cache.append(*(on(xp, x) for x in new), table, indptr=[0, 64, 64, 129], **scales)
    for got, expected in zip(case.stores(cache.data), want, strict=True):
        (assert_same_bits if dtype == to else assert_same_values)(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_fp8_saturates_and_keeps_nan(xp, dtype):
    rows = np.array([500, -1e4, 464, INF, np.nan, 1e-5, 3, 0], np.float32).astype(dtype)
    for scale, want in (
        (1.0, [448, -448, 448, 448, np.nan, 0, 3, 0]),
        (0.5, [448, -448, 448, 448, np.nan, 0, 6, 0]),
        (2.0, [256, -448, 224, 448, np.nan, 0, 1.5, 0]),
    ):
        cache = PagedKVCache(on(xp, np.zeros((1, 2, 1, 1, 8), ml_dtypes.float8_e4m3fn)))
        table = PageTable(*(on(xp, np.array(x, np.int32)) for x in ([0, 1], [0], [1])), 1)
        there = on(xp, rows.reshape(1, 1, 8))
        cache.append(there, there, table, k_scale=scale)
        got = to_numpy(cache.k).astype(np.float32).ravel()
        np.testing.assert_array_equal(got, np.array(want, np.float32))
        assert to_numpy(cache.v).astype(np.float32)[0, 0, 0, 6] == 3  # v has its own scale


# Every kind of scalar; a float32 array on the device is read by the kernel.
HALF = {
    "float": 0.5,
    "float32": np.float32(0.5),
    "float64": np.float64(0.5),
    "float16": np.float16(0.5),
    "bfloat16": ml_dtypes.bfloat16(0.5),
    "0-d": np.array(0.5),
    "one element": np.array([0.5], np.float32),
}


@pytest.mark.parametrize("kind", HALF)
def test_a_scale_may_be_any_scalar(xp, kind, rng):
    case = PagedCase((5, 3), 4, dtype="float8_e4m3fn")
    cache, table = case.nouns(case.arrays(rng), xp)
    rows = random_rows(rng, (8, 2, 64), "bfloat16")
    there = on(xp, rows)
    cache.append(there, there, table, indptr=[0, 5, 8], k_scale=HALF[kind], v_scale=2)
    k, v = cache.gather(table, nnz=8)
    assert_same_bits(k.data, reference.convert(rows, cache.dtype, 0.5))
    assert_same_bits(v.data, reference.convert(rows, cache.dtype, 2.0))
    k, v = cache.gather(table, nnz=8, dtype="float32", k_scale=HALF[kind], v_scale=2)
    want = reference.convert(rows, cache.dtype, 0.5).astype(np.float32) * np.float32(0.5)
    assert_same_bits(k.data, want)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_on_the_device_is_read_by_the_kernel(shape, rng):
    case = PagedCase((5, 3), 4, dtype="float8_e5m2")
    cache, table = case.nouns(case.arrays(rng), cp)
    rows = random_rows(rng, (8, 2, 64), "bfloat16")
    there, scale = cp.asarray(rows), cp.full(shape, 0.25, np.float32)
    cache.append(there, there, table, indptr=[0, 5, 8], k_scale=scale, v_scale=DLPackOnly(scale))
    for dtype in (None, "float16"):
        options = {} if dtype is None else {"dtype": dtype, "k_scale": scale, "v_scale": scale}
        for got in cache.gather(table, nnz=8, **options):
            want = reference.convert(rows, cache.dtype, 0.25)
            if dtype is not None:
                want = (want.astype(np.float32) * np.float32(0.25)).astype(np.float16)
            assert_same_bits(got.data, want)


@pytest.mark.gpu
def test_every_argument_may_speak_nothing_but_dlpack(rng):
    case = PagedCase((45, 8, 25, 22))
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, cp)
    theirs = PageTable(DLPackOnly(table.indptr), to_numpy(table.indices).tolist(),
                       to_numpy(table.last_page_len).tolist(), 16)  # fmt: skip
    rows = random_rows(rng, (4, 2, 64), "float16")
    where = cp.arange(4), cp.asarray(table.seq_lens - 1)
    cache.append(
        DLPackOnly(cp.asarray(rows)), DLPackOnly(cp.asarray(rows)), theirs,
        batch_indices=DLPackOnly(where[0]), positions=DLPackOnly(where[1]),
    )  # fmt: skip
    k, _ = cache.gather(table, nnz=100)
    assert_same_bits(to_numpy(k.data)[np.cumsum(case.kv_lens) - 1], rows)


# Gather


@pytest.mark.parametrize("case", PAGE_CASES, ids=str)
def test_gather_gives_the_rows_of_every_request(xp, case, rng):
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    for nnz in (None, case.nnz, case.nnz + 5):
        for got, want in zip(cache.gather(table, nnz=nnz), (arrays.k, arrays.v), strict=True):
            length = len(arrays.indices) * case.page_size if nnz is None else nnz
            assert got.nnz == length
            assert got.layout == "NHD"
            assert to_numpy(got.indptr).tolist() == np.cumsum([0, *case.kv_lens]).tolist()
            assert_same_bits(got.data[: case.nnz], want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dims", DIMS, ids=lambda d: "x".join(map(str, d)))
def test_gather_takes_any_heads_and_dims(xp, dims, layout, rng):
    form = "pair" if len(dims) == 3 else "5d"
    case = PagedCase((9, 0, 4, 1), 4, *dims, dtype="bfloat16", layout=layout, form=form)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    for got, want in zip(cache.gather(table, nnz=14), (arrays.k, arrays.v), strict=True):
        assert_same_bits(got.data, want)


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("head_dim", [16, 9])
@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gather_converts_between_all_dtypes(xp, dtype, to, head_dim, scale, rng):
    case = PagedCase((64, 0, 65), 16, 2, head_dim, dtype=dtype)
    arrays = case.arrays(rng)
    rows = [values_of(rng, (129, 2, head_dim), dtype) for _ in range(2)]
    at = [(0, t) for t in range(64)] + [(2, t) for t in range(65)]
    for store, values in zip(case.stores(arrays.data), rows, strict=True):
        case.write(arrays, store, values, at)
    cache, table = case.nouns(arrays, xp)
    scales = {} if dtype == to else {"k_scale": scale}
    got = cache.gather(table, nnz=129, dtype=to, **scales)
    for x, values, factor in zip(got, rows, (scale, 1.0), strict=True):
        if dtype == to:
            assert_same_bits(x.data, values)
            continue
        with np.errstate(all="ignore"):
            product = values.astype(np.float32) * np.float32(factor)
        assert_same_values(x.data, reference.convert(product, as_dtype("test", "to", to)))


@pytest.mark.gpu
def test_tokens_on_a_page_out_of_range_are_zero_and_the_others_kept(rng):
    case = PagedCase((9, 4, 6), 4)
    arrays = case.arrays(rng)
    indices = arrays.indices.copy()
    indices[1], indices[3] = -1, case.max_num_pages
    cache, _ = case.nouns(arrays, cp)
    table = PageTable(*map(cp.asarray, (arrays.indptr, indices, arrays.last_page_len)), 4)
    for got, rows in zip(cache.gather(table, nnz=19), (arrays.k, arrays.v), strict=True):
        want = rows.copy()
        want[4:8] = want[9:13] = 0
        assert_same_bits(got.data, want)


@pytest.mark.gpu
def test_gather_stops_at_the_length_it_is_given(rng):
    case = PagedCase((9, 4, 6), 4)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, cp)
    k, _ = cache.gather(table, nnz=11)
    assert_same_bits(k.data, arrays.k[:11])


def test_gather_reads_index_arrays_of_any_stride(xp, rng):
    case = PagedCase((45, 8, 25, 22), index_dtype="int64")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    parts = (strided(-3)(x) for x in (table.indptr, table.indices, table.last_page_len))
    for got, want in zip(
        cache.gather(PageTable(*parts, 16), nnz=100), (arrays.k, arrays.v), strict=True
    ):
        assert_same_bits(got.data, want)


# copy_pages: swaps, chains, a page onto itself, pairs to skip; as if all were read first.
COPIES = {
    "one": ([2], [5]),
    "swap": ([1, 4], [4, 1]),
    "chain": ([0, 1, 2, 3], [1, 2, 3, 4]),
    "rotation": ([0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 0]),
    "one source": ([3, 3, 3], [0, 1, 2]),
    "itself": ([2, 3], [2, 3]),
    "negative": ([-1, 2, -5, 4], [3, -1, -1, 0]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", COPIES)
def test_copied_pages_are_as_if_all_were_read_first(xp, name, index_dtype, rng):
    src, dst = (np.array(x, index_dtype) for x in COPIES[name])
    for dims, form, layout, dtype in (
        ((2, 64), "5d", "NHD", "float16"),
        ((3, 9), "5d", "HND", "float8_e5m2"),
        ((2, 33, 5), "pair", "HND", "bfloat16"),
        ((1, 3, 1), "pair", "NHD", "float32"),
    ):
        case = PagedCase((9, 0, 4, 1), 4, *dims, dtype=dtype, form=form, layout=layout)
        arrays = case.arrays(rng)
        want = [store.copy() for store in case.stores(arrays.data)]
        before = [store.copy() for store in want]
        for store, old in zip(want, before, strict=True):
            for a, b in zip(src, dst, strict=True):
                if a >= 0 and b >= 0:
                    store[b] = old[a]
        cache, _ = case.nouns(arrays, xp)
        cache.copy_pages(on(xp, src), on(xp, dst))
        for got, expected in zip(case.stores(cache.data), want, strict=True):
            assert_same_bits(got, expected)


def test_pages_to_copy_may_be_sequences_and_strided(xp, rng):
    case = PagedCase((9, 4), 4)
    want = case.arrays(rng).data
    want[[0, 3]] = want[[3, 0]]
    for swap in (lambda x: x, lambda x: strided(2)(on(xp, np.array(x)))):
        cache, _ = case.nouns(case.arrays(np.random.default_rng(20240)), xp)
        cache.copy_pages(swap([0, 3]), swap((3, 0)))
        assert_same_bits(cache.data, want)


@pytest.mark.gpu
def test_a_page_out_of_range_is_not_copied_on_the_device(rng):
    case = PagedCase((9, 4), 4)
    cache, _ = case.nouns(case.arrays(rng), cp)
    want = to_numpy(cache.data).copy()
    n = case.max_num_pages
    cache.copy_pages([n, 0, 2**31 - 1, 1, 2], [1, n, 3, -(2**31), 5])
    want[5] = want[2]
    assert_same_bits(cache.data, want)


def test_a_page_out_of_range_raises_on_numpy_and_nothing_is_copied(rng):
    case = PagedCase((9, 4), 4)
    arrays = case.arrays(rng)
    want = arrays.data.copy()
    cache, _ = case.nouns(arrays)
    n = case.max_num_pages
    for src, dst, name in (([0, n], [1, 2], "src"), ([0, 1], [3, n], "dst")):
        with pytest.raises(
            ValueError,
            match=rf"^PagedKVCache.copy_pages: {name}\[1\] must be below {n} pages, got {n}",
        ):
            cache.copy_pages(src, dst)
    assert_same_bits(arrays.data, want)


def test_a_forked_page_is_its_own(xp, rng):
    # Two requests share a full page; the partly filled one behind it is copied before they go on.
    cache = PagedKVCache(on(xp, poison((6, 2, 4, 1, 8), np.dtype(np.float16))))
    rows = random_rows(rng, (8, 1, 8), "float16")
    there = on(xp, rows)
    first = PageTable.from_seq_lens([6], 4, on(xp, np.array([2, 5])))
    cache.append(there[:6], there[:6], first, indptr=[0, 6])
    cache.copy_pages([5], [1])
    both = PageTable.from_seq_lens([7, 7], 4, on(xp, np.array([2, 5, 2, 1])))
    cache.append(there[6:], there[6:], both)
    k, _ = cache.gather(both, nnz=14)
    want = np.concatenate([rows[:6], rows[6:7], rows[:6], rows[7:8]])
    assert_same_bits(k.data, want)


# Empty things


def test_nothing_to_do_is_done_without_a_launch(no_launch):
    # These arrays are not there: a launch would fail.
    cache = PagedKVCache(fake_cupy((3, 2, 16, 2, 8)))
    table = PageTable(*(fake_cupy(n, "int32") for n in (2, 1, 1)), 16)
    rows = fake_cupy((0, 2, 8))
    cache.append(rows, rows, table, indptr=fake_cupy(2, "int32"))
    cache.append(rows, rows, table, batch_indices=fake_cupy(0, "int32"),
                 positions=fake_cupy(0, "int64"))  # fmt: skip
    nobody = PageTable(*(fake_cupy(n, "int32") for n in (1, 0, 0)), 16)
    cache.append(rows, rows, nobody)
    some = fake_cupy((4, 2, 8))
    cache.append(some, some, nobody)
    cache.append(some, some, nobody, indptr=fake_cupy(1, "int32"))
    cache.copy_pages(fake_cupy(0, "int32"), fake_cupy(0, "int64"))
    PagedKVCache(fake_cupy((0, 2, 16, 2, 8))).append(
        some, some, table, indptr=fake_cupy(2, "int32")
    )


def test_empty_shapes_give_empty_results(xp):
    for pages, heads, lens in ((0, 2, []), (0, 2, [0, 0]), (3, 0, [5]), (3, 2, [])):
        cache = PagedKVCache(on(xp, np.zeros((pages, 2, 4, heads, 8), np.float16)))
        table = PageTable.from_seq_lens(on(xp, np.array(lens, np.int64)), 4, on(xp, np.arange(2)))
        rows = on(xp, np.zeros((len(lens), heads, 8), np.float16))
        cache.append(rows, rows, table)
        k, v = cache.gather(table, nnz=sum(lens))
        assert k.data.shape == v.data.shape == (sum(lens), heads, 8)
        assert to_numpy(k.indptr).tolist() == [0, *np.cumsum(lens)]
        cache.copy_pages([], [])


# On the device: large memory, large batches, anything in the tables


def release():
    cp.get_default_memory_pool().free_all_blocks()


# Page ids times page strides beyond 32 bits, of elements and of bytes: one cache, and one layer of
# a cache that packs 32 layers into a page of 2^20 elements.
@pytest.mark.gpu
@pytest.mark.parametrize("packed_layers", [False, True])
def test_offsets_are_64_bit(packed_layers, rng):
    shape = (2101, 32, 2, 16, 8, 128) if packed_layers else (70_000, 2, 16, 8, 128)
    whole = cp.empty(shape, np.uint16)
    layer = whole[:, 0] if packed_layers else whole
    cache = PagedKVCache(layer.view(BF16))
    last = cache.max_num_pages - 1
    rows = [random_rows(rng, (5, 8, 128), "bfloat16") for _ in range(2)]
    for page in (0, 1, last - 1, last):
        layer[page] = 0
    table = PageTable.from_seq_lens([5, 5], 16, cp.array([0, last]))
    cache.append(*(cp.asarray(np.concatenate([x, x])) for x in rows), table, indptr=[0, 5, 10])
    for got, store, want in zip(cache.gather(table, nnz=10), (cache.k, cache.v), rows, strict=True):
        assert_same_bits(got.data[:5], want)
        assert_same_bits(got.data[5:], want)
        assert_same_bits(store[0], store[last])
        assert not bits(store[1]).any()
    cache.copy_pages([last], [last - 1])
    assert_same_bits(cache.k[last - 1], cache.k[0])
    del whole, layer, cache, store
    release()


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_three_hundred_thousand_requests_of_one_token(way, rng):
    n = 300_000
    pages = rng.permutation(n).astype(np.int32)
    rows = rng.integers(0, 2**15, (n, 1, 8), np.uint16).view(np.float16)
    table = PageTable.from_seq_lens(cp.ones(n, np.int32), 1, cp.asarray(pages))
    cache = PagedKVCache(cp.full((n, 2, 1, 1, 8), 7, np.float16))
    where = {"indptr": cp.arange(n + 1)} if way == "indptr" else {}
    if way == "positions":
        where = {"batch_indices": cp.arange(n), "positions": cp.zeros(n, np.int32)}
    there = cp.asarray(rows)
    cache.append(there, there, table, **where)
    for store in (cache.k, cache.v):
        assert_same_bits(to_numpy(store)[pages, 0], rows)
    for got in cache.gather(table, nnz=n):
        assert_same_bits(got.data, rows)


@pytest.mark.gpu
def test_one_request_of_a_million_tokens(rng):
    n = 1_000_001
    pages = rng.permutation(-(-n // 16)).astype(np.int32)
    rows = rng.integers(0, 2**15, (n, 1, 8), np.uint16).view(np.float16)
    table = PageTable.from_seq_lens([n], 16, cp.asarray(pages))
    cache = PagedKVCache(cp.full((len(pages), 2, 16, 1, 8), 7, np.float16))
    there = cp.asarray(rows)
    cache.append(there, there, table, indptr=[0, n])
    got = to_numpy(cache.v)[pages].reshape(-1, 1, 8)
    assert_same_bits(got[:n], rows)
    assert (got[n:] == 7).all()
    for result in cache.gather(table, nnz=n):
        assert_same_bits(result.data, rows)


def garbage(rng, n, dtype, kind):
    """Draw what an index array must never hold."""
    info = np.iinfo(dtype)
    if kind == "any bits":
        return rng.integers(info.min, info.max, n, dtype, endpoint=True)
    if kind == "near":
        return rng.integers(-5, 40, n).astype(dtype)
    extremes = np.array([info.min, info.min + 1, -1, 0, 1, info.max - 1, info.max], dtype)
    return rng.choice(extremes, n)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["any bits", "near", "extremes"])
def test_garbage_in_a_table_touches_nothing_outside_the_storage(kind, index_dtype, way, rng):
    guard, shape = 1 << 16, (12, 2, 4, 3, 20)
    size = int(np.prod(shape)) * 2
    memory = cp.full(guard + size + guard, 0xA5, np.uint8)
    cache = PagedKVCache(memory[guard : guard + size].view(np.float16).reshape(shape))
    rows = cp.ones((50, 3, 20), np.float16)

    def index(n):
        return cp.asarray(garbage(rng, n, index_dtype, kind))

    for _ in range(30):
        batch_size = int(rng.integers(1, 40))
        table = PageTable(index(batch_size + 1), index(30), index(batch_size), 4)
        where = {}
        if way == "indptr":
            where = {"indptr": index(batch_size + 1)}
        elif way == "positions":
            where = {"batch_indices": index(50), "positions": index(50)}
        cache.append(rows, rows, table, **where)
        cache.gather(table)
        cache.gather(table, nnz=77, dtype="float32")
        cache.copy_pages(index(9), index(9))
        assert (memory[:guard] == 0xA5).all()
        assert (memory[guard + size :] == 0xA5).all()


# On the device: streams, graphs, threads


@pytest.mark.gpu
def test_append_and_gather_follow_the_current_stream(rng):
    case = PagedCase((45, 8, 25, 22))
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, cp)
    want = random_rows(rng, (4, 2, 64), "float16")
    later, rows = cp.asarray(want), cp.zeros((4, 2, 64), np.float16)
    slow = cp.zeros(1 << 24, np.float32)
    cp.cuda.Device().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        for _ in range(20):
            slow += 1
        rows[:] = later  # not there yet when append is called
        cache.append(rows, rows, table)
        k, v = cache.gather(table, nnz=100)
        stream.synchronize()
    for got in (k, v):
        assert_same_bits(to_numpy(got.data)[np.cumsum(case.kv_lens) - 1], want)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_captured_append_follows_its_arrays(way, rng):
    before, after = PagedCase((45, 8, 25, 22)), PagedCase((3, 0, 80, 17))
    nnz = 60
    scale = cp.ones(1, np.float32)
    cache = PagedKVCache(poisoned_on_device((20, 2, 16, 2, 64)))
    table = PageTable(cp.asarray(indptr_of(before.pages)), cp.arange(30, dtype=np.int32) % 20,
                      cp.asarray(np.array(before.last_page_len, np.int32)), 16)  # fmt: skip
    rows = cp.zeros((nnz, 2, 64), BF16)
    where = {"indptr": cp.array([0, 1, 2, 3, 4])} if way == "indptr" else {}
    if way == "positions":
        where = {"batch_indices": cp.zeros(nnz, np.int64), "positions": cp.zeros(nnz, np.int32)}

    def call():
        cache.append(rows, rows, table, **where, k_scale=scale, v_scale=scale)

    with captured(call) as (stream, graph, _):
        for step, case in enumerate((after, before, after)):
            pages = rng.permutation(20)[: sum(case.pages)].astype(np.int32)
            indices = np.concatenate([pages, np.full(30 - len(pages), -1, np.int32)])
            table.indptr.set(indptr_of(case.pages), stream)
            table.indices.set(indices, stream)
            table.last_page_len.set(np.array(case.last_page_len, np.int32), stream)
            values = random_rows(rng, (nnz, 2, 64), "bfloat16")
            rows.set(values, stream)
            scale.fill(0.5 + step)
            chosen = case.rows(way, rng)
            arguments = dict(chosen.arguments)
            if way == "indptr":
                counts = [min(n, 15) for n in case.kv_lens]
                arguments["indptr"] = indptr_of(counts)
            elif way == "positions":
                for name, padding in (("batch_indices", -1), ("positions", 0)):
                    full = np.full(nnz, padding)
                    part = arguments[name][:nnz]
                    full[: len(part)] = part
                    arguments[name] = full
            for name, array in where.items():
                array.set(np.asarray(arguments[name]).astype(array.dtype), stream)
            stored = cp.asarray(poison((20, 2, 16, 2, 64), np.dtype(np.uint8)))
            cache.data.view(np.uint8)[...] = stored
            eager = PagedKVCache(stored.view(cache.dtype))
            graph.launch(stream)
            eager.append(rows, rows, table, **where, k_scale=scale, v_scale=scale)
            stream.synchronize()
            assert_same_bits(cache.data, to_numpy(eager.data))


def poisoned_on_device(shape):
    """Make fp8 memory of NaNs on the GPU."""
    return cp.asarray(poison(shape, np.dtype(np.uint8))).view(ml_dtypes.float8_e4m3fn)


@pytest.mark.gpu
def test_a_captured_gather_follows_its_arrays(rng):
    case = PagedCase((45, 8, 25, 22))
    cache, table = case.nouns(case.arrays(rng), cp)

    def call():
        return cache.gather(table, nnz=200, dtype="float32", k_scale=2.0)

    with captured(call) as (stream, graph, (k, v)):
        for lens in ((1, 60, 0, 3), (16, 16, 16, 16)):
            other = PagedCase(lens)
            arrays = other.arrays(rng)
            indices = np.full(len(table.indices), -1, np.int32)
            own = int(arrays.indptr[-1])
            indices[:own] = arrays.indices[:own]
            for mine, theirs in (
                (table.indptr, arrays.indptr),
                (table.indices, indices),
                (table.last_page_len, arrays.last_page_len),
            ):
                mine.set(theirs, stream)
            data = cache.data
            data[: len(arrays.data)] = cp.asarray(arrays.data[: len(data)])
            graph.launch(stream)
            stream.synchronize()
            nnz = sum(lens)
            assert to_numpy(k.indptr).tolist() == np.cumsum([0, *lens]).tolist()
            assert_same_bits(k.data[:nnz], 2 * arrays.k.astype(np.float32))
            assert_same_bits(v.data[:nnz], arrays.v.astype(np.float32))


@pytest.mark.gpu
def test_a_captured_copy_writes_nothing_but_the_cache(rng):
    pages = random_rows(rng, (8, 2, 4, 2, 64), "float16")
    cache = PagedKVCache(cp.asarray(pages))
    src, dst = cp.array([0, 1, 2]), cp.array([1, 2, 0])
    with captured(lambda: cache.copy_pages(src, dst)) as (stream, graph, _):
        # Memory of the capture that went back to the pool would be among these.
        others = [cp.full(n, 7, np.uint8) for n in (512, 3 * 4 * 2 * 64 * 2) for _ in range(64)]
        cache.data.set(pages, stream)
        src.set(np.array([7, 6, 5]), stream)
        dst.set(np.array([6, 7, 5]), stream)
        graph.launch(stream)
        stream.synchronize()
        assert all((x == 7).all() for x in others)
    want = pages.copy()
    want[[6, 7]] = want[[7, 6]]
    assert_same_bits(cache.data, want)


@pytest.mark.gpu
def test_appending_twice_gives_the_same_bits(rng):
    case = PagedCase((45, 0, 300, 22), 16, 8, 128, dtype="float8_e4m3fn")
    rows = cp.asarray(random_rows(rng, (367, 8, 128), "bfloat16"))
    results = []
    for _ in range(3):
        cache, table = case.nouns(case.arrays(np.random.default_rng(3)), cp)
        cache.append(rows, rows, table, indptr=indptr_of(case.kv_lens).tolist(), k_scale=0.3)
        results.append([to_numpy(cache.data), to_numpy(cache.gather(table, nnz=367)[0].data)])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_same_bits(got, want)


@pytest.mark.gpu
def test_a_new_thread_appends_as_its_first_use_of_the_gpu(rng):
    case = PagedCase((45, 8, 25, 22), dtype="float32")
    cache, table = case.nouns(case.arrays(rng), cp)
    rows = cp.full((4, 2, 64), 3, np.float32)
    cache.append(rows * 0, rows * 0, table)  # loaded
    cp.cuda.Device().synchronize()
    failures = []

    def work():
        try:
            cache.append(rows, rows, table)
            cp.cuda.Device().synchronize()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    k, _ = cache.gather(table, nnz=100)
    assert (to_numpy(k.data)[np.cumsum(case.kv_lens) - 1] == 3).all()


@pytest.mark.gpu
def test_threads_append_side_by_side(rng):
    case = PagedCase((45, 8, 25, 22), dtype="float32")
    arrays = case.arrays(rng)
    caches = [case.nouns(arrays, cp) for _ in range(8)]
    rows = [cp.full((4, 2, 64), i, np.float32) for i in range(8)]
    cp.cuda.Device().synchronize()

    def work(i):
        cache, table = caches[i]
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                cache.append(rows[i], rows[i], table)
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (cache, table) in enumerate(caches):
        k, _ = cache.gather(table, nnz=100)
        assert (to_numpy(k.data)[np.cumsum(case.kv_lens) - 1] == i).all()


# Attention, on NumPy: against the definitions, and the values that are known by hand


def one_request(q, k, v, *, layout="NHD", page_size=4, kv_len=None):
    """Make (queries, cache, table) of one request with NaN wherever nobody should look."""
    kv_len = len(k) if kv_len is None else kv_len
    pages = -(-kv_len // page_size)
    stores = []
    for rows in (k, v):
        store = poison((2 * pages + 3, page_size, *rows.shape[1:]), rows.dtype)
        at = np.arange(kv_len)
        store[2 * (at // page_size) + 1, at % page_size] = rows
        stores.append(store if layout == "NHD" else store.swapaxes(1, 2).copy())
    table = PageTable.from_seq_lens([kv_len], page_size, 1 + 2 * np.arange(pages))
    return RaggedTensor(q, [0, len(q)]), PagedKVCache(tuple(stores), layout), table


def every_entry(q, k, v, *, causal=False, custom_mask=None, **options):
    """Attend with decode where there is one row, paged prefill and ragged prefill: all equal."""
    found = []
    for layout, page_size in (("NHD", 4), ("HND", 4), ("NHD", 1), ("NHD", 64)):
        ragged_q, cache, table = one_request(q, k, v, layout=layout, page_size=page_size)
        call = options | {"return_lse": True}
        masked = call | {"causal": causal, "custom_mask": custom_mask}
        found.append(cache.prefill(ragged_q, table, **masked))
        if len(q) == 1 and custom_mask is None:
            found.append(cache.decode(q, table, **call))
    keys, values = (RaggedTensor(x, [0, len(x)]) for x in (k, v))
    found.append(ragged_q.prefill(keys, values, **masked))
    for o, lse in found[1:]:
        assert_same_bits(o, found[0][0])
        assert_same_bits(lse, found[0][1])
    return found[0]


def column(*values, dtype="float32"):
    """Make [n, 1, 1] rows."""
    return np.array(values, np.float32).astype(dtype).reshape(-1, 1, 1)


def test_decode_and_prefill_are_the_definitions(rng):
    for dtype, layout, form in (("bfloat16", "NHD", "5d"), ("float16", "HND", "pair")):
        case = PagedCase((45, 0, 8, 25), 16, 2, 64, dtype=dtype, layout=layout, form=form)
        arrays = case.arrays(rng)
        cache, table = case.nouns(arrays)
        k, v = case.stores(arrays.data)
        csr = (arrays.indptr, arrays.indices, arrays.last_page_len)
        options = {
            "sm_scale": 0.3, "window_left": 20, "logits_soft_cap": 5.0,
            "sinks": np.array([0.5, -1.0, 2.0, -INF], np.float32),
            "q_scale": 0.5, "k_scale": 2.0, "v_scale": 3.0,
        }  # fmt: skip
        q = case.queries(rng, 4, 4)
        got = cache.decode(q, table, return_lse=True, **options)
        want = reference.decode(q, k, v, *csr, **options)
        assert got[0].dtype.name == dtype
        assert got[1].dtype == np.float32
        bound, scale = ATTENTION_TANH[dtype], 3 * np.abs(arrays.v.astype(np.float32)).max()
        assert_close(got[0], want[0], bound, scale=scale)
        assert_close(got[1], want[1], LSE_TANH)
        q = case.queries(rng, 60, 4)
        lens = np.array([45, 3, 0, 12])
        for causal in (False, True):
            ragged_q = RaggedTensor(q, indptr_of(lens))
            got = cache.prefill(ragged_q, table, return_lse=True, causal=causal, **options)
            want = reference.prefill(q, ragged_q.indptr, k, v, *csr, causal=causal, **options)
            assert_close(got[0], want[0], bound, scale=scale)
            assert_close(got[1], want[1], LSE_TANH)


def test_a_request_without_keys_is_zero_and_its_lse_minus_infinity(rng):
    case = PagedCase((5, 0, 3))
    cache, table = case.nouns(case.arrays(rng))
    q = case.queries(rng, 3, 4)
    out, lse = np.full(q.shape, np.nan, np.float16), np.full((3, 4), 7, np.float32)
    cache.decode(q, table, out=out, lse=lse)
    assert not bits(out[1]).any()
    assert (lse[1] == -INF).all()
    assert np.isfinite(out.astype(np.float32)).all()
    assert np.isfinite(lse[[0, 2]]).all()
    cache.decode(q, table, out=out, lse=lse, sinks=np.full(4, 2.0))
    assert not bits(out[1]).any()
    assert_close(lse[1], np.full(4, 2 * np.log2(np.e)), LSE)


def test_masked_rows_are_zero_and_their_lse_minus_infinity(rng):
    q, k, v = (random_rows(rng, (n, 2, 8), "float32") for n in (5, 3, 3))
    o, lse = every_entry(q, k, v, causal=True)
    assert not bits(o[:2]).any()
    assert (lse[:2] == -INF).all()
    assert np.isfinite(lse[2:]).all()
    mask = np.ones((5, 3), bool)
    mask[3] = False
    ragged = RaggedMask(mask.reshape(-1), [0, 5], [0, 3])
    o, lse = every_entry(q, k, v, custom_mask=ragged)
    assert not bits(o[3]).any()
    assert (lse[3] == -INF).all()
    # The window leaves only key i + 3 - 5, and the mask drops that.
    only = np.array([[True, True, False]])
    o, lse = every_entry(
        q[:1], k, v, custom_mask=RaggedMask(only.reshape(-1), [0, 1], [0, 3]), window_left=0
    )
    assert not bits(o).any()
    assert (lse == -INF).all()


def test_causal_is_aligned_to_the_end():
    v = column(*range(5))
    o, _ = every_entry(column(1, 1), column(*[0] * 5), v, causal=True)
    np.testing.assert_allclose(o.ravel(), [1.5, 2.0], rtol=1e-6)
    o, _ = every_entry(column(1), column(*[0] * 9), column(*range(9)), causal=True)
    np.testing.assert_allclose(o.ravel(), [4.0], rtol=1e-6)
    o, _ = every_entry(column(*[1] * 5), column(0, 0, 0), column(0, 1, 2), causal=True)
    np.testing.assert_allclose(o.ravel(), [0, 0, 0, 0.5, 1.0], rtol=1e-6)
    o, _ = every_entry(column(1), column(3), column(7), causal=True)
    assert o.item() == 7


def test_very_negative_logits_are_ordinary(rng):
    q = np.ones((1, 1, 128), np.float32)
    k = np.full((64, 1, 128), -2.45e5 / 128, np.float32)
    k[0] = -2.40e5 / 128
    v = np.zeros((64, 1, 64), np.float32)
    v[0] = 1
    o, lse = every_entry(q, k, v)
    np.testing.assert_allclose(o, 1.0)
    np.testing.assert_allclose(lse, -30604.183, rtol=1e-6)
    mask = RaggedMask(np.array([True, False]), [0, 1], [0, 2])
    o, _ = every_entry(column(1), column(-20000, 0), column(1, 100), sm_scale=1.0, custom_mask=mask)
    assert o.item() == 1.0


@pytest.mark.parametrize("junk", [np.nan, INF])
@pytest.mark.parametrize(("kv_len", "page_size"), [(13, 4), (1, 64)])
def test_what_lies_beyond_kv_len_never_matters(kv_len, page_size, junk, rng):
    q = random_rows(rng, (2, 4, 8), "float16")
    rows = [random_rows(rng, (kv_len, 2, 8), "float16") for _ in range(2)]
    results = []
    for filler in (junk, 0.0):
        cache = PagedKVCache(np.full((9, 2, page_size, 2, 8), filler, np.float16))
        table = PageTable.from_seq_lens([kv_len], page_size, [7, 2, 5, 0], xp=np)
        cache.append(*rows, table, indptr=[0, kv_len])
        results.append(cache.prefill(RaggedTensor(q, [0, 2]), table, causal=True, return_lse=True))
        results[-1] += cache.decode(q[:1], table, return_lse=True, window_left=5)
    for got, want in zip(*results, strict=True):
        assert_same_bits(got, want)
        assert np.isfinite(got[-1:].astype(np.float32)).all()


def test_a_window_may_skip_whole_pages_of_nan(rng):
    k, v = (random_rows(rng, (40, 1, 8), "float32") for _ in range(2))
    q = random_rows(rng, (1, 2, 8), "float32")
    want, _ = every_entry(q, k, v, window_left=9)
    k[:30], v[:30] = np.nan, np.nan
    got, _ = every_entry(q, k, v, window_left=9)
    assert_same_bits(got, want)


def test_lse_is_base_2():
    # Two equal keys: 1 in base 2, 0.693 in natural logarithms.
    _, lse = every_entry(column(1), column(0, 0), column(1, 2))
    assert lse.item() == 1.0


def test_the_soft_cap_acts_before_the_mask():
    arguments = column(1), column(0, 100), column(1, 5)
    mask = RaggedMask(np.array([True, False]), [0, 1], [0, 2])
    o, _ = every_entry(*arguments, sm_scale=1.0, logits_soft_cap=2.0, custom_mask=mask)
    assert o.item() == 1.0
    o, lse = every_entry(*arguments, sm_scale=1.0, logits_soft_cap=2.0)
    np.testing.assert_allclose(o.item(), 4.52319, rtol=1e-5)
    np.testing.assert_allclose(lse.item() * np.log(2), 2.12693, rtol=1e-5)
    for off in (None, 0, 0.0):
        o, _ = every_entry(*arguments, sm_scale=1.0, logits_soft_cap=off)
        assert o.item() == 5.0


@pytest.mark.parametrize(
    ("window_left", "want"),
    [(2, 8), (3, 7.5), (4, 7), (0, 9), (-1, 4.5), (9, 4.5), (10, 4.5), (2**31 - 1, 4.5)],
)
def test_a_window_of_w_sees_w_keys_and_its_own(window_left, want):
    for window in (window_left, np.int64(window_left)):
        o, _ = every_entry(column(1), column(*[0] * 10), column(*range(10)), window_left=window)
        np.testing.assert_allclose(o.item(), want, rtol=1e-6)


@pytest.mark.parametrize("window_left", [63, 64, 65])
def test_a_row_of_prefill_is_a_decode_at_its_length(window_left, rng):
    q, k, v = (random_rows(rng, (200, 1, 8), "float32") for _ in range(3))
    o, lse = every_entry(q, k, v, causal=True, window_left=window_left)
    for i in (0, 62, 63, 64, 65, 66, 150, 199):
        alone = every_entry(q[i : i + 1], k[: i + 1], v[: i + 1], window_left=window_left)
        np.testing.assert_allclose(o[i : i + 1], alone[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[i : i + 1], alone[1], rtol=1e-5, atol=1e-6)


def test_bool_and_packed_masks_give_the_same_bits(rng):
    # Two requests, (1, 5) and (1, 9), that keep key 0 and key 8; then batches with empty parts.
    for shapes in (((1, 5), (1, 9)), ((0, 4), (3, 0), (2, 3)), ((7, 33), (1, 1), (16, 16))):
        lens = [n for _, n in shapes]
        case = PagedCase(tuple(lens), 4, 1, 8, dtype="float32")
        arrays = case.arrays(rng)
        cache, table = case.nouns(arrays)
        parts = [rng.random(shape) < 0.5 for shape in shapes]
        if shapes[0] == (1, 5):
            parts = [np.arange(5)[None] == 0, np.arange(9)[None] == 8]
        mask = RaggedMask.from_list(parts)
        packed = mask.pack()
        longer = PackedMask(np.append(packed.data, 255).astype(np.uint8), mask.qo_indptr,
                            mask.kv_indptr)  # fmt: skip
        q = RaggedTensor(case.queries(rng, int(mask.qo_indptr[-1]), 2), mask.qo_indptr)
        k, v = (RaggedTensor(x, indptr_of(lens)) for x in (arrays.k, arrays.v))
        for options in ({}, {"window_left": 1}, {"causal": True}):
            got = [
                cache.prefill(q, table, custom_mask=m, return_lse=True, **options)
                for m in (mask, packed, longer)
            ]
            got += [
                q.prefill(k, v, custom_mask=m, return_lse=True, **options) for m in (mask, packed)
            ]
            for o, lse in got[1:]:
                assert_same_bits(o, got[0][0])
                assert_same_bits(lse, got[0][1])
        if shapes[0] == (1, 5):
            o = cache.prefill(q, table, custom_mask=mask)
            assert_same_bits(o[0], np.repeat(arrays.v[0], 2, 0))
            assert_same_bits(o[1], np.repeat(arrays.v[5 + 8], 2, 0))


def test_a_mask_replaces_causal_and_leaves_nothing_behind(rng):
    q, k, v = (random_rows(rng, (n, 1, 8), "float32") for n in (3, 5, 5))
    everything = RaggedMask(np.ones(15, bool), [0, 3], [0, 5])
    ragged_q, cache, table = one_request(q, k, v)
    plain, causal = (cache.prefill(ragged_q, table, causal=c) for c in (False, True))
    assert not np.array_equal(plain, causal)
    masked = cache.prefill(ragged_q, table, causal=True, custom_mask=everything)
    assert_same_bits(masked, plain)
    assert_same_bits(cache.prefill(ragged_q, table, causal=True), causal)
    windowed = cache.prefill(ragged_q, table, custom_mask=everything, window_left=1)
    assert_same_bits(windowed, cache.prefill(ragged_q, table, window_left=1))


def test_wrong_masks_raise(rng):
    q, k, v = (random_rows(rng, (n, 1, 8), "float32") for n in (2, 3, 3))
    ragged_q, cache, table = one_request(q, k, v)
    keys, values = (RaggedTensor(x, [0, 3]) for x in (k, v))

    def refuse(mask, error, message):
        for op, call in (
            ("PagedKVCache", lambda: cache.prefill(ragged_q, table, custom_mask=mask)),
            ("RaggedTensor", lambda: ragged_q.prefill(keys, values, custom_mask=mask)),
        ):
            with pytest.raises(error, match=rf"^({op}.prefill|\w+Mask.validate): {message}"):
                call()

    refuse(RaggedMask(np.ones(5, bool), [0, 2], [0, 3]), ValueError, r"data must be .* got \[5\]")
    refuse(RaggedMask(np.ones(8, bool), [0, 2], [0, 4]), ValueError,
           "custom_mask has kv_len=4 for request 0, the call 3")  # fmt: skip
    refuse(RaggedMask(np.ones(9, bool), [0, 3], [0, 3]), ValueError,
           "custom_mask has qo_len=3 for request 0, the call 2")  # fmt: skip
    refuse(RaggedMask(np.ones(9, bool), [0, 2, 3], [0, 3, 3]), ValueError,
           "custom_mask must have batch_size=1 requests, got 2")  # fmt: skip
    refuse(PackedMask(np.ones(0, np.uint8), [0, 2], [0, 3]), ValueError, "")
    refuse(np.ones((1, 2, 3), bool), TypeError, "custom_mask must be a RaggedMask or PackedMask")


def test_scales_reach_every_entry_and_the_lse():
    fp8 = "float8_e4m3fn"
    q = np.ones((1, 1, 1), BF16)
    k, v = column(0, 8, dtype=fp8), column(2, 4, dtype=fp8)
    o, lse = every_entry(q, k, v, sm_scale=1.0, k_scale=0.25, v_scale=0.5)
    assert o.dtype == BF16
    np.testing.assert_allclose(o.item(), 1.880797, rtol=2**-8)
    np.testing.assert_allclose(lse.item() * np.log(2), 2.126928, rtol=1e-5)
    o, _ = every_entry(q, k, v, sm_scale=1.0)
    np.testing.assert_allclose(float(o.item()), 3.99933, rtol=2**-8)
    for scale in HALF.values():
        again, again_lse = every_entry(
            q, k, v, sm_scale=1.0, q_scale=scale, k_scale=0.5, v_scale=0.5
        )
        np.testing.assert_allclose(float(again.item()), 1.880797, rtol=2**-8)
        assert_same_bits(again_lse, lse)


def test_any_finite_sm_scale_is_right():
    for scale in (0, -1.0, np.float32(0.5), np.float16(2), 3):
        o, lse = every_entry(column(1), column(0, 2), column(1, 5), sm_scale=scale)
        weights = np.exp([0.0, 2.0 * float(scale)])
        np.testing.assert_allclose(o.item(), weights @ [1, 5] / weights.sum(), rtol=1e-6)
        np.testing.assert_allclose(lse.item(), np.log2(weights.sum()), rtol=1e-6)


@pytest.mark.parametrize("group", [1, 5, 6, 7, 12, 71, 128])
def test_a_query_head_reads_its_groups_kv_head(group, rng):
    q, k = (random_rows(rng, (3, n, 8), "float16") for n in (2 * group, 2))
    v = np.ones((3, 2, 8), np.float16) * np.arange(2, dtype=np.float16)[:, None]
    o, _ = every_entry(q, k, v)
    want = np.broadcast_to((np.arange(2 * group) // group)[None, :, None], (3, 2 * group, 8))
    np.testing.assert_array_equal(o.astype(np.float32), want)


def test_pages_listed_twice_are_read_twice(rng):
    data = random_rows(rng, (3, 2, 4, 1, 8), "float32")
    cache = PagedKVCache(data)
    q = random_rows(rng, (1, 2, 8), "float32")
    table = PageTable(*(np.array(x) for x in ([0, 2], [2, 2], [3])), 4)
    rows = [np.concatenate([data[2, i], data[2, i, :3]]) for i in range(2)]
    want, _ = every_entry(q, *rows)
    assert_same_bits(cache.decode(q, table), want)


# Results: where told, in q's dtype, bfloat16 for fp8


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_results_have_the_dtype_of_q_or_go_where_told(dtype, out_dtype, rng):
    case = PagedCase((45, 0, 8), dtype=dtype, head_dim=16)
    cache, table = case.nouns(case.arrays(rng))
    q = random_rows(rng, (3, 4, 16), dtype)
    ragged_q = RaggedTensor(q, [0, 1, 2, 3])
    o, lse = cache.decode(q, table, return_lse=True)
    assert o.dtype.name == ("bfloat16" if dtype.startswith("float8") else dtype)
    assert lse.dtype == np.float32
    want, _ = reference.decode(q, *case.stores(cache.data), table.indptr, table.indices,
                               table.last_page_len)  # fmt: skip
    for call in (
        lambda **where: cache.decode(q, table, **where),
        lambda **where: cache.prefill(ragged_q, table, **where),
    ):
        whole = np.full((3, 4, 32), 7, as_dtype("test", "out", out_dtype))
        sums = np.full((6, 4), 7, np.float32)
        got = call(out=whole[..., 8:24], lse=sums[::2], return_lse=True)
        assert np.shares_memory(got[0], whole)
        assert np.shares_memory(got[1], sums)
        assert_same_bits(whole[..., 8:24], want.astype(np.float32).astype(whole.dtype))
        assert_same_bits(sums[::2], lse)
        assert (whole[..., :8] == 7).all()
        assert (whole[..., 24:] == 7).all()
        assert (sums[1::2] == 7).all()
        assert isinstance(call(lse=sums[::2]), np.ndarray)


def test_float64_and_any_head_dim_attend_on_numpy(rng):
    q, k, v = (rng.standard_normal((n, 1, 7)) for n in (1, 9, 9))
    o, _ = every_entry(q, k, v)
    assert o.dtype == np.float64
    weights = np.exp(k[:, 0] @ q[0, 0] / np.sqrt(7))
    np.testing.assert_allclose(o[0, 0], weights @ v[:, 0] / weights.sum(), rtol=1e-12)


def test_bad_outputs_raise_and_nothing_is_written(rng):
    case = PagedCase((5, 3))
    cache, table = case.nouns(case.arrays(rng))
    q = case.queries(rng, 2, 4)
    out, lse = np.full((2, 4, 64), 7, np.float16), np.full((2, 4), 7, np.float32)
    locked, locked_lse = out.copy(), lse.copy()
    locked.flags.writeable = locked_lse.flags.writeable = False
    bad = [
        (out[:1], lse, ValueError, r"out must be \[rows=2, num_qo_heads=4, head_dim_vo=64\], got"),
        (out, lse[:, :3], ValueError, r"lse must be \[rows=2, num_qo_heads=4\], got \[2, 3\]"),
        (out.astype(np.int16), lse, TypeError, "out must be float16 or bfloat16 or float32"),
        (out, lse.astype(np.float16), TypeError, "lse must be float32, got float16"),
        (np.broadcast_to(out[:1], out.shape), lse, (TypeError, ValueError), "out is"),
        (out[..., ::-1], lse, ValueError, "out must have a contiguous last axis"),
        (locked, lse, TypeError, "out is a read-only NumPy array"),
        (out, locked_lse, TypeError, "lse is a read-only NumPy array"),
        (fake_cupy(out.shape), lse, TypeError, "q is in NumPy but out is on the GPU"),
        (out, fake_cupy(lse.shape, "float32"), TypeError, "q is in NumPy but lse is on the GPU"),
    ]
    for o_out, lse_out, error, message in bad:
        with pytest.raises(error, match=f"^PagedKVCache.decode: {message}"):
            cache.decode(q, table, out=o_out, lse=lse_out)
    assert (out == 7).all()
    assert (lse == 7).all()


# Plans


def test_a_plan_serves_the_calls_it_was_made_for_and_no_others(rng):
    case = PagedCase((45, 0, 8), head_dim=16)
    cache, table = case.nouns(case.arrays(rng))
    q = case.queries(rng, 3, 4)
    ragged_q = RaggedTensor(q, [0, 1, 1, 3])
    plan = cache.plan(q, table, window_left=5)
    assert isinstance(plan, Plan)
    plan.update()
    want = cache.decode(q, table, window_left=5)
    assert_same_bits(cache.decode(q, table, window_left=5, plan=plan), want)
    with pytest.raises(
        ValueError, match=r"^PagedKVCache.decode: .* made for window_left=5, got -1"
    ):
        cache.decode(q, table, plan=plan)
    with pytest.raises(ValueError, match=r"made for q=.*got"):
        cache.decode(q[:, :2], table, window_left=5, plan=plan)
    with pytest.raises(ValueError, match=r"made for q=.*float16.*got.*float32"):
        cache.decode(q.astype(np.float32), table, window_left=5, plan=plan)
    with pytest.raises(ValueError, match=r"^PagedKVCache.prefill: the plan was made for .*decode"):
        cache.prefill(ragged_q, table, window_left=5, plan=plan)
    with pytest.raises(TypeError, match=r"plan must be a Plan, got <class 'int'>"):
        cache.decode(q, table, plan=3)
    shorter = PageTable(table.indptr, table.indices[:-1], table.last_page_len, 16)
    with pytest.raises(ValueError, match="made for indices="):
        cache.decode(q, shorter, window_left=5, plan=plan)

    plan = cache.plan(ragged_q, table, causal=True, batch_invariant=True)
    want = cache.prefill(ragged_q, table, causal=True)
    assert_same_bits(cache.prefill(ragged_q, table, causal=True, plan=plan), want)
    with pytest.raises(ValueError, match="made for causal=True, got False"):
        cache.prefill(ragged_q, table, plan=plan)
    mask = RaggedMask(np.ones(16, bool), [0, 1, 1, 3], [0, 45, 45, 53])
    with pytest.raises(ValueError, match="made for custom_mask=None, got RaggedMask"):
        cache.prefill(ragged_q, table, causal=True, custom_mask=mask, plan=plan)
    assert repr(plan).startswith("Plan(PagedKVCache.prefill, q=((3, 4, 16), 'float16')")


# Messages: what is refused, before anything is touched


def fakes(batch_size=2, device=0):
    """Make a cache [3, 2, 16, 2, 64] and a table over memory that is not there."""
    sizes = (batch_size + 1, 5, batch_size)
    table = PageTable(*(fake_cupy(n, "int32", device) for n in sizes), 16)
    return PagedKVCache(fake_cupy((3, 2, 16, 2, 64), device=device)), table


def hosts(batch_size=2):
    """Make the same on NumPy, of zeros."""
    table = PageTable.from_seq_lens([5] * batch_size, 16, xp=np)
    return PagedKVCache(np.zeros((3, 2, 16, 2, 64), np.float16)), table


def zeros(shape, dtype="float16"):
    kind = np.dtype(dtype) if dtype in ("int32", "int64") else as_dtype("test", "dtype", dtype)
    return np.zeros(shape, kind)


def test_more_rows_than_a_sequence_has_tokens_raise_on_the_host():
    cache, table = hosts()
    counts = table.seq_lens
    rows = zeros((int(counts[0]) + 1, 2, 64))
    with pytest.raises(
        ValueError, match=r"append: request 0 has \d+ tokens but \d+ rows to append"
    ):
        cache.append(rows, rows, table, indptr=[0, len(rows), len(rows)])
    assert not cache.data.any()


HOMES = [pytest.param(hosts, zeros, id="host"), pytest.param(fakes, fake_cupy, id="device")]


@pytest.mark.parametrize(("nouns", "make"), HOMES)
def test_append_names_what_it_refuses(nouns, make, no_launch):
    cache, table = nouns()
    good = make((5, 2, 64))
    n2, n3, n5 = (make(n, "int32") for n in (2, 3, 5))
    rule = "give indptr, or batch_indices and positions, or none of them"
    for k, v, where, error, message in [
        (make((5, 2, 32)), good, {}, ValueError,
         r"k must be \[nnz, num_heads=2, head_dim=64\], got \[5, 2, 32\]"),
        (good, make((5, 1, 64)), {}, ValueError,
         r"v must be \[nnz=5, num_heads=2, head_dim=64\], got \[5, 1, 64\]"),
        (good, make((4, 2, 64)), {}, ValueError,
         r"v must be \[nnz=5, num_heads, head_dim\], got \[4, 2, 64\]"),
        (make((5, 128)), good, {}, ValueError,
         r"k must be \[nnz, num_heads=2, head_dim=64\], got \[5, 128\]"),
        (make(()), good, {}, ValueError, r"k must be \[nnz, num_heads=2, head_dim=64\], got \[\]"),
        (make(()), make(()), {}, ValueError, r"k must be \[nnz, .*, got \[\]"),
        (make((2, 64)), good, {}, ValueError,
         r"k must be \[nnz, num_heads=2, head_dim=64\], got \[2, 64\]"),
        (good, make((5, 2, 64), "float32"), {}, TypeError, "v must be float16, got float32"),
        (make((5, 2, 64), "int32"), good, {}, TypeError,
         "k must be float16 or bfloat16 or float32 or float8_e4m3fn or .*, got int32"),
        (make((5, 2, 128))[..., ::2], good, {}, ValueError, "k must have a contiguous last axis"),
        (good, make((5, 2, 128))[..., ::-2], {}, ValueError, "v must have a contiguous last axis"),
        ([[1.0]], good, {}, TypeError, "k must be a CuPy, NumPy or DLPack array, got <class 'list"),
        (make((1, 2, 64)), make((1, 2, 64)), {}, ValueError,
         "without indptr or positions there must be one row per request, got 1 rows for 2 req"),
        (good, good, {"batch_indices": n5}, ValueError, rule),
        (good, good, {"positions": n5}, ValueError, rule),
        (good, good, {"indptr": n3, "positions": n5}, ValueError, rule),
        (good, good, {"indptr": n3, "batch_indices": n5}, ValueError, rule),
        (good, good, {"indptr": n3, "batch_indices": n5, "positions": n5}, ValueError, rule),
        (good, good, {"indptr": n2}, ValueError, r"indptr must be \[n=3\], got \[2\]"),
        (good, good, {"indptr": make((3, 1), "int32")}, ValueError, r"indptr must be \[n=3\], got"),
        (good, good, {"indptr": make(3, "float32")}, TypeError,
         "indptr must be int32 or int64, got float32"),
        (good, good, {"indptr": [0, 1.5, 5]}, TypeError, "indptr must be integers, got float64"),
        (good, good, {"batch_indices": n3, "positions": n5}, ValueError,
         r"batch_indices must be \[n=5\], got \[3\]"),
        (good, good, {"batch_indices": n5, "positions": n3}, ValueError,
         r"positions must be \[n=5\], got \[3\]"),
        (good, good, {"k_scale": 0.5}, ValueError,
         "k_scale must be 1.0, got 0.5: only fp8 pages hold scaled values, these are float16"),
        (good, good, {"v_scale": np.float32(2)}, ValueError, "v_scale must be 1.0, got 2.0"),
        (good, good, {"k_scale": "1"}, TypeError, "k_scale must be one number, got '1'"),
        (good, good, {"k_scale": np.ones(2)}, TypeError, "k_scale must be one number"),
        (good, good, {"k_scale": 1e-50}, ValueError, "k_scale must not be 0"),
        (good, good, {"v_scale": 1j}, TypeError, "v_scale must be one number"),
        (good, good, {"v_scale": None}, TypeError, "v_scale must be one number"),
    ]:  # fmt: skip
        if isinstance(where.get("indptr"), list) and nouns is fakes:
            continue  # goes to a GPU
        with pytest.raises(error, match="^PagedKVCache.append: " + message):
            cache.append(k, v, table, **where)
    other = PageTable(*(make(n, "int32") for n in (3, 5, 2)), 8)
    with pytest.raises(ValueError, match="append: the table's page_size is 8, the cache's 16"):
        cache.append(good, good, other)
    if nouns is hosts:
        assert not cache.data.any()


def test_append_checks_scales_on_the_device_without_reading_them(no_launch):
    cache, table = fakes()
    rows = fake_cupy((5, 2, 64))
    with pytest.raises(
        ValueError, match=r"k_scale must be 1\.0, got an array on the GPU: only fp8"
    ):
        cache.append(
            rows, rows, table, indptr=fake_cupy(3, "int32"), k_scale=fake_cupy(1, "float32")
        )
    fp8 = PagedKVCache(fake_cupy((3, 2, 16, 2, 64), "float8_e4m3fn"))
    for scale, error, message in (
        (fake_cupy(2, "float32"), ValueError, r"k_scale must be float32 \[1\], got float32\[2\]"),
        (fake_cupy(1, "float16"), TypeError, r"k_scale must be float32 \[1\], got float16\[1\]"),
        (fake_cupy((), "float32", 1), ValueError, "k_scale is on device 1, the cache on 0"),
    ):
        with pytest.raises(error, match=message):
            fp8.append(rows, rows, table, indptr=fake_cupy(3, "int32"), k_scale=scale)
    host, host_table = hosts()
    with pytest.raises(TypeError, match="v_scale must be a number on the host, got an arr"):
        host.append(*[zeros((5, 2, 64))] * 2, host_table, indptr=[0, 0, 5],
                    v_scale=fake_cupy(1, "float32"))  # fmt: skip


def test_append_mixes_no_homes_and_no_devices(no_launch):
    (cache, table), (host, host_table) = fakes(), hosts()
    rows, host_rows = fake_cupy((5, 2, 64)), zeros((5, 2, 64))
    n3, n5 = fake_cupy(3, "int32"), fake_cupy(5, "int32")
    h3, h5 = zeros(3, "int32"), zeros(5, "int32")
    there = {"indptr": fake_cupy(3, "int32", 1)}
    for call, error in [
        (lambda: cache.append(rows, rows, table, indptr=h3), TypeError),
        (lambda: cache.append(rows, rows, table, batch_indices=h5, positions=n5), TypeError),
        (lambda: cache.append(rows, rows, table, batch_indices=n5, positions=h5), TypeError),
        (lambda: cache.append(rows, host_rows, table, indptr=n3), TypeError),
        (lambda: cache.append(rows, rows, host_table, indptr=n3), TypeError),
        (lambda: host.append(host_rows, host_rows, table, indptr=h3), TypeError),
        (lambda: host.append(host_rows, host_rows, host_table, indptr=n3), TypeError),
        (lambda: host.append(host_rows, rows, host_table, indptr=h3), TypeError),
        (lambda: host.append(*[host_rows] * 2, host_table, batch_indices=n5, positions=h5),
         TypeError),
        (lambda: cache.append(rows, rows, table, **there), ValueError),
        (lambda: cache.append(rows, fake_cupy((5, 2, 64), device=1), table, indptr=n3), ValueError),
        (lambda: cache.append(rows, rows, fakes(device=1)[1], indptr=n3), ValueError),
        (lambda: cache.append(rows, rows, fakes(device=1)[1]), ValueError),
        (lambda: cache.append(rows, rows, host_table), TypeError),
        (lambda: cache.gather(host_table), TypeError),
        (lambda: host.gather(table), TypeError),
        (lambda: cache.gather(fakes(device=1)[1]), ValueError),
        (lambda: cache.copy_pages(h3, n3), TypeError),
        (lambda: host.copy_pages(h3, n3), TypeError),
        (lambda: cache.copy_pages(n3, fake_cupy(3, "int32", 1)), ValueError),
    ]:  # fmt: skip
        with pytest.raises(error, match=r"^PagedKVCache.\w+: .*(on the GPU|device 1)"):
            call()
    assert not host.data.any()


def test_values_that_name_nothing_raise_on_numpy_and_nothing_is_written():
    cache, table = hosts()
    rows = np.ones((5, 2, 64), np.float16)
    for where, message in (
        ({"indptr": [0, 2, 6]}, r"append: indptr ends at 6, but there are 5 rows"),
        ({"indptr": [1, 2, 5]}, r"append: indptr\[0\] must be 0, got 1"),
        ({"indptr": [0, 4, 3]}, r"append: indptr falls at request 1"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.append(rows, rows, table, **where)
    for indices, last, message in (
        ([0, 3], [5, 5], "page 0 of request 1 must be 0 or more and below max_num_pages=3, got 3"),
        ([-1, 2], [5, 5], "page 0 of request 0 must be 0 or more .*got -1"),
        ([0, 1], [5, 17], "last_page_len of request 1 must be 1 to page_size=16, got 17"),
        ([0, 1], [0, 5], "last_page_len of request 0 must be 1 to page_size=16, got 0"),
    ):
        bad = PageTable(np.array([0, 1, 2]), np.array(indices), np.array(last), 16)
        for call in (
            lambda bad=bad: cache.append(rows, rows, bad),
            lambda bad=bad: cache.gather(bad),
            lambda bad=bad: cache.decode(np.ones((2, 2, 64), np.float16), bad),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    assert not cache.data.any()
    with pytest.raises(ValueError, match="gather: nnz must be at least 10 tokens, got 9"):
        cache.gather(table, nnz=9)


def test_memory_that_repeats_or_is_locked_is_not_written():
    table = hosts()[1]
    rows = np.ones((2, 2, 64), np.float16)
    locked = np.zeros((3, 2, 16, 2, 64), np.float16)
    locked.flags.writeable = False
    pair = np.zeros((3, 16, 2, 64), np.float16)
    half = pair.copy()
    half.flags.writeable = False
    for data, name in ((locked, "k"), ((pair, half), "v")):
        cache = PagedKVCache(data)
        for call in (lambda c=cache: c.append(rows, rows, table),
                     lambda c=cache: c.copy_pages([0], [1])):  # fmt: skip
            with pytest.raises(TypeError, match=rf"PagedKVCache.\w+: {name} is a read-only NumPy"):
                call()
        cache.gather(table)
    assert not pair.any()
    wide = np.zeros((3, 2, 16, 2, 64), np.float16)
    for axis, shown in ((0, 0), (2, 1), (3, 2)):
        view = np.lib.stride_tricks.as_strided(
            wide, wide.shape, [0 if i == axis else s for i, s in enumerate(wide.strides)]
        )
        cache = PagedKVCache(view)
        with pytest.raises(
            ValueError,
            match=rf"k is written and must not repeat memory, got stride 0 on axis {shown}",
        ):
            cache.append(rows, rows, table)
        with pytest.raises(ValueError, match="must not repeat memory"):
            cache.copy_pages([0], [1])
    one_page = np.lib.stride_tricks.as_strided(wide, (1, 2, 16, 2, 64), (0, *wide.strides[1:]))
    PagedKVCache(one_page).append(rows[:1], rows[:1], PageTable.from_seq_lens([3], 16, xp=np))
    assert wide[0, :, 2].all()


def test_stride_zero_is_refused_on_the_device_too():
    _, table = fakes()
    fake = fake_cupy((3, 2, 16, 2, 64))
    view = cp.lib.stride_tricks.as_strided(fake, fake.shape, (0, *fake.strides[1:]))
    rows = fake_cupy((2, 2, 64))
    with pytest.raises(ValueError, match="must not repeat memory, got stride 0 on axis 0"):
        PagedKVCache(view).append(rows, rows, table)


def test_elements_that_are_not_aligned_are_refused(no_launch):
    memory = cp.cuda.UnownedMemory((1 << 20) + 1, 1 << 20, None, device_id=0)
    pointer = cp.cuda.MemoryPointer(memory, 0)
    with pytest.raises(ValueError, match="k must be aligned to its 2-byte elements"):
        PagedKVCache(cp.ndarray((3, 2, 16, 2, 64), np.float16, memptr=pointer))
    cache, table = fakes()
    rows = cp.ndarray((2, 2, 64), np.float16, memptr=pointer)
    with pytest.raises(ValueError, match="aligned to"):
        cache.append(rows, rows, table)


@pytest.mark.parametrize(("nouns", "make"), HOMES)
def test_gather_and_copy_name_what_they_refuse(nouns, make):
    cache, table = nouns()
    for options, error, message in (
        ({"nnz": -1}, ValueError, "nnz must be 0 or more, got -1"),
        ({"dtype": "int32"}, TypeError, r"dtype must be one of \['float16', .*got 'int32'"),
        ({"k_scale": 0.5}, ValueError, "k_scale must be 1.0 where rows keep the cache's dtype"),
        ({"v_scale": 0.5, "dtype": "float16"}, ValueError, "v_scale must be 1.0 where rows keep"),
        ({"v_scale": "x", "dtype": "float32"}, TypeError, "v_scale must be one number, got 'x'"),
    ):
        with pytest.raises(error, match="^PagedKVCache.gather: " + message):
            cache.gather(table, **options)
    with pytest.raises(ValueError, match="gather: the table's page_size is 8, the cache's 16"):
        cache.gather(PageTable(*(make(n, "int32") for n in (3, 5, 2)), 8))
    for src, dst, error, message in (
        (make(3, "int32"), make(2, "int32"), ValueError, r"dst must be \[n=3\], got \[2\]"),
        (make((3, 1), "int32"), make(3, "int32"), ValueError, r"src must be \[n\], got \[3, 1\]"),
        (
            make(3, "float32"),
            make(3, "int32"),
            TypeError,
            "src must be int32 or int64, got float32",
        ),
        (
            make(3, "int32"),
            make(3, "float32"),
            TypeError,
            "dst must be int32 or int64, got float32",
        ),
        (3, make(3, "int32"), TypeError, "src must be a CuPy, NumPy or DLPack array"),
    ):
        with pytest.raises(error, match="^PagedKVCache.copy_pages: " + message):
            cache.copy_pages(src, dst)


@pytest.mark.parametrize(("nouns", "make"), HOMES)
def test_attention_names_what_it_refuses(nouns, make):
    cache, table = nouns()
    q = make((2, 4, 64))
    for bad, error, message in (
        (make((3, 4, 64)), ValueError,
         r"q must be \[batch_size=2, num_qo_heads, head_dim=64\], got \[3, 4, 64\]"),
        (make((2, 4, 32)), ValueError, r"q must be .*head_dim=64\], got \[2, 4, 32\]"),
        (make((2, 3, 64)), ValueError, "num_qo_heads must be a multiple of num_kv_heads=2, got 3"),
        (make((2, 4, 64), "bfloat16"), TypeError,
         "q and a 16-bit cache share a dtype, got bfloat16 and float16"),
        (make((2, 4, 64), "int32"), TypeError, "q must be float16 or bfloat16 or .*got int32"),
        ([1.0], TypeError, "q must be a CuPy, NumPy or DLPack array"),
    ):  # fmt: skip
        for call in (cache.decode, cache.plan):
            with pytest.raises(error, match="^PagedKVCache.decode: " + message):
                call(bad, table)
    for options, error, message in (
        ({"window_left": -2}, ValueError, "window_left must be a whole number, -1 = off, got -2"),
        ({"window_left": 1.5}, ValueError, "window_left must be a whole number"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap must be finite and 0 or more"),
        ({"logits_soft_cap": np.nan}, ValueError, "logits_soft_cap must be finite and 0 or more"),
        ({"logits_soft_cap": INF}, ValueError, "logits_soft_cap must be finite and 0 or more"),
        ({"logits_soft_cap": "30"}, TypeError, "logits_soft_cap must be one number, got '30'"),
        ({"sm_scale": np.nan}, ValueError, "sm_scale must be finite, got nan"),
        ({"sm_scale": INF}, ValueError, "sm_scale must be finite, got inf"),
        ({"sinks": make(3, "float32")}, ValueError, r"sinks must be \[num_qo_heads=4\], got \[3\]"),
        ({"sinks": make(4, "int32")}, TypeError, "sinks must be float16 or bfloat16 or float32"),
        ({"plan": 3}, TypeError, "plan must be a Plan"),
    ):
        with pytest.raises(error, match="^PagedKVCache.decode: " + message):
            cache.decode(q, table, **options)
        with pytest.raises(error, match="^PagedKVCache.prefill: " + message):
            cache.prefill(RaggedTensor(q, make(3, "int32")), table, **options)
    with pytest.raises(TypeError, match=r"prefill: q must be a RaggedTensor, got <class '\w+.ndar"):
        cache.prefill(q, table)
    with pytest.raises(ValueError, match="q must have batch_size=2 requests, got 3"):
        cache.prefill(RaggedTensor(q, make(4, "int32")), table)
    with pytest.raises(ValueError, match="decode: the table's page_size is 8, the cache's 16"):
        cache.decode(q, PageTable(*(make(n, "int32") for n in (3, 5, 2)), 8))


def test_attention_mixes_no_homes():
    (cache, table), (host, host_table) = fakes(), hosts()
    q, host_q = fake_cupy((2, 4, 64)), zeros((2, 4, 64))
    for call in (
        lambda: cache.decode(host_q, table),
        lambda: cache.decode(q, host_table),
        lambda: host.decode(q, host_table),
        lambda: cache.decode(q, table, sinks=zeros(4, "float32")),
        lambda: host.decode(host_q, host_table, sinks=fake_cupy(4, "float32")),
        lambda: host.decode(host_q, host_table, k_scale=fake_cupy(1, "float32")),
        lambda: cache.prefill(RaggedTensor(host_q, [0, 1, 2]), table),
    ):
        with pytest.raises(TypeError, match=r"^PagedKVCache.\w+: .*on the GPU"):
            call()
    with pytest.raises(ValueError, match="q is on device 1 but cache is on device 0"):
        cache.decode(fake_cupy((2, 4, 64), device=1), table)


def test_attention_on_the_gpu_says_what_exists():
    cache, table = fakes()
    bits = fake_cupy(16, "float8_e4m3fn").view(bool)
    mask = RaggedMask(bits, fake_cupy(3, "int32"), fake_cupy(3, "int32"))
    with pytest.raises(ValueError, match=r"^PagedKVCache.decode: takes no custom_mask"):
        cache.plan(fake_cupy((2, 4, 64)), table, custom_mask=mask)
    for shape, dtype, message in (
        ((3, 2, 16, 2, 64), "float32", "a cache must be float16, .* on a GPU, got float32"),
        ((3, 2, 16, 2, 60), "bfloat16", "head_dim must be a multiple of 8 up to 256 .*, got 60"),
        ((3, 2, 16, 2, 264), "bfloat16", "head_dim must be a multiple of 8 up to 256 .*, got 264"),
    ):
        cache, q = PagedKVCache(fake_cupy(shape, dtype)), fake_cupy((2, 4, shape[4]), "bfloat16")
        for call in (cache.decode, cache.plan):
            with pytest.raises(NotImplementedError, match=f"^PagedKVCache.decode: {message}"):
                call(q, table)


# Structure


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("make", [zeros, fake_cupy], ids=["host", "device"])
def test_a_cache_says_its_sizes(make, layout):
    page = (16, 2) if layout == "NHD" else (2, 16)
    whole = PagedKVCache(make((3, 2, *page, 64)), layout)
    pair = PagedKVCache([make((3, *page, 192)), make((3, *page, 128))], layout)
    for cache, dims in ((whole, (64, 64)), (pair, (192, 128))):
        assert (cache.max_num_pages, cache.page_size, cache.num_kv_heads) == (3, 16, 2)
        assert (cache.head_dim, cache.head_dim_vo) == dims
        assert cache.dtype == np.float16
        assert cache.k.shape == (3, *page, dims[0])
        assert cache.v.shape == (3, *page, dims[1])
    assert isinstance(pair.data, tuple)
    where = "numpy" if make is zeros else "cuda:0"
    shown = ", ".join(map(str, (3, 2, *page, 64)))
    assert repr(whole) == f"PagedKVCache(data=float16[{shown}], layout='{layout}', device={where})"
    assert repr(pair).startswith("PagedKVCache(data=(float16[3, ")


def test_views_share_the_caches_memory():
    data = np.zeros((3, 2, 16, 2, 64), np.float16)
    cache = PagedKVCache(data)
    assert cache.data is data
    cache.k[1, 2, 0] = 1
    cache.v[1, 2, 0] = 2
    assert (data[1, 0, 2, 0] == 1).all()
    assert (data[1, 1, 2, 0] == 2).all()


@pytest.mark.parametrize("make", [zeros, fake_cupy], ids=["host", "device"])
def test_a_cache_names_what_it_refuses(make):
    a = make((3, 16, 2, 64))
    for data, layout, error, message in (
        (make((3, 16, 2, 64)), "NHD", ValueError,
         r"data must be \[max_num_pages, 2, page_size, num_kv_heads, head_dim\], got"),
        (make((3, 2, 2, 16)), "HND", ValueError,
         r"data must be \[max_num_pages, 2, num_kv_heads, page_size, head_dim\], got"),
        (make((3, 3, 16, 2, 64)), "NHD", ValueError, r"data must be .*got \[3, 3, 16, 2, 64\]"),
        ((a,), "NHD", ValueError, "data must be one array or a pair, got 1"),
        ((a, a, a), "NHD", ValueError, "data must be one array or a pair, got 3"),
        ((a, make((4, 16, 2, 64))), "NHD", ValueError,
         r"v must be \[max_num_pages=3, page_size=16, num_kv_heads=2, head_dim_vo\], got \[4, 16"),
        ((a, make((3, 16, 1, 64))), "NHD", ValueError, r"v must be .*got \[3, 16, 1, 64\]"),
        ((a, make((3, 16, 2, 64), "bfloat16")), "NHD", TypeError, "v must be float16, got bf"),
        (make((3, 2, 16, 2, 64), "int32"), "NHD", TypeError, "k must be float16 or .*got int32"),
        (make((3, 2, 0, 2, 64)), "NHD", ValueError, "page_size must be 1 or more, got 0"),
        (make((3, 2, 16, 2, 128))[..., ::2], "NHD", ValueError, "k must have a contiguous last"),
        (a, "nhd", ValueError, 'layout must be "NHD" or "HND", got \'nhd\''),
        (a, None, ValueError, "layout must be"),
        ("data", "NHD", TypeError, "data must be a CuPy, NumPy or DLPack array"),
        ((a, 3), "NHD", TypeError, "v must be a CuPy, NumPy or DLPack array"),
    ):  # fmt: skip
        with pytest.raises(error, match="^PagedKVCache: " + message):
            PagedKVCache(data, layout)


def test_homes_of_a_pair_do_not_mix():
    with pytest.raises(TypeError, match=r"^PagedKVCache: k is in NumPy but v is on the GPU"):
        PagedKVCache((zeros((3, 16, 2, 64)), fake_cupy((3, 16, 2, 64))))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_empty_allocates_one_array_or_a_pair(xp, layout, dtype):
    page = (16, 2) if layout == "NHD" else (2, 16)
    cache = PagedKVCache.empty(3, 16, 2, 64, dtype, layout, xp=xp)
    assert isinstance(cache.data, xp.ndarray)
    assert cache.data.shape == (3, 2, *page, 64)
    assert cache.dtype.name == dtype
    assert PagedKVCache.empty(3, 16, 2, 64, dtype, layout, 64, xp=xp).data.ndim == 5
    pair = PagedKVCache.empty(3, 16, 2, 192, cache.dtype, layout, 128, xp=xp)
    assert pair.k.shape == (3, *page, 192)
    assert pair.v.shape == (3, *page, 128)


def test_empty_names_what_it_refuses():
    for arguments, options, error, message in (
        ((3, 16, 2, 64, "int8"), {}, TypeError, "dtype must be one of"),
        ((3, 16, 2, 64, "float16", "NDH"), {}, ValueError, "layout must be"),
        ((3, 16, 2, 64, "float16"), {"xp": "numpy"}, TypeError, "xp must be cupy or numpy"),
        ((-3, 16, 2, 64, "float16"), {}, ValueError, "max_num_pages must be 0 or more, got -3"),
        ((3, 0, 2, 64, "float16"), {}, ValueError, "page_size must be 1 or more, got 0"),
        ((3, 16, 2, 64.0, "float16"), {}, TypeError, "head_dim must be an integer, got 64.0"),
    ):
        with pytest.raises(error, match="^PagedKVCache.empty: " + message):
            PagedKVCache.empty(*arguments, **{"xp": np, **options})


@pytest.mark.parametrize("call", ["append", "gather", "decode", "prefill", "plan"])
def test_a_table_must_be_a_page_table(call):
    cache = PagedKVCache.empty(2, 4, 1, 8, "float16", xp=np)
    rows = np.zeros((1, 1, 8), np.float16)
    calls = {
        "append": lambda: cache.append(rows, rows, None),
        "gather": lambda: cache.gather(None),
        "decode": lambda: cache.decode(rows, None),
        "prefill": lambda: cache.prefill(RaggedTensor(rows, [0, 1]), None),
        "plan": lambda: cache.plan(rows, None),
    }
    with pytest.raises(TypeError, match="table must be a PageTable"):
        calls[call]()


def test_decode_leaves_ragged_queries_to_prefill():
    cache = PagedKVCache.empty(2, 4, 1, 8, "float16", xp=np)
    table = PageTable.from_seq_lens([1], 4, xp=np)
    with pytest.raises(TypeError, match="prefill takes a RaggedTensor"):
        cache.decode(RaggedTensor(np.zeros((1, 1, 8), np.float16), [0, 1]), table)


@pytest.mark.parametrize("scale", [0.0, 1e39, float("nan")])
def test_a_scale_that_divides_no_row_is_refused(scale):
    cache = PagedKVCache.empty(2, 4, 1, 8, "float8_e4m3fn", xp=np)
    table = PageTable.from_seq_lens([1], 4, xp=np)
    rows = np.zeros((1, 1, 8), np.float16)
    with pytest.raises(ValueError, match="k_scale must"):
        cache.append(rows, rows, table, k_scale=scale)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_plan_belongs_to_a_number_of_requests(rows):
    cache = PagedKVCache.empty(4, 4, 1, 8, "float16", xp=np)
    cache.data[...] = 0
    one, two = (PageTable.from_seq_lens(n, 4, num_pages=2, xp=np) for n in ([3], [3, 1]))
    queries = np.zeros((rows, 1, 8), np.float16)
    plan = cache.plan(RaggedTensor(queries, [0, rows]), one)
    with pytest.raises(ValueError, match="batch_size=1, got 2"):
        cache.prefill(RaggedTensor(queries, [0, 1, rows]), two, plan=plan)


def test_keys_without_elements_are_all_alike_on_numpy():
    values = np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)
    cache = PagedKVCache((np.zeros((1, 8, 1, 0), np.float32), values))
    table = PageTable.from_seq_lens([4], 8, xp=np)
    o, lse = cache.decode(np.zeros((1, 2, 0), np.float32), table, return_lse=True)
    assert o.tolist() == [[[1.5], [1.5]]]
    assert lse.tolist() == [[2.0, 2.0]]
