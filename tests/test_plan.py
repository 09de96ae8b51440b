"""Plans of paged attention: what they belong to, what they follow, which bits they promise.

Tests with the ``xp`` fixture run on both homes; a plan of NumPy arrays has nothing to prepare, so
there they check themselves.
"""

import gc

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from capturing import capturing
from cases import PagedCase, captured, indptr_of, on, poison, random_rows
from tolerances import ATTENTION, LSE, assert_close, assert_same_bits, max_abs, to_numpy

from cukv import PagedKVCache, PageTable, Plan, RaggedTensor, reference
from cukv._arrays import as_dtype

BF16 = np.dtype(ml_dtypes.bfloat16)
PAGE_SIZE = 16


def assert_equal(got, want, rows=None):
    """Compare (o, lse) pairs bit for bit, or their first rows."""
    for x, y in zip(got, want, strict=True):
        assert_same_bits(x[:rows], to_numpy(y)[:rows])


def page_table(xp, *parts):
    """Make a home's PageTable of host arrays or lists."""
    return PageTable(*(on(xp, np.asarray(x)) for x in parts), PAGE_SIZE)


def write_bits(to, array):
    """Copy an array's elements, of whatever dtype, into another of its home."""
    unsigned = f"u{array.dtype.itemsize}"
    to.view(unsigned)[...] = array.view(unsigned)


