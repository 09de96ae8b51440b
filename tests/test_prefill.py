"""Prefill's own: custom masks, many query rows per request, and requests of few beside many.

On a GPU a call's requests are served by tiles of 8 to 32 packed rows or of 128, and a mask becomes
classes and bits of such tiles. Definitions are those of cukv.reference.
"""

import functools

import cupy as cp
import ml_dtypes
import numpy as np
import pytest
from cases import PagedCase, captured, indptr_of, on, random_rows
from tolerances import (
    ATTENTION,
    LSE,
    ROW_NORM,
    assert_close,
    assert_rows_close,
    assert_same_bits,
    max_abs,
    to_numpy,
)

from cukv import (
    PackedMask,
    PagedKVCache,
    PageTable,
    RaggedMask,
    RaggedTensor,
    _paged_attention,
    _tiles,
    reference,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
INF = np.inf

# Rows of a request: none, one, some of a tile, beside a tile, many tiles; keys: none, one, beside
# the steps of kernels and masks, many steps.
QO_LENS = (0, 1, 17, 37, 127, 577)
KV_LENS = (0, 1, 54, 97, 512, 2048)
GRID = [(qo_len, kv_len) for kv_len in KV_LENS for qo_len in QO_LENS]


def draw_mask(rng, kind, qo_len, kv_len):
    """Draw a mask [qo_len, kv_len]."""
    if kind == "random":
        return rng.random((qo_len, kv_len)) < 0.5
    if kind == "rows without keys":
        return (rng.random((qo_len, 1)) < 0.6) & (rng.random((qo_len, kv_len)) < 0.9)
    if kind == "scattered":  # few keys, so that most tiles are empty, in the middle too
        return rng.random((qo_len, kv_len)) < 0.002
    if kind == "all":
        return np.ones((qo_len, kv_len), bool)
    if kind == "none":
        return np.zeros((qo_len, kv_len), bool)
    if kind == "causal":
        return np.tri(qo_len, kv_len, kv_len - qo_len, dtype=bool)
    assert kind == "tree"  # every row sees the prompt, and of the drafts its ancestors and itself
    mask = np.ones((qo_len, kv_len), bool)
    drafts = min(qo_len, kv_len)
    ancestors = np.eye(drafts, dtype=bool)
    for node in range(1, drafts):
        ancestors[node] |= ancestors[rng.integers(0, node)]
    mask[qo_len - drafts :, kv_len - drafts :] = ancestors
    return mask


KINDS = ("random", "rows without keys", "scattered", "all", "none", "causal", "tree")


class Call:
    """Queries over a paged cache or over packed keys, and masks of the requests, on the host."""

    def __init__(self, rng, shapes, *, page_size=16, heads=(4, 1), dims=(64, 64), dtype="bfloat16"):
        self.qo_lens, kv_lens = (tuple(lens) for lens in zip(*shapes, strict=True))
        self.shapes, num_qo_heads = shapes, heads[0]
        self.case = PagedCase(kv_lens, page_size, heads[1], *dims, dtype=dtype, form="pair")
        self.arrays = self.case.arrays(rng)
        self.q = self.case.queries(rng, sum(self.qo_lens), num_qo_heads)
        self.masks = None

    def draw(self, rng, *kinds):
        """Draw a mask for each request, of kinds in turn."""
        self.masks = [
            draw_mask(rng, kinds[b % len(kinds)], *shape) for b, shape in enumerate(self.shapes)
        ]
        return self

    def mask(self, bits):
        """Make the noun of the masks on the GPU."""
        mask = RaggedMask.from_list([cp.asarray(m) for m in self.masks])
        return mask.pack() if bits else mask

    def attend(self, ragged=False, planned=False, bits=None, **options):
        """Attend on the GPU: (o, lse)."""
        rows = RaggedTensor(on(cp, self.q), indptr_of(self.qo_lens).tolist())
        if bits is not None:
            options["custom_mask"] = self.mask(bits)
        told = {n: x for n, x in options.items() if n in ("causal", "window_left", "custom_mask")}
        if ragged:
            indptr = indptr_of(self.case.kv_lens).tolist()
            k, v = (RaggedTensor(on(cp, x), indptr) for x in (self.arrays.k, self.arrays.v))
            plan = rows.plan(k, v, **told) if planned else None
            return rows.prefill(k, v, plan=plan, return_lse=True, **options)
        cache, table = self.case.nouns(self.arrays, cp)
        plan = cache.plan(rows, table, **told) if planned else None
        return cache.prefill(rows, table, plan=plan, return_lse=True, **options)

    def define(self, **options):
        """Attend by definition: (o, lse)."""
        if self.masks is not None:
            options["custom_mask"] = np.concatenate([m.reshape(-1) for m in self.masks])
        return reference.ragged_prefill(
            self.q, indptr_of(self.qo_lens), self.arrays.k, self.arrays.v,
            indptr_of(self.case.kv_lens), **options,
        )  # fmt: skip

    def check(self, got, want=None, **options):
        """Compare (o, lse) with the definition: a row without keys is 0 and -inf exactly."""
        want = self.define(**options) if want is None else want
        assert_close(got[1], want[1], LSE)
        bound = ATTENTION[self.q.dtype.name]
        assert_close(got[0], want[0], bound, scale=max_abs(self.arrays.v))
        assert (to_numpy(got[0])[np.isneginf(want[1])] == 0).all()


@pytest.fixture
def portable(monkeypatch):
    """The portable kernel, in place of Hopper's too."""
    kinds = functools.cache(lambda *geometry: {})  # those of other tests have Hopper's tiles
    monkeypatch.setattr(_paged_attention, "_kinds_of", kinds)
    monkeypatch.setattr(_tiles, "_on_hopper", lambda tile, *rest: tile)


# Grids


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_any_rows_on_any_keys(page_size, rng):
    call = Call(rng, GRID, page_size=page_size)
    for options in ({"causal": True}, {"window_left": 60}):
        call.check(call.attend(**options), **options)


# Plain tiles beside those with the code of options, which a window of all keys takes; so do pages
# of 8 tokens.
@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [8, 16, 48, 64])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_window_of_all_keys_of_pages_changes_no_bit(dtype, dims, page_size, portable, rng):
    call = Call(rng, GRID, page_size=page_size, heads=(8, 2), dims=dims, dtype=dtype)
    for options in ({"causal": True}, {"sm_scale": -0.1}):
        got = call.attend(**options)
        call.check(got, **options)
        for mine, other in zip(got, call.attend(window_left=5000, **options), strict=True):
            assert_same_bits(mine, to_numpy(other))


