"""PagedKVCache.decode and prefill without masks: the kernel and the definition give one answer.

Tests with the ``xp`` fixture run on both homes, against the float64 definitions over the same
arrays or values known by hand; on NumPy they check themselves. Sizes that only a GPU takes in its
stride shrink there.
"""

import threading
from dataclasses import dataclass, replace
from fractions import Fraction

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from cases import DLPackOnly, PagedCase, indptr_of, on, poison, random_rows
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

import cukv
from cukv import PagedKVCache, PageTable, RaggedTensor, reference
from cukv._arrays import as_dtype

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
INF = np.inf
LOG2_E = np.log2(np.e)
# FlashInfer's documented batch, empty requests first, between and last, one token.
LENS = (0, 45, 8, 0, 25, 22, 1, 0)


# Calls and what they must give


def attend(cache, table, q, qo_indptr=None, **options):
    """Decode q, or prefill if it is said which rows each request has: (o, lse)."""
    if qo_indptr is None:
        return cache.decode(q, table, return_lse=True, **options)
    if isinstance(qo_indptr, np.ndarray):
        qo_indptr = qo_indptr.tolist()  # goes to the home of q
    return cache.prefill(RaggedTensor(q, qo_indptr), table, return_lse=True, **options)


def define(case, arrays, q, qo_indptr=None, **options):
    """Attend to a case's arrays by definition, in float64."""
    k, v = case.stores(arrays.data)
    csr = arrays.indptr, arrays.indices, arrays.last_page_len
    qo_indptr = np.arange(len(q) + 1) if qo_indptr is None else qo_indptr
    return reference.prefill(q, qo_indptr, k, v, *csr, **options)


def assert_attends(got, want, *, operands, scale, capped=False):
    """Compare (o, lse) with a definition's, within the bounds of the operands' dtype.

    A row without keys is 0 exactly; its lse is compared with -inf, or with its sink's.
    """
    operands = np.dtype(operands).name if not isinstance(operands, str) else operands
    operands = "bfloat16" if operands.startswith("float8") else operands
    bound = (ATTENTION_TANH if capped else ATTENTION)[operands]
    assert got[1].dtype == np.float32
    assert_close(got[1], want[1], LSE_TANH if capped else LSE)
    assert_close(got[0], want[0], bound, scale=scale)
    assert (to_numpy(got[0])[np.isneginf(want[1])] == 0).all()


