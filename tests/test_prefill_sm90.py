"""Hopper's own prefill: wherever it can be launched it gives what the definition gives.

The cases are those of the portable kernel, with Hopper's kernel chosen for all that it has tiles
for, however few rows there are; and what only that kernel has: copies of pieces of pages and of
single tokens, pages that do not exist, tiles of items that any CTA may take, scores far above those
before, entries of masks as steps, weights of e4m3.
"""

import cupy as cp
import numpy as np
import pytest
from cases import PagedCase, indptr_of, on, random_rows
from test_decode import (
    LENS,
    PAGE_CASES,
    ROWS,
    assert_attends,
    attend,
    check,
    define,
    shared_pages,
)
from test_prefill import GRID, KINDS, Call
from test_ragged import assert_is_prefill, prefill_arrays
from tolerances import (
    ATTENTION,
    LSE,
    LSE_E4M3,
    MEAN_E4M3,
    ROW_NORM,
    SUM_LOSS_E4M3,
    assert_close,
    assert_rows_close,
    assert_same_bits,
    max_abs,
    to_numpy,
)

from cukv import PagedKVCache, RaggedMask, RaggedTensor, _paged_attention, reference
from cukv._arrays import as_dtype
from cukv._geometry import Sm90Tile
from cukv._kernels import arch_of
from cukv._specialisations import runs_on, sm90_tiles
from cukv._tiles import _ALL_ROWS, Served

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_hopper():
    if not runs_on("prefill_sm90", arch_of(0)):
        pytest.skip("needs sm_90")


@pytest.fixture
def forced(monkeypatch):
    """Have prefill_sm90 serve every call that it can: gives the tiles that were chosen."""
    chosen = []
    choose = _paged_attention.choose_tiles

    def choose_hopper(op, pages, aligned, *sizes):
        *_, one_row, batch_invariant, copies = sizes
        k, v = (p.array for p in pages)
        wanted = (k.dtype, k.shape[3], v.shape[3], *(copies or ()))
        for tile in () if one_row or batch_invariant else sm90_tiles():
            if tile[:5] == wanted:
                chosen.append(tile)
                return (Served(tile, *_ALL_ROWS),)
        return choose(op, pages, aligned, *sizes)

    monkeypatch.setattr(_paged_attention, "choose_tiles", choose_hopper)
    _paged_attention._kinds_of.cache_clear()
    yield chosen
    _paged_attention._kinds_of.cache_clear()


def planned_on_hopper(plan):
    """Tell whether a plan's work is for prefill_sm90."""
    ((tile, _),) = plan.work.kind.tiles
    return isinstance(tile, Sm90Tile)


def is_mapped(page_size):
    """Tell whether tensor maps can read pages of a size, wherever they lie."""
    return page_size % 8 == 0


@pytest.mark.parametrize("case", PAGE_CASES, ids=str)
def test_any_page_size_layout_and_form(case, rng, forced):
    qo_lens = [(1, 3, 0, 2)[b % 4] for b in range(case.batch_size)]
    check(cp, case, rng, qo_lens=qo_lens, causal=True)
    assert {t.mapped for t in forced} == {is_mapped(case.page_size)}


# Every width; pieces of pages that a step of keys holds 16, 8, 2 and 1 of, or a part of; pages that
# steps begin and end within.
@pytest.mark.parametrize("page_size", [1, 3, 5, 8, 16, 17, 24, 64, 200, 256, 300])
@pytest.mark.parametrize("tile", sorted({t[1:3] for t in sm90_tiles() if t.paged}), ids=str)
def test_every_width_takes_every_kind_of_page(tile, page_size, rng, forced):
    form = "5d" if tile[0] == tile[1] else "pair"
    case = PagedCase(
        (45, 0, 700, 17), page_size, 2, *tile, dtype="bfloat16", layout="HND", form=form
    )
    for causal in (True, False):
        check(cp, case, rng, group_size=2, qo_lens=(3, 2, 300, 30), causal=causal)
    assert {(t[1:3], t.mapped) for t in forced} == {(tile, is_mapped(page_size))}


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_any_rows(rows, rng, forced):
    case = PagedCase(rows.kv_lens, rows.page_size, 2, 64, dtype=rows.dtype, index_dtype="int64")
    options = {"causal": rows.causal, "window_left": rows.window_left}
    check(cp, case, rng, group_size=rows.group_size, qo_lens=rows.qo_lens, **options)
    assert bool(forced) == (not rows.dtype.startswith("float8"))


