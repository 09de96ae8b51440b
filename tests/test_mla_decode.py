"""MLAPagedCache.decode and plan: the kernels and the definition give one answer.

Tests with the ``xp`` fixture run on both homes, against the float64 definition over the same
arrays or values known by hand; on NumPy they check themselves. Sizes that only a GPU takes in its
stride are its own.
"""

from dataclasses import dataclass, replace

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from capturing import capturing
from cases import MLACase, captured, fake_cupy, indptr_of, on, poison, random_rows
from tolerances import ATTENTION, LSE, assert_close, assert_same_bits, max_abs, to_numpy

from cukv import MLAPagedCache, PageTable, Plan, reference
from cukv._arrays import as_dtype

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = "float8_e4m3fn"
SCALE = 192**-0.5
# Nothing, one token, around tiles of 16, 32 and 64 tokens, and requests of several parts.
LENS = (0, 1, 17, 33, 96, 97, 114, 514, 1024, 0)


# Calls and what they must give


def queries(rng, num_rows, heads, dtype):
    """Draw q_nope and q_pe on the host."""
    kind = as_dtype("test", "q", dtype)
    return [random_rows(rng, (num_rows, heads, n), "float32").astype(kind) for n in (512, 64)]


def define(arrays, stores, q, qo_indptr, **options):
    """Attend to a case's arrays by definition, in float64."""
    csr = arrays.indptr, arrays.indices, arrays.last_page_len
    qo_indptr = np.arange(len(q[0]) + 1) if qo_indptr is None else qo_indptr
    return reference.mla_decode(*q, qo_indptr, *stores, *csr, **{"sm_scale": SCALE} | options)


def assert_attends(got, want, operands, scale):
    """Compare (o, lse) with a definition's, within the bounds of the operands' dtype."""
    operands = "bfloat16" if operands.startswith("float8") else operands
    assert got[1].dtype == np.float32
    assert_close(got[1], want[1], LSE)
    assert_close(got[0], want[0], ATTENTION[operands], scale=scale)
    assert (to_numpy(got[0])[np.isneginf(want[1])] == 0).all()


def check(xp, case, rng, *, heads, qo_lens=None, q_dtype=None, arrays=None, **options):
    """Attend to a case and compare with the definition. Options are numbers."""
    arrays = case.arrays(rng) if arrays is None else arrays
    cache, table = case.nouns(arrays, xp)
    qo_indptr = None if qo_lens is None else indptr_of(qo_lens)
    num_rows = case.batch_size if qo_lens is None else sum(qo_lens)
    q = queries(rng, num_rows, heads, q_dtype or case.dtype)
    rows = {} if qo_lens is None else {"qo_indptr": on(xp, qo_indptr)}
    here = {"sm_scale": SCALE} | options
    got = cache.decode(*(on(xp, x) for x in q), table, **rows, **here, return_lse=True)
    want = define(arrays, case.stores(arrays.data), q, qo_indptr, **options)
    assert got[0].dtype == (BF16 if q[0].dtype.name.startswith("float8") else q[0].dtype)
    scale = max_abs(arrays.k) * abs(options.get("ckv_scale", 1.0))
    assert_attends(got, want, q[0].dtype.name, scale)
    return got


# Heads: one, few, what tiles of 16 and 64 rows hold and what they do not. Page sizes that tensor
# maps take, of a tile and beside it, and others; both forms and index dtypes.
CASES = [
    (1, MLACase(LENS, 1, dtype="bfloat16")),
    (2, MLACase(LENS, 16, dtype="float16", form="pair")),
    (16, MLACase(LENS, 17, dtype="bfloat16", index_dtype="int64")),
    (17, MLACase(LENS, 64, dtype="bfloat16")),
    (64, MLACase(LENS, 32, dtype="float16", index_dtype="int64")),
    (96, MLACase(LENS, 64, dtype="bfloat16", form="pair")),
    (97, MLACase(LENS, 48, dtype="bfloat16")),
    (128, MLACase(LENS, 16, dtype="bfloat16", index_dtype="int64")),
    (128, MLACase(LENS, 17, dtype="float16", form="pair")),
    (128, MLACase(LENS, 1, dtype="bfloat16")),
    (128, MLACase(LENS, 256, dtype="float16")),
]


