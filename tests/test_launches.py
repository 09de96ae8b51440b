"""The host's half of every attention operation, on a GPU that is not there."""

from types import SimpleNamespace

import pytest
from cases import fake_cupy
from fake_gpus import FakeGpus

import cukv
from cukv import _kernels, _paged_attention, _plan
from cukv._ragged_pages import ragged_pages
from cukv._tiles import choose_grid

BATCH, HEADS, KV_HEADS, NNZ, PAGE_SIZE = 4, 16, 2, 40, 16


@pytest.fixture(params=["80", "90", "100"])
def gpu(request, monkeypatch):
    with FakeGpus(monkeypatch, request.param) as gpu:
        yield gpu


@pytest.fixture
def chosen(monkeypatch):
    """Tiles and grids of the launches that are prepared."""
    tiles, bind = [], _paged_attention.bind

    def keep(tile, grid, *arguments):
        tiles.append((tile, grid))
        return bind(tile, grid, *arguments)

    monkeypatch.setattr(_paged_attention, "bind", keep)
    return tiles


@pytest.fixture
def table():
    return cukv.PageTable(
        fake_cupy(BATCH + 1, "int32"), fake_cupy(12, "int32"), fake_cupy(BATCH, "int32"), PAGE_SIZE
    )


def pages(dtype="bfloat16", head_dim=128):
    return cukv.PagedKVCache(fake_cupy((12, 2, PAGE_SIZE, KV_HEADS, head_dim), dtype))


def queries(rows, head_dim=128):
    return fake_cupy((rows, HEADS, head_dim), "bfloat16")


def masks():
    qo_indptr, kv_indptr = fake_cupy(BATCH + 1, "int32"), fake_cupy(BATCH + 1, "int32")
    yield None
    yield cukv.RaggedMask(fake_cupy(900, "bool"), qo_indptr, kv_indptr)
    yield cukv.PackedMask(fake_cupy(900, "uint8"), qo_indptr, kv_indptr)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decode_plans_and_attends(dtype, head_dim, table, gpu):
    q, cache = queries(BATCH, head_dim), pages(dtype, head_dim)
    assert cache.decode(q, table, window_left=5).shape == q.shape
    assert gpu.names() == ["plan", "decode"]
    plan = cache.plan(q, table)
    gpu.names()
    cache.decode(q, table, plan=plan, sinks=fake_cupy(HEADS, "float32"), k_scale=2.0)
    plan.update()
    assert gpu.names() == ["decode", "plan"]


