"""MLAPagedCache: append, gather and copy_pages bit for bit; absorbed decode on NumPy; messages."""

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from cases import WAYS, MLACase, captured, fake_cupy, indptr_of, on, poison, random_rows
from tolerances import ATTENTION, LSE, assert_close, assert_same_bits, bits, to_numpy

from cukv import MLAPagedCache, PageTable, Plan, RaggedTensor, reference
from cukv._arrays import as_dtype

FLOATS = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
BF16 = np.dtype(ml_dtypes.bfloat16)
LENS = (45, 0, 8, 25, 22, 1, 16, 17, 0)
INF = np.inf


def check_append(xp, case, way, rng, rows_of=lambda x: x):
    """Append rows in a way and compare all storage, poison included, with rows placed by hand."""
    arrays = case.arrays(rng)
    want = [store.copy() for store in case.stores(arrays.data)]
    rows = case.rows(way, rng)
    new = [random_rows(rng, (len(rows.at), 1, store.shape[-1]), store.dtype) for store in want]
    for store, values in zip(want, new, strict=True):
        case.write(arrays, store, values, rows.at)
    cache, table = case.nouns(arrays, xp)
    given = [rows_of(on(xp, x)) for x in new]
    where = case.where(rows, given[0])
    cache.append(*given, table, **{name: on(xp, x) for name, x in where.items()})
    for got, expected in zip(case.stores(cache.data), want, strict=True):
        assert_same_bits(got, expected)