@pytest.mark.parametrize(("heads", "case"), CASES, ids=str)
def test_decode_takes_any_heads_page_size_and_form(xp, heads, case, rng):
    check(xp, case, rng, heads=heads)


def fp8_latents(case, kpe_dtype, rng):
    """Make a case's arrays of e4m3, with rotary parts of any dtype."""
    arrays = case.arrays(rng)
    kpe = poison(arrays.data[1].shape, as_dtype("test", "kpe", kpe_dtype))
    kpe[case._slots(arrays.indptr, arrays.indices)] = random_rows(rng, (case.nnz, 64), kpe_dtype)
    return arrays._replace(data=(arrays.data[0], kpe))


# Few rows of requests: pages that a tensor map brings a step's keys of in one piece or in several,
# of all their tokens or of the first, and beside them pages that none can.
@pytest.mark.parametrize("page_size", [8, 16, 24, 48, 64, 128, 20])
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, (E4M3, "bfloat16"), (E4M3, E4M3)], ids=str)
def test_few_rows_are_attended_from_pages_of_any_size(xp, page_size, dtypes, rng):
    num = 140 if xp is cp else 3
    lens = (*(int(n) for n in rng.integers(0, 300, num)), 0, 1, 63, 64, 65, 129)
    case = MLACase(lens, page_size, dtype=dtypes[0], form="pair")
    arrays = fp8_latents(case, dtypes[1], rng) if dtypes[0] == E4M3 else None
    check(xp, case, rng, heads=16, arrays=arrays, q_dtype="bfloat16")


# One to 17 rows, none, more rows than keys; tiles that end inside a row of heads.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "page_size"), [(3, 17), (16, 64), (40, 64), (128, 16)])
def test_rows_of_a_request_see_up_to_their_own_position(xp, heads, page_size, causal, rng):
    case = MLACase((65, 5, 33, 97, 0, 514, 3, 130), page_size, dtype="bfloat16")
    qo_lens = (1, 9, 3, 17, 2, 4, 0, 2)
    check(xp, case, rng, heads=heads, qo_lens=qo_lens, causal=causal)


# One request in as many items as there are parts, and two in parts of one another.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "lens"), [(16, (65536,)), (16, (4096,)), (128, (20000, 3)), (128, (4096,))], ids=str
)
def test_few_long_requests_are_shared_by_all(heads, lens, rng):
    check(cp, MLACase(lens, 64, dtype="bfloat16"), rng, heads=heads)


# Equal requests beside the 132 parts of an H200, or its 66 of 128 heads; lengths of all kinds.
@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "num"), [(16, 131), (16, 133), (128, 66), (128, 67)])
def test_batches_beside_the_number_of_parts(heads, num, rng):
    check(cp, MLACase((130,) * num, 64, dtype="bfloat16"), rng, heads=heads)
    lens = tuple(int(n) for n in rng.integers(0, 300, num))
    check(cp, MLACase(lens, 16, dtype="bfloat16"), rng, heads=heads)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("first", [-8192.0, -16384.0])
def test_equal_scores_weigh_the_same_however_large_they_are(xp, heads, first):
    """Scores of -1e8 are rounded to base 2. Those of the first tile may be far below the others."""
    num_pages, page_size = 8, 64
    ckv = np.repeat(np.arange(num_pages), page_size * 512).reshape(num_pages, page_size, 512)
    kpe = np.zeros((num_pages, page_size, 64))
    kpe[..., 0] = -8192
    kpe[0, :, 0] = first
    cache = MLAPagedCache((on(xp, ckv.astype(BF16)), on(xp, kpe.astype(BF16))))
    table = PageTable.from_seq_lens([num_pages * page_size], page_size, xp=xp)
    q_nope, q_pe = np.zeros((1, heads, 512), BF16), np.zeros((1, heads, 64), BF16)
    q_pe[..., 0] = 12288
    o, lse = cache.decode(on(xp, q_nope), on(xp, q_pe), table, sm_scale=1.0, return_lse=True)
    seen = np.arange(num_pages)[int(first < -8192) :]
    assert_close(o, np.full((1, heads, 512), seen.mean()), ATTENTION["bfloat16"], scale=seen.max())
    assert_close(lse, np.full((1, heads), -8192 * 12288 * np.log2(np.e)), LSE)