# Requests that share pages, and have some twice; long ids.
@pytest.mark.parametrize("page_size", [1, 5])
def test_pages_may_be_shared(page_size, rng, forced):
    case = PagedCase((300 * page_size,), page_size, 2, 128, dtype="bfloat16", index_dtype="int64")
    arrays = shared_pages(case, (200, 0, 31, 700), rng)
    check(cp, case, rng, arrays=arrays, qo_lens=(150, 1, 31, 90), causal=True)
    assert {t.mapped for t in forced} == {False}


# Pages and ragged rows that lie apart, backwards, at other multiples of 16 bytes than of 128.
def view_of(x, kind):
    """Copy an array [rows, ..., heads, dim] to where no tensor map reads it."""
    *outer, heads, dim = x.shape
    if kind == "backwards":
        return cp.asarray(x[::-1, ..., ::-1, :].copy())[::-1, ..., ::-1, :]
    wide = cp.empty((*outer, heads + 1, dim + 8), x.dtype)
    wide.view("u2")[...] = 0x7FFF
    view = wide[..., 1:, 8:]
    view[...] = cp.asarray(x)
    return view


@pytest.mark.parametrize("dims", sorted({t[1:3] for t in sm90_tiles() if not t.mapped}), ids=str)
@pytest.mark.parametrize("kind", ["backwards", "padded"])
def test_strides_that_no_map_takes_are_copied_token_by_token(kind, dims, rng, forced):
    call = Call(rng, [(70, 333), (1, 65), (129, 1000)], heads=(4, 2), dims=dims)
    cache, table = call.case.nouns(call.arrays, cp)
    cache = PagedKVCache(tuple(view_of(x, kind) for x in call.arrays.data))
    rows = RaggedTensor(cp.asarray(call.q), indptr_of(call.qo_lens).tolist())
    call.check(cache.prefill(rows, table, causal=True, return_lse=True), causal=True)
    indptr = indptr_of(call.case.kv_lens).tolist()
    k, v = (RaggedTensor(view_of(x, kind), indptr) for x in (call.arrays.k, call.arrays.v))
    for options in ({"causal": True}, {"window_left": 60}):
        call.check(rows.prefill(k, v, return_lse=True, **options), **options)
    assert {t.mapped for t in forced} == {False}


# Keys wider than values.
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"logits_soft_cap": 5.0}], ids=str)
def test_ragged_keys_wider_than_values(options, rng, forced):
    qo_lens, kv_lens = (0, 200, 3, 77, 1), (9, 700, 0, 130, 256)
    arrays = prefill_arrays(rng, "bfloat16", (4, 2, 2), (192, 128), qo_lens, kv_lens)
    q, k, v = (
        RaggedTensor(cp.asarray(x), cp.asarray(indptr_of(lens)))
        for x, lens in zip(arrays, (qo_lens, kv_lens, kv_lens), strict=True)
    )
    got = q.prefill(k, v, return_lse=True, **options)
    assert_is_prefill(got, arrays, "bfloat16", qo_lens, kv_lens, **options)
    assert {t[1:3] for t in forced} == {(192, 128)}


# Heads whose keys come 128 at a time, and 64.
STEPS = [128, 256]