@pytest.mark.parametrize("window_left", [-1, 7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_plans_and_attends(head_dim, causal, window_left, table, gpu):
    q = cukv.RaggedTensor(queries(NNZ, head_dim), fake_cupy(BATCH + 1, "int32"))
    k = cukv.RaggedTensor(fake_cupy((NNZ, KV_HEADS, head_dim), "bfloat16"), q.indptr)
    how = {"causal": causal, "window_left": window_left}
    wants = ["prefill_sm90" if gpu.compute_capability == "90" else "prefill_sm80"]
    for mask in masks():
        planned = ["plan"] if mask is None else ["plan", "mask_tiles"]
        for call in (pages(head_dim=head_dim).prefill, q.prefill):
            keys = (q, table) if call != q.prefill else (k, k)
            gpu.names()
            call(*keys, custom_mask=mask, **how)
            launched = gpu.names()
            assert (sorted(launched[:-1]), launched[-1:]) == (sorted(planned), wants)


# Hopper's own kernel multiplies what is of one dtype, as it is.
@pytest.mark.parametrize(
    ("q", "kv", "head_dim", "options", "on_hopper"),
    [
        ("bfloat16", "bfloat16", 128, {}, True),
        ("float8_e4m3fn", "float8_e4m3fn", 128, {}, True),
        ("float8_e4m3fn", "float8_e4m3fn", 128, {"window_left": 5}, True),
        ("float8_e4m3fn", "float8_e4m3fn", 128, {"logits_soft_cap": 5.0}, False),
        ("float8_e4m3fn", "float8_e4m3fn", 128, {"logits_soft_cap": 1e30}, True),  # off
        ("float8_e4m3fn", "float8_e4m3fn", 64, {}, False),
        ("float8_e5m2", "float8_e5m2", 128, {}, False),
        ("bfloat16", "float8_e4m3fn", 128, {}, False),
        ("float8_e4m3fn", "float8_e5m2", 128, {}, False),
        ("float8_e4m3fn", "bfloat16", 128, {}, False),
    ],
)
def test_hopper_multiplies_fp8_where_all_is_e4m3_and_uncapped(
    q, kv, head_dim, options, on_hopper, table, gpu
):
    rows = cukv.RaggedTensor(fake_cupy((NNZ, HEADS, head_dim), q), fake_cupy(BATCH + 1, "int32"))
    k = cukv.RaggedTensor(fake_cupy((NNZ, KV_HEADS, head_dim), kv), rows.indptr)
    own = on_hopper and gpu.compute_capability == "90"
    calls = (pages(kv, head_dim).prefill, rows, table), (rows.prefill, k, k)
    for prefill, *arrays in calls:
        assert prefill(*arrays, **options).dtype.name == "bfloat16"
        assert gpu.names() == ["plan", "prefill_sm90" if own else "prefill_sm80"]


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 5.0}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_prefill_has_as_many_ctas_as_its_kernel_has_room_for(dtype, options, table, gpu, chosen):
    q = cukv.RaggedTensor(fake_cupy((NNZ, HEADS, 128), dtype), fake_cupy(BATCH + 1, "int32"))
    for mask in masks():
        pages(dtype).prefill(q, table, custom_mask=mask, **options)
        ((tile, grid),) = chosen
        assert grid == choose_grid(tile, KV_HEADS, 0)
        chosen.clear()


# Hopper has kernels of its own: for many heads, and, of e4m3, for few where a tensor map takes the
# pages.
@pytest.mark.parametrize("page_size", [PAGE_SIZE, 20])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("num_qo_heads", [16, 128])
def test_latent_decode_plans_and_attends(num_qo_heads, dtype, page_size, gpu):
    arrays = (fake_cupy(n, "int32") for n in (BATCH + 1, 12, BATCH))
    table = cukv.PageTable(*arrays, page_size)
    parts = fake_cupy((12, page_size, 512), dtype), fake_cupy((12, page_size, 64), "bfloat16")
    cache = cukv.MLAPagedCache(parts)
    nope, pe = (fake_cupy((BATCH, num_qo_heads, width), "bfloat16") for width in (512, 64))
    cache.decode(nope, pe, table, sm_scale=0.1)
    wants = "mla_decode"
    if gpu.compute_capability == "90":
        if dtype == "float8_e4m3fn":
            wants = "mla_stream_sm90" if page_size == PAGE_SIZE else "mla_decode"
        elif num_qo_heads == 128:
            wants = "mla_decode_sm90"
    assert gpu.names() == ["plan", wants]


# Where the kernel of many rows reads fp8: for more than 16, if an SM has keys enough. On an H200
# the calls of the first six lines took it 24, 31, 26, 57, 56 and 306 us, and mla_decode, of which
# mla_stream_sm90 takes nine tenths, 16, 29, 16, 94, 81 and 700.
@pytest.mark.parametrize(
    ("batch_size", "kv_len", "num_qo_heads", "wide"),
    [
        (1, 4096, 128, False),
        (16, 1024, 128, False),
        (16, 1024, 32, False),
        (1, 65536, 128, True),
        (16, 4096, 96, True),
        (128, 4096, 128, True),
        (128, 4096, 64, True),
        (128, 4096, 32, True),
        (128, 4096, 17, True),
        (128, 4096, 16, False),
        (1, 32768, 128, True),
        (16, 4096, 32, False),
        (1, 64, 128, False),
    ],
)
@pytest.mark.parametrize("kpe_dtype", ["bfloat16", "float8_e4m3fn"])
def test_hopper_decodes_fp8_latents_of_many_heads_and_keys(
    kpe_dtype, batch_size, kv_len, num_qo_heads, wide, gpu
):
    num_pages = batch_size * kv_len // 64
    index = (fake_cupy(n, "int32") for n in (batch_size + 1, num_pages, batch_size))
    table = cukv.PageTable(*index, 64)
    stores = [((num_pages, 64, 512), "float8_e4m3fn"), ((num_pages, 64, 64), kpe_dtype)]
    layers = [cukv.MLAPagedCache(tuple(fake_cupy(*store) for store in stores)) for _ in range(2)]
    nope, pe = (fake_cupy((batch_size, num_qo_heads, n), "bfloat16") for n in (512, 64))
    layers[0].decode(nope, pe, table, sm_scale=0.1)
    plan = layers[0].plan(nope, table)
    for cache in layers:
        cache.decode(nope, pe, table, sm_scale=0.1, plan=plan)
    attended = decode_of_fp8(wide, gpu)
    assert gpu.names() == ["plan", attended, "plan", attended, attended]


def decode_of_fp8(wide, gpu):
    """Name the kernel that reads pages of fp8 which tensor maps take."""
    if gpu.compute_capability != "90":
        return "mla_decode"
    return "mla_decode_sm90" if wide else "mla_stream_sm90"


# As many packed rows of fewer heads are as many.
def test_hopper_decodes_fp8_latents_of_few_heads_and_many_rows(gpu):
    index = (fake_cupy(n, "int32") for n in (17, 16 * 64, 16))
    table = cukv.PageTable(*index, 64)
    stores = fake_cupy((1024, 64, 512), "float8_e4m3fn"), fake_cupy((1024, 64, 64), "bfloat16")
    cache = cukv.MLAPagedCache(stores)
    for num_rows, wide in ((16, False), (16 * 6, True)):
        q = [fake_cupy((num_rows, 16, n), "bfloat16") for n in (512, 64)]
        cache.decode(*q, table, sm_scale=0.1, qo_indptr=fake_cupy(17, "int32"))
        assert gpu.names() == ["plan", decode_of_fp8(wide, gpu)]


@pytest.mark.parametrize("window_left", [-1, 7])
def test_a_cascade_attends_to_every_level(window_left, table, gpu):
    shared = cukv.PageTable(
        fake_cupy(2, "int32"), fake_cupy(12, "int32"), fake_cupy(1, "int32"), PAGE_SIZE
    )
    indptrs = fake_cupy(2, "int32"), fake_cupy(BATCH + 1, "int32")
    levels = cukv.CascadeLevels(indptrs, (shared, table))
    q = queries(BATCH)
    assert levels.attend(q, pages(), causal=True, window_left=window_left).shape == q.shape
    launched = gpu.names()
    assert launched.count("plan") >= 1
    assert "decode" in launched


@pytest.fixture
def bound(monkeypatch):
    """Launches that are prepared, as (kernel, fields that each call gives), as they are."""
    found = []

    def bind(kernel, *geometry, per_call, **fixed):
        found.append((kernel._name, per_call))
        return prepare(kernel, *geometry, per_call=per_call, **fixed)

    prepare = _kernels.Kernel.bind
    monkeypatch.setattr(_kernels.Kernel, "bind", bind)
    return found


def test_gather_prepares_rows_of_one_kind_once(table, gpu, bound):
    cache, scale = pages(), fake_cupy(1, "float32")
    kinds = ({}, {"nnz": 7}, {"dtype": "float16"}, {"dtype": "float16", "k_scale": scale})
    for _ in range(2):
        for options in kinds:
            k, v = cache.gather(table, **options)
            assert k.dtype == v.dtype == options.get("dtype", "bfloat16")
            assert k.nnz == v.nnz == options.get("nnz", 12 * PAGE_SIZE)
            assert gpu.names() == ["token_indptr", "gather", "gather"]
    # Scales come with each call, as tables do.
    assert bound == [("gather", ("table", "token_indptr", "out", "scale"))] * 6


def test_copies_of_as_many_pages_are_prepared_once(gpu, bound):
    cache = pages()
    for _ in range(2):
        for num_pairs in (3, 5, 0):
            src, dst = (fake_cupy(num_pairs, dtype) for dtype in ("int32", "int64"))
            cache.copy_pages(src, dst)
            assert gpu.names() == ["copy_pages"] * (4 if num_pairs else 0)
    # K and V, each to the scratch and back, of both numbers of pages.
    assert bound == [("copy_pages", ("scratch", "src", "dst"))] * 8


@pytest.fixture
def tiles(monkeypatch):
    """Tiles of the launches of attention over pages, as they are made."""
    tiles = []

    def bind(tile, *args):
        tiles.append(tile)
        return lambda *values: None

    monkeypatch.setattr(_paged_attention, "bind", bind)
    return tiles


OUT = (BATCH, HEADS, 128)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"k_scale": 2.0, "return_lse": True, "out": fake_cupy(OUT, "bfloat16")}, True),
        ({"window_left": 5}, False),
        ({"logits_soft_cap": 30.0}, False),
        ({"sinks": fake_cupy(HEADS, "float32")}, False),
        ({"out": fake_cupy(OUT, "float32")}, False),
        ({"out": fake_cupy((*OUT[:2], 132), "bfloat16")[..., :128]}, False),  # rows not aligned
    ],
)
def test_a_call_without_options_has_a_tile_without_their_code(options, plain, table, gpu, tiles):
    pages().decode(queries(BATCH), table, **options)
    assert [tile.plain for tile in tiles] == [plain]