def attend_along(xp, rng, kpe, heads, ckv_dtype, num_absent=0):
    """Attend to keys of which the j-th is kpe[j] times what a head wants, and compare.

    Heads want from -1 to 1. The first pages may be absent. On a GPU so many requests have the same
    pages that its parts have several steps of each.
    """
    num, page_size = 140 if xp is cp else 1, 64
    ids = np.arange(len(kpe) // page_size, dtype=np.int32)
    kpes = np.zeros((len(ids), page_size, 64), BF16)
    kpes[..., 0] = kpe.reshape(-1, page_size)
    stores = random_rows(rng, (len(ids), page_size, 512), ckv_dtype), kpes
    q = np.zeros((num, heads, 512), BF16), np.zeros((num, heads, 64), BF16)
    q[1][..., 0] = np.linspace(-1, 1, heads)
    q[1][:, 1, 0] = 1  # beside one that wants the contrary
    given = np.where(ids < num_absent, -1, ids)
    last = np.full(num, page_size, np.int32)
    index = indptr_of((len(ids),) * num), np.tile(given, num), last
    table = PageTable(*(on(xp, x) for x in index), page_size)
    cache = MLAPagedCache(tuple(on(xp, x) for x in stores))
    got = cache.decode(*(on(xp, x) for x in q), table, sm_scale=1.0, return_lse=True)
    one = np.arange(2), *(x[:, :, None] for x in stores)
    csr = indptr_of((len(ids) - num_absent,)), ids[num_absent:], last[:1]
    want = reference.mla_decode(*(x[:1] for x in q), *one, *csr, sm_scale=1.0)
    for i in range(num):
        assert_attends([x[i : i + 1] for x in got], want, "bfloat16", max_abs(stores[0]))


STEP = np.arange(512) // 64  # of a key, for 8 warps
# A GPU's weights are relative to maxima of earlier steps, which rise with logits that are 8 above
# them in base 2: here these rise by less and by more, all the way or at a few keys, and fall.
ALONG = {
    "slowly": 0.02 * np.arange(512),
    "by less": 5.5 * STEP,
    "by more": 6.0 * STEP,
    "from far below": 1e5 * (STEP - 4),
    "at one key": 1e5 * (np.arange(512) == 300),
    "up and down": 1e5 * np.array([0, 1, -1, 0, 2, -2, 2, 1])[STEP],
}


@pytest.mark.parametrize("ckv_dtype", ["bfloat16", E4M3])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("along", ALONG)
def test_logits_may_rise_fall_and_jump_along_the_keys(xp, along, heads, ckv_dtype, rng):
    attend_along(xp, rng, ALONG[along], heads, ckv_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("ckv_dtype", ["bfloat16", E4M3])
@pytest.mark.parametrize("heads", [16, 128])
def test_first_steps_may_have_no_key(heads, ckv_dtype, rng):
    attend_along(cp, rng, -1000 + ALONG["by more"], heads, ckv_dtype, num_absent=3)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("sm_scale", [0.0, -0.07, 3.0])
def test_any_scale_of_the_logits(xp, heads, sm_scale, rng):
    case = MLACase((200, 33, 0), 64, dtype="float16")
    check(xp, case, rng, heads=heads, sm_scale=sm_scale)


# fp8 latents with rotary parts of either kind, scales, few and many heads, causal rows. So few keys
# are not for the kernel of many rows: test_mla_decode_sm90.py has them read by it.
@pytest.mark.parametrize("heads", [5, 16, 128])
@pytest.mark.parametrize(
    ("kpe_dtype", "q_dtype"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), (E4M3, "bfloat16"), (E4M3, E4M3)],
)
def test_fp8_latents_are_read_as_their_scales_say(xp, kpe_dtype, q_dtype, heads, rng):
    attend_with_scales(xp, kpe_dtype, q_dtype, heads, rng)


def attend_with_scales(xp, kpe_dtype, q_dtype, heads, rng):
    """Attend to fp8 latents with scales, and compare."""
    case = MLACase((200, 33, 0, 514), 64, dtype=E4M3, form="pair")
    arrays = fp8_latents(case, kpe_dtype, rng)
    scales = {"ckv_scale": 0.5, "kpe_scale": 2.0 if kpe_dtype == E4M3 else 1.0}
    check(xp, case, rng, heads=heads, arrays=arrays, q_dtype=q_dtype, **scales)
    rows = (3, 1, 2, 17)
    check(xp, case, rng, heads=heads, arrays=arrays, q_dtype=q_dtype, qo_lens=rows, causal=True,
          **scales)  # fmt: skip


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("size", [1e-30, 1e6])
def test_queries_of_fp8_latents_may_be_of_any_size(xp, size, heads, rng):
    attend_with_queries_of(xp, size, heads, rng)


def attend_with_queries_of(xp, size, heads, rng):
    """Attend with queries that are beyond the halves which they become, and compare."""
    case = MLACase((200, 33, 0), 64, dtype=E4M3)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    q = [(x.astype(np.float32) * size).astype(BF16) for x in queries(rng, 3, heads, "bfloat16")]
    got = cache.decode(*(on(xp, x) for x in q), table, sm_scale=SCALE / size, return_lse=True)
    want = define(arrays, case.stores(arrays.data), q, None, sm_scale=SCALE / size)
    assert_attends(got, want, "bfloat16", max_abs(arrays.k))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kpe_dtype", ["bfloat16", E4M3])
def test_nan_among_fp8_latents_is_seen_where_it_is_a_key(xp, kpe_dtype, heads, rng):
    attend_to_nan(xp, kpe_dtype, heads, rng)


def attend_to_nan(xp, kpe_dtype, heads, rng):
    """Attend to two requests, one of which has a NaN, and see in which it shows."""
    case = MLACase((150, 70), 64, dtype=E4M3, form="pair")
    arrays = fp8_latents(case, kpe_dtype, rng)
    page, entry = arrays.indices[1], 3
    arrays.data[0][page, entry, 100] = np.nan
    cache, table = case.nouns(arrays, xp)
    q = [on(xp, x) for x in queries(rng, 2, heads, "bfloat16")]
    o, lse = cache.decode(*q, table, sm_scale=SCALE, return_lse=True)
    assert np.isnan(to_numpy(o[0]).astype(np.float32)).all() and np.isnan(to_numpy(lse[0])).all()
    assert np.isfinite(to_numpy(o[1]).astype(np.float32)).all()


def test_scales_may_be_on_the_device_and_are_of_fp8_only(xp, rng):
    case = MLACase((40, 7), 16, dtype=E4M3)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    q = [on(xp, x) for x in queries(rng, 2, 16, "bfloat16")]
    numbers = cache.decode(*q, table, sm_scale=SCALE, ckv_scale=0.25, kpe_scale=4.0)
    scales = {
        f"{n}_scale": on(xp, np.array([x], np.float32)) for n, x in (("ckv", 0.25), ("kpe", 4.0))
    }
    assert_same_bits(cache.decode(*q, table, sm_scale=SCALE, **scales), to_numpy(numbers))
    case = replace(case, dtype="bfloat16")
    cache, table = case.nouns(case.arrays(rng), xp)
    for name in scales:
        with pytest.raises(ValueError, match=rf"decode: {name} must be 1\.0, got .*only fp8"):
            cache.decode(*q, table, sm_scale=SCALE, **{name: 0.5})


@pytest.mark.parametrize("q_dtype", [E4M3, "float8_e5m2"])
@pytest.mark.parametrize("heads", [16, 128])
def test_queries_may_be_fp8(xp, heads, q_dtype, rng):
    for dtype in ("bfloat16", "float16"):
        check(xp, MLACase((200, 33), 64, dtype=dtype), rng, heads=heads, q_dtype=q_dtype)


# Slices of a wider buffer: aligned to 16 bytes, to two, off a vector; pages and tokens apart.
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("first", [0, 16, 1])
def test_slices_of_a_wider_buffer_are_as_good_as_copies(xp, first, heads, rng):
    case = MLACase((97, 0, 300), 16, dtype="bfloat16")
    arrays = case.arrays(rng)
    wide = poison((case.max_num_pages, 2, 16, 608), BF16)
    wide[:, 1, :, first : first + 576] = arrays.data
    cache, table = case.nouns(arrays, xp)
    sliced = MLAPagedCache(on(xp, wide)[:, 1, :, first : first + 576])
    q = [on(xp, x) for x in queries(rng, 3, heads, "bfloat16")]
    wanted = cache.decode(*q, table, sm_scale=SCALE, return_lse=True)
    got = sliced.decode(*q, table, sm_scale=SCALE, return_lse=True)
    assert_attends(got, [to_numpy(x).astype(np.float64) for x in wanted], "bfloat16", 4.0)


def test_queries_and_results_may_have_any_strides(xp, rng):
    case = MLACase((97, 0, 300), 64, dtype="bfloat16")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    for heads in (16, 128):
        host = queries(rng, 3, heads, "bfloat16")
        want = define(arrays, case.stores(arrays.data), host, None)
        wide = on(xp, np.zeros((3, heads, 577), BF16))
        wide[:, :, 1:513] = on(xp, host[0])
        q = wide[:, :, 1:513], on(xp, host[1])[:, ::-1].copy()[:, ::-1]
        for dtype in ("bfloat16", "float16", "float32"):
            memory = xp.zeros((heads, 3, 516), as_dtype("test", "out", dtype))
            lse = xp.zeros((3, heads + 1), np.float32)[:, 1:]
            out = memory.swapaxes(0, 1)[:, :, 2:514]
            given = cache.decode(*q, table, sm_scale=SCALE, out=out, lse=lse, return_lse=True)
            assert given[0] is out
            bound = max(ATTENTION[dtype], ATTENTION["bfloat16"])
            assert_close(out, want[0], bound, scale=max_abs(arrays.k))
            assert_close(lse, want[1], LSE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", E4M3])
def test_pages_that_are_not_there_have_no_keys(dtype, rng):
    attend_beyond_pages(dtype, rng)


def attend_beyond_pages(dtype, rng):
    """Attend by a table that names pages which are not there, and compare."""
    case = MLACase((150, 40), 16, dtype=dtype)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, cp)
    keep = np.r_[0:32, 64:150, 150:190]  # of the packed tokens
    bad = arrays.indices.copy()
    bad[[2, 3]] = case.max_num_pages, -1
    broken = PageTable(table.indptr, cp.asarray(bad), table.last_page_len, 16)
    rows = [x[keep, 0] for x in (arrays.k, arrays.v)]
    for heads in (16, 128):
        q = queries(rng, 2, heads, "bfloat16")
        got = cache.decode(*map(cp.asarray, q), broken, sm_scale=SCALE, return_lse=True)
        packed = [x[:, None, None] for x in rows]  # a token a page, and a head
        want = reference.mla_decode(
            *q, np.arange(3), *packed, np.array([0, 118, 158]), np.arange(158), np.array([1, 1]),
            sm_scale=SCALE,
        )  # fmt: skip
        assert_attends(got, want, "bfloat16", max_abs(arrays.k))


@pytest.mark.parametrize("heads", [4, 32])
def test_attention_before_absorption_gives_the_same(xp, heads, rng):
    case = MLACase((70, 130), 16, dtype="bfloat16")
    arrays = case.arrays(rng)
    ckv, kpe = (x[:, 0].astype(np.float64) for x in (arrays.k, arrays.v))
    up_k, up_v = (rng.standard_normal((heads, 512, 128)) / 512**0.5 for _ in range(2))
    q = rng.standard_normal((2, heads, 192))
    absorbed = [
        x.astype(np.float32).astype(BF16)
        for x in (np.einsum("rhd,hcd->rhc", q[..., :128], up_k), q[..., 128:])
    ]
    cache, table = case.nouns(arrays, xp)
    got = cache.decode(*(on(xp, x) for x in absorbed), table, sm_scale=SCALE)
    o = np.einsum("rhc,hcd->rhd", to_numpy(got).astype(np.float64), up_v)
    for r, (first, end) in enumerate(((0, 70), (70, 200))):
        k_nope, v = (np.einsum("tc,hcd->htd", ckv[first:end], x) for x in (up_k, up_v))
        logits = np.einsum("hd,htd->ht", q[r, :, :128], k_nope)
        logits = SCALE * (logits + q[r, :, 128:] @ kpe[first:end].T)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        want = np.einsum("ht,htd->hd", weights / weights.sum(1, keepdims=True), v)
        # Queries rounded to bfloat16 move each logit by their error times the key.
        assert np.abs(o[r] - want).max() < 4 * 2.0**-8 * np.abs(v).max()


# Plans


@dataclass
class Steps:
    """Arrays of fixed sizes whose contents change in place from step to step of serving."""

    xp: object
    rng: object
    heads: int

    def __post_init__(self):
        """Make the arrays, a plan of them, and a call."""
        xp, heads = self.xp, self.heads
        self.cache = MLAPagedCache(on(xp, poison((40, 32, 576), BF16)))
        self.index = [on(xp, np.zeros(n, np.int32)) for n in (5, 40, 4, 5)]
        self.table, self.options = PageTable(*self.index[:3], 32), {"causal": True}
        self.options["qo_indptr"] = self.index[3]
        self.q = [on(xp, np.zeros((8, heads, n), BF16)) for n in (512, 64)]
        self.plan = self.cache.plan(self.q[0], self.table, **self.options)

    def __call__(self):
        """Follow the arrays and attend."""
        self.plan.update()
        return self.cache.decode(
            *self.q, self.table, sm_scale=SCALE, plan=self.plan, return_lse=True, **self.options
        )

    def write(self, kv_lens, counts):
        """Give all arrays other contents, and what attention to them must give."""
        rng, pages = self.rng, -(-np.array(kv_lens) // 32)
        ids = rng.permutation(40).astype(np.int32)
        last = [(n - 1) % 32 + 1 if n else 77 for n in kv_lens]
        stored = poison((40, 32, 576), BF16)
        for b, n in enumerate(kv_lens):
            at = np.arange(n)
            stored[ids[pages[:b].sum() + at // 32], at % 32] = random_rows(rng, (n, 576), BF16)
        host = (indptr_of(pages), ids, np.array(last, np.int32), indptr_of(counts))
        q = queries(rng, 8, self.heads, "bfloat16")
        for to, values in zip(
            (self.cache.data, *self.index, *self.q), (stored, *host, *q), strict=True
        ):
            unsigned = f"u{values.itemsize}"
            to.view(unsigned)[...] = on(self.xp, values.view(unsigned))
        live = [x[: host[3][-1]] for x in q]
        stores = stored[..., None, :512], stored[..., None, 512:]
        return reference.mla_decode(*live, host[3], *stores, *host[:3], sm_scale=SCALE, causal=True)


STEPS = [
    ((300, 0, 5, 64), (2, 1, 0, 4)),
    ((1, 1, 700, 2), (0, 5, 1, 1)),
    ((0, 0, 0, 0), (3, 3, 0, 0)),
    ((129, 128, 127, 126), (1, 1, 1, 1)),
]


@pytest.mark.parametrize("heads", [16, 128])
def test_a_step_follows_its_arrays(xp, heads, rng):
    step = Steps(xp, rng, heads)
    for lens, counts in STEPS:
        want = step.write(lens, counts)
        assert_attends([x[: len(want[1])] for x in step()], want, "bfloat16", 5.0)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_step_follows_its_arrays(heads, rng):
    step = Steps(cp, rng, heads)
    step.write(*STEPS[0])
    with captured(step) as (stream, graph, got):
        for lens, counts in STEPS:
            want = step.write(lens, counts)
            cp.cuda.Device().synchronize()
            for _ in range(2):  # what one launch leaves behind, the next must find in order
                graph.launch(stream)
            stream.synchronize()
            assert_attends([x[: len(want[1])] for x in got], want, "bfloat16", 5.0)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_the_same_call_gives_the_same_bits(heads, rng):
    case = MLACase((5000, 3, 900, 2000), 64, dtype="bfloat16")
    cache, table = case.nouns(case.arrays(rng), cp)
    q = [cp.asarray(x) for x in queries(rng, 4, heads, "bfloat16")]
    plan = cache.plan(q[0], table)
    first = cache.decode(*q, table, sm_scale=SCALE, plan=plan, return_lse=True)
    for _ in range(20):
        again = cache.decode(*q, table, sm_scale=SCALE, plan=plan, return_lse=True)
        for got, want in zip(again, first, strict=True):
            assert_same_bits(got, want)
    for got, want in zip(cache.decode(*q, table, sm_scale=SCALE, return_lse=True), first,
                         strict=True):  # fmt: skip
        assert_same_bits(got, want)


def test_a_plan_serves_the_layers_it_was_made_for_and_no_others(xp, rng):
    case = MLACase((45, 0, 8), 16, dtype="bfloat16")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, xp)
    q = [on(xp, x) for x in queries(rng, 3, 8, "bfloat16")]
    plan = cache.plan(q[0], table)
    assert isinstance(plan, Plan)
    layers = [cache, case.nouns(arrays, xp)[0]]
    results = [c.decode(*q, table, sm_scale=SCALE, plan=plan) for c in layers]
    assert_same_bits(results[0], to_numpy(results[1]))
    for call in (
        lambda: cache.decode(*(x[:, :4] for x in q), table, sm_scale=SCALE, plan=plan),
        lambda: cache.decode(*q, table, sm_scale=SCALE, plan=plan, causal=True),
        lambda: cache.decode(*q, table, sm_scale=SCALE, plan=plan, qo_indptr=[0, 1, 2, 3]),
    ):
        with pytest.raises(ValueError, match=r"^MLAPagedCache.decode: the plan was made for"):
            call()


@pytest.mark.gpu
def test_a_captured_call_needs_a_plan(rng):
    case = MLACase((45, 8), 16, dtype="bfloat16")
    cache, table = case.nouns(case.arrays(rng), cp)
    q = [cp.asarray(x) for x in queries(rng, 2, 8, "bfloat16")]
    cache.decode(*q, table, sm_scale=SCALE)
    with (
        cp.cuda.Stream(non_blocking=True) as stream,
        capturing(stream),
        pytest.raises(ValueError, match="captured into a graph needs plan="),
    ):
        cache.decode(*q, table, sm_scale=SCALE)


# Nothing to do, and what there is no kernel for


def test_nothing_gives_nothing(xp):
    cache = MLAPagedCache.empty(2, 16, "bfloat16", xp=xp)
    for batch_size, heads in ((0, 16), (3, 0), (3, 16)):
        table = PageTable.from_seq_lens([0] * batch_size, 16, xp=xp)
        q = [xp.zeros((batch_size, heads, n), BF16) for n in (512, 64)]
        o, lse = cache.decode(*q, table, sm_scale=SCALE, return_lse=True)
        assert (o.shape, lse.shape) == ((batch_size, heads, 512), (batch_size, heads))
        assert (to_numpy(o) == 0).all()
        assert np.isneginf(to_numpy(lse)).all()


def test_what_there_is_no_kernel_for_is_named(xp):
    if xp is np:
        return
    table = PageTable(*(fake_cupy((n,), "int32") for n in (3, 5, 2)), 16)
    for shape, dtype, message in (
        ((32, 16), "bfloat16", "head_dim_ckv=512 with head_dim_kpe=64 is what there is"),
        ((512, 64), "float8_e5m2", "there are .*float8_e4m3fn with bfloat16.* for ckv and kpe"),
        ((512, 64), "float32", "there are .*bfloat16 with bfloat16"),
    ):
        cache = MLAPagedCache(tuple(fake_cupy((3, 16, n), dtype) for n in shape))
        kind = dtype if dtype == "bfloat16" else "float16"
        q = [fake_cupy((2, 4, n), kind) for n in shape]
        for call in (
            lambda cache=cache, q=q: cache.decode(*q, table, sm_scale=0.1),
            lambda cache=cache, q=q: cache.plan(q[0], table),
        ):
            with pytest.raises(NotImplementedError, match=rf"^MLAPagedCache.decode: .*{message}"):
                call()