# Options alone and with the diagonal; scales of either sign and none.
OPTIONS: list[dict[str, float]] = [
    {"window_left": 9},
    {"window_left": 0, "causal": True},
    {"window_left": 130, "causal": True},
    {"logits_soft_cap": 2.0, "causal": True},
    {"logits_soft_cap": 30.0, "sm_scale": -0.2, "window_left": 70},
    {"sm_scale": -0.2, "k_scale": 0.5, "v_scale": 3.0},
    {"sm_scale": 0.0, "causal": True},
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", STEPS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, head_dim, dtype, rng, forced):
    qo_lens, kv_lens = (0, 1, 200, 5, 77), (9, 0, 333, 130, 40)
    arrays = prefill_arrays(rng, dtype, (8, 2, 2), (head_dim, head_dim), qo_lens, kv_lens)
    q, k, v = (
        RaggedTensor(cp.asarray(x), cp.asarray(indptr_of(lens)))
        for x, lens in zip(arrays, (qo_lens, kv_lens, kv_lens), strict=True)
    )
    got = q.prefill(k, v, return_lse=True, **options)
    assert_is_prefill(got, arrays, dtype, qo_lens, kv_lens, **options)
    assert forced


def test_sinks(rng, forced):
    case = PagedCase(LENS, 16, 2, 128, dtype="bfloat16")
    sinks = rng.normal(0, 3, 8).astype(np.float32)
    qo_lens = [(1, 3, 0, 2)[b % 4] for b in range(case.batch_size)]
    check(cp, case, rng, qo_lens=qo_lens, sinks=sinks)
    assert forced


# Scores so far above those before that weights relative to the old maximum would overflow.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", STEPS)
@pytest.mark.parametrize("factor", [4.0, 60.0])
def test_scores_far_above_those_before(factor, head_dim, dtype, rng, forced):
    q, k, v = prefill_arrays(rng, dtype, (4, 1, 1), (head_dim, head_dim), (300,), (1500,))
    k = k.astype(np.float32)
    k[5::97] *= factor
    arrays = q, k.astype(q.dtype), v
    for causal in (True, False):
        q, k, v = (
            RaggedTensor(cp.asarray(x), [0, n])
            for x, n in zip(arrays, (300, 1500, 1500), strict=True)
        )
        got = q.prefill(k, v, causal=causal, return_lse=True)
        assert_is_prefill(got, arrays, dtype, (300,), (1500,), causal=causal)
    assert forced


def test_rows_that_see_nothing_in_the_first_step_and_all_of_the_next(rng, forced):
    arrays = prefill_arrays(rng, "bfloat16", (1, 1, 1), (128, 128), (256,), (511,))
    q, k, v = (RaggedTensor(cp.asarray(x), [0, len(x)]) for x in arrays)
    got = q.prefill(k, v, causal=True, return_lse=True)
    assert_is_prefill(got, arrays, "bfloat16", (256,), (511,), causal=True)
    assert forced


# A tile that all CTAs share, with and without soft cap; over and over with the same bits.
@pytest.mark.parametrize("head_dim", STEPS)
@pytest.mark.parametrize("cap", [None, 30.0])
def test_few_rows_over_many_keys_are_split(cap, head_dim, rng, forced):
    case = PagedCase((9000, 3, 5001), 64, 1, head_dim, dtype="bfloat16")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, cp)
    q = case.queries(rng, 50, 4)
    options = {"causal": True} | ({} if cap is None else {"logits_soft_cap": cap})
    found = [attend(cache, table, cp.asarray(q), [0, 40, 43, 50], **options) for _ in range(4)]
    want = define(case, arrays, q, [0, 40, 43, 50], **options)
    scale = max_abs(arrays.v)
    assert_attends(found[0], want, operands="bfloat16", scale=scale, capped=cap is not None)
    for got in found:
        for x, first in zip(got, found[0], strict=True):
            assert_same_bits(x, first)
    assert forced