@pytest.mark.parametrize(("dtype", "head_dim"), [("float8_e4m3fn", 128), ("bfloat16", 96)])
def test_caches_of_fp8_or_narrower_than_their_tile_keep_all_code(
    dtype, head_dim, table, gpu, tiles
):
    pages(dtype, head_dim).decode(queries(BATCH, head_dim), table)
    assert [tile.plain for tile in tiles] == [False]


@pytest.mark.parametrize("page_size", [None, 8, 16, 48])
@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"causal": True, "k_scale": 2.0, "return_lse": True}, True),
        ({"window_left": 5}, False),
        ({"logits_soft_cap": 30.0}, False),
        ({"sinks": fake_cupy(HEADS, "float32")}, False),
        ({"out": fake_cupy((NNZ, HEADS, 128), "float32")}, False),
    ],
)
def test_prefill_without_options_has_a_tile_without_their_code_if_keys_lie_in_runs(
    options, plain, page_size, tiles, monkeypatch
):
    plain = plain and page_size != 8
    expected = (plain, not (plain and page_size is None), False)
    assert tiles_of_prefill(options, page_size, tiles, monkeypatch) == [expected]


MASK = next(mask for mask in masks() if mask is not None)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(
    ("options", "head_dim", "masked"),
    [
        ({}, 128, True),
        ({}, 64, True),
        ({}, 96, False),  # narrower than its tile
        ({"causal": True, "window_left": 5, "k_scale": 2.0, "return_lse": True}, 128, True),
        ({"logits_soft_cap": 30.0}, 128, False),
        ({"sinks": fake_cupy(HEADS, "float32")}, 128, False),
    ],
)
def test_prefill_under_a_mask_alone_has_a_tile_of_its_own_if_keys_are_packed(
    options, head_dim, masked, page_size, tiles, monkeypatch
):
    masked = masked and page_size is None
    found = tiles_of_prefill(
        {"custom_mask": MASK, **options}, page_size, tiles, monkeypatch, head_dim
    )
    assert found == [(masked, not masked, masked)]