class Steps:
    """Arrays of fixed sizes whose contents change in place from step to step of serving.

    Two layers of one table: an NHD array and an HND pair of more pages. ``num_rows`` is given for
    prefill, whose rows are dealt anew in each step; without it a step decodes.
    """

    def __init__(self, xp, batch_size, num_pages, *, num_rows=None, dtype="bfloat16"):
        self.xp, self.num_pages, self.num_rows = xp, num_pages, num_rows
        self.dtype = as_dtype("test", "dtype", dtype)
        self.table = page_table(
            xp,
            np.zeros(batch_size + 1, np.int32),
            np.zeros(num_pages, np.int64),
            np.zeros(batch_size, np.int32),
        )
        nhd = poison((num_pages, 2, PAGE_SIZE, 2, 64), self.dtype)
        hnd = [poison((num_pages + 7, 2, PAGE_SIZE, 64), self.dtype) for _ in range(2)]
        self.layers = (
            PagedKVCache(on(xp, nhd)),
            PagedKVCache(tuple(on(xp, x) for x in hnd), "HND"),
        )
        kind = BF16 if dtype.startswith("float8") else self.dtype
        self.q = on(xp, np.zeros((num_rows or batch_size, 8, 64), kind))
        self.qo_indptr = None if num_rows is None else on(xp, np.zeros(batch_size + 1, np.int64))
        self.options = {} if num_rows is None else {"causal": True}
        self.live = num_rows or batch_size

    @property
    def queries(self):
        """What plan, decode and prefill take."""
        return self.q if self.qo_indptr is None else RaggedTensor(self.q, self.qo_indptr)

    def plan(self, **options):
        """Make a plan for every layer."""
        return self.layers[0].plan(self.queries, self.table, **self.options, **options)

    def attend(self, layer=0, **options):
        """Attend in a layer: (o, lse)."""
        cache, options = self.layers[layer], self.options | {"return_lse": True} | options
        if self.qo_indptr is None:
            return cache.decode(self.q, self.table, **options)
        return cache.prefill(self.queries, self.table, **options)

    def write(self, kv_lens, rng):
        """Give requests these lengths on pages drawn anew, and all arrays other contents.

        NaN lies wherever nobody should look, and indices go on with ids that are not pages.
        """
        kv_lens = np.array([*kv_lens, *[0] * (self.table.batch_size - len(kv_lens))])
        pages = -(-kv_lens // PAGE_SIZE)
        indices = np.full(self.num_pages, -1)
        indices[::2] = 2**31 - 1
        indices[: pages.sum()] = rng.permutation(self.num_pages)[: pages.sum()]
        last = np.where(kv_lens > 0, (kv_lens - 1) % PAGE_SIZE + 1, 99)
        self.csr = indptr_of(pages), indices, last
        for mine, theirs in zip(
            (self.table.indptr, self.table.indices, self.table.last_page_len), self.csr, strict=True
        ):
            mine[...] = on(self.xp, theirs.astype(mine.dtype))
        at = np.concatenate([np.arange(n) for n in kv_lens])
        page = indices[np.repeat(self.csr[0][:-1], kv_lens) + at // PAGE_SIZE]
        self.stores = []
        for cache in self.layers:
            for view in (cache.k, cache.v):
                nhd = view if cache.layout == "NHD" else view.swapaxes(1, 2)
                store = poison(nhd.shape, self.dtype)
                store[page, at % PAGE_SIZE] = random_rows(rng, (len(at), 2, 64), self.dtype)
                self.stores.append(store)
                layout = store if cache.layout == "NHD" else store.swapaxes(1, 2).copy()
                write_bits(view, on(self.xp, layout))
        self.host_q = random_rows(rng, self.q.shape, self.q.dtype)
        write_bits(self.q, on(self.xp, self.host_q))
        self.host_qo_indptr = np.arange(len(kv_lens) + 1)
        if self.qo_indptr is not None:  # as many rows as there are tokens, at most 5, as they fit
            rows = np.cumsum(np.minimum(rng.integers(0, 6, len(kv_lens)), kv_lens + 1))
            self.host_qo_indptr = np.minimum([0, *rows], self.num_rows)
            self.qo_indptr[...] = on(self.xp, self.host_qo_indptr)
        self.live = int(self.host_qo_indptr[-1])

    def check(self, got, layer=0, **options):
        """Compare (o, lse) of a layer with the definition on the present contents."""
        k, v = self.stores[2 * layer : 2 * layer + 2]
        q = self.host_q[: self.live]
        options = self.options | options
        want = reference.prefill(q, self.host_qo_indptr, k, v, *self.csr, **options)
        name = self.host_q.dtype.name
        assert_close(got[0][: self.live], want[0], ATTENTION[name], scale=max_abs(v))
        assert_close(got[1][: self.live], want[1], LSE)


# Steps of serving: name -> (requests, pages, lengths of each step). Requests come, grow, go, leave
# empty places; from tiny to cut into parts and back; all to none.
SERVING = {
    "mixed": (6, 60, [
        (45, 8, 25, 22, 1, 16), (0, 45, 0, 700, 3, 0), (), (1,), (400, 500), (0, 0, 0, 0, 0, 950),
        (2,) * 6,
    ]),
    "grown": (4, 1100, [
        (2,) * 4, (8192, 8192), (0, 8192, 0, 17), (8193, 5), (), (1, 1, 1, 16_000),
    ]),
}  # fmt: skip
ENTRIES = {"decode": None, "prefill": 14}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", SERVING)
def test_an_updated_plan_gives_what_a_call_without_one_gives(xp, name, entry, rng):
    batch_size, num_pages, lengths = SERVING[name]
    steps = Steps(xp, batch_size, num_pages, num_rows=ENTRIES[entry])
    plan = steps.plan()
    for kv_lens in lengths:
        steps.write(kv_lens, rng)
        assert plan.update() is None
        for layer in (0, 1):
            got = steps.attend(layer, plan=plan)
            assert_equal(got, steps.attend(layer), steps.live)
            assert_equal(got, steps.attend(layer, plan=steps.plan()), steps.live)
            steps.check(got, layer)


# A step is the update and all layers, in one graph; a step of other contents is its replay.
@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", SERVING)
def test_a_replay_is_an_eager_call_on_the_present_contents(name, entry, batch_invariant, rng):
    batch_size, num_pages, lengths = SERVING[name]
    steps = Steps(cp, batch_size, num_pages, num_rows=ENTRIES[entry], dtype="float16")
    steps.write(lengths[0], rng)
    plan = steps.plan(batch_invariant=batch_invariant)

    def step():
        plan.update()
        assert "Plan(" in repr(plan)  # reads nothing
        return [steps.attend(layer, plan=plan) for layer in (0, 1)]

    with captured(step) as (stream, graph, results):
        for kv_lens in (*lengths, *lengths[::-1]):
            steps.write(kv_lens, rng)
            for o, lse in results:
                o.fill(np.nan)
                lse.fill(7)
            graph.launch(stream)
            fresh = steps.plan(batch_invariant=batch_invariant)
            eager = [steps.attend(layer, plan=fresh) for layer in (0, 1)]
            stream.synchronize()
            for layer in (0, 1):
                assert_equal(results[layer], eager[layer], steps.live)
                steps.check(results[layer], layer)


@pytest.mark.gpu
def test_a_captured_call_needs_a_plan(rng):
    steps, rows = Steps(cp, 4, 60), Steps(cp, 4, 60, num_rows=9)
    for one in (steps, rows):
        one.write((45, 0, 8, 300), rng)
    want = [one.attend() for one in (steps, rows)]
    with cp.cuda.Stream(non_blocking=True) as stream:
        cp.cuda.Device().synchronize()
        with capturing(stream):
            for one in (steps, rows):
                with pytest.raises(ValueError, match=r"^PagedKVCache\.\w+: .*plan"):
                    one.attend()
    for one, expected in zip((steps, rows), want, strict=True):
        assert_equal(one.attend(), expected, one.live)


@pytest.mark.gpu
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_replayed_graph_owns_what_it_uses(entry, rng):
    steps = Steps(cp, 6, 300, num_rows=ENTRIES[entry])
    steps.write((45, 0, 4000, 22), rng)
    plan = steps.plan()

    def step():
        plan.update()
        return steps.attend(plan=plan)

    with captured(step) as (stream, graph, result):
        # Memory of the capture that went back to the pool would be among these.
        others = [cp.full(n, 7, np.uint8) for n in (512, 8192, 1 << 20) for _ in range(64)]
        graph.launch(stream)
        stream.synchronize()
        assert all((x == 7).all() for x in others)
        steps.check(result)


# Lengths that grow, shrink and vanish under a plan that was not told.
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", SERVING)
def test_a_call_under_changed_lengths_harms_nothing_that_an_update_does_not_mend(
    xp, name, entry, batch_invariant, rng
):
    batch_size, num_pages, lengths = SERVING[name]
    steps = Steps(xp, batch_size, num_pages, num_rows=ENTRIES[entry])
    steps.write(lengths[0], rng)
    plan = steps.plan(batch_invariant=batch_invariant)
    for kv_lens in (*lengths[1:], *lengths[::-1]):
        steps.write(kv_lens, rng)
        for layer in (0, 1, 0):
            steps.attend(layer, plan=plan)  # of unspecified values
        plan.update()
        got = steps.attend(plan=plan)
        assert_equal(
            got, steps.attend(plan=steps.plan(batch_invariant=batch_invariant)), steps.live
        )
        steps.check(got)


def test_updating_twice_and_calling_twice_change_nothing(xp, rng):
    steps = Steps(xp, 6, 300)
    steps.write((45, 0, 4000, 22, 1), rng)
    plan = steps.plan()
    want = steps.attend(plan=plan)
    for updates in (0, 1, 2, 3):
        for _ in range(updates):
            plan.update()
        for _ in range(3):
            assert_equal(steps.attend(plan=plan), want)


def test_two_plans_are_used_in_turn_without_waiting(xp, rng):
    a, b = Steps(xp, 4, 600), Steps(xp, 6, 60, num_rows=14)
    a.write((5000, 0, 45, 800), rng)
    b.write((45, 8, 25, 22, 1, 16), rng)
    plans = a.plan(), b.plan()
    want = [one.attend() for one in (a, b)]
    found = []
    for i in range(100 if xp is cp else 3):
        for plan in plans:
            plan.update()
        found.append(
            [one.attend(i % 2, plan=plan) for one, plan in zip((a, b), plans, strict=True)]
        )
    for i, results in enumerate(found):
        for one, got, expected in zip((a, b), results, want, strict=True):
            if i % 2 == 0:
                assert_equal(got, expected, one.live)
            else:
                one.check(got, 1)


# Layers: other layouts, forms, strides and numbers of pages; other options.


def test_one_plan_serves_every_layer_of_equal_shapes(xp, rng):
    case = PagedCase((45, 0, 8, 1500), PAGE_SIZE, 2, 64)
    arrays = case.arrays(rng)
    first, table = case.nouns(arrays, xp)
    q = case.queries(rng, 4, 8)
    plan = first.plan(on(xp, q), table)
    pages = case.max_num_pages
    layers = {
        "packed": arrays.data,
        "of more pages": np.concatenate(
            [arrays.data, poison((5, *arrays.data.shape[1:]), q.dtype)]
        ),
        "of as few as are owned": arrays.data[: arrays.indices[: arrays.indptr[-1]].max() + 1],
    }
    views = {name: on(xp, data.copy()) for name, data in layers.items()}
    views["backwards"] = on(xp, arrays.data[::-1].copy())[::-1]
    views["a pair"] = tuple(on(xp, arrays.data[:, i].copy()) for i in (0, 1))
    caches = {name: PagedKVCache(data) for name, data in views.items()}
    hnd = on(xp, arrays.data.swapaxes(2, 3).copy())
    caches["heads first"] = PagedKVCache(hnd, "HND")
    assert caches["of more pages"].max_num_pages == pages + 5
    csr = arrays.indptr, arrays.indices, arrays.last_page_len
    want = reference.decode(q, *case.stores(arrays.data), *csr)
    for cache in caches.values():
        got = cache.decode(on(xp, q), table, plan=plan, return_lse=True)
        assert_close(got[0], want[0], ATTENTION["float16"], scale=max_abs(arrays.v))
        assert_close(got[1], want[1], LSE)
        alone = cache.decode(on(xp, q), table, return_lse=True)
        assert_equal(got, alone)


def test_a_plan_for_aligned_layers_refuses_one_that_is_not(xp, rng):
    case = PagedCase((45, 0, 8, 1500), PAGE_SIZE, 2, 64)
    arrays = case.arrays(rng)
    aligned, table = case.nouns(arrays, xp)
    flat = arrays.data.reshape(-1)
    off = on(xp, np.concatenate([flat[:1], flat]))[1:].reshape(arrays.data.shape)
    q = on(xp, case.queries(rng, 4, 8))
    for one, other, where in (
        (aligned, PagedKVCache(off), "at"),
        (PagedKVCache(off), aligned, "not at"),
    ):
        plan = one.plan(q, table)
        assert_equal(
            one.decode(q, table, plan=plan, return_lse=True), one.decode(q, table, return_lse=True)
        )
        if xp is cp:  # which kernel serves a call is settled by its plan
            with pytest.raises(ValueError, match=rf"rows {where} multiples of 16 bytes, unlike"):
                other.decode(q, table, plan=plan)


def test_options_of_a_plans_calls_may_differ_where_the_work_does_not(xp, rng):
    steps = Steps(xp, 4, 300)
    steps.write((45, 0, 8, 3000), rng)
    plan = steps.plan(window_left=100)
    sinks = on(xp, rng.standard_normal(8).astype(np.float32))
    for options in (
        {},
        {"sm_scale": 0.5, "q_scale": 2.0},
        {"logits_soft_cap": 3.0},
        {"sinks": sinks},
        {"v_scale": on(xp, np.array([0.5], np.float32))},
        {"out": on(xp, np.zeros((4, 8, 64), np.float32))},
    ):
        got = [to_numpy(x).copy() for x in steps.attend(plan=plan, window_left=100, **options)]
        assert_equal(got, steps.attend(window_left=100, **options))


# Requests that no table of this size can outgrow, and far fewer than it could hold.
@pytest.mark.parametrize("entry", ENTRIES)
def test_indices_may_have_far_more_room_than_requests_need(xp, entry, rng):
    case = PagedCase((45, 0, 8, 25), PAGE_SIZE, 2, 64)
    arrays = case.arrays(rng)
    room = np.full(1 << (21 if xp is cp else 12), -1, np.int32)
    room[: arrays.indptr[-1]] = arrays.indices[: arrays.indptr[-1]]
    cache, _ = case.nouns(arrays, xp)
    table = page_table(xp, arrays.indptr, room, arrays.last_page_len)
    nnz = ENTRIES[entry] or 4
    q = case.queries(rng, nnz, 8)
    qo_indptr = np.array([0, 6, 6, 8, 14]) if entry == "prefill" else np.arange(5)
    csr = arrays.indptr, room, arrays.last_page_len
    want = reference.prefill(q, qo_indptr, *case.stores(arrays.data), *csr)
    call, rows = cache.decode, on(xp, q)
    if entry == "prefill":
        call, rows = cache.prefill, RaggedTensor(rows, qo_indptr.tolist())
    got = call(rows, table, plan=cache.plan(rows, table), return_lse=True)
    assert_close(got[0], want[0], ATTENTION["float16"], scale=max_abs(arrays.v))
    assert_close(got[1], want[1], LSE)


@pytest.mark.gpu
def test_a_plan_keeps_its_arrays(rng):
    steps = Steps(cp, 4, 300)
    steps.write((45, 0, 8, 3000), rng)
    parts = [to_numpy(x) for x in (steps.table.indptr, steps.table.indices,
                                   steps.table.last_page_len)]  # fmt: skip
    lent = page_table(cp, *parts)
    plan = steps.layers[0].plan(steps.q, lent)
    want = steps.attend()
    sizes = [x.nbytes for x in parts]
    del lent
    gc.collect()
    others = [cp.full(n, 0x7F, np.uint8) for n in sizes for _ in range(64)]
    plan.update()
    got = steps.layers[0].decode(steps.q, plan.work.table, plan=plan, return_lse=True)
    assert_equal(got, want)
    assert all((x == 0x7F).all() for x in others)


# Batch-invariant: the bits of a request alone, among mates of any number, length and place.


def mates(rng, kind, qo_len):
    """Give lengths of 63 other requests and numbers of their rows, which are up to qo_len."""
    lens = {
        "random": rng.integers(0, 1500, 63),
        "tiny": rng.integers(0, 3, 63),
        "long": np.full(63, 5000),
        "one huge": np.where(np.arange(63) == 7, 100_000, 20),
    }[kind]
    return lens, (np.ones(63, int) if qo_len == 1 else rng.integers(0, qo_len + 1, 63))


@pytest.mark.parametrize("kind", ["random", "tiny", "long", "one huge"])
@pytest.mark.parametrize(
    ("qo_len", "window_left"), [(1, -1), (1, 700), (3, -1), (3, 1000), (40, 900)]
)
def test_a_requests_bits_do_not_depend_on_its_batch_mates(xp, qo_len, window_left, kind, rng):
    pool = PagedCase((1024,), PAGE_SIZE, 2, 64, dtype="bfloat16")
    arrays = pool.arrays(rng)
    cache, _ = pool.nouns(arrays, xp)
    own = arrays.indices[: arrays.indptr[-1]]
    heads = 8 if qo_len == 1 else 4
    options = {"window_left": window_left}
    options |= {} if qo_len == 1 else {"causal": True}
    shrink = 1 if xp is cp else 20

    def attend(lens, pages, q, qo_lens, padding):
        lens = np.array(lens)
        counts = -(-lens // PAGE_SIZE)
        indices = np.concatenate([*pages, np.full(padding, -1, np.int32)])
        table = page_table(
            xp, indptr_of(counts), indices, np.where(lens > 0, (lens - 1) % PAGE_SIZE + 1, 0)
        )
        queries = on(xp, q)
        if qo_len > 1:
            queries = RaggedTensor(queries, indptr_of(qo_lens).tolist())
        plan = cache.plan(queries, table, batch_invariant=True, **options)
        call = cache.decode if qo_len == 1 else cache.prefill
        got = call(queries, table, plan=plan, return_lse=True, **options)
        csr = to_numpy(table.indptr), indices, to_numpy(table.last_page_len)
        return [to_numpy(x) for x in got], csr

    for kv_len in (n // shrink + n % 3 for n in (1, 17, 1000, 4097, 12_345)):
        pages = rng.choice(own, -(-kv_len // PAGE_SIZE))
        q = pool.queries(rng, qo_len, heads)
        alone, csr = attend([kv_len], [pages], q, [qo_len], 0)
        want = reference.prefill(
            q, np.array([0, qo_len]), *pool.stores(arrays.data), *csr, **options
        )
        assert_close(alone[0], want[0], ATTENTION["bfloat16"], scale=max_abs(arrays.v))
        assert_close(alone[1], want[1], LSE)
        lens, qo_lens = mates(rng, kind, qo_len)
        lens = lens // shrink
        place = int(rng.integers(0, 64))
        theirs = [rng.choice(own, -(-n // PAGE_SIZE)) for n in lens]
        q_of = [pool.queries(rng, n, heads) for n in qo_lens]
        together, _ = attend(
            np.insert(lens, place, kv_len),
            [*theirs[:place], pages, *theirs[place:]],
            np.concatenate([*q_of[:place], q, *q_of[place:]]),
            np.insert(qo_lens, place, qo_len),
            int(rng.integers(0, 3000)),
        )
        first = int(qo_lens[:place].sum())
        assert_equal([x[first : first + qo_len] for x in together], alone)


# Costs that divide evenly among the CTAs of an H200, or miss it by one, and parts without items.
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("batch_size", [1, 16, 32, 33, 65, 66, 132, 133, 264, 528])
def test_equal_requests_are_all_served(xp, batch_size, entry, batch_invariant, rng):
    for kv_len in (16, 64) if xp is cp else (16,):
        case = PagedCase((kv_len,) * batch_size, PAGE_SIZE, 2, 64)
        arrays = case.arrays(rng)
        cache, table = case.nouns(arrays, xp)
        q = case.queries(rng, batch_size, 8)
        csr = arrays.indptr, arrays.indices, arrays.last_page_len
        want = reference.decode(q, *case.stores(arrays.data), *csr)
        call, rows = cache.decode, on(xp, q)
        if entry == "prefill":
            call, rows = cache.prefill, RaggedTensor(rows, np.arange(batch_size + 1).tolist())
        plan = cache.plan(rows, table, batch_invariant=batch_invariant)
        got = call(rows, table, plan=plan, return_lse=True)
        assert_close(got[0], want[0], ATTENTION["float16"], scale=max_abs(arrays.v))
        assert_close(got[1], want[1], LSE)


# What a plan belongs to

FP8 = "float8_e4m3fn"


def nouns(xp, kv_lens=(45, 0, 8), *, num_kv_heads=2, dims=(64, 64), dtype=FP8, index="int32"):
    """Make (cache, table) of other sizes, of finite data."""
    case = PagedCase(kv_lens, PAGE_SIZE, num_kv_heads, *dims, dtype=dtype, form="pair",
                     index_dtype=index)  # fmt: skip
    return case.nouns(case.arrays(np.random.default_rng(1)), xp)


def queries(xp, shape=(3, 4, 64), dtype="bfloat16"):
    return on(xp, random_rows(np.random.default_rng(2), shape, dtype))


def rows(xp, shape=(9, 4, 64), indptr=(0, 4, 4, 9)):
    return RaggedTensor(queries(xp, shape), list(indptr))


# What a call may not change: name -> (the part of the key it names, call of a plan for decode).
OTHER_DECODES = {
    "window": ("window_left", lambda xp, c, t, p: c.decode(queries(xp), t, plan=p)),
    "heads of q": (
        "q",
        lambda xp, c, t, p: c.decode(queries(xp, (3, 8, 64)), t, window_left=5, plan=p),
    ),
    "dtype of q": (
        "q",
        lambda xp, c, t, p: c.decode(queries(xp, dtype="float16"), t, window_left=5, plan=p),
    ),
    "dtype of the cache": (
        "cache",
        lambda xp, c, t, p: nouns(xp, dtype="float8_e5m2")[0].decode(
            queries(xp), t, window_left=5, plan=p
        ),
    ),
    "KV heads": (
        "cache",
        lambda xp, c, t, p: nouns(xp, num_kv_heads=4)[0].decode(
            queries(xp), t, window_left=5, plan=p
        ),
    ),
    "dim of values": (
        "cache",
        lambda xp, c, t, p: nouns(xp, dims=(64, 32))[0].decode(
            queries(xp), t, window_left=5, plan=p
        ),
    ),
    "requests": (
        "q",
        lambda xp, c, t, p: c.decode(
            queries(xp, (2, 4, 64)), nouns(xp, (45, 8))[1], window_left=5, plan=p
        ),
    ),
    "room of indices": (
        "indices",
        lambda xp, c, t, p: c.decode(
            queries(xp), PageTable(t.indptr, t.indices[:-1], t.last_page_len, PAGE_SIZE),
            window_left=5, plan=p,
        ),
    ),
    "rows": (
        "",
        lambda xp, c, t, p: c.prefill(
            RaggedTensor(queries(xp), [0, 1, 2, 3]), t, window_left=5, plan=p
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_DECODES)
def test_a_plan_for_decode_serves_no_other_call(xp, name):
    cache, table = nouns(xp)
    plan = cache.plan(queries(xp), table, window_left=5)
    part, call = OTHER_DECODES[name]
    with pytest.raises(ValueError, match=rf"^PagedKVCache\.\w+: the plan was made for {part}"):
        call(xp, cache, table, plan)
    want = cache.decode(queries(xp), table, window_left=5)
    assert_same_bits(cache.decode(queries(xp), table, window_left=5, plan=plan), to_numpy(want))


# Likewise of a plan for causal prefill.
OTHER_PREFILLS = {
    "causal": ("causal=True, got False", lambda xp, c, t, p: c.prefill(rows(xp), t, plan=p)),
    "window": (
        "window_left=-1, got 0",
        lambda xp, c, t, p: c.prefill(rows(xp), t, causal=True, window_left=0, plan=p),
    ),
    "number of rows": (
        "q",
        lambda xp, c, t, p: c.prefill(rows(xp, (10, 4, 64)), t, causal=True, plan=p),
    ),
    "one row each": ("", lambda xp, c, t, p: c.decode(queries(xp), t, plan=p)),
}


@pytest.mark.parametrize("name", OTHER_PREFILLS)
def test_a_plan_for_prefill_serves_no_other_call(xp, name):
    cache, table = nouns(xp)
    q = rows(xp)
    plan = cache.plan(q, table, causal=True)
    part, call = OTHER_PREFILLS[name]
    with pytest.raises(ValueError, match=rf"^PagedKVCache\.\w+: the plan was made for {part}"):
        call(xp, cache, table, plan)
    want = cache.prefill(q, table, causal=True)
    assert_same_bits(cache.prefill(q, table, causal=True, plan=plan), to_numpy(want))


def test_a_plan_is_a_plan(xp):
    cache, table = nouns(xp)
    plan, other = (cache.plan(queries(xp), table, window_left=5) for _ in range(2))
    assert isinstance(plan, Plan)
    assert plan == plan
    assert plan != other
    assert len({plan, other}) == 2
    shown = repr(plan)
    assert shown.startswith("Plan(PagedKVCache.decode, q=((3, 4, 64), 'bfloat16')")
    assert "window_left=5" in shown
    assert "\n" not in shown
    assert repr(cache.plan(rows(xp), table)).startswith("Plan(PagedKVCache.prefill, q=((9, 4, 64)")
    assert "batch_invariant=True" in repr(cache.plan(rows(xp), table, batch_invariant=True))
    for wrong in (3, "plan", object()):
        with pytest.raises(TypeError, match=r"plan must be a Plan, got <class '\w+'>"):
            cache.decode(queries(xp), table, plan=wrong)


# The arguments of plan are those of its calls: they are checked as there.
def test_plan_names_what_it_refuses(xp):
    cache, table = nouns(xp)
    for arguments, options, error, message in (
        ((queries(xp, (2, 4, 64)), table), {}, ValueError, r"q must be \[batch_size=3, .*got \[2"),
        ((queries(xp, (3, 3, 64)), table), {}, ValueError, "num_qo_heads must be a multiple"),
        ((queries(xp, (3, 4, 32)), table), {}, ValueError, "q must be .*head_dim=64"),
        ((rows(xp, indptr=(0, 9)), table), {}, ValueError, "q must have batch_size=3 requests"),
        ((queries(xp), table), {"window_left": -2}, ValueError, "window_left must be"),
        ((queries(xp), None), {}, TypeError, "table must be a PageTable"),
        ((3, table), {}, TypeError, "q must be a CuPy, NumPy or DLPack array"),
    ):
        with pytest.raises(error, match=rf"^PagedKVCache\.\w+: {message}"):
            cache.plan(*arguments, **options)