# Append and gather: every page size, both forms, index dtypes alternate.
CASES = [
    MLACase(LENS, page_size, 64, 16, form=form, index_dtype=index_dtype)
    for page_size in (1, 3, 16, 17, 48, 64, 256)
    for form, index_dtype in (("one", "int32"), ("pair", "int64"))
]
# DeepSeek's widths, odd ones, kpe wider than ckv, kpe of one column and of none.
CASES += [
    MLACase((9, 0, 4, 1), 4, ckv, kpe, dtype=dtype, form=form)
    for ckv, kpe in ((512, 64), (99, 20), (46, 80), (20, 1), (64, 0))
    for dtype in ("bfloat16", "float8_e4m3fn")
    for form in ("one", "pair")
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_append_writes_its_rows_and_nothing_else(xp, case, way, rng):
    check_append(xp, case, way, rng)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gather_gives_the_rows_of_every_request(xp, case, rng):
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    for nnz in (None, case.nnz):
        for got, want in zip(cache.gather(table, nnz=nnz), (arrays.k, arrays.v), strict=True):
            assert got.data.shape[1:] == want.shape[1:]
            assert to_numpy(got.indptr).tolist() == np.cumsum([0, *case.kv_lens]).tolist()
            assert_same_bits(got.data[: case.nnz], want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copied_pages_are_as_if_all_were_read_first(xp, case, rng):
    arrays = case.arrays(rng)
    want = [store.copy() for store in case.stores(arrays.data)]
    for store in want:
        store[[0, 2, 1]] = store[[2, 0, 2]]
    cache, _ = case.nouns(arrays, xp)
    cache.copy_pages([0, 2, -1, 2], [2, 0, 1, 1])
    for got, expected in zip(case.stores(cache.data), want, strict=True):
        assert_same_bits(got, expected)


# Rows without a head axis, with one, as RaggedTensors, slices of one projection, off a vector.
def flat(x):
    return x[:, 0]


def with_head(x):
    return x


def ragged(x):
    return RaggedTensor(x, [0, len(x)])


def heads_first(x):
    return RaggedTensor(x.swapaxes(0, 1), [0, len(x)], "HND")


def sliced(x):
    xp = np if isinstance(x, np.ndarray) else cp
    wide = xp.zeros((len(x), x.shape[-1] + 7), x.dtype)
    wide[:, 3:-4] = x[:, 0]
    return wide[:, 3:-4]


def backwards(x):
    return x[::-1].copy()[::-1, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "rows_of", [flat, with_head, ragged, heads_first, sliced, backwards], ids=lambda f: f.__name__
)
def test_append_reads_rows_of_any_kind(xp, rows_of, way, rng):
    check_append(xp, MLACase((9, 0, 4, 1), 4, 64, 16), way, rng, rows_of)


@pytest.mark.parametrize("ragged_kpe", [False, True])
def test_append_goes_by_the_offsets_of_ragged_rows(rng, ragged_kpe):
    ckv, kpe = rng.standard_normal((4, 1, 512)), rng.standard_normal((4, 1, 64))
    table = PageTable.from_seq_lens([5, 0, 3], 16, xp=np)
    cache, want = (MLAPagedCache.empty(2, 16, "float64", xp=np) for _ in range(2))
    for x in (cache, want):
        x.data[...] = 0
    want.append(ckv, kpe, table, indptr=[0, 3, 3, 4])
    rows = [RaggedTensor(ckv, [0, 3, 3, 4]), kpe]
    if ragged_kpe:
        rows = [ckv, RaggedTensor(kpe, [0, 3, 3, 4])]
    cache.append(*rows, table)
    assert_same_bits(cache.data, want.data)


def test_views_of_one_buffer_are_as_good_as_copies(xp, rng):
    # A buffer of NaN with a layer axis and columns to spare, and lengths with an empty one.
    lens = np.array([40, 0, 17])
    nnz = int(lens.sum())
    rows = [random_rows(rng, (nnz, 1, n), "bfloat16") for n in (512, 64)]
    whole = on(xp, poison((9, 2, 17, 600), BF16))
    table = PageTable.from_seq_lens(on(xp, lens), 17, on(xp, np.array([8, 2, 5, 0])))
    caches = [
        MLAPagedCache(whole[:, 1, :, :576]),
        MLAPagedCache((on(xp, poison((9, 17, 512), BF16)), on(xp, poison((9, 17, 64), BF16)))),
    ]
    for cache in caches:
        cache.append(*(on(xp, x) for x in rows), table, indptr=indptr_of(lens).tolist())
        for got, want in zip(cache.gather(table, nnz=nnz), rows, strict=True):
            assert_same_bits(got.data, want)
    host = to_numpy(whole)
    assert np.isnan(host[:, 0].astype(np.float32)).all()
    assert np.isnan(host[..., 576:].astype(np.float32)).all()
    if xp is np:
        q = random_rows(rng, (3, 4, 512), "bfloat16"), random_rows(rng, (3, 4, 64), "bfloat16")
        results = [c.decode(*q, table, sm_scale=192**-0.5, return_lse=True) for c in caches]
        for got, want in zip(*results, strict=True):
            assert_same_bits(got, want)
        assert not bits(results[0][0][1]).any()
        assert (results[0][1][1] == -INF).all()
        assert np.isfinite(results[0][0].astype(np.float32)).all()


# Parts of different dtypes, each with its own conversion and scale.
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize(("ckv_dtype", "kpe_dtype"), [("float8_e4m3fn", "bfloat16"),
                                                      ("bfloat16", "float8_e5m2"),
                                                      ("float8_e4m3fn", "float8_e5m2"),
                                                      ("float16", "float32")])  # fmt: skip
def test_parts_may_have_their_own_dtypes(xp, ckv_dtype, kpe_dtype, dtype, rng):
    rows = [random_rows(rng, (12, 1, n), dtype) for n in (64, 24)]
    scales = [0.5 if d.startswith("float8") else 1.0 for d in (ckv_dtype, kpe_dtype)]
    kinds = [as_dtype("test", "dtype", d) for d in (ckv_dtype, kpe_dtype)]
    cache = MLAPagedCache(tuple(on(xp, poison((4, 4, x.shape[-1]), kind))
                                for x, kind in zip(rows, kinds, strict=True)))  # fmt: skip
    assert (cache.dtype, cache.kpe_dtype) == tuple(kinds)
    table = PageTable.from_seq_lens(on(xp, np.array([12])), 4, on(xp, np.array([3, 0, 2])))
    cache.append(*(on(xp, x) for x in rows), table, indptr=[0, 12], ckv_scale=scales[0],
                 kpe_scale=scales[1])  # fmt: skip
    want = [reference.convert(*x) for x in zip(rows, kinds, scales, strict=True)]
    for got, expected in zip(cache.gather(table, nnz=12), want, strict=True):
        assert_same_bits(got.data, expected)
    wide = [
        scale if kind.name != "float32" else 1.0 for scale, kind in zip(scales, kinds, strict=True)
    ]
    got = cache.gather(table, nnz=12, dtype="float32", ckv_scale=wide[0], kpe_scale=wide[1])
    for x, expected, scale in zip(got, want, wide, strict=True):
        assert_same_bits(x.data, expected.astype(np.float32) * np.float32(scale))


@pytest.mark.gpu
def test_offsets_are_64_bit(rng):
    # More than 2^32 elements: the last page and page 0 hold the same rows.
    pages = 262_146
    memory = cp.empty((pages, 32, 576), np.uint16)
    cache = MLAPagedCache(memory.view(BF16))
    for page in (0, 1, pages - 2, pages - 1):
        memory[page] = 0
    rows = [random_rows(rng, (5, n), "bfloat16") for n in (512, 64)]
    table = PageTable.from_seq_lens([5, 5], 32, cp.array([0, pages - 1]))
    cache.append(*(cp.asarray(np.concatenate([x, x])) for x in rows), table, indptr=[0, 5, 10])
    for got, want in zip(cache.gather(table, nnz=10), rows, strict=True):
        assert_same_bits(got.data[:5, 0], want)
        assert_same_bits(got.data[5:, 0], want)
    assert_same_bits(cache.data[pages - 1], cache.data[0])
    for heads in (16, 128):
        q = [
            cp.asarray(random_rows(rng, (1, heads, n), "bfloat16").repeat(2, 0)) for n in (512, 64)
        ]
        o = cache.decode(*q, table, sm_scale=0.07)
        assert_same_bits(o[1], o[0])
        assert bits(o).any()
    cache.copy_pages([pages - 1], [pages - 2])
    assert_same_bits(cache.data[pages - 2], cache.data[0])
    assert not bits(cache.data[1]).any()
    del memory, cache, got
    cp.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_garbage_in_a_table_touches_nothing_outside_the_storage(way, rng):
    guard, shape = 1 << 16, (12, 4, 83)
    size = int(np.prod(shape)) * 2
    memory = cp.full(guard + size + guard, 0xA5, np.uint8)
    cache = MLAPagedCache(memory[guard : guard + size].view(np.float16).reshape(shape), 19)
    rows = cp.ones((50, 64), np.float16), cp.ones((50, 19), np.float16)
    for dtype in (np.int32, np.int64):
        info = np.iinfo(dtype)
        extremes = np.array([info.min, -1, 0, 1, 2, 5, 13, 40, info.max], dtype)

        def index(n, extremes=extremes):
            return cp.asarray(rng.choice(extremes, n))

        for _ in range(30):
            table = PageTable(index(21), index(30), index(20), 4)
            where = {"indptr": index(21)} if way == "indptr" else {}
            if way == "positions":
                where = {"batch_indices": index(50), "positions": index(50)}
            cache.append(*rows, table, **where)
            cache.gather(table)
            cache.copy_pages(index(9), index(9))
            assert (memory[:guard] == 0xA5).all()
            assert (memory[guard + size :] == 0xA5).all()


@pytest.mark.gpu
def test_a_captured_step_follows_its_arrays(rng):
    cache = MLAPagedCache(cp.zeros((20, 16, 576), BF16))
    host = MLAPagedCache(np.zeros((20, 16, 576), BF16))
    ckv, kpe = cp.zeros((40, 512), BF16), cp.zeros((40, 64), BF16)
    arrays = [cp.zeros(n, np.int32) for n in (4, 20, 3)]
    indptr = cp.zeros(4, np.int64)
    table = PageTable(*arrays, 16)

    def step():
        cache.append(ckv, kpe, table, indptr=indptr)
        return cache.gather(table, nnz=100)

    with captured(step) as (stream, graph, results):
        for lens, counts in (((33, 0, 60), (10, 0, 30)), ((5, 5, 5), (1, 5, 0))):
            made = PageTable.from_seq_lens(lens, 16, rng.permutation(20).astype(np.int32), 20)
            rows = [random_rows(rng, (40, n), "bfloat16") for n in (512, 64)]
            for array, values in zip(
                (*arrays, indptr, ckv, kpe),
                (made.indptr, made.indices, made.last_page_len, indptr_of(counts, np.int64), *rows),
                strict=True,
            ):
                array.set(np.ascontiguousarray(values), stream)
            graph.launch(stream)
            stream.synchronize()
            host.append(*rows, made, indptr=indptr_of(counts))
            assert_same_bits(cache.data, host.data)
            for got, want in zip(results, host.gather(made, nnz=100), strict=True):
                assert_same_bits(got.data[: sum(lens)], want.data[: sum(lens)])


# Decode, on NumPy


def test_decode_is_the_definition(rng):
    for case in (
        MLACase((45, 0, 8, 25), 17, dtype="bfloat16"),
        MLACase((3, 70), 1, 64, 32, "float16", "pair"),
        MLACase((5, 9), 4, 24, 0, "bfloat16"),
    ):
        arrays = case.arrays(rng)
        cache, table = case.nouns(arrays)
        csr = (arrays.indptr, arrays.indices, arrays.last_page_len)
        stores = case.stores(arrays.data)
        for num_qo_heads in (1, 16, 128):
            for counts in (None, [3, *[0] * (case.batch_size - 2), 2]):
                qo_indptr = np.arange(case.batch_size + 1) if counts is None else indptr_of(counts)
                q = [random_rows(rng, (qo_indptr[-1], num_qo_heads, d), case.dtype)
                     for d in (case.head_dim_ckv, case.head_dim_kpe)]  # fmt: skip
                for causal in (False, True):
                    got = cache.decode(
                        *q, table, sm_scale=0.1, causal=causal, return_lse=True,
                        qo_indptr=None if counts is None else qo_indptr,
                    )  # fmt: skip
                    want = reference.mla_decode(*q, qo_indptr, *stores, *csr, sm_scale=0.1,
                                                causal=causal)  # fmt: skip
                    assert got[0].dtype.name == case.dtype
                    largest = np.abs(arrays.k.astype(np.float32)).max()
                    assert_close(got[0], want[0], ATTENTION[case.dtype], scale=largest)
                    assert_close(got[1], want[1], LSE)


def test_the_scale_is_the_callers():
    q_nope, q_pe = np.ones((1, 1, 512), np.float32), np.zeros((1, 1, 64), np.float32)
    data = np.zeros((1, 4, 576), np.float32)
    data[0, 0, :512] = 0.05
    cache, table = MLAPagedCache(data), PageTable.from_seq_lens([2], 4, xp=np)
    o, lse = cache.decode(q_nope, q_pe, table, sm_scale=192**-0.5, return_lse=True)
    np.testing.assert_allclose(o[0, 0] / 0.05, 0.863836, rtol=1e-5)
    np.testing.assert_allclose(lse.item() * np.log(2), 1.993893, rtol=1e-5)
    with pytest.raises(TypeError, match="sm_scale"):
        cache.decode(q_nope, q_pe, table)
    with pytest.raises(TypeError, match=r"^MLAPagedCache.decode: sm_scale has no default"):
        cache.decode(q_nope, q_pe, table, sm_scale=None)


def test_stored_scales_reach_logits_and_values(rng):
    fp8 = as_dtype("test", "dtype", "float8_e4m3fn")
    rows = [random_rows(rng, (9, n), "float32") for n in (32, 16)]
    cache = MLAPagedCache((np.zeros((3, 4, 32), fp8), np.zeros((3, 4, 16), fp8)))
    exact = MLAPagedCache((np.zeros((3, 4, 32), np.float32), np.zeros((3, 4, 16), np.float32)))
    table = PageTable.from_seq_lens([9], 4, xp=np)
    cache.append(*rows, table, indptr=[0, 9], ckv_scale=0.25, kpe_scale=4.0)
    stored = cache.gather(table, dtype="float32", ckv_scale=0.25, kpe_scale=4.0)
    exact.append(stored[0].data[:9], stored[1].data[:9], table, indptr=[0, 9])
    q = random_rows(rng, (1, 2, 32), "bfloat16"), random_rows(rng, (1, 2, 16), "bfloat16")
    got = cache.decode(*q, table, sm_scale=0.2, ckv_scale=0.25, kpe_scale=np.float32(4),
                       return_lse=True)  # fmt: skip
    want = exact.decode(*q, table, sm_scale=0.2, return_lse=True)
    assert_close(got[0], want[0], ATTENTION["bfloat16"])
    assert_close(got[1], want[1], LSE)
    q8 = [x.astype(fp8) for x in q]
    assert cache.decode(*q8, table, sm_scale=0.2).dtype == BF16


@pytest.mark.parametrize("junk", [np.nan, INF])
def test_what_lies_beyond_kv_len_never_matters(junk, rng):
    rows = [random_rows(rng, (13, n), "float16") for n in (32, 16)]
    q = [random_rows(rng, (2, 3, n), "float16") for n in (32, 16)]
    results = []
    for filler in (junk, 0.0):
        cache = MLAPagedCache(np.full((9, 4, 48), filler, np.float16), 16)
        table = PageTable.from_seq_lens([13], 4, [7, 2, 5, 0], xp=np)
        cache.append(*rows, table, indptr=[0, 13])
        results.append(cache.decode(*q, table, sm_scale=0.2, qo_indptr=[0, 2], causal=True,
                                    return_lse=True))  # fmt: skip
    for got, want in zip(*results, strict=True):
        assert_same_bits(got, want)
        assert np.isfinite(got.astype(np.float32)).all()


def test_results_go_where_told(rng):
    case = MLACase((5, 0, 3), 4, 32, 16, "bfloat16")
    cache, table = case.nouns(case.arrays(rng))
    q = [random_rows(rng, (3, 2, n), "bfloat16") for n in (32, 16)]
    want = cache.decode(*q, table, sm_scale=0.2, return_lse=True)
    whole, lse = np.full((3, 2, 40), 7, np.float32), np.full((3, 2), 7, np.float32)
    got = cache.decode(*q, table, sm_scale=0.2, out=whole[..., 4:36], lse=lse)
    assert np.shares_memory(got, whole)
    assert_same_bits(whole[..., 4:36].astype(BF16), want[0])
    assert_same_bits(lse, want[1])
    assert (whole[..., :4] == 7).all()
    assert (whole[..., 36:] == 7).all()
    lse.flags.writeable = False
    whole[:] = 9
    with pytest.raises(TypeError, match="decode: lse is a read-only NumPy array"):
        cache.decode(*q, table, sm_scale=0.2, out=whole[..., 4:36], lse=lse)
    assert (whole == 9).all()


def test_a_plan_serves_the_calls_it_was_made_for_and_no_others(rng):
    case = MLACase((5, 0, 3), 4, 32, 16, "bfloat16")
    cache, table = case.nouns(case.arrays(rng))
    q = [random_rows(rng, (3, 2, n), "bfloat16") for n in (32, 16)]
    plan = cache.plan(q[0], table, causal=True)
    assert isinstance(plan, Plan)
    plan.update()
    want = cache.decode(*q, table, sm_scale=0.2, causal=True)
    assert_same_bits(cache.decode(*q, table, sm_scale=0.2, causal=True, plan=plan), want)
    for change, message in (
        ({}, "made for causal=True, got False"),
        ({"causal": True, "qo_indptr": [0, 1, 2, 3]}, "made for qo_indptr=False, got True"),
    ):
        with pytest.raises(ValueError, match=r"^MLAPagedCache.decode: .*" + message):
            cache.decode(*q, table, sm_scale=0.2, plan=plan, **change)
    with pytest.raises(ValueError, match="made for q="):
        cache.decode(*(x[:, :1] for x in q), table, sm_scale=0.2, causal=True, plan=plan)


# Messages


def zeros(shape, dtype="float16"):
    kind = np.dtype(dtype) if dtype in ("int32", "int64") else as_dtype("test", "dtype", dtype)
    return np.zeros(shape, kind)


def nouns(make):
    """Make a cache [3, 16, 32 + 16] and a table of two requests of zeros or of no memory."""
    table = PageTable(*(make(n, "int32") for n in (3, 5, 2)), 16)
    return MLAPagedCache(make((3, 16, 48)), 16), table


MAKERS = [pytest.param(zeros, id="host"), pytest.param(fake_cupy, id="device")]


@pytest.mark.parametrize("make", MAKERS)
def test_calls_name_what_they_refuse(make):
    cache, table = nouns(make)
    ckv, kpe = make((5, 32)), make((5, 16))
    for arguments, error, message in (
        ((make((5, 31)), kpe), ValueError,
         r"ckv must be \[nnz, num_heads=1, head_dim=32\], got \[5, 1, 31\]"),
        ((make((5, 2, 32)), kpe), ValueError, r"ckv must be .*got \[5, 2, 32\]"),
        ((ckv, make((4, 16))), ValueError, r"kpe must be \[nnz=5, .*got \[4, 1, 16\]"),
        ((ckv, make((5, 16), "bfloat16")), TypeError, "kpe must be float16, got bfloat16"),
        ((make((5, 64))[:, ::2], kpe), ValueError, "ckv must have a contiguous last axis"),
        ((3, kpe), TypeError, "ckv must be a CuPy, NumPy or DLPack array"),
    ):  # fmt: skip
        with pytest.raises(error, match=r"^MLAPagedCache.append: " + message):
            cache.append(*arguments, table)
    q_nope, q_pe = make((2, 4, 32)), make((2, 4, 16))
    for arguments, options, error, message in (
        ((make((3, 4, 32)), q_pe), {}, ValueError,
         r"q_nope must be \[rows=2, num_qo_heads, head_dim_ckv=32\], got \[3, 4, 32\]"),
        ((make((2, 4, 16)), q_pe), {}, ValueError, "q_nope must be"),
        ((q_nope, make((2, 3, 16))), {}, ValueError,
         r"q_pe must be \[rows=2, num_qo_heads=4, head_dim_kpe=16\], got \[2, 3, 16\]"),
        ((q_nope, make((2, 4, 16), "bfloat16")), {}, TypeError, "q_pe must be float16, got bf"),
        ((make((2, 4, 32), "bfloat16"), q_pe), {}, TypeError, "q_nope and a 16-bit cache share"),
        ((q_nope, q_pe), {"qo_indptr": make(2, "int32")}, ValueError, r"qo_indptr must be \[n=3\]"),
        ((q_nope, q_pe), {"qo_indptr": make(3, "float32")}, TypeError, "qo_indptr must be int32"),
        ((q_nope, q_pe), {"sm_scale": np.nan}, ValueError, "sm_scale must be finite"),
        ((q_nope, q_pe), {"plan": 3}, TypeError, "plan must be a Plan"),
    ):  # fmt: skip
        with pytest.raises(error, match=r"^MLAPagedCache.decode: " + message):
            cache.decode(*arguments, table, **{"sm_scale": 0.1, **options})
    other = PageTable(*(make(n, "int32") for n in (3, 5, 2)), 8)
    for call in (
        lambda: cache.decode(q_nope, q_pe, other, sm_scale=0.1),
        lambda: cache.append(ckv, kpe, other),
        lambda: cache.gather(other),
    ):
        with pytest.raises(ValueError, match="the table's page_size is 8, the cache's 16"):
            call()
    with pytest.raises(ValueError, match=r"gather: kpe_scale must be 1\.0 where rows keep"):
        cache.gather(table, kpe_scale=2.0)


def test_decode_checks_the_rows_it_is_told(rng):
    case = MLACase((5, 3), 4, 32, 16)
    cache, table = case.nouns(case.arrays(rng))
    q = [zeros((2, 4, n)) for n in (32, 16)]
    for bad, message in (([0, 1, 3], "qo_indptr ends at 3, but there are 2 rows"),
                         ([0, 2, 1], "qo_indptr falls at request 1")):  # fmt: skip
        with pytest.raises(ValueError, match=r"^MLAPagedCache.decode: " + message):
            cache.decode(*q, table, sm_scale=0.1, qo_indptr=bad)


def test_calls_mix_no_homes_and_say_what_exists():
    (cache, table), (host, host_table) = nouns(fake_cupy), nouns(zeros)
    q, host_q = ([make((2, 4, n)) for n in (32, 16)] for make in (fake_cupy, zeros))
    for call in (
        lambda: cache.decode(*host_q, table, sm_scale=0.1),
        lambda: cache.decode(q[0], host_q[1], table, sm_scale=0.1),
        lambda: host.decode(*host_q, table, sm_scale=0.1),
        lambda: cache.append(q[0][:, 0], host_q[1][:, 0], table),
        lambda: host.gather(table),
        lambda: MLAPagedCache((zeros((3, 4, 8)), fake_cupy((3, 4, 8)))),
    ):
        with pytest.raises(TypeError, match=r"^MLAPagedCache.*on the GPU"):
            call()
    assert host_table.batch_size == 2
    for call in (
        lambda: cache.decode(*q, table, sm_scale=0.1),
        lambda: cache.plan(q[0], table),
    ):
        with pytest.raises(NotImplementedError, match=r"^MLAPagedCache.decode: head_dim_ckv=512"):
            call()


def test_locked_memory_is_not_written():
    data = zeros((3, 16, 48))
    data.flags.writeable = False
    cache, table = MLAPagedCache(data, 16), PageTable.from_seq_lens([5, 3], 16, xp=np)
    with pytest.raises(TypeError, match="append: ckv is a read-only NumPy array"):
        cache.append(zeros((2, 32)), zeros((2, 16)), table)
    with pytest.raises(TypeError, match="copy_pages: ckv is a read-only NumPy array"):
        cache.copy_pages([0], [1])


# Structure


@pytest.mark.parametrize("make", MAKERS)
def test_a_cache_says_its_sizes(make):
    one = MLAPagedCache(make((3, 16, 576)))
    pair = MLAPagedCache([make((3, 16, 512)), make((3, 16, 64), "bfloat16")])
    for cache in (one, pair):
        assert (cache.max_num_pages, cache.page_size) == (3, 16)
        assert (cache.head_dim_ckv, cache.head_dim_kpe) == (512, 64)
        assert cache.ckv.shape == (3, 16, 512)
        assert cache.kpe.shape == (3, 16, 64)
    assert (pair.dtype.name, pair.kpe_dtype.name) == ("float16", "bfloat16")
    where = "numpy" if make is zeros else "cuda:0"
    assert repr(one) == f"MLAPagedCache(data=float16[3, 16, 576], head_dim_kpe=64, device={where})"
    assert MLAPagedCache(make((3, 16, 40)), 0).head_dim_ckv == 40
    assert MLAPagedCache(make((3, 16, 40)), 40).head_dim_ckv == 0


def test_views_share_the_caches_memory():
    cache = MLAPagedCache(zeros((3, 4, 12)), 5)
    cache.ckv[1, 2] = 1
    cache.kpe[1, 2] = 2
    assert cache.data[1, 2].tolist() == [1] * 7 + [2] * 5


@pytest.mark.parametrize("make", MAKERS)
def test_a_cache_names_what_it_refuses(make):
    for data, kpe, error, message in (
        (
            make((3, 16)),
            64,
            ValueError,
            r"data must be \[max_num_pages, page_size, head_dim\], got",
        ),
        (make((3, 16, 40)), 64, ValueError, "head_dim_kpe must be 0 to 40 columns, got 64"),
        (make((3, 16, 40)), -1, ValueError, "head_dim_kpe must be 0 or more, got -1"),
        (make((3, 16, 40)), 1.5, TypeError, "head_dim_kpe must be an integer, got 1.5"),
        (make((3, 16, 40)), None, TypeError, "head_dim_kpe must be an integer, got None"),
        (make((3, 0, 576)), 64, ValueError, "page_size must be 1 or more, got 0"),
        (make((3, 16, 576), "int32"), 64, TypeError, "ckv must be float16 or .*got int32"),
        ((make((3, 16, 8)),), 64, ValueError, "data must be one array or a pair, got 1"),
        (
            (make((3, 16, 8)), make((3, 8, 8))),
            64,
            ValueError,
            "kpe must be .*page_size=16, head_dim",
        ),
        (make((3, 16, 576))[..., ::2], 64, ValueError, "ckv must have a contiguous last axis"),
        ("data", 64, TypeError, "data must be a CuPy, NumPy or DLPack array"),
    ):
        with pytest.raises(error, match=r"^MLAPagedCache: " + message):
            MLAPagedCache(data, kpe)


@pytest.mark.parametrize("dtype", FLOATS)
def test_empty_allocates_one_array_or_a_pair(xp, dtype):
    cache = MLAPagedCache.empty(3, 16, dtype, xp=xp)
    assert cache.data.shape == (3, 16, 576)
    assert cache.dtype.name == cache.kpe_dtype.name == dtype
    assert MLAPagedCache.empty(3, 16, dtype, 40, 8, dtype, xp=xp).data.shape == (3, 16, 48)
    other = "float16" if dtype != "float16" else "bfloat16"
    pair = MLAPagedCache.empty(3, 16, dtype, 40, 8, other, xp=xp)
    assert (pair.dtype.name, pair.kpe_dtype.name) == (dtype, other)
    assert (pair.head_dim_ckv, pair.head_dim_kpe) == (40, 8)
    with pytest.raises(TypeError, match="empty: kpe_dtype must be one of"):
        MLAPagedCache.empty(3, 16, dtype, kpe_dtype="int8", xp=xp)
    with pytest.raises(ValueError, match="empty: page_size must be 1 or more, got 0"):
        MLAPagedCache.empty(3, 0, dtype, xp=xp)