@pytest.mark.parametrize("mask", [None, MASK], ids=["no mask", "a mask"])
def test_few_rows_have_a_tile_with_the_code_of_masks_under_one(mask, table, gpu, tiles):
    rows = cukv.RaggedTensor(queries(BATCH), fake_cupy(BATCH + 1, "int32"))
    pages().prefill(rows, table, custom_mask=mask)
    assert [(tile.kernel, tile.plain) for tile in tiles] == [("decode", mask is None)]


def tiles_of_prefill(options, page_size, tiles, monkeypatch, head_dim=128):
    """Attend to pages, or to packed keys: how tiles are plain, paged and masked."""
    table = cukv.PageTable(
        fake_cupy(BATCH + 1, "int32"),
        fake_cupy(12, "int32"),
        fake_cupy(BATCH, "int32"),
        page_size or PAGE_SIZE,
    )
    with FakeGpus(monkeypatch, "80"):
        q = cukv.RaggedTensor(queries(NNZ, head_dim), fake_cupy(BATCH + 1, "int32"))
        if page_size is None:
            k = cukv.RaggedTensor(fake_cupy((NNZ, KV_HEADS, head_dim), "bfloat16"), q.indptr)
            q.prefill(k, k, **options)
        else:
            data = fake_cupy((12, 2, page_size, KV_HEADS, head_dim), "bfloat16")
            cukv.PagedKVCache(data).prefill(q, table, **options)
    wide = [tile for tile in tiles if tile.kernel == "prefill_sm80"]
    return [(tile.plain, tile.paged, tile.masked) for tile in wide]