# Plain tiles of packed keys attend to some steps by halves, and their plans cut elsewhere.
@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_window_of_all_packed_keys_changes_only_the_order_of_sums(dtype, dims, portable, rng):
    call = Call(rng, GRID, heads=(8, 2), dims=dims, dtype=dtype)
    for options in ({"causal": True}, {"sm_scale": -0.1}):
        want = call.define(**options)
        got, other = (call.attend(True, window_left=n, **options) for n in (-1, 5000))
        call.check(got, want)
        call.check(other, want)
        seen = np.isfinite(want[1])
        assert_rows_close(to_numpy(got[0])[seen], to_numpy(other[0])[seen], 2 * ROW_NORM[dtype])


# In one batch most requests are served by wide tiles; alone, those of few rows are by narrow ones.
@pytest.mark.gpu
@pytest.mark.parametrize(("page_size", "heads"), [(1, (4, 1)), (5, (3, 1)), (16, (8, 1))])
def test_any_mask_on_any_rows_and_keys(page_size, heads, rng):
    call = Call(rng, GRID, page_size=page_size, heads=heads).draw(rng, *KINDS)
    want = call.define()
    for ragged in (False, True):  # which may be by different kernels
        packed = call.attend(ragged, bits=True)
        call.check(packed, want)
        for got, other in zip(call.attend(ragged, bits=False), packed, strict=True):
            assert_same_bits(got, to_numpy(other))