@pytest.mark.parametrize("page_size", [1, 5, 16, 17, 24, 128])
@pytest.mark.parametrize("head_dim", STEPS)
@pytest.mark.parametrize("causal", [True, False])
def test_keys_of_pages_that_do_not_exist_are_dropped(page_size, head_dim, causal, rng, forced):
    case = PagedCase((900, 77), page_size, 2, head_dim, dtype="bfloat16")
    arrays = case.arrays(rng)
    pages = case.pages[0]
    gone = np.arange(1, pages, 3)
    cache, table = case.nouns(arrays, cp)
    bad = to_numpy(table.indices).copy()
    bad[gone] = np.resize([-1, case.max_num_pages, np.iinfo(bad.dtype).max], len(gone))
    table.indices[...] = cp.asarray(bad)
    q = case.queries(rng, 90, 4)
    got = attend(cache, table, cp.asarray(q), [0, 50, 90], causal=causal)

    # The same as a mask that hides them.
    hidden = np.zeros(900, bool)
    for page in gone:
        hidden[page * page_size : (page + 1) * page_size] = True
    keys = np.arange(900)
    mask = np.broadcast_to(~hidden, (50, 900)).copy()
    if causal:
        mask &= keys <= np.arange(50)[:, None] + 850
    first = (arrays.indptr[:2], arrays.indices, arrays.last_page_len[:1])
    k, v = case.stores(arrays.data)
    want = reference.prefill(q[:50], np.array([0, 50]), k, v, *first, custom_mask=mask.reshape(-1))
    assert_close(got[0][:50], want[0], ATTENTION["bfloat16"], scale=max_abs(arrays.v))
    assert_close(got[1][:50], want[1], LSE)
    assert forced


# Queries and results that no map reads: groups that do not divide a team, odd strides, floats.
@pytest.mark.parametrize("group_size", [3, 5, 128])
@pytest.mark.parametrize("head_dim", STEPS)
def test_groups_that_do_not_divide_a_team_of_rows(group_size, head_dim, rng, forced):
    case = PagedCase((300, 0, 45), 16, 1, head_dim, dtype="float16")
    check(cp, case, rng, group_size=group_size, qo_lens=(70, 2, 9), causal=True)
    assert forced


@pytest.mark.parametrize("head_dim", STEPS)
def test_queries_and_results_of_any_strides_and_dtypes(head_dim, rng, forced):
    case = PagedCase((300, 45), 16, 2, head_dim, dtype="bfloat16")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, cp)
    q = case.queries(rng, 90, 8)
    want = attend(cache, table, cp.asarray(q), [0, 80, 90], causal=True)
    wide = cp.empty((90, 9, head_dim + 4), q.dtype)
    view = wide[:, 1:, 3:-1]
    view[...] = cp.asarray(q)
    assert_same_bits(attend(cache, table, view, [0, 80, 90], causal=True)[0], want[0])
    out = cp.empty(wide.shape, q.dtype)
    out.view("u2")[...] = 0x7FFF
    got = attend(cache, table, view, [0, 80, 90], causal=True, out=out[:, 1:, 3:-1])
    assert_same_bits(got[0], want[0])
    assert (to_numpy(out.view("u2")[:, :1]) == 0x7FFF).all()
    assert (to_numpy(out.view("u2")[:, :, :3]) == 0x7FFF).all()
    assert (to_numpy(out.view("u2")[:, :, -1:]) == 0x7FFF).all()
    floats = cp.empty(q.shape, np.float32)
    attend(cache, table, cp.asarray(q), [0, 80, 90], causal=True, out=floats)
    assert_close(floats, want[0], ATTENTION["bfloat16"], scale=max_abs(arrays.v))
    assert forced


@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_queries_of_another_dtype_than_the_keys_are_not_for_hopper(q_dtype, rng, forced):
    case = PagedCase((300, 45), 16, 2, 128, dtype="bfloat16")
    check(cp, case, rng, group_size=4, qo_lens=(200, 40), q_dtype=q_dtype, causal=True)
    assert not forced