@pytest.mark.parametrize("entry", ["plan", "prefill"])
@pytest.mark.parametrize(
    ("options", "head_dim", "steps"),
    [
        ({}, 128, (32, 4)),
        ({"causal": True}, 64, (32, 4)),
        ({}, 96, (64, 2)),
        ({"window_left": 5}, 128, (64, 2)),
        ({"custom_mask": next(mask for mask in masks() if mask is not None)}, 128, (64, 2)),
    ],
)
def test_plans_of_packed_keys_count_in_halves_of_steps_if_calls_will_have_no_options(
    options, head_dim, steps, entry, monkeypatch
):
    cuts, sizes_of = [], _paged_attention.WorkSizes

    def keep(of_call, *args, **kwargs):
        cuts.extend(of_call)
        return sizes_of(of_call, *args, **kwargs)

    monkeypatch.setattr(_paged_attention, "WorkSizes", keep)
    with FakeGpus(monkeypatch, "80"):
        q = cukv.RaggedTensor(queries(NNZ, head_dim), fake_cupy(BATCH + 1, "int32"))
        k = cukv.RaggedTensor(fake_cupy((NNZ, KV_HEADS, head_dim), "bfloat16"), q.indptr)
        if entry == "plan":
            q.plan(k, **options)
        else:
            q.prefill(k, k, **options)
    assert [(cut.step_tokens, cut.round_steps) for cut in cuts if cut.rows == 128] == [steps]


def test_leaves_have_a_tile_without_the_code_of_options(table, gpu, tiles):
    shared = cukv.PageTable(
        fake_cupy(2, "int32"), fake_cupy(12, "int32"), fake_cupy(1, "int32"), PAGE_SIZE
    )
    indptrs = fake_cupy(2, "int32"), fake_cupy(BATCH + 1, "int32")
    cukv.CascadeLevels(indptrs, (shared, table)).attend(queries(BATCH), pages())
    assert [(tile.kernel, getattr(tile, "plain", None)) for tile in tiles][1:] == [("decode", True)]
    cukv.CascadeLevels(indptrs, (shared, table)).attend(queries(BATCH), pages(), window_left=3)
    assert [tile.plain for tile in tiles[2:] if tile.kernel == "decode"] == [False]


def test_work_lists_lie_in_the_memory_of_their_plan(table, gpu, monkeypatch):
    addresses, starts = [1 << 20, 1 << 21, 1 << 20], []
    for address in addresses:
        monkeypatch.setattr(_plan, "_alloc", lambda *_, ptr=address: SimpleNamespace(ptr=ptr))
        (packed,) = pages().plan(queries(BATCH), table).work.packed
        starts.append(int.from_bytes(packed[:8], "little"))  # of the items
    assert starts == addresses


def test_a_plan_of_ragged_keys_has_the_table_of_calls_with_values(gpu):
    indptr = fake_cupy(BATCH + 1, "int32")
    q = cukv.RaggedTensor(queries(NNZ), indptr)
    k, v = (cukv.RaggedTensor(fake_cupy((NNZ, KV_HEADS, 128), "bfloat16"), indptr) for _ in "kv")
    assert q.plan(k).work.table is ragged_pages("", k, v).table


def test_calls_that_were_prepared_refuse_a_table_of_other_pages(table, gpu):
    q, cache = queries(BATCH), pages()
    rows = fake_cupy((BATCH, KV_HEADS, 128), "bfloat16")
    latent = cukv.MLAPagedCache(fake_cupy((12, PAGE_SIZE, 576), "bfloat16"))
    nope, pe = (fake_cupy((BATCH, HEADS, width), "bfloat16") for width in (512, 64))
    other = cukv.PageTable(table.indptr, table.indices, table.last_page_len, 2 * PAGE_SIZE)
    for call in (
        lambda table: cache.plan(q, table),
        lambda table: cache.decode(q, table),
        lambda table: cache.append(rows, rows, table),
        lambda table: latent.plan(nope, table),
        lambda table: latent.decode(nope, pe, table, sm_scale=0.1),
    ):
        call(table)
        with pytest.raises(ValueError, match="the table's page_size is 32, the cache's 16"):
            call(other)
        with pytest.raises(TypeError, match="table must be a PageTable"):
            call(None)