# Packed keys under a mask have tiles of their own: of steps of all classes, the last of them short,
# and of items without keys between others.
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (6, 2), (2, 2)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_any_mask_on_packed_keys(dtype, dims, heads, portable, rng):
    shapes = [(150, 333), (90, 515), (33, 97), (64, 40), (70, 700), (130, 1300), (270, 270)]
    call = Call(rng, shapes, heads=heads, dims=dims, dtype=dtype).draw(rng, *KINDS)
    for options in ({}, {"window_left": 41}, {"sm_scale": -0.3}, {"sm_scale": 0.0}):
        want = call.define(**options)
        for bits in (True, False):
            call.check(call.attend(True, bits=bits, **options), want)


# Requests that share rows list each other's steps, of which some lie behind the last key.
@pytest.mark.gpu
@pytest.mark.parametrize("bits", [True, False])
def test_no_offsets_lead_behind_packed_keys_under_a_mask(bits, portable, rng):
    num_rows, num_keys, batch_size = 400, 900, 4
    q = on(cp, random_rows(rng, (num_rows, 4, 128), "bfloat16"))
    keys = np.concatenate(
        [random_rows(rng, (num_keys, 2, 128), "bfloat16"), np.full((2048, 2, 128), np.nan, BF16)]
    )
    k, v = (on(cp, keys)[:num_keys] for _ in range(2))
    qo_indptr, kv_indptr = (
        cp.asarray(indptr_of(batch_size * [n // batch_size])) for n in (num_rows, num_keys)
    )
    elements = cp.ones(batch_size * num_rows * num_keys, bool)
    mask = RaggedMask(elements, qo_indptr, kv_indptr)
    mask = mask.pack() if bits else mask
    rows = RaggedTensor(q, qo_indptr)
    k, v = RaggedTensor(k, kv_indptr), RaggedTensor(v, kv_indptr)
    plan = rows.plan(k, v, custom_mask=mask)
    for _ in range(40):
        qo_indptr[1:-1] = cp.asarray(rng.integers(0, num_rows, batch_size - 1))
        kv_indptr[1:-1] = cp.asarray(rng.integers(0, num_keys, batch_size - 1))
        plan.update()
        o = rows.prefill(k, v, custom_mask=mask, plan=plan)
        assert np.isfinite(to_numpy(o).astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_under_a_mask(kind, rng):
    shapes = [(1, 300), (3, 2048), (0, 40), (8, 513), (2, 1), (5, 0), (4, 129)]
    call = Call(rng, shapes, heads=(8, 2)).draw(rng, kind)
    got = call.attend(bits=True, planned=True)
    call.check(got)
    for other, mine in zip(call.attend(bits=False), got, strict=True):
        assert_same_bits(other, to_numpy(mine))


# A window of none, inside a step, across steps, of all keys.
@pytest.mark.gpu
@pytest.mark.parametrize("window_left", [0, 31, 200, 5000])
@pytest.mark.parametrize("rows", ["few", "many"])
def test_the_window_applies_under_a_mask(window_left, rows, rng):
    many = [(130, 700), (577, 97), (40, 40), (1, 512), (300, 1000)]
    shapes = many if rows == "many" else [(2, 700), (5, 97), (1, 40), (3, 512)]
    call = Call(rng, shapes, heads=(4, 2)).draw(rng, "all", "random", "tree", "causal")
    options = {"window_left": window_left}
    want = call.define(**options)
    for bits in (True, False):
        call.check(call.attend(bits=bits, **options), want)


# Every geometry of both kernels, and masks whose rows begin at any bit.
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_masks_on_every_geometry(dtype, dims, rng):
    for shapes, heads in (
        ([(3, 257), (1, 100)], (6, 2)),
        ([(70, 333), (1, 65), (129, 130)], (12, 2)),
    ):
        call = Call(rng, shapes, heads=heads, dims=dims, dtype=dtype).draw(rng, "random", "tree")
        call.check(call.attend(bits=True))


@pytest.mark.gpu
def test_options_act_beside_a_mask(rng):
    call = Call(rng, [(37, 97), (2, 512), (64, 300)], heads=(8, 2)).draw(rng, "random")
    sinks = rng.standard_normal(8).astype(np.float32)
    got = call.attend(bits=True, sinks=on(cp, sinks), sm_scale=-0.3, causal=True)
    call.check(got, sinks=sinks, sm_scale=-0.3)
    plain, zero = call.define(sm_scale=0.0), call.attend(bits=True, sm_scale=0.0)
    call.check(zero, plain)


@pytest.mark.gpu
def test_very_negative_logits_are_logits(rng):
    call = Call(rng, [(130, 200), (2, 70)], dims=(128, 128)).draw(rng, "random", "all")
    k = np.zeros_like(call.arrays.k)
    k[..., 0], call.q[...] = -2.4e5 / 16, 0
    call.q[..., 0] = 16
    cache = call.case.stores(call.arrays.data)[0]
    live = ~np.isnan(cache.astype(np.float32))
    cache[live] = np.broadcast_to(k[0], cache.shape)[live]
    call.arrays = call.arrays._replace(k=k)
    got, want = call.attend(bits=True), call.define()
    assert np.nanmax(np.where(np.isinf(want[1]), np.nan, want[1])) < -1e4
    call.check(got, want)


# What lies past the end, and far away


# A mask one element too short, and its memory goes on with True: that element counts as False.
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(5, 131), (130, 131)])
@pytest.mark.parametrize("bits", [True, False])
def test_a_mask_is_not_read_past_its_end(bits, shape, rng):
    call = Call(rng, [(3, 40), shape]).draw(rng, "all")
    mask = call.mask(bits)
    size = int(mask.indptr[-1]) - 1
    lost = shape[0] * shape[1] % 8 if bits else 1  # elements of the last byte
    longer = cp.full(size + 4096, 0xFF if bits else 1, np.uint8)
    longer = longer if bits else longer.view(np.bool_)
    nouns = (mask.qo_indptr, mask.kv_indptr)
    cut = PackedMask(longer[:size], *nouns) if bits else RaggedMask(longer[:size], *nouns)
    with pytest.raises(ValueError, match=r"request 1|data"):
        cut.validate()
    call.masks[1].reshape(-1)[-lost:] = False
    rows = RaggedTensor(on(cp, call.q), indptr_of(call.qo_lens).tolist())
    cache, table = call.case.nouns(call.arrays, cp)
    call.check(cache.prefill(rows, table, custom_mask=cut, return_lse=True))


@pytest.mark.gpu
@pytest.mark.parametrize("step", [2, -1, 3])
@pytest.mark.parametrize("bits", [True, False])
def test_masks_of_any_stride_and_start(bits, step, rng):
    call = Call(rng, [(9, 77), (150, 300)]).draw(rng, "random")
    want = call.attend(bits=bits)
    mask = call.mask(bits)
    n = mask.data.size
    room = cp.ones(n * abs(step) + 7, mask.data.dtype)
    view = room[3 : 3 + n * step : step] if step > 0 else room[n + 2 : 2 : -1]
    view[...] = mask.data
    moved = type(mask)(view, mask.qo_indptr, mask.kv_indptr)
    rows = RaggedTensor(on(cp, call.q), indptr_of(call.qo_lens).tolist())
    cache, table = call.case.nouns(call.arrays, cp)
    got = cache.prefill(rows, table, custom_mask=moved, return_lse=True)
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, to_numpy(other))


# A request whose mask begins 2^31 elements and more behind the start of the data.
@pytest.mark.gpu
@pytest.mark.parametrize("bits", [True, False])
def test_offsets_of_mask_elements_are_64_bit(bits, rng):
    far = Call(rng, [(40, 200)], dims=(8, 8)).draw(rng, "random")
    qo_len, kv_len = 1 << 15, (1 << 16) + 5
    size = (1 << 31) + 5 * qo_len
    part = np.packbits(far.masks[0].reshape(-1), bitorder="little") if bits else far.masks[0]
    data = cp.zeros((size // 8 if bits else size) + part.size, np.uint8 if bits else np.bool_)
    data[-part.size :] = cp.asarray(part.reshape(-1))
    qo_indptr, kv_indptr = [0, qo_len, qo_len + 40], [0, kv_len, kv_len + 200]
    make = PackedMask if bits else RaggedMask
    mask = make(data, qo_indptr, kv_indptr)
    q = cp.zeros((qo_len + 40, 4, 8), BF16)
    q[qo_len:] = on(cp, far.q)
    k, v = (cp.zeros((kv_len + 200, 1, 8), BF16) for _ in range(2))
    k[kv_len:], v[kv_len:] = on(cp, far.arrays.k), on(cp, far.arrays.v)
    o, lse = RaggedTensor(q, qo_indptr).prefill(
        *(RaggedTensor(x, kv_indptr) for x in (k, v)), custom_mask=mask, return_lse=True
    )
    assert cp.isneginf(lse[:qo_len]).all()
    far.check((o[qo_len:], lse[qo_len:]))
    del data, mask
    cp.get_default_memory_pool().free_all_blocks()


# Plans


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [True, False])
@pytest.mark.parametrize("most", [6, 700])
def test_a_replay_follows_lengths_and_masks(bits, most, rng):
    heads, page_size, room = (8, 2), 16, 80
    data = random_rows(rng, (64, 2, page_size, 2, 64), "bfloat16")
    cache = PagedKVCache(on(cp, data))
    qo, pages = cp.zeros(4, np.int32), cp.zeros(4, np.int32)
    indices, last = cp.zeros(room, np.int32), cp.zeros(3, np.int32)
    kv = cp.zeros(4, np.int32)
    rows = RaggedTensor(on(cp, random_rows(rng, (most, heads[0], 64), "bfloat16")), qo)
    table = PageTable(pages, indices, last, page_size)
    elements = most * room * page_size
    flat = cp.zeros(elements // 8 + 3 if bits else elements, np.uint8 if bits else np.bool_)
    mask = (PackedMask if bits else RaggedMask)(flat, qo, kv)

    def write(qo_lens, kv_lens):
        counts = -(-np.array(kv_lens) // page_size)
        qo[:], pages[:] = cp.asarray(indptr_of(qo_lens)), cp.asarray(indptr_of(counts))
        indices[: counts.sum()] = cp.asarray(rng.integers(0, 64, counts.sum()))
        last[:] = cp.asarray((np.array(kv_lens) - 1) % page_size + 1)
        kv[:] = cp.asarray(indptr_of(kv_lens))
        shapes = zip(("tree", "random", "scattered"), qo_lens, kv_lens, strict=True)
        masks = [draw_mask(rng, *shape) for shape in shapes]
        parts = [np.packbits(m.reshape(-1), bitorder="little") if bits else m.reshape(-1)
                 for m in masks]  # fmt: skip
        flat[...] = 1  # padding says nothing
        flat[: sum(map(len, parts))] = cp.asarray(np.concatenate(parts))

    write((2, 1, 3), (100, 300, 7)) if most < 10 else write((300, 1, 90), (400, 100, 333))
    plan = cache.plan(rows, table, custom_mask=mask)
    out = cp.empty(rows.rows.shape, BF16)

    def step():
        plan.update()
        return cache.prefill(rows, table, custom_mask=mask, plan=plan, out=out)

    few = [((1, 4, 1), (700, 16, 300)), ((0, 0, 6), (0, 17, 1100)), ((3, 3, 0), (1, 600, 9))]
    many = [
        ((1, 1, 698), (16, 16, 1000)),
        ((200, 0, 133), (128, 500, 129)),
        ((5, 640, 1), (0, 9, 9)),
    ]
    with captured(step) as (stream, graph, _):
        for lens in few if most < 10 else many:
            write(*lens)
            out[...] = np.nan
            graph.launch(stream)
            stream.synchronize()
            got = to_numpy(out)
            want = cache.prefill(rows, table, custom_mask=mask)
            live = sum(lens[0])
            assert_same_bits(got[:live], to_numpy(want)[:live])


@pytest.mark.gpu
def test_a_plan_serves_its_own_mask_and_no_other(rng):
    call = Call(rng, [(20, 60), (1, 33)]).draw(rng, "random")
    rows = RaggedTensor(on(cp, call.q), indptr_of(call.qo_lens).tolist())
    cache, table = call.case.nouns(call.arrays, cp)
    mask = call.mask(False)
    plan = cache.plan(rows, table, custom_mask=mask)
    again = RaggedMask(mask.data, mask.qo_indptr, mask.kv_indptr)  # the same memory
    want = cache.prefill(rows, table, custom_mask=mask)
    for one in (mask, again):
        assert_same_bits(cache.prefill(rows, table, custom_mask=one, plan=plan), to_numpy(want))
    for other in (call.mask(False), call.mask(True), None):
        with pytest.raises(ValueError, match=r"^PagedKVCache.prefill: the plan was made for"):
            cache.prefill(rows, table, custom_mask=other, plan=plan)


# Requests of few rows beside requests of many


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 1), (32, 8), (3, 1), (64, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_beside_prompts(heads, masked, rng):
    shapes = [(1, 300)] * 20 + [(600, 700)] + [(1, 2000), (0, 9), (8, 60), (9, 60), (1, 0)]
    shapes += [(300, 50), (33, 33)]
    call = Call(rng, shapes, heads=heads)
    if masked:
        call.draw(rng, "tree", "random", "causal")
    options = {} if masked else {"causal": True}
    want = call.define(**options)
    bits = True if masked else None
    for planned in (False, True):
        call.check(call.attend(bits=bits, planned=planned, **options), want)


# Few tiles of many keys are cut into parts; many tiles are dealt by many threads.
@pytest.mark.gpu
@pytest.mark.parametrize(
    "shapes", [[(40, 9000)], [(128, 5000), (33, 7000)], [(3000, 3000)], [(1, 5000), (2500, 2600)]]
)
def test_prompts_are_cut_and_balanced(shapes, rng):
    call = Call(rng, shapes, heads=(2, 1))
    got = call.attend(causal=True)
    call.check(got, causal=True)
    call.draw(rng, "causal")
    call.check(call.attend(bits=True), causal=True)


@pytest.mark.gpu
def test_one_row_beside_others_is_its_decode(rng):
    call = Call(rng, [(1, 500), (200, 300), (1, 40), (400, 400)], heads=(8, 2))
    cache, table = call.case.nouns(call.arrays, cp)
    o, lse = call.attend(causal=True)
    first = [int(x) for x in indptr_of(call.qo_lens)]
    for b in (0, 2):
        at = slice(first[b], first[b] + 1)
        alone = PageTable(
            cp.asarray([0, call.case.pages[b]]),
            table.indices[int(call.arrays.indptr[b]) :][: call.case.pages[b]],
            table.last_page_len[b : b + 1], 16,
        )  # fmt: skip
        want = cache.decode(on(cp, call.q[at]), alone, return_lse=True)
        want = [to_numpy(x).astype(np.float64) for x in want]
        assert_close(o[at], want[0], ATTENTION["bfloat16"], scale=max_abs(call.arrays.v))
        assert_close(lse[at], want[1], LSE)