# A plan belongs to a geometry: layers that no map reads are copied token by token.
def test_a_plan_serves_layers_that_no_map_reads(rng, forced):
    case = PagedCase((300, 45), 16, 2, 128, dtype="bfloat16", form="pair")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, cp)
    q = RaggedTensor(cp.asarray(case.queries(rng, 90, 8)), [0, 80, 90])
    plan = cache.plan(q, table, causal=True)
    assert planned_on_hopper(plan)
    want = cache.prefill(q, table, causal=True, plan=plan)
    # The same contents with heads in descending order of addresses.
    layer = PagedKVCache(tuple(cp.asarray(x[:, :, ::-1].copy())[:, :, ::-1] for x in arrays.data))
    got = layer.prefill(q, table, causal=True, plan=plan)
    assert_close(got, want, ATTENTION["bfloat16"], scale=max_abs(arrays.v))


# Values narrower than the keys that a ragged plan was made from.
def test_a_ragged_plan_serves_narrower_values(rng, forced):
    arrays = prefill_arrays(rng, "float16", (4, 2, 2), (128, 64), (150, 3), (200, 90))
    q, k, v = (
        RaggedTensor(cp.asarray(x), cp.asarray(indptr_of(lens)))
        for x, lens in zip(arrays, ((150, 3), (200, 90), (200, 90)), strict=True)
    )
    plan = q.plan(k, causal=True)
    assert planned_on_hopper(plan)
    got = q.prefill(k, v, causal=True, plan=plan, return_lse=True)
    assert_is_prefill(got, arrays, "float16", (150, 3), (200, 90), causal=True)


# Custom masks


def check_masked(call, forced, ragged=False, want=None, **options):
    """Compare with the definition; both forms of a mask, planned or not, give the same bits."""
    packed = call.attend(ragged, bits=True, planned=True, **options)
    call.check(packed, call.define(**options) if want is None else want)
    for got, other in zip(call.attend(ragged, bits=False, **options), packed, strict=True):
        assert_same_bits(got, to_numpy(other))
    assert forced