def check(xp, case, rng, *, arrays=None, group_size=4, qo_lens=None, q_dtype=None, **options):
    """Attend to a case and compare with the definition. Options hold host arrays and numbers."""
    arrays = case.arrays(rng) if arrays is None else arrays
    cache, table = case.nouns(arrays, xp)
    num_rows = len(arrays.last_page_len) if qo_lens is None else sum(qo_lens)
    q = case.queries(rng, num_rows, group_size * case.num_kv_heads)
    q = q if q_dtype is None else q.astype(np.float32).astype(as_dtype("test", "q", q_dtype))
    qo_indptr = None if qo_lens is None else indptr_of(qo_lens)
    here = {n: on(xp, x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    got = attend(cache, table, on(xp, q), qo_indptr, **here)
    want = define(case, arrays, q, qo_indptr, **options)
    assert got[0].dtype == (BF16 if q.dtype.name.startswith("float8") else q.dtype)
    scale = max_abs(arrays.v) * abs(options.get("v_scale", 1.0))
    capped = bool(options.get("logits_soft_cap"))
    assert_attends(got, want, operands=q.dtype, scale=scale, capped=capped)
    return got


def shared_pages(pool, lens, rng):
    """Make a pool's arrays with requests of any lengths on pages drawn from it with repetition.

    Requests share pages and have some twice. All slots of the pool's pages must be tokens.
    """
    arrays, lens = pool.arrays(rng), np.asarray(lens)
    pages = -(-lens // pool.page_size)
    drawn = rng.integers(0, arrays.indptr[-1], pages.sum())
    last = np.where(lens > 0, (lens - 1) % pool.page_size + 1, 0)
    return arrays._replace(
        indptr=indptr_of(pages, pool.index_dtype),
        indices=arrays.indices[drawn],
        last_page_len=last.astype(pool.index_dtype),
    )


# Page sizes: below, at, above and beside a tile of 8, 16, 32, 64 and 128 tokens; a page's edges.
PAGE_SIZES = (1, 2, 3, 5, 7, 16, 17, 48, 64, 100, 128, 256, 512)
FORMS = [
    (layout, form, index_dtype)
    for layout, form in (("NHD", "5d"), ("HND", "5d"), ("NHD", "pair"), ("HND", "pair"))
    for index_dtype in ("int32", "int64")
]
PAGE_CASES = [
    PagedCase(
        (*LENS, page_size, page_size + 1, max(page_size - 1, 1), 2 * page_size, 5 * page_size + 3),
        page_size,
        dtype=("float16", "bfloat16")[i % 2],
        layout=layout,
        form=form,
        index_dtype=index_dtype,
    )
    for i, page_size in enumerate(PAGE_SIZES)
    for layout, form, index_dtype in (FORMS[i % 8], FORMS[(i + 3) % 8])
]


@pytest.mark.parametrize("case", PAGE_CASES, ids=str)
def test_decode_takes_any_page_size_layout_and_form(xp, case, rng):
    check(xp, case, rng)


@pytest.mark.parametrize("case", PAGE_CASES[::2], ids=str)
def test_prefill_takes_any_page_size_layout_and_form(xp, case, rng):
    qo_lens = [(1, 3, 0, 2)[b % 4] for b in range(case.batch_size)]
    check(xp, case, rng, qo_lens=qo_lens, causal=True)


# Where the shape cannot tell the token axis from the head axis.
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_page_may_hold_as_many_tokens_as_heads(xp, layout, rng):
    check(xp, PagedCase((9, 4, 1), 4, 4, layout=layout), rng)


# Head dims: each class of the kernel, its edges, dims that fill no vector of 16 bytes in fp8, and
# K and V that differ either way, up to the ends of the range.
HEAD_DIMS = [8, 16, 40, 64, 72, 80, 96, 112, 128, 136, 192, 248, 256]
HEAD_DIMS = [(d, d) for d in HEAD_DIMS]
HEAD_DIMS += [(192, 128), (128, 192), (64, 128), (128, 64), (40, 8), (8, 256), (256, 8)]
DIM_DTYPES = [
    (dims, dtype)
    for i, dims in enumerate(HEAD_DIMS)
    for dtype in (("float16", "bfloat16")[i % 2], (E4M3, E5M2)[i // 2 % 2])
]


@pytest.mark.parametrize(
    ("dims", "dtype"), DIM_DTYPES, ids=[f"{k}x{v}-{dtype}" for (k, v), dtype in DIM_DTYPES]
)
def test_decode_takes_any_head_dims(xp, dims, dtype, rng):
    layout = ("NHD", "HND")[dims[0] // 8 % 2]
    case = PagedCase((33, 0, 70, 1), 16, 2, *dims, dtype=dtype, layout=layout, form="pair")
    check(xp, case, rng, group_size=3)


# Every geometry of the kernel: dims up to 64, 128, 192/128 and 256; 8, 16 and 32 packed rows; fewer
# requests than twice the SMs and more.
GEOMETRIES = [(64, 64), (128, 128), (192, 128), (256, 256)]
GEOMETRIES = [(dims, dtype) for dims in GEOMETRIES for dtype in ("float16", "bfloat16", E4M3, E5M2)]


@pytest.mark.parametrize("batch_size", [4, 140])
@pytest.mark.parametrize("group_size", [8, 12, 24])
@pytest.mark.parametrize(
    ("dims", "dtype"), GEOMETRIES, ids=[f"{k}x{v}-{dtype}" for (k, v), dtype in GEOMETRIES]
)
def test_every_geometry_of_the_kernel(xp, dims, dtype, group_size, batch_size, rng):
    pool = PagedCase((320,), 16, 2, *dims, dtype=dtype, form="pair")
    lens = rng.integers(0, 300 if batch_size == 4 else 40, batch_size)
    check(xp, pool, rng, arrays=shared_pages(pool, lens, rng), group_size=group_size)


@pytest.mark.parametrize(
    ("dims", "dtype"), GEOMETRIES, ids=[f"{k}x{v}-{dtype}" for (k, v), dtype in GEOMETRIES]
)
def test_every_geometry_reads_storage_that_is_not_aligned(xp, dims, dtype, rng):
    case = PagedCase((45, 0, 8, 300), 16, 2, *dims, dtype=dtype, form="pair")
    arrays = case.arrays(rng)
    data = tuple(viewed(xp, store, "one element off")[0] for store in arrays.data)
    q = case.queries(rng, 4, 10)
    got = attend(PagedKVCache(data), table_of(xp, arrays, 16), on(xp, q))
    assert_attends(got, define(case, arrays, q), operands=q.dtype, scale=max_abs(arrays.v))


# Group sizes: below, at and above a tile's 8 and 16 packed rows, odd ones, the largest; the KV
# heads of models.
GROUPS = [(g, 2) for g in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 64, 71, 128)]
GROUPS += [(5, 1), (6, 4), (7, 4), (5, 8), (12, 1)]


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"{g[0] * g[1]}on{g[1]}")
def test_a_query_head_reads_its_own_kv_head(xp, group, rng):
    group_size, num_kv_heads = group
    case = PagedCase((45, 0, 3, 130), 16, num_kv_heads, 64, dtype="bfloat16")
    check(xp, case, rng, group_size=group_size)
    check(xp, case, rng, group_size=group_size, qo_lens=(3, 1, 17, 0), causal=True)


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"{g[0] * g[1]}on{g[1]}")
def test_a_value_that_says_its_head_comes_out_exactly(xp, group, rng):
    group_size, num_kv_heads = group
    case = PagedCase((45, 8, 25), 16, num_kv_heads, 64)
    arrays = case.arrays(rng)
    v = case.stores(arrays.data)[1]
    v[...] = np.arange(num_kv_heads)[:, None]
    cache, table = case.nouns(arrays, xp)
    want = np.repeat(np.arange(num_kv_heads), group_size)
    for rows, qo_indptr in ((3, None), (21, [0, 1, 4, 21])):
        q = on(xp, np.zeros((rows, group_size * num_kv_heads, 64), np.float16))
        o, _ = attend(cache, table, q, qo_indptr)
        np.testing.assert_array_equal(
            to_numpy(o).astype(np.float64),
            np.broadcast_to(want[None, :, None], (rows, len(want), 64)),
        )


# Lengths: at and beside every multiple of a step, a round of steps and a part that a kernel may
# have; alone, where they are cut into the most parts, and all in one batch.
EDGES = sorted({n + d for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) for d in (-1, 0, 1)})


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_lengths_beside_every_edge_in_one_batch(xp, page_size, rng):
    case = PagedCase(tuple(rng.permutation(EDGES).tolist()), page_size, 1, 64, dtype="bfloat16")
    check(xp, case, rng)


@pytest.mark.parametrize(
    "kv_len", [0, 1, 2, 15, 16, 17, 127, 128, 129, 511, 513, 2047, 2049, 4097, 16_896, 33_333]
)
def test_a_request_alone_is_cut_into_parts_and_merged(xp, kv_len, rng):
    pool = PagedCase((4096,), 16, 1, 64, dtype="bfloat16")
    arrays = shared_pages(pool, [kv_len], rng)
    check(xp, pool, rng, arrays=arrays)
    check(xp, pool, rng, arrays=arrays, window_left=max(kv_len - 100, 0))
    check(xp, pool, rng, arrays=arrays, qo_lens=(5,), causal=True)


# Batches: one request, a few, and beside once and twice the number of SMs.
@pytest.mark.parametrize("batch_size", [1, 2, 3, 131, 132, 133, 264, 265])
def test_batches_beside_the_number_of_sms(xp, batch_size, rng):
    pool = PagedCase((2048,), 16, 1, 64)
    lens = 1023 + np.arange(batch_size) % 3
    check(xp, pool, rng, arrays=shared_pages(pool, lens, rng))


# Lengths that leave one CTA with almost all of the work if requests are not cut.
LOPSIDED = {
    "one long first": [100_000] + [64] * 511,
    "one long in the middle": [64] * 300 + [100_000] + [64] * 211,
    "long ones between empty ones": [0, 0, 30_000, 0, 0, 0, 20_001, 0],
    "growing": [3 * n for n in range(200)],
}


@pytest.mark.parametrize("name", LOPSIDED)
def test_long_requests_among_short_ones(xp, name, rng):
    pool = PagedCase((2048,), 16, 1, 64, dtype="bfloat16")
    check(xp, pool, rng, arrays=shared_pages(pool, LOPSIDED[name], rng), group_size=2)


# Very large


def counted(q, k, v, counts):
    """Attend q [heads, dim] of one request to tokens that it has some number of times each."""
    num_kv_heads = k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    queries = q.reshape(num_kv_heads, -1, q.shape[1]) / np.sqrt(q.shape[1])
    s = np.einsum("hgd,thd->hgt", queries, k)
    m = s.max(-1, where=counts > 0, initial=-INF, keepdims=True)
    p = counts * np.exp(s - m)
    d = p.sum(-1, keepdims=True)
    o = np.einsum("hgt,thd->hgd", p / d, v)
    return o.reshape(len(q), -1), ((m + np.log(d)) * LOG2_E).reshape(-1)


def check_counted(xp, pool, rng, kv_len, num_qo_heads, others=()):
    """Decode a request of many tokens, on the pages of a pool over and over, before others."""
    arrays, page_size = pool.arrays(rng), pool.page_size
    drawn = rng.integers(0, arrays.indptr[-1], -(-kv_len // page_size))
    of_token = (drawn[:, None] * page_size + np.arange(page_size)).reshape(-1)[:kv_len]
    counts = np.bincount(of_token, minlength=pool.nnz)
    indptr = np.array([0, len(drawn), *(len(drawn) + np.arange(len(others)) + 1)])
    indices = arrays.indices[np.concatenate([drawn, np.array(others, np.int64)])]
    last = np.array([(kv_len - 1) % page_size + 1, *[1] * len(others)])
    arrays = arrays._replace(indptr=indptr, indices=indices, last_page_len=last)
    cache, table = pool.nouns(arrays, xp)
    q = pool.queries(rng, 1 + len(others), num_qo_heads)
    o, lse = attend(cache, table, on(xp, q))
    want = counted(q[0], arrays.k, arrays.v, counts)
    got = to_numpy(o)[0], to_numpy(lse)[0]
    assert_attends(got, want, operands=q.dtype, scale=max_abs(arrays.v))
    if others:  # of one token: its value
        first = arrays.v[np.array(others) * page_size]
        assert_same_bits(to_numpy(o)[1:], np.repeat(first, num_qo_heads // first.shape[1], 1))


# Lengths of a million and beyond, where products of lengths and dims pass 32 bits; page sizes 1,
# odd and of a tile.
@pytest.mark.parametrize(
    ("kv_len", "page_size", "dtype"),
    [
        (1 << 20, 16, "bfloat16"),
        ((1 << 20) + 1, 1, "float16"),
        ((1 << 20) - 1, 48, E4M3),
        (4_194_305, 64, "bfloat16"),
    ],
)
def test_a_million_keys_are_as_good_as_a_thousand(xp, kv_len, page_size, dtype, rng):
    pool = PagedCase((64 * page_size,), page_size, 1, 128, dtype=dtype)
    check_counted(xp, pool, rng, kv_len if xp is cp else kv_len >> 8, 4)


# What sums held in 16 bits would lose: an average, a large value, one weight among a million.
def test_a_million_equal_keys_average_their_values(xp):
    n = 1 << (20 if xp is cp else 12)
    data = np.zeros((3, 2, 16, 2, 64), np.float16)
    data[0, 1, ::2] = 1  # values 0 and 1 in turn
    data[1, 1] = 60_000
    data[2, 1, -1] = 1  # the very last key differs
    data[2, 0, -1, :, 0] = 10
    cache = PagedKVCache(on(xp, data))
    pages = n // 16
    ids = np.repeat([0, 1, 0], [pages, pages, pages - 1]).tolist()
    indices = on(xp, np.array([*ids, 2], np.int32))
    # The third request: values 1 in all keys but the last page's, whose own are 0 but for one.
    table = PageTable(on(xp, indptr_of([pages] * 3)), indices, on(xp, np.full(3, 16)), 16)
    q = np.zeros((3, 4, 64), np.float16)
    q[:, :, 0] = 1
    o, lse = (to_numpy(x) for x in attend(cache, table, on(xp, q), sm_scale=1.0))
    assert (o[0] == 0.5).all()
    assert (o[1] == 60_000).all()
    assert (lse[:2] == np.log2(n)).all()
    top = np.exp(10.0)
    want = (8 * (pages - 1) + top) / (n - 1 + top)
    assert_close(o[2], np.full((4, 64), want), ATTENTION["float16"])
    assert_close(lse[2], np.full(4, np.log2(n - 1 + top)), LSE)


def test_one_weight_among_a_million_is_not_lost(xp):
    n = 1 << (20 if xp is cp else 12)
    data = np.zeros((2, 2, 1, 1, 64), np.float16)
    data[1, 0, 0, 0, 0] = 10
    data[1, 1] = 1
    cache = PagedKVCache(on(xp, data))
    indices = np.zeros(n, np.int32)
    indices[-1] = 1
    table = PageTable(*(on(xp, x) for x in (np.array([0, n]), indices, np.array([1]))), 1)
    q = np.zeros((1, 1, 64), np.float16)
    q[..., 0] = 1
    o, lse = attend(cache, table, on(xp, q), sm_scale=1.0, out=on(xp, q.astype(np.float32)))
    want = np.exp(10.0) / (np.exp(10.0) + n - 1)
    if xp is cp:
        assert abs(want - 0.020573) < 1e-6
    np.testing.assert_allclose(to_numpy(o), want, rtol=2**-10)
    assert_close(lse, np.full((1, 1), np.log2(np.exp(10.0) + n - 1)), LSE)


# Many heads and a long request beside many tiny ones: the most states to merge.
def test_scratch_holds_whatever_is_cut(xp, rng):
    pool = PagedCase((1024,), 16, 8, 64, dtype="bfloat16")
    others = rng.integers(0, 64, 511 if xp is cp else 5).tolist()
    check_counted(xp, pool, rng, 131_072 if xp is cp else 3000, 128, others)


# Grids that pass 65535 and 300,000 requests; one token, or none, each.
@pytest.mark.parametrize(("batch_size", "page_size"), [(65_536, 1), (300_000, 1), (300_000, 16)])
def test_swarms_of_tiny_requests(xp, batch_size, page_size, rng):
    n = batch_size if xp is cp else batch_size // 1000
    lens = (rng.random(n) < 0.9).astype(np.int32)
    num_pages = n if page_size == 1 else 4096
    data = rng.standard_normal((num_pages, 2, 1, 64), np.float32).astype(np.float16)
    data[data == 0] = 1  # of -0 the sum is +0
    pages = rng.permutation(num_pages) if page_size == 1 else rng.integers(0, num_pages, n)
    pages = pages[: lens.sum()].astype(np.int32)
    whole = poison((num_pages, 2, page_size, 1, 64), data.dtype)
    whole[:, :, 0] = data
    q = rng.standard_normal((n, 1, 64), np.float32).astype(np.float16)
    cache = PagedKVCache(on(xp, whole))
    table = PageTable(*(on(xp, x) for x in (indptr_of(lens), pages, lens)), page_size)
    out, sums = on(xp, np.full(q.shape, np.nan, np.float16)), on(xp, np.full((n, 1), 7, np.float32))
    cache.decode(on(xp, q), table, out=out, lse=sums)
    k, v = np.zeros((2, n, 1, 64), np.float16)
    k[lens > 0], v[lens > 0] = data[pages, 0], data[pages, 1]
    assert_same_bits(out, v)  # of one key exactly its value, of none 0
    logits = np.einsum("nhd,nhd->nh", q, k, dtype=np.float64) / 8
    want = np.where(lens[:, None] > 0, logits * LOG2_E, -INF)
    assert_close(sums, want, LSE)


# More rows than a grid's y and z axes take: a request each, one of them all, and rows times heads.
@pytest.mark.parametrize("qo_lens", [[1] * 70_000, [70_000], [64] * 1024], ids=lambda x: len(x))
def test_swarms_of_rows(xp, qo_lens, rng):
    qo_lens = np.array(qo_lens if xp is cp else [max(n // 100, 1) for n in qo_lens][:300])
    batch_size, nnz = len(qo_lens), int(qo_lens.sum())
    data = random_rows(rng, (512, 2, 1, 1, 64), "bfloat16")
    pages = rng.integers(0, 512, batch_size)
    q = random_rows(rng, (nnz, 1, 64), "bfloat16")
    cache = PagedKVCache(on(xp, data))
    table = PageTable(*(on(xp, x) for x in (
        np.arange(batch_size + 1), pages, np.ones(batch_size, np.int32))), 1)  # fmt: skip
    o, lse = attend(cache, table, on(xp, q), on(xp, indptr_of(qo_lens)))
    of_row = pages[np.repeat(np.arange(batch_size), qo_lens)]
    assert_same_bits(o, data[of_row, 1, 0])
    k = data[of_row, 0, 0].astype(np.float32)
    logits = np.einsum("nhd,nhd->nh", q.astype(np.float32), k, dtype=np.float64) / 8
    assert_close(lse, logits * LOG2_E, LSE)


@pytest.mark.parametrize("num_kv_heads", [64, 300])
def test_many_kv_heads_in_a_large_batch(xp, num_kv_heads, rng):
    pool = PagedCase((64,), 4, num_kv_heads, 16)
    lens = rng.integers(0, 4, 1024 if xp is cp else 8)
    check(xp, pool, rng, arrays=shared_pages(pool, lens, rng), group_size=1)


# Page ids times page strides beyond 32 bits, of elements and of bytes: one cache, and one layer of
# a cache that packs 32 layers into a page of 2^20 elements.
@pytest.mark.gpu
@pytest.mark.parametrize("packed_layers", [False, True])
def test_offsets_are_64_bit(packed_layers, rng):
    shape = (2101, 32, 2, 16, 8, 128) if packed_layers else (70_000, 2, 16, 8, 128)
    whole = cp.empty(shape, np.uint16)
    layer = whole[:, 0] if packed_layers else whole
    rows = cp.asarray(random_rows(rng, (2, 16, 8, 128), "bfloat16").view(np.uint16))
    last = len(layer) - 1
    layer[0] = layer[last] = rows
    cache = PagedKVCache(layer.view(BF16))
    table = PageTable.from_seq_lens([5, 5, 5], 16, cp.array([0, last, 0]))
    q = cp.asarray(np.repeat(random_rows(rng, (1, 32, 128), "bfloat16"), 3, 0))
    for got in attend(cache, table, q) + attend(cache, table, q, [0, 1, 2, 3]):
        assert_same_bits(got[1], got[0])
        assert_same_bits(got[2], got[0])
    k, v = (to_numpy(x).view(BF16)[:5] for x in rows)
    seen = np.ones((1, 5), bool)
    want = reference.attend(to_numpy(q)[:1], k, v, seen, sm_scale=128**-0.5)
    got = attend(cache, table, q)
    assert_attends([x[1:2] for x in got], want, operands=BF16, scale=max_abs(v))
    del whole, layer, cache
    cp.get_default_memory_pool().free_all_blocks()


# Dtypes


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of the cache, the queries and the output; None is what the call chooses."""

    cache: str
    q: str
    out: str | None = None

    def __str__(self):
        return f"{self.q}-on-{self.cache}" + (f"-to-{self.out}" if self.out else "")


# Every cache with every kind of query it goes with; every output of each.
DTYPES = [Dtypes(d, d, out) for d in ("float16", "bfloat16") for out in (None, "float32")]
DTYPES += [Dtypes("float16", "float16", "bfloat16"), Dtypes("bfloat16", "bfloat16", "float16")]
DTYPES += [Dtypes(cache, q) for cache in (E4M3, E5M2) for q in ("float16", "bfloat16", E4M3, E5M2)]
DTYPES += [Dtypes(E4M3, E4M3, "float16"), Dtypes(E4M3, E5M2, "float32")]
DTYPES += [Dtypes(E5M2, "float16", "bfloat16"), Dtypes(E5M2, "bfloat16", "float32")]


@pytest.mark.parametrize("qo_lens", [None, (2, 0, 7)], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_every_dtype_of_cache_query_and_output(xp, dtypes, qo_lens, rng):
    case = PagedCase((45, 8, 150), 16, dtype=dtypes.cache, layout="HND")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    q = random_rows(rng, (3 if qo_lens is None else sum(qo_lens), 4, 64), dtypes.q)
    qo_indptr = None if qo_lens is None else indptr_of(qo_lens)
    scales = {"q_scale": 0.5, "k_scale": 1.5, "v_scale": 0.25}
    fp8 = dtypes.q.startswith("float8")
    wanted = dtypes.out or ("bfloat16" if fp8 else dtypes.q)
    result = np.full((len(q), 4, 64), 7, as_dtype("test", "out", wanted))
    options = {"out": on(xp, result)} if dtypes.out else {}
    got = attend(cache, table, on(xp, q), qo_indptr, **scales, **options)
    assert got[0].dtype.name == wanted
    want = define(case, arrays, q, qo_indptr, **scales)
    coarsest = "bfloat16" if wanted == "bfloat16" or fp8 else dtypes.q
    assert_attends(got, want, operands=coarsest, scale=0.25 * max_abs(arrays.v))


# Queries far from 1: what an fp16 copy of a bfloat16 query would lose at either end.
@pytest.mark.parametrize("size", [1e5, 3e30, 1e-6, 1e-30])
@pytest.mark.parametrize("dtype", ["bfloat16", E4M3, E5M2])
def test_queries_may_be_of_any_size(xp, dtype, size, rng):
    case = PagedCase((45, 0, 8, 150), 16, dtype=dtype)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    q = (random_rows(rng, (4, 8, 64), "float32") * np.float32(size)).astype(BF16)
    for qo_indptr in (None, np.array([0, 2, 2, 3, 4])):
        scales = {"q_scale": 1 / size, "k_scale": 0.5}
        got = attend(cache, table, on(xp, q), qo_indptr, **scales)
        want = define(case, arrays, q, qo_indptr, **scales)
        assert_attends(got, want, operands=BF16, scale=max_abs(arrays.v))


# The largest finite keys and values of both fp8 dtypes; large queries: sums beyond fp16's range.
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_fp8_values_overflow_nothing(xp, dtype, rng):
    case = PagedCase((45, 130), 16, dtype=dtype)
    arrays = case.arrays(rng)
    largest = 448.0 if dtype == E4M3 else 57344.0
    for store in case.stores(arrays.data):
        finite = np.isfinite(store.astype(np.float32))
        store[finite] = np.where(rng.random(int(finite.sum())) < 0.5, largest, -largest)
    cache, table = case.nouns(arrays, xp)
    q = np.abs(random_rows(rng, (2, 4, 64), "float32") * 1e5).astype(BF16)
    options = {"sm_scale": 1e-4, "k_scale": 1e-4 / largest, "v_scale": 1 / largest}
    got = attend(cache, table, on(xp, q), **options)
    assert_attends(got, define(case, arrays, q, **options), operands=BF16, scale=1.0)


HALF = {
    "float": 0.5,
    "float64": np.float64(0.5),
    "float16": np.float16(0.5),
    "bfloat16": ml_dtypes.bfloat16(0.5),
    "0-d": np.array(0.5),
    "one element": np.array([0.5], np.float32),
    "on the device": [0.5],
    "on the device, 0-d": 0.5,
}


@pytest.mark.parametrize("kind", HALF)
def test_a_scale_may_be_any_scalar_and_is_never_lost(xp, kind, rng):
    half = HALF[kind]
    if kind.startswith("on the device"):
        half = on(xp, np.array(half, np.float32))
    # Two keys of logits 0 and 2, values 1 and 2 after scaling; unscaled it would be 3.99933.
    options = {"sm_scale": 1.0, "q_scale": half, "k_scale": 0.5, "v_scale": half}
    for o, lse in attend_numbers(xp, [1], [0, 8], [2, 4], dtype=E4M3, **options):
        np.testing.assert_allclose(o, 1.880797, rtol=2**-8)
        np.testing.assert_allclose(lse * np.log(2), 2.126928, rtol=1e-5)
    options |= {"q_scale": 0.5, "k_scale": half}
    for o, _ in attend_numbers(xp, [1], [0, 8], [2, 4], dtype=E5M2, return_lse=False, **options):
        np.testing.assert_allclose(o, 1.880797, rtol=2**-8)
    for o, _ in attend_numbers(xp, [1], [0, 8], [2, 4], dtype=E4M3, sm_scale=1.0):
        np.testing.assert_allclose(o, 3.99933, rtol=2**-8)


# 16-bit caches take scales too.
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_multiply_whatever_the_dtype(xp, dtype, rng):
    case = PagedCase((45, 0, 8, 150), 16, dtype=dtype)
    check(xp, case, rng, q_scale=-2.0, k_scale=0.25, v_scale=-3.0)


# Memory: views that engines have. Beside the view lies NaN.


def flat(shape):
    """Say how many elements a shape has."""
    return int(np.prod(shape))


VIEWS = {  # name: (shape of the whole for a shape, view of the whole for a shape)
    "a layer of each page": (lambda s: (s[0], 3, *s[1:]), lambda w, s: w[:, 1]),
    "some pages": (lambda s: (s[0] + 5, *s[1:]), lambda w, s: w[2 : 2 + s[0]]),
    "every other page": (lambda s: (2 * s[0], *s[1:]), lambda w, s: w[::2]),
    "pages backwards": (lambda s: s, lambda w, s: w[::-1]),
    "some tokens": (
        lambda s: (*s[:-3], s[-3] + 6, *s[-2:]),
        lambda w, s: w[..., 2 : 2 + s[-3], :, :],
    ),
    "tokens backwards": (lambda s: s, lambda w, s: w[..., ::-1, :, :]),
    "every other head": (
        lambda s: (*s[:-2], 2 * s[-2] + 1, s[-1]),
        lambda w, s: w[..., 1::2, :],
    ),
    "heads backwards": (lambda s: s, lambda w, s: w[..., ::-1, :]),
    "everything backwards": (lambda s: s, lambda w, s: w[(slice(None, None, -1),) * (w.ndim - 1)]),
    "heads before tokens": (
        lambda s: (*s[:-3], s[-2], s[-3], s[-1]),
        lambda w, s: w.swapaxes(-3, -2),
    ),
    "some columns": (lambda s: (*s[:-1], s[-1] + 24), lambda w, s: w[..., 8 : 8 + s[-1]]),
    "columns off a vector": (lambda s: (*s[:-1], s[-1] + 8), lambda w, s: w[..., 3 : 3 + s[-1]]),
    "rows off a vector": (lambda s: (*s[:-1], s[-1] + 1), lambda w, s: w[..., : s[-1]]),
    "one element off": (lambda s: (flat(s) + 1,), lambda w, s: w[1:].reshape(s)),
}


def viewed(xp, array, name):
    """Copy a host array to a view of poisoned memory of a home: (view, the whole)."""
    shape_of, view_of = VIEWS[name]
    whole = poison(shape_of(array.shape), array.dtype)
    view_of(whole, array.shape)[...] = array
    whole = on(xp, whole)
    return view_of(whole, array.shape), whole


@pytest.mark.parametrize("form", ["5d", "pair"])
@pytest.mark.parametrize("name", VIEWS)
def test_decode_reads_a_cache_that_is_a_view_of_larger_memory(xp, name, form, rng):
    for dtype in ("float16", E4M3):
        case = PagedCase((45, 0, 8, 150), 16, 2, 64, dtype=dtype, form=form)
        arrays = case.arrays(rng)
        _, table = case.nouns(arrays, xp)
        if form == "5d":
            data, _ = viewed(xp, arrays.data, name)
        else:  # K and V of different strides
            data = (viewed(xp, arrays.data[0], name)[0], on(xp, arrays.data[1]))
        q = case.queries(rng, 6, 8)
        for qo_indptr in (None, np.array([0, 3, 3, 4, 6])):
            rows = q[:4] if qo_indptr is None else q
            got = attend(PagedKVCache(data), table, on(xp, rows), qo_indptr)
            want = define(case, arrays, rows, qo_indptr)
            assert_attends(got, want, operands=rows.dtype, scale=max_abs(arrays.v))


def test_k_and_v_may_lie_side_by_side_or_be_one(xp, rng):
    case = PagedCase((45, 0, 8, 150), 16, 2, 64, form="pair", head_dim_vo=128)
    arrays = case.arrays(rng)
    _, table = case.nouns(arrays, xp)
    both = on(xp, np.concatenate(arrays.data, -1))
    cache = PagedKVCache((both[..., :64], both[..., 64:]))
    q = case.queries(rng, 4, 8)
    got = attend(cache, table, on(xp, q))
    assert_attends(got, define(case, arrays, q), operands=q.dtype, scale=max_abs(arrays.v))
    # Values that are the first columns of the keys, as latent caches have them.
    case = PagedCase((45, 0, 8, 150), 16, 2, 128)
    arrays = case.arrays(rng)
    keys = arrays.data[:, 0]
    host = PagedKVCache((keys, keys[..., :64]))
    there = on(xp, keys.copy())
    q = case.queries(rng, 4, 8)
    got = attend(PagedKVCache((there, there[..., :64])), table_of(xp, arrays, 16), on(xp, q))
    want = reference.decode(q, host.k, host.v, arrays.indptr, arrays.indices, arrays.last_page_len)
    assert_attends(got, want, operands=q.dtype, scale=max_abs(arrays.k))


def table_of(xp, arrays, page_size):
    """Make a home's PageTable of a case's arrays."""
    return PageTable(
        *(on(xp, x) for x in (arrays.indptr, arrays.indices, arrays.last_page_len)), page_size
    )


# A stride of 0: one head's keys for all heads, and one page that has every id.
def test_strides_of_zero_repeat_what_they_name(xp, rng):
    page = random_rows(rng, (2, 16, 1, 64), "float16")
    here = on(xp, page)
    cache = PagedKVCache(xp.broadcast_to(here[None], (9, 2, 16, 2, 64)))
    packed = np.broadcast_to(page[None], (9, 2, 16, 2, 64)).copy()
    case = PagedCase((45, 0, 8), 16)
    arrays = case.arrays(rng)._replace(data=packed, indices=np.array([8, 0, 3, 7, -1], np.int32))
    q = case.queries(rng, 3, 8)
    got = attend(cache, table_of(xp, arrays, 16), on(xp, q))
    assert_attends(got, define(case, arrays, q), operands=q.dtype, scale=max_abs(page))
    # One query for all requests and heads.
    q = random_rows(rng, (1, 1, 64), "float16")
    got = attend(cache, table_of(xp, arrays, 16), xp.broadcast_to(on(xp, q), (3, 8, 64)))
    want = define(case, arrays, np.broadcast_to(q, (3, 8, 64)))
    assert_attends(got, want, operands=q.dtype, scale=max_abs(page))


# Queries: [rows, heads, dim] as views; "rows" are the pages of VIEWS.
Q_VIEWS = [name for name in VIEWS if name not in ("a layer of each page", "heads before tokens")]


@pytest.mark.parametrize("dtype", ["bfloat16", E5M2])
@pytest.mark.parametrize("name", [*Q_VIEWS, "heads first", "a fused projection"])
def test_queries_may_be_views(xp, name, dtype, rng):
    case = PagedCase((45, 8, 3, 22), 16, dtype=dtype)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    q = random_rows(rng, (4, 8, 64), dtype)
    if name == "heads first":
        view = on(xp, q.swapaxes(0, 1).copy()).swapaxes(0, 1)
    elif name == "a fused projection":
        fused = random_rows(rng, (4, (8 + 2 + 2) * 64), dtype)
        fused[:, : 8 * 64] = q.reshape(4, -1)
        view = on(xp, fused)[:, : 8 * 64].reshape(4, 8, 64)
    else:
        view, _ = viewed(xp, q, name)
    want = define(case, arrays, q)
    scale = max_abs(arrays.v)
    assert_attends(attend(cache, table, view), want, operands=dtype, scale=scale)
    got = attend(cache, table, view, [0, 1, 2, 3, 4])
    assert_attends(got, want, operands=dtype, scale=scale)


def test_ragged_queries_may_have_their_heads_first(xp, rng):
    case = PagedCase((45, 8), 16)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    q = case.queries(rng, 5, 8)
    ragged = RaggedTensor(on(xp, q.swapaxes(0, 1).copy()), [0, 2, 5], "HND")
    got = cache.prefill(ragged, table, causal=True, return_lse=True)
    want = define(case, arrays, q, np.array([0, 2, 5]), causal=True)
    assert_attends(got, want, operands=q.dtype, scale=max_abs(arrays.v))


# Outputs: as views, in every dtype they may have. What lies beside them must stay as it is.
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", Q_VIEWS)
def test_results_go_where_told_and_nowhere_else(xp, name, out_dtype, rng):
    case = PagedCase((45, 0, 3, 300), 16, dtype="bfloat16")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    kind = as_dtype("test", "out", out_dtype)
    shape_of, view_of = VIEWS[name]
    for qo_lens in (None, (1, 2, 0, 3)):
        q = case.queries(rng, 4 if qo_lens is None else 6, 8)
        qo_indptr = None if qo_lens is None else indptr_of(qo_lens)
        out, whole = viewed(xp, np.full(q.shape, 7, np.float32).astype(kind), name)
        sums = on(xp, np.full((2 * len(q), 9), 7, np.float32))
        lse = sums[::-2, :8]
        got = attend(cache, table, on(xp, q), qo_indptr, out=out, lse=lse)
        assert_same_bits(got[0], to_numpy(out))
        assert_same_bits(got[1], to_numpy(lse))
        want = define(case, arrays, q, qo_indptr)
        coarsest = out_dtype if out_dtype == "bfloat16" else "bfloat16"
        assert_attends((out, lse), want, operands=coarsest, scale=max_abs(arrays.v))
        untouched = poison(shape_of(q.shape), kind)
        view_of(untouched, q.shape)[...] = to_numpy(out)
        assert_same_bits(whole, untouched)
        assert (to_numpy(sums)[::2] == 7).all()
        assert (to_numpy(sums)[:, 8] == 7).all()


def test_results_need_not_be_asked_for(xp, rng):
    case = PagedCase((45, 0, 3), 16)
    cache, table = case.nouns(case.arrays(rng), xp)
    q = on(xp, case.queries(rng, 3, 8))
    o, lse = cache.decode(q, table, return_lse=True)
    sums = on(xp, np.full((3, 8), 7, np.float32))
    assert_same_bits(cache.decode(q, table), to_numpy(o))
    assert_same_bits(cache.decode(q, table, lse=sums), to_numpy(o))
    assert_same_bits(sums, to_numpy(lse))


# Tables: index arrays of both widths and any stride, one of each in a call.
@pytest.mark.parametrize(
    "kinds",
    [("int64",) * 4, ("int32", "int64", "int32", "int64"), ("int64", "int32", "int64", "int32")],
    ids="-".join,
)
@pytest.mark.parametrize("step", [1, 3, -1, -2])
def test_index_arrays_may_have_any_width_and_stride(xp, step, kinds, rng):
    case = PagedCase(LENS, 16)
    arrays = case.arrays(rng)
    cache, _ = case.nouns(arrays, xp)

    def strided(array, dtype):
        wide = np.full((len(array), abs(step)), 10**9, dtype)
        wide[:, 0] = (array if step > 0 else array[::-1]).clip(-1, 2**31 - 1)
        return on(xp, wide)[:, 0][:: 1 if step > 0 else -1]

    qo_indptr = indptr_of([b % 3 for b in range(8)])
    parts = arrays.indptr, arrays.indices, arrays.last_page_len
    table = PageTable(*map(strided, parts, kinds[:3]), 16)
    q = case.queries(rng, 8, 4)
    scale = max_abs(arrays.v)
    got = attend(cache, table, on(xp, q))
    assert_attends(got, define(case, arrays, q), operands=q.dtype, scale=scale)
    q = case.queries(rng, int(qo_indptr[-1]), 4)
    got = attend(cache, table, on(xp, q), strided(qo_indptr, kinds[3]), causal=True)
    want = define(case, arrays, q, qo_indptr, causal=True)
    assert_attends(got, want, operands=q.dtype, scale=scale)


# The tail of indices: none at all, absent pages, ids that are huge; one page less than a tile has.
@pytest.mark.parametrize("tail", [[], [-1] * 64, [2**31 - 1] * 64, [0] * 64])
def test_what_lies_past_the_last_page_of_a_table_never_matters(xp, tail, rng):
    case = PagedCase((45, 0, 8, 25, 1), 4)
    arrays = case.arrays(rng)
    indices = np.array([*arrays.indices[: arrays.indptr[-1]], *tail], np.int32)
    check(xp, case, rng, arrays=arrays._replace(indices=indices))


def test_rows_past_the_last_request_never_matter(xp, rng):
    case = PagedCase((45, 0, 8), 16)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    q = case.queries(rng, 12, 4)
    qo_indptr = np.array([0, 2, 2, 5])
    want = define(case, arrays, q[:5], qo_indptr)
    q[5:] = np.nan
    o, lse = attend(cache, table, on(xp, q), qo_indptr)
    assert o.shape == (12, 4, 64)
    assert lse.shape == (12, 4)
    assert_attends((o[:5], lse[:5]), want, operands=q.dtype, scale=max_abs(arrays.v))


# Slots past kv_len: NaN and infinity, whole pages of them, on a page larger than the request.
@pytest.mark.parametrize("junk", [np.nan, INF, -INF])
@pytest.mark.parametrize(("kv_len", "page_size"), [(13, 4), (1, 64), (100, 1), (1000, 256)])
def test_what_lies_beyond_kv_len_changes_no_bit(xp, kv_len, page_size, junk, rng):
    pages = -(-kv_len // page_size)
    table = PageTable.from_seq_lens(
        on(xp, np.array([kv_len])), page_size, on(xp, rng.permutation(pages + 5)[:pages])
    )
    rows = [on(xp, random_rows(rng, (kv_len, 2, 64), "bfloat16")) for _ in range(2)]
    q = on(xp, random_rows(rng, (3, 8, 64), "bfloat16"))
    results = []
    for filler in (junk, 0.0):
        data = np.full((pages + 5, 2, page_size, 2, 64), filler, np.float32).astype(BF16)
        cache = PagedKVCache(on(xp, data))
        cache.append(*rows, table, indptr=[0, kv_len])
        results.append(attend(cache, table, q[:1]) + attend(cache, table, q[:1], window_left=5))
        results[-1] += attend(cache, table, q, [0, 3], causal=True)
    for got, want in zip(*results, strict=True):
        assert_same_bits(got, to_numpy(want))
        assert np.isfinite(to_numpy(got)[-1].astype(np.float32)).all()


def test_a_window_skips_far_pages_of_nan(xp, rng):
    case = PagedCase((4000, 700), 16)
    arrays = case.arrays(rng)
    q = case.queries(rng, 2, 8)
    want = define(case, arrays, q, window_left=100)
    pages = arrays.indices[:150]  # 2400 of the first request's tokens
    arrays.data[pages] = np.nan
    cache, table = case.nouns(arrays, xp)
    got = attend(cache, table, on(xp, q), window_left=100)
    assert_attends(got, want, operands=q.dtype, scale=max_abs(arrays.v))


def test_pages_listed_twice_are_read_twice(xp, rng):
    case = PagedCase((12,), 4)
    arrays = case.arrays(rng)
    a, b, c = arrays.indices[:3]
    arrays = arrays._replace(
        indptr=np.array([0, 2, 5, 5, 6]),
        indices=np.array([b, b, a, c, a, c]),
        last_page_len=np.array([3, 4, 1, 2]),
    )
    check(xp, case, rng, arrays=arrays)
    cache, table = case.nouns(arrays, xp)
    k, v = (x.reshape(3, 4, 2, 64) for x in (arrays.k, arrays.v))
    keys, values = (np.concatenate([x[1], x[1, :3]]) for x in (k, v))
    q = case.queries(rng, 4, 2)
    want = reference.attend(q[:1], keys, values, np.ones((1, 7), bool), sm_scale=0.125)
    got = [x[:1] for x in attend(cache, table, on(xp, q))]
    assert_attends(got, want, operands=q.dtype, scale=max_abs(v))


@pytest.mark.gpu
def test_every_argument_of_decode_may_speak_nothing_but_dlpack(rng):
    case = PagedCase((45, 8, 25, 22))
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, cp)
    theirs = PageTable(DLPackOnly(table.indptr), DLPackOnly(table.indices),
                       to_numpy(table.last_page_len).tolist(), 16)  # fmt: skip
    q, sinks = case.queries(rng, 4, 8), random_rows(rng, (8,), "float32")
    out, lse = cp.zeros((4, 8, 64), np.float16), cp.zeros((4, 8), np.float32)
    PagedKVCache(DLPackOnly(cache.data)).decode(
        DLPackOnly(cp.asarray(q)), theirs, sinks=DLPackOnly(cp.asarray(sinks)),
        k_scale=DLPackOnly(cp.full(1, 0.5, np.float32)), out=DLPackOnly(out), lse=DLPackOnly(lse),
    )  # fmt: skip
    want = define(case, arrays, q, sinks=sinks, k_scale=0.5)
    assert_attends((out, lse), want, operands=q.dtype, scale=max_abs(arrays.v))


# Options


# Windows: only the own key, beside page and tile edges, all but one key, exactly all, far more.
@pytest.mark.parametrize("window_left", [0, 1, 14, 15, 16, 63, 64, 65, 148, 149, 150, 2**31 - 1])
def test_windows_beside_every_edge(xp, window_left, rng):
    case = PagedCase((150, 0, 1, 16, 65, 66, 149), 16, dtype="bfloat16")
    check(xp, case, rng, window_left=window_left)
    qo_lens = (5, 2, 3, 0, 1, 9, 2)
    for causal in (False, True):
        check(xp, case, rng, qo_lens=qo_lens, causal=causal, window_left=window_left)


# A window that cuts a long request somewhere in a part, or leaves whole parts nothing.
@pytest.mark.parametrize("window_left", [0, 99, 8191, 16_384, 19_998, 19_999])
def test_windows_of_a_long_request(xp, window_left, rng):
    pool = PagedCase((2048,), 16, 1, 64)
    arrays = shared_pages(pool, [20_000, 17], rng)
    check(xp, pool, rng, arrays=arrays, window_left=window_left)
    check(xp, pool, rng, arrays=arrays, window_left=window_left, qo_lens=(4, 2), causal=True)


# Soft caps: small, where tanh is flat, ordinary, and so large that it does nothing; with a second
# call that has none.
@pytest.mark.parametrize("cap", [0.5, 5.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
def test_soft_caps(xp, dtype, cap, rng):
    case = PagedCase((45, 0, 8, 300), 16, dtype=dtype)
    for options in ({"sm_scale": 0.5}, {"sm_scale": 3.0, "window_left": 20}, {"sm_scale": -1.0}):
        check(xp, case, rng, logits_soft_cap=cap, **options)
        check(xp, case, rng, logits_soft_cap=None, **options)
        check(xp, case, rng, qo_lens=(3, 1, 2, 0), causal=True, logits_soft_cap=cap, **options)


# Sinks: of every dtype, absent for one head (-inf), dominating another, far below the logits.
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sinks_add_to_the_denominator_once(xp, dtype, rng):
    case = PagedCase((45, 0, 8, 1, 5000), 16, 2, dtype="bfloat16")
    sinks = np.array([0.5, -1, 3, -INF, 30, -60, 0, 1], np.float32)
    sinks = sinks.astype(as_dtype("test", "sinks", dtype))
    o, lse = check(xp, case, rng, sinks=sinks)
    assert (to_numpy(o)[1] == 0).all()
    want = sinks.astype(np.float64) * LOG2_E
    assert_close(to_numpy(lse)[1], want, LSE)  # of no tokens: its own
    check(xp, case, rng, sinks=sinks, logits_soft_cap=2.0, window_left=10)
    check(xp, case, rng, sinks=sinks, qo_lens=(3, 2, 12, 2, 1), causal=True, q_scale=0.5)


def test_a_sink_is_neither_scaled_nor_capped(xp):
    want = np.exp(0.5) / (np.exp(0.5) + np.exp(9.0))
    sinks = on(xp, np.array([9.0], np.float32))
    options = {"sm_scale": 0.125, "q_scale": 0.5, "k_scale": 4.0, "sinks": sinks}
    for cap in (None, 50.0):
        capped = 0.5 if cap is None else cap * np.tanh(0.5 / cap)
        want = np.exp(capped) / (np.exp(capped) + np.exp(9.0))
        for o, lse in attend_numbers(xp, [1], [2], [1000], logits_soft_cap=cap, **options):
            np.testing.assert_allclose(o, 1000 * want, rtol=0.01)
            np.testing.assert_allclose(lse, np.logaddexp(capped, 9.0) * LOG2_E, atol=4e-3)


# sm_scale: nothing at all, negative, small, and every kind of number.
@pytest.mark.parametrize(
    "sm_scale", [0, 0.0, -0.3, 2, 1e-3, np.float32(0.5), np.float64(0.5), np.float16(0.5)], ids=repr
)
def test_any_finite_sm_scale_is_right(xp, sm_scale, rng):
    case = PagedCase((45, 0, 8, 600), 16, dtype="bfloat16")
    check(xp, case, rng, sm_scale=sm_scale)
    check(xp, case, rng, sm_scale=sm_scale, qo_lens=(2, 1, 9, 1), causal=True)


def test_numbers_of_any_kind_mean_the_same(xp, rng):
    case = PagedCase((45, 8), 16)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    other = PageTable(table.indptr, table.indices, table.last_page_len, np.int16(16))
    q = on(xp, case.queries(rng, 2, 4))
    want = attend(cache, table, q, sm_scale=0.5, window_left=3, logits_soft_cap=2.0)
    kinds = np.float32(0.5), np.int64(3), np.float16(2)
    got = attend(cache, other, q, sm_scale=kinds[0], window_left=kinds[1], logits_soft_cap=kinds[2])
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, to_numpy(y))
    with pytest.raises(TypeError, match="sm_scale must be one number"):
        cache.decode(q, table, sm_scale=Fraction(1, 2))


# Prefill


@dataclass(frozen=True)
class RowsCase:
    """Rows of each request over its tokens."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    group_size: int = 1
    causal: bool = True
    window_left: int = -1
    page_size: int = 16
    dtype: str = "bfloat16"

    def __str__(self):
        def shown(lens):
            return ",".join(map(str, lens[:4])) + ("" if len(lens) <= 4 else f",..x{len(lens)}")

        window = "" if self.window_left < 0 else f"-window{self.window_left}"
        return (
            f"{shown(self.qo_lens)}-over-{shown(self.kv_lens)}-group{self.group_size}"
            f"-{'causal' if self.causal else 'full'}{window}-page{self.page_size}-{self.dtype}"
        )


# Few rows, as speculation has them: one number of rows for all, for groups that share tiles and
# ones that fill them; causal and full in turn.
ROWS = [
    RowsCase((rows,) * 4, (45, 1, 150, 17), group_size, causal=(rows + i) % 2 == 0)
    for i, group_size in enumerate((1, 4, 8))
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16)
]
# Uneven rows, none, more rows than keys, rows over nothing.
UNEVEN = RowsCase((1, 0, 16, 3, 5, 2, 0, 7), (45, 9, 16, 0, 3, 130, 0, 300))
ROWS += [
    replace(UNEVEN, group_size=group_size, causal=causal, window_left=window_left)
    for group_size in (1, 4, 8)
    for causal in (False, True)
    for window_left in (-1, 0, 9)
]
# Long rows: more than a tile of every group, at and beside its edges; a chunk beside single rows.
LONG = RowsCase((100, 1, 33, 0, 64), (100, 200, 40, 5, 300))
ROWS += [
    replace(LONG, group_size=1),
    replace(LONG, group_size=4, window_left=17),
    replace(LONG, group_size=8, causal=False, dtype="float16"),
    replace(LONG, group_size=5, page_size=3),
    replace(LONG, group_size=3, dtype=E4M3, window_left=64),
    RowsCase((1,) * 20 + (500,) + (1,) * 11, (70,) * 20 + (900,) + (33,) * 11, 2, page_size=48),
]


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_prefill_takes_any_rows(xp, rows, rng):
    case = PagedCase(rows.kv_lens, rows.page_size, 2, 64, dtype=rows.dtype, index_dtype="int64")
    options = {"causal": rows.causal, "window_left": rows.window_left}
    check(xp, case, rng, group_size=rows.group_size, qo_lens=rows.qo_lens, **options)


# Rows with the other head dims, dtypes and strides of the kernel.
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [((128, 128), "bfloat16"), ((256, 256), "float16"), ((192, 128), "bfloat16"),
     ((40, 40), E5M2), ((128, 128), E4M3), ((80, 96), "float16")],
    ids=str,
)  # fmt: skip
def test_prefill_takes_any_head_dims_and_dtypes(xp, dims, dtype, rng):
    case = PagedCase((45, 0, 150, 17), 16, 2, *dims, dtype=dtype, layout="HND", form="pair")
    check(xp, case, rng, group_size=2, qo_lens=(3, 2, 7, 30), causal=True)


def test_one_row_of_prefill_is_decode(xp, rng):
    case = PagedCase((45, 0, 8, 600), 16)
    arrays = case.arrays(rng)
    q = case.queries(rng, 4, 8)
    cache, table = case.nouns(arrays, xp)
    want = define(case, arrays, q, window_left=30)
    for causal in (False, True):
        got = attend(cache, table, on(xp, q), np.arange(5), causal=causal, window_left=30)
        assert_attends(got, want, operands=q.dtype, scale=max_abs(arrays.v))


@pytest.mark.parametrize("window_left", [63, 64, 65])
def test_a_row_of_prefill_is_a_decode_at_its_length(xp, window_left, rng):
    case = PagedCase((200,), 16, 1, 64)
    arrays = case.arrays(rng)
    q = case.queries(rng, 200, 2)
    cache, table = case.nouns(arrays, xp)
    o, lse = attend(cache, table, on(xp, q), [0, 200], causal=True, window_left=window_left)
    lens = np.array([1, 63, 64, 65, 66, 151, 200])
    pages = -(-lens // 16)
    prefixes = PageTable(*(on(xp, x) for x in (
        indptr_of(pages), np.concatenate([arrays.indices[:n] for n in pages]),
        (lens - 1) % 16 + 1)), 16)  # fmt: skip
    alone = attend(cache, prefixes, on(xp, q[lens - 1]), window_left=window_left)
    want = [to_numpy(x).astype(np.float64) for x in alone]
    got = [to_numpy(x)[lens - 1] for x in (o, lse)]
    assert_close(got[0], want[0], ATTENTION["float16"], scale=2 * max_abs(arrays.v))
    assert_close(got[1], want[1], LSE)


# Values known by hand


def attend_numbers(xp, q, k, v, *, dtype="float16", page_size=4, dim=64, **options):
    """Attend one request whose logits are products of numbers: [(o, lse)], each [len(q)].

    The first element of a query and a key is the number, the others are 0; all of a value's are the
    number. One query decodes and prefills, more prefill.
    """
    pages = -(-len(k) // page_size)
    data = poison((2 * pages + 3, 2, page_size, 1, dim), as_dtype("test", "dtype", dtype))
    ids, at = 2 * np.arange(pages)[::-1] + 1, np.arange(len(k))
    slots = ids[at // page_size], slice(None), at % page_size
    rows = np.zeros((len(k), 2, 1, dim), np.float32)
    rows[:, 0, 0, 0], rows[:, 1] = k, np.array(v, np.float32).reshape(-1, 1, 1)
    data[slots] = rows.astype(data.dtype)
    queries = np.zeros((len(q), 1, dim), np.float32)
    queries[:, 0, 0] = q
    queries = on(xp, queries.astype(BF16 if dtype.startswith("float8") else data.dtype))
    cache = PagedKVCache(on(xp, data))
    table = PageTable.from_seq_lens(on(xp, np.array([len(k)])), page_size, on(xp, ids))
    options = {"return_lse": True} | options
    ragged = RaggedTensor(queries, [0, len(q)])
    found = [cache.prefill(ragged, table, **options)]
    if len(q) == 1:
        decodes = {n: x for n, x in options.items() if n != "causal"}
        found.append(cache.decode(queries, table, **decodes))
    results = []
    for result in found:
        o, lse = result if options["return_lse"] else (result, None)
        o = to_numpy(o)[:, 0].astype(np.float64)
        assert (o == o[:, :1]).all(), "the columns of a value are equal"
        results.append((o[:, 0], None if lse is None else to_numpy(lse)[:, 0].astype(np.float64)))
    return results


def test_lse_is_base_2(xp):
    # Two equal keys: 1 in base 2, 0.693 in natural logarithms.
    for _, lse in attend_numbers(xp, [1], [0, 0], [1, 2]):
        assert lse == 1.0


def test_states_of_two_halves_merge_to_the_whole(xp, rng):
    case = PagedCase((64, 3), 16)
    arrays = case.arrays(rng)
    cache, whole = case.nouns(arrays, xp)
    first = PageTable(*(on(xp, np.array(x)) for x in ([0, 3, 3], arrays.indices[:3], [16, 9])), 16)
    second = PageTable(
        *(on(xp, np.array(x)) for x in ([0, 1, 2], arrays.indices[3:5], [16, 3])), 16
    )
    q = on(xp, case.queries(rng, 2, 4))
    parts = attend(cache, first, q) + attend(cache, second, q)
    o, lse = cukv.merge_state(*parts)
    want = [to_numpy(x).astype(np.float64) for x in attend(cache, whole, q)]
    assert_close(o, want[0], ATTENTION["float16"], scale=2 * max_abs(arrays.v))
    assert_close(lse, want[1], LSE)


def test_causal_is_aligned_to_the_end(xp):
    for rows, keys, want in (
        (2, 5, [1.5, 2.0]),
        (1, 9, [4.0]),
        (5, 3, [0, 0, 0, 0.5, 1.0]),
        (1, 1, [0.0]),
    ):
        for o, lse in attend_numbers(xp, [1] * rows, [0] * keys, range(keys), causal=True):
            np.testing.assert_allclose(o, want, rtol=2**-10)
            seen = np.maximum(np.arange(rows) + keys - rows + 1, 0)
            with np.errstate(divide="ignore"):
                np.testing.assert_allclose(lse, np.log2(seen), rtol=1e-6)


@pytest.mark.parametrize(
    ("window_left", "want"),
    [(2, 8), (3, 7.5), (4, 7), (0, 9), (-1, 4.5), (9, 4.5), (10, 4.5), (2**31 - 1, 4.5)],
)
def test_a_window_of_w_sees_w_keys_and_its_own(xp, window_left, want):
    for o, lse in attend_numbers(xp, [1], [0] * 10, range(10), window_left=window_left):
        np.testing.assert_allclose(o, want, rtol=2**-10)
        seen = 10 if window_left < 0 else min(window_left + 1, 10)
        np.testing.assert_allclose(lse, np.log2(seen), rtol=1e-6)


def test_the_soft_cap_acts_before_the_mask(xp):
    capped = {"sm_scale": 1.0, "logits_soft_cap": 2.0}
    for o, _ in attend_numbers(xp, [1], [100, 0], [5, 1], window_left=0, **capped):
        assert o == 1.0  # 1.4768 if what the window hides were capped
    for o, lse in attend_numbers(xp, [1], [0, 100], [1, 5], **capped):
        np.testing.assert_allclose(o, 4.52319, rtol=3e-3)
        np.testing.assert_allclose(lse * np.log(2), 2.12693, atol=4e-3)
    for off in (None, 0, 0.0):
        for o, _ in attend_numbers(xp, [1], [0, 100], [1, 5], sm_scale=1.0, logits_soft_cap=off):
            assert o == 5.0


# Logits far below zero are ordinary: one below all others, one hidden, none a stand-in for -inf.
def test_very_negative_logits_are_ordinary(xp):
    keys, values = [-60_000, *[-61_248] * 63], [1, *[0] * 63]
    for o, lse in attend_numbers(xp, [4], keys, values, dim=128):
        assert o == 1.0
        np.testing.assert_allclose(lse, -30604.183, rtol=1e-6)
    for o, lse in attend_numbers(xp, [1], [0, -20_000], [100, 1], sm_scale=1.0, window_left=0):
        assert o == 1.0
        np.testing.assert_allclose(lse, -20_000 * LOG2_E, rtol=1e-6)


# Logits q * k: of 5e4 and a billion, both signs; equal ones must weigh the same however they round.
@pytest.mark.parametrize(
    ("dtype", "q", "k"),
    [("float16", 1, 5e4), ("bfloat16", 1, 1e9), ("float16", 2.0**14, 61_024), (E5M2, 3e4, 4e4)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_logits_weigh_the_same_however_large(xp, sign, dtype, q, k):
    kind = as_dtype("test", "dtype", dtype)
    key = float(np.array(sign * k, kind).astype(np.float64))
    query = float(np.array(q, BF16 if dtype == E5M2 else kind).astype(np.float64))
    for n in (2, 70, 3000):
        for o, lse in attend_numbers(
            xp, [q], [key] * n, [1, 3] * (n // 2), dtype=dtype, page_size=16, sm_scale=1.0
        ):
            np.testing.assert_allclose(o, 2.0, rtol=2**-8)
            assert_close(lse, np.array([query * key * LOG2_E + np.log2(n)]), LSE)
    # One that is less negative, or larger, takes all.
    for keys, values in (([key, key / 2, key], [5, 7, 5]), ([-key, key, -key], [5, 7, 5])):
        top = int(np.argmax(keys))
        for o, _ in attend_numbers(xp, [q], keys, values, dtype=dtype, sm_scale=1.0):
            np.testing.assert_allclose(o, 7.0 if top == 1 else 5.0, rtol=2**-8)


def test_weights_may_sum_to_more_than_fp16_holds(xp):
    n = 70_001
    for value in (60_000, 65_504, -65_504):
        for o, lse in attend_numbers(xp, [1], [0] * n, [value] * n, page_size=64):
            assert o == value
            np.testing.assert_allclose(lse, np.log2(n), rtol=1e-6)


# Nothing to do


def test_a_request_without_keys_is_zero_and_its_lse_minus_infinity(xp, rng):
    case = PagedCase((5, 0, 3))
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    for qo_indptr in (None, np.array([0, 2, 4, 9])):  # 5 causal rows over 3 keys: 2 see none
        nnz = 3 if qo_indptr is None else 9
        options = {} if qo_indptr is None else {"causal": True}
        q = case.queries(rng, nnz, 4)
        out = on(xp, np.full(q.shape, np.nan, np.float16))
        lse = on(xp, np.full((nnz, 4), 7, np.float32))
        attend(cache, table, on(xp, q), qo_indptr, out=out, lse=lse, **options)
        empty = [1] if qo_indptr is None else [2, 3, 4, 5]
        assert not bits(out)[empty].any()
        assert (to_numpy(lse)[empty] == -INF).all()
        want = define(case, arrays, q, qo_indptr, **options)
        assert_attends((out, lse), want, operands=q.dtype, scale=max_abs(arrays.v))


# A batch of none, rows of none, requests of none, a cache without a page.
def test_empty_shapes_give_empty_results(xp):
    cache = PagedKVCache(on(xp, np.zeros((3, 2, 16, 2, 64), np.float16)))
    nothing = np.zeros(0, np.int32)
    table = PageTable(*(on(xp, x) for x in (np.zeros(1, np.int32), nothing, nothing)), 16)
    q = on(xp, np.zeros((0, 4, 64), np.float16))
    for o, lse in (attend(cache, table, q), attend(cache, table, q, [0], causal=True)):
        assert (o.shape, o.dtype) == ((0, 4, 64), np.float16)
        assert (lse.shape, lse.dtype) == ((0, 4), np.float32)
    plan = cache.plan(q, table)
    plan.update()
    assert cache.decode(q, table, plan=plan).shape == (0, 4, 64)

    bare = PagedKVCache(on(xp, np.zeros((0, 2, 16, 2, 64), np.float16)))
    for store in (cache, bare):
        table = PageTable(
            *(on(xp, x) for x in (np.zeros(4, np.int32), nothing, np.array([3, 0, -9]))), 16
        )
        q = on(xp, np.ones((3, 4, 64), np.float16))
        for qo_indptr in (None, [0, 0, 3, 3]):
            o, lse = attend(store, table, q, qo_indptr)
            assert not bits(o).any()
            assert (to_numpy(lse) == -INF).all()
        o, lse = attend(store, table, q[:0], [0, 0, 0, 0])
        assert o.shape == (0, 4, 64)


def test_requests_without_rows_leave_the_others_alone(xp, rng):
    case = PagedCase((45, 8, 25, 22))
    check(xp, case, rng, qo_lens=(0, 0, 3, 0), causal=True)
    check(xp, case, rng, qo_lens=(0, 0, 0, 0))


# Bits


@pytest.mark.parametrize("qo_len", [1, 3])
def test_twenty_runs_give_the_same_bits(xp, qo_len, rng):
    pool = PagedCase((2048,), 16, 2, 128, dtype="bfloat16")
    lens = [30_000, 0, 1, 4097, 513, 64] if xp is cp else [300, 0, 1, 50]
    arrays = shared_pages(pool, lens, rng)
    cache, table = pool.nouns(arrays, xp)
    q = on(xp, pool.queries(rng, qo_len * len(lens), 16))
    qo_indptr = None if qo_len == 1 else on(xp, indptr_of([qo_len] * len(lens)))
    first = [to_numpy(x) for x in attend(cache, table, q, qo_indptr)]
    runs = [attend(cache, table, q, qo_indptr) for _ in range(20)]
    for run in runs:
        for got, want in zip(run, first, strict=True):
            assert_same_bits(got, want)


# On the device: anything in the tables, streams, threads


# Absent pages: in the middle, first, last, all of a request; in a long request whole parts of it.
@pytest.mark.gpu
@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, "one past the last"])
def test_keys_on_a_page_out_of_range_are_dropped_and_the_others_kept(bad, rng):
    pool = PagedCase((1024,), 16, 2, 64, dtype="bfloat16")
    lens = np.array([100, 33, 16, 40_000, 50])
    arrays = shared_pages(pool, lens, rng)
    cache, _ = pool.nouns(arrays, cp)
    starts = arrays.indptr
    absent = [2, starts[1], starts[3] - 1, *range(starts[3] + 5, starts[3] + 1200), starts[5] - 1]
    indices = arrays.indices.copy()
    indices[absent] = cache.max_num_pages if isinstance(bad, str) else bad
    table = table_of(cp, arrays._replace(indices=indices), 16)
    gone = np.zeros(len(indices), bool)
    gone[absent] = True
    there = [~np.repeat(gone[starts[b] : starts[b + 1]], 16)[: lens[b]] for b in range(len(lens))]
    for qo_lens, causal, window_left in (
        ((1,) * 5, False, -1),
        ((1,) * 5, False, 30),
        ((3, 1, 2, 2, 5), True, -1),
    ):
        q = pool.queries(rng, sum(qo_lens), 8)
        qo_indptr = None if max(qo_lens) == 1 else indptr_of(qo_lens)
        mask = [
            np.tri(rows, n, n - rows, dtype=bool) & seen if causal else np.tile(seen, (rows, 1))
            for rows, n, seen in zip(qo_lens, lens, there, strict=True)
        ]
        mask = np.concatenate([m.reshape(-1) for m in mask])
        want = define(pool, arrays, q, qo_indptr, custom_mask=mask, window_left=window_left)
        options = {"window_left": window_left} | ({"causal": True} if causal else {})
        got = attend(cache, table, on(cp, q), qo_indptr, **options)
        assert_attends(got, want, operands=q.dtype, scale=max_abs(arrays.v))


def garbage(rng, n, dtype, kind):
    """Draw what an index array must never hold; "sawtooth" gives many requests all the pages."""
    info = np.iinfo(dtype)
    if kind == "any bits":
        return rng.integers(info.min, info.max, n, dtype, endpoint=True)
    if kind == "near":
        return rng.integers(-5, 40, n).astype(dtype)
    if kind == "sawtooth":
        return (np.arange(n) % 2 * 3000).astype(dtype)
    extremes = np.array([info.min, info.min + 1, -1, 0, 1, info.max - 1, info.max], dtype)
    return rng.choice(extremes, n)


@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["any bits", "near", "extremes", "sawtooth"])
def test_garbage_in_a_table_harms_nothing(kind, index_dtype, rng):
    guard, shape = 1 << 16, (40, 9, 64)
    size = flat(shape) * 2
    data = on(cp, random_rows(rng, (40, 2, 4, 3, 64), "float16"))
    cache, before = PagedKVCache(data), to_numpy(data)
    memory = cp.full(guard + size + guard, 0xA5, np.uint8)
    out = memory[guard : guard + size].view(np.float16).reshape(shape)
    sums = cp.full((42, 9), 7, np.float32)
    q = cp.ones(shape, np.float16)

    def index(n):
        return cp.asarray(garbage(rng, n, index_dtype, kind))

    for attempt in range(20):
        batch_size = int(rng.integers(1, 41))
        # Half of the tables name real pages, so that there are keys to attend to.
        ids = index(3000) if attempt % 2 else cp.arange(3000, dtype=index_dtype) % 40
        last = index(batch_size) if attempt % 4 < 2 else cp.full(batch_size, 4, index_dtype)
        table = PageTable(index(batch_size + 1), ids, last, 4)
        plan = cache.plan(q[:batch_size], table, batch_invariant=attempt % 3 == 0)
        cache.decode(q[:batch_size], table, out=out[:batch_size], lse=sums[1 : batch_size + 1],
                     plan=plan)  # fmt: skip
        ragged = RaggedTensor(q, index(batch_size + 1))
        cache.prefill(ragged, table, causal=True, window_left=attempt - 1, out=out, lse=sums[1:41])
        # The plan goes on with tables that are right.
        lens = rng.integers(0, 50, batch_size)
        right = indptr_of(-(-lens // 4)), rng.integers(0, 40, 3000), (lens - 1) % 4 + 1
        for mine, theirs in zip(
            (table.indptr, table.indices, table.last_page_len), right, strict=True
        ):
            mine[...] = cp.asarray(theirs.astype(index_dtype))
        plan.update()
        got = cache.decode(q[:batch_size], table, plan=plan, return_lse=True)
        host_q = np.ones((batch_size, 9, 64), np.float16)
        want = reference.decode(host_q, before[:, 0], before[:, 1], *right)
        assert_attends(got, want, operands="float16", scale=max_abs(before))
    assert (memory[:guard] == 0xA5).all()
    assert (memory[guard + size :] == 0xA5).all()
    assert (sums[[0, 41]] == 7).all()
    assert_same_bits(data, before)


@pytest.mark.gpu
def test_decode_follows_the_current_stream(rng):
    case = PagedCase((45, 8, 25, 3000), 16)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, cp)
    q = case.queries(rng, 4, 8)
    later, rows = cp.asarray(q), cp.zeros(q.shape, np.float16)
    want = [to_numpy(x) for x in attend(cache, table, later)]
    slow = cp.zeros(1 << 24, np.float32)
    cp.cuda.Device().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        for _ in range(20):
            slow += 1
        rows[:] = later  # not there yet when decode is called
        got = attend(cache, table, rows)
        rows[:] = 0
        del rows  # its memory, and that of the call's own plan, is free for what comes next
        others = [cp.full(q.size, 7, np.float16) for _ in range(50)]
        stream.synchronize()
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x, y)
    assert all((x == 7).all() for x in others)


@pytest.mark.gpu
def test_threads_decode_side_by_side(rng):
    pool = PagedCase((1024,), 16, 2, 64)
    arrays = shared_pages(pool, [9000, 0, 45, 700], rng)
    cache, table = pool.nouns(arrays, cp)
    queries = [cp.asarray(pool.queries(rng, 4, 8)) for _ in range(8)]
    want = [to_numpy(cache.decode(q, table)) for q in queries]
    cp.cuda.Device().synchronize()
    found = [None] * 8

    def work(i):
        with cp.cuda.Stream(non_blocking=True) as stream:
            results = [cache.decode(queries[i], table) for _ in range(30)]
            stream.synchronize()
            found[i] = [to_numpy(o) for o in results]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, expected in zip(found, want, strict=True):
        assert results is not None, "its thread raised"
        for got in results:
            assert_same_bits(got, expected)


# What no kernel exists for is refused before anything is launched.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "num_qo_heads", "dtype"),
    [((46, 46), 4, "float16"), ((264, 264), 4, "float16"), ((512, 512), 4, "bfloat16"),
     ((64, 60), 4, "float16"), ((576, 512), 4, "bfloat16"), ((1, 1), 4, "float16"),
     ((64, 64), 4, "float32")],
    ids=str,
)  # fmt: skip
def test_what_the_kernel_does_not_take_is_refused(dims, num_qo_heads, dtype, rng):
    case = PagedCase((45, 8), 16, 1, *dims, dtype=dtype, form="pair")
    cache, table = case.nouns(case.arrays(rng), cp)
    kind = "float16" if dtype == "float32" else dtype
    q = cp.asarray(random_rows(rng, (2, num_qo_heads, dims[0]), kind))
    out = cp.full((2, num_qo_heads, dims[1]), 7, np.float16)
    for call in (
        lambda: cache.decode(q, table, out=out),
        lambda: cache.prefill(RaggedTensor(q, [0, 1, 2]), table, out=out),
        lambda: cache.plan(q, table),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=r"^PagedKVCache.*, got"):
            call()
    assert (out == 7).all()