# Groups that divide a tile of rows, and one that does not.
@pytest.mark.parametrize(
    ("page_size", "heads"), [(1, (4, 1)), (5, (3, 1)), (8, (4, 1)), (24, (3, 1)), (64, (8, 1))]
)
def test_any_mask_on_any_rows_and_keys(page_size, heads, rng, forced):
    call = Call(rng, GRID, page_size=page_size, heads=heads).draw(rng, *KINDS)
    want = call.define()
    for ragged in (False, True):
        check_masked(call, forced, ragged, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", sorted({t[1:3] for t in sm90_tiles()}), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_width_takes_every_mask(kind, dims, dtype, rng, forced):
    shapes = [(70, 333), (1, 65), (129, 1000), (3, 0)]
    call = Call(rng, shapes, page_size=5, heads=(12, 2), dims=dims, dtype=dtype).draw(rng, kind)
    for ragged in (True, False):
        check_masked(call, forced, ragged)
    assert {t.mapped for t in forced} == {True, False}


@pytest.mark.parametrize("options", [{"window_left": 31}, {"sm_scale": -0.3}], ids=str)
def test_options_act_beside_a_mask(options, rng, forced):
    call = Call(rng, [(130, 700), (40, 40), (300, 1000)], heads=(4, 2), dims=(128, 128))
    check_masked(call.draw(rng, "all", "random", "tree"), forced, **options)


# The portable kernel works off lists that Hopper's was chosen for.
def test_a_cap_beside_a_mask(rng, forced):
    call = Call(rng, [(130, 700), (40, 40)], heads=(4, 2), dims=(128, 128)).draw(rng, "random")
    got = call.attend(bits=True, planned=True, logits_soft_cap=5.0)  # plans know of no cap
    want = call.define(logits_soft_cap=5.0)
    assert_attends(got, want, operands="bfloat16", scale=max_abs(call.arrays.v), capped=True)
    assert forced


# Steps come last first: rows without a maximum when all see all of a step, and one far too low.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", STEPS)
@pytest.mark.parametrize("factor", [1.0, 60.0])
def test_rows_that_see_nothing_before_steps_that_all_see(factor, head_dim, dtype, rng, forced):
    call = Call(rng, [(90, 900)], heads=(4, 1), dims=(head_dim, head_dim), dtype=dtype)
    (mask,) = call.draw(rng, "all").masks
    mask[::3, 384:] = False
    mask[1::3, 640:] = False
    if factor > 1:
        k = call.arrays.k.astype(np.float32)
        k[5::97] *= factor
        call.arrays = call.arrays._replace(k=k.astype(call.arrays.k.dtype))
    check_masked(call, forced, ragged=True)


# A tile that all CTAs share; over and over with the same bits.
@pytest.mark.parametrize("head_dim", STEPS)
def test_few_rows_under_a_mask_over_many_keys_are_split(head_dim, rng, forced):
    call = Call(rng, [(40, 9000), (10, 5001)], heads=(4, 1), dims=(head_dim, head_dim))
    call.draw(rng, "scattered", "rows without keys")
    want = call.define()
    first = call.attend(bits=True)
    call.check(first, want)
    for _ in range(3):
        for x, y in zip(call.attend(bits=True), first, strict=True):
            assert_same_bits(x, to_numpy(y))
    assert forced


# No key of a hole is seen by a mask's steps either, whatever their classes.
@pytest.mark.parametrize("page_size", [1, 16, 17])
@pytest.mark.parametrize("head_dim", STEPS)
def test_keys_of_pages_that_do_not_exist_are_dropped_under_a_mask(head_dim, page_size, rng, forced):
    call = Call(rng, [(90, 900)], page_size=page_size, heads=(4, 1), dims=(head_dim, head_dim))
    call.draw(rng, "tree")
    cache, table = call.case.nouns(call.arrays, cp)
    gone = np.arange(1, call.case.pages[0], 3)
    table.indices[cp.asarray(gone)] = call.case.max_num_pages
    rows = RaggedTensor(cp.asarray(call.q), [0, 90])
    got = cache.prefill(rows, table, custom_mask=call.mask(True), return_lse=True)
    for page in gone:
        call.masks[0][:, page * page_size : (page + 1) * page_size] = False
    call.check(got)
    assert forced


@pytest.mark.parametrize("head_dim", STEPS)
def test_large_calls_choose_it_by_themselves(head_dim, rng):
    q, k = (
        RaggedTensor(cp.asarray(random_rows(rng, (600, n, head_dim), "bfloat16")), [0, 600])
        for n in (4, 1)
    )
    assert planned_on_hopper(q.plan(k, causal=True))
    mask = RaggedMask.from_list([cp.ones((600, 600), bool)])
    assert planned_on_hopper(q.plan(k, custom_mask=mask))
    assert not planned_on_hopper(q.plan(k, causal=True, batch_invariant=True))
    case = PagedCase((600,), 1, 1, head_dim, dtype="bfloat16")
    cache, table = case.nouns(case.arrays(rng), cp)
    assert planned_on_hopper(cache.plan(q, table, causal=True))


# Queries, keys and values of e4m3, which are multiplied as they are

E4M3 = "float8_e4m3fn"


def assert_is_near(got, want, v, v_scale=1.0):
    """Compare (o, lse) with the definition's, each row with a key by its norm too."""
    assert_close(got[1], want[1], LSE_E4M3)
    assert_close(got[0], want[0], ATTENTION[E4M3], scale=max_abs(v) * abs(v_scale))
    o, seen = to_numpy(got[0]).astype(np.float32), ~np.isneginf(want[1])
    assert (o[~seen] == 0).all()
    assert_rows_close(o[seen], want[0][seen], ROW_NORM[E4M3])


def ragged_e4m3(rng, heads, qo_lens, kv_lens):
    """Draw q, k and v of e4m3: on the host, and as nouns."""
    q, k, v = prefill_arrays(rng, E4M3, heads, (128, 128), qo_lens, kv_lens)
    arrays = q.astype(np.float32).astype(k.dtype), k, v
    lens = qo_lens, kv_lens, kv_lens
    nouns = [
        RaggedTensor(on(cp, x), cp.asarray(indptr_of(n))) for x, n in zip(arrays, lens, strict=True)
    ]
    return arrays, nouns


def check_e4m3(rng, forced, heads, qo_lens, kv_lens, **options):
    arrays, (q, k, v) = ragged_e4m3(rng, heads, qo_lens, kv_lens)
    got = q.prefill(k, v, return_lse=True, **options)
    indptrs = indptr_of(qo_lens), indptr_of(kv_lens)
    host = {n: to_numpy(x) if isinstance(x, cp.ndarray) else x for n, x in options.items()}
    want = reference.ragged_prefill(arrays[0], indptrs[0], *arrays[1:], indptrs[1], **host)
    assert_is_near(got, want, arrays[2], options.get("v_scale", 1.0))
    assert forced


# Groups that divide a team of rows and one that does not; ends of steps, and a step too many.
@pytest.mark.parametrize("heads", [(1, 1, 1), (8, 2, 2), (8, 1, 1), (6, 2, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_e4m3_of_any_lengths(causal, heads, rng, forced):
    kv_lens = (1, 17, 0, 127, 129, 128, 1500)
    check_e4m3(rng, forced, heads, (1, 20, 3, 0, 70, 128, 333), kv_lens, causal=causal)


@pytest.mark.parametrize("options", [o for o in OPTIONS if "logits_soft_cap" not in o], ids=str)
def test_e4m3_with_options(options, rng, forced):
    check_e4m3(rng, forced, (8, 2, 2), (0, 1, 200, 5, 77), (9, 0, 333, 130, 40), **options)


def test_e4m3_with_sinks(rng, forced):
    sinks = cp.asarray(rng.normal(0, 3, 8).astype(np.float32))
    check_e4m3(rng, forced, (8, 2, 2), (40, 3), (333, 7), sinks=sinks, causal=True)


@pytest.mark.parametrize("page_size", [8, 16, 24, 64, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_e4m3_in_every_kind_of_page(causal, page_size, rng, forced):
    for form, layout in (("5d", "NHD"), ("pair", "HND")):
        case = PagedCase((45, 0, 700, 17), page_size, 2, 128, dtype=E4M3, layout=layout, form=form)
        arrays = case.arrays(rng)
        cache, table = case.nouns(arrays, cp)
        qo_indptr = np.array([0, 3, 5, 305, 335])
        q = case.queries(rng, 335, 8).astype(np.float32).astype(arrays.v.dtype)
        got = attend(cache, table, on(cp, q), qo_indptr, causal=causal)
        assert_is_near(got, define(case, arrays, q, qo_indptr, causal=causal), arrays.v)
    assert forced


# Results of every dtype, by maps and without, of queries that lie anywhere.
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
def test_e4m3_of_any_strides_and_to_any_dtype(out, rng, forced):
    arrays, (q, k, v) = ragged_e4m3(rng, (8, 2, 2), (80, 10), (300, 45))
    want = reference.ragged_prefill(
        arrays[0], indptr_of((80, 10)), *arrays[1:], indptr_of((300, 45)), causal=True
    )
    view = cp.empty((90, 9, 132), np.uint8)[:, 1:, 3:-1]
    view[...] = q.rows.view(np.uint8)
    for rows in (q.rows, view.view(arrays[0].dtype)):
        to = cp.empty((90, 9, 132), as_dtype("test", "out", out))
        bits = to.view(f"u{to.itemsize}")
        bits[...] = 0x7F7F
        for results in (cp.empty((90, 8, 128), to.dtype), to[:, 1:, 3:-1]):
            mine = RaggedTensor(rows, q.indptr)
            got = mine.prefill(k, v, causal=True, return_lse=True, out=results)
            assert_is_near(got, want, arrays[2])
        for beside in (bits[:, :1], bits[..., :3], bits[..., -1:]):
            assert (beside == 0x7F7F).all()
    assert forced


def test_e4m3_of_few_rows_over_many_keys_is_split(rng, forced):
    arrays, (q, k, v) = ragged_e4m3(rng, (4, 1, 1), (40, 3, 7), (9000, 3, 5001))
    found = [q.prefill(k, v, causal=True, return_lse=True) for _ in range(4)]
    indptrs = indptr_of((40, 3, 7)), indptr_of((9000, 3, 5001))
    want = reference.ragged_prefill(arrays[0], indptrs[0], *arrays[1:], indptrs[1], causal=True)
    assert_is_near(found[0], want, arrays[2])
    for got in found:
        for x, first in zip(got, found[0], strict=True):
            assert_same_bits(x, first)
    assert forced


# Sums have fewer bits than float32 and lose a part of themselves with each step, of which no more
# comes together than is known.
def test_e4m3_of_positive_values_over_many_keys(rng, forced):
    arrays, (q, k, _) = ragged_e4m3(rng, (4, 1, 1), (70,), (16384,))
    positive = np.abs(arrays[2].astype(np.float32)).astype(arrays[2].dtype)
    v = RaggedTensor(on(cp, positive), k.indptr)
    got = q.prefill(k, v, return_lse=True)
    want = reference.ragged_prefill(
        arrays[0], np.array([0, 70]), arrays[1], positive, np.array([0, 16384])
    )
    assert_is_near(got, want, positive)
    ratio = np.vdot(to_numpy(got[0]).astype(np.float64), want[0]) / np.vdot(want[0], want[0])
    assert -16384 * SUM_LOSS_E4M3 < ratio - 1 < MEAN_E4M3
    assert forced


def test_e4m3_of_pages_that_do_not_exist_is_dropped(rng, forced):
    case = PagedCase((900, 77), 24, 2, 128, dtype=E4M3)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays, cp)
    q = on(cp, case.queries(rng, 90, 8).astype(np.float32).astype(arrays.v.dtype))
    table.indices[1:-1:3] = -1
    got = attend(cache, table, q, [0, 50, 90], causal=True)
    # So high a cap changes nothing but the kernel: the portable one drops them too.
    want = attend(cache, table, q, [0, 50, 90], causal=True, logits_soft_cap=1e4)
    assert_close(got[1], want[1], LSE_E4M3)
    seen = ~np.isneginf(to_numpy(want[1]))
    o, other = (to_numpy(x[0]).astype(np.float32) for x in (got, want))
    assert_rows_close(o[seen], other[seen], ROW_NORM[E4M3] + ROW_NORM["bfloat16"])
    assert forced


# What the kernel has no code for is the portable one's.
@pytest.mark.parametrize("options", [{"logits_soft_cap": 5.0}, {"custom_mask": True}], ids=str)
def test_e4m3_with_a_cap_or_a_mask_is_portable(options, rng, forced):
    arrays, (q, k, v) = ragged_e4m3(rng, (4, 2, 2), (50, 9), (70, 200))
    host = dict(options)
    if "custom_mask" in options:
        flat = rng.random(50 * 70 + 9 * 200) < 0.5
        options = {"custom_mask": RaggedMask(cp.asarray(flat), [0, 50, 59], [0, 70, 270])}
        host = {"custom_mask": flat}
    want = reference.ragged_prefill(
        arrays[0], indptr_of((50, 9)), *arrays[1:], indptr_of((70, 200)), **host
    )
    capped = "logits_soft_cap" in options
    plan = q.plan(k, custom_mask=options.get("custom_mask"))
    assert planned_on_hopper(plan) == capped  # of which plans do not know
    forced.clear()
    for planned in (plan, None):
        got = q.prefill(k, v, plan=planned, return_lse=True, **options)
        assert_attends(got, want, operands="bfloat16", scale=max_abs(arrays[2]), capped=capped)
    assert not forced
