"""Arrays on a device other than the current one: every call works where its arrays are.

Each call is made on GPUs that are not there, as far as its launches, and on two real ones, where
its bits are those of the same call on the current device. Both leave the current device as it was.
"""

import contextlib
import copy
import functools
import inspect
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy as cp
import numpy as np
import pytest
from capturing import capturing
from cases import MLACase, PagedCase, on, random_rows
from fake_gpus import FakeGpus, fake, moved
from tolerances import MERGE, assert_close, assert_same_bits, max_abs, to_numpy

import cukv
from cukv import _arrays, _kernels, _noun, _scratch, flashinfer

# Public names that neither launch nor allocate: structure, views, checks and copies on the host.
ON_NO_DEVICE = {
    *("CudaUnavailableError", "is_available", "warmup"),
    *("PagedKVCache.empty", "MLAPagedCache.empty"),  # on the current device: no array is given
    *("batch_size", "batch_sizes", "dtype", "head_dim", "head_dim_ckv", "head_dim_kpe"),
    *("head_dim_vo", "k", "v", "ckv", "kpe", "max_num_pages", "nnz", "num_heads", "num_kv_heads"),
    *("kpe_dtype", "num_levels", "page_size"),
    *("show", "plot", "to_host", "to_device", "validate"),
}
SUBMODULES = {"cascade", "decode", "mla", "page", "prefill", "quantization"}  # of cukv.flashinfer

DECODE = ("PagedKVCache.decode", "PagedKVCache.plan", "Plan.update")

CALLS: dict[tuple[str, ...], Any] = {}  # by the names that they make
OF_CUPY: set[tuple[str, ...]] = set()  # names whose work CuPy's own kernels and copies do
# Of those the ones whose work comes before some of their arrays are looked at.
CUPY_FIRST = {
    "flashinfer.BatchMLAPagedAttentionWrapper",
    "flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "flashinfer.single_decode_with_kv_cache",
}


def covers(*names, of_cupy=False):
    """Enter a call ``call(there, rng)``, which moves its arrays and nouns by ``there``."""

    def enter(call):
        CALLS[names] = call
        if of_cupy:
            OF_CUPY.add(names)
        return call

    return enter


def paged(there, rng, **options):
    """Give a case, and its cache and table there."""
    case = PagedCase((45, 0, 8, 25), **options)
    return case, *map(there, case.nouns(case.arrays(rng)))


def page_table(there, rng):
    case = PagedCase((45, 0, 8, 25))
    return there(case.nouns(case.arrays(rng))[1])


def latent(there, rng):
    case = MLACase((45, 0, 8, 25))
    return case, *map(there, case.nouns(case.arrays(rng)))


def ragged(there, rng, rows, heads, lens):
    data = random_rows(rng, (rows, heads, 64), "float16")
    return there(cukv.RaggedTensor(data, np.cumsum([0, *lens]).astype(np.int32)))


def results(there, *shape):
    """Make arrays to write an output and its lse to."""
    return there(np.zeros(shape, np.float32)), there(np.zeros(shape[:2], np.float32))


def masks(rng, qo_lens, kv_lens):
    """Give masks of a batch, in NumPy: as booleans and as bits."""
    mask = cukv.RaggedMask.from_list(
        [rng.random(shape) < 0.5 for shape in zip(qo_lens, kv_lens, strict=True)]
    )
    return mask, mask.pack()


@covers("PagedKVCache.append")
def append(there, rng):
    _, cache, table = paged(there, rng, num_kv_heads=2)
    k, v = (there(random_rows(rng, (6, 2, 64), "float32")) for _ in range(2))
    cache.append(k[:4], v[:4], table)
    cache.append(k, v, table, indptr=there(np.array([0, 3, 3, 4, 6])))
    where = there(np.array([0, 2, 3, -1, 0, 3])), there(np.array([3, 1, 0, 0, 9, 11]))
    cache.append(k, v, table, batch_indices=where[0], positions=where[1])
    return cache


@covers("PagedKVCache.append of fp8")
def append_fp8(there, rng):
    _, cache, table = paged(there, rng, dtype="float8_e4m3fn", form="pair")
    rows, scale = there(random_rows(rng, (4, 2, 64), "bfloat16")), there(np.full(1, 0.5, "f4"))
    cache.append(rows, rows, table, k_scale=scale, v_scale=2.0)
    return cache, cache.gather(table, nnz=78, dtype="float16", k_scale=scale)


@covers("PagedKVCache.gather")
def gather(there, rng):
    _, cache, table = paged(there, rng)
    return cache.gather(table, nnz=78)


@covers("PagedKVCache.copy_pages")
def copy_pages(there, rng):
    case = PagedCase((45, 0, 8, 25))
    cache = there(case.nouns(case.arrays(rng))[0])
    cache.copy_pages(there(np.array([1, 2, -1])), there(np.array([2, 1, 0])))
    return cache


@covers(*DECODE)
def decode(there, rng):
    case, cache, table = paged(there, rng)
    q, sinks = there(case.queries(rng, 4, 8)), there(random_rows(rng, (8,), "float32"))
    scale = there(np.full(1, 0.5, np.float32))
    eager = cache.decode(q, table, sinks=sinks, k_scale=scale, return_lse=True)
    plan = cache.plan(q, table, window_left=7)
    plan.update()
    out, lse = results(there, 4, 8, 64)
    cache.decode(q, table, window_left=7, plan=plan, out=out, lse=lse)
    return *eager, out, lse


@covers("PagedKVCache.prefill")
def prefill(there, rng):
    case, cache, table = paged(there, rng)
    q = ragged(there, rng, 9, 8, (3, 0, 1, 5))
    found = [cache.prefill(q, table, causal=True, window_left=20)]
    for mask in map(there, masks(rng, (3, 0, 1, 5), case.kv_lens)):
        plan = cache.plan(q, table, custom_mask=mask)
        plan.update()
        found.append(cache.prefill(q, table, custom_mask=mask, plan=plan))
    return tuple(found)


@covers("PagedKVCache.prefill of many rows")
def prefill_of_many_rows(there, rng):
    _, cache, table = paged(there, rng, head_dim=128, dtype="bfloat16")
    rows = there(random_rows(rng, (78, 8, 128), "bfloat16"))
    q = cukv.RaggedTensor(rows, there(np.array([0, 45, 45, 53, 78])))
    return cache.prefill(q, table, causal=True, return_lse=True)


@covers("RaggedTensor.prefill", "RaggedTensor.plan")
def ragged_prefill(there, rng):
    q, (k, v) = ragged(there, rng, 9, 8, (3, 6)), (ragged(there, rng, 50, 2, (10, 40)),) * 2
    mask = there(masks(rng, (3, 6), (10, 40))[0])
    plan = q.plan(k, v, causal=True)
    plan.update()
    return q.prefill(k, v, causal=True, plan=plan), q.prefill(k, v, custom_mask=mask)


@covers("RaggedTensor.from_list", "RaggedTensor.lens", of_cupy=True)
def from_list(there, rng):
    parts = [there(random_rows(rng, (n, 2, 8), "float16")) for n in (3, 0, 4)]
    made = cukv.RaggedTensor.from_list(parts)
    fp8 = [there(random_rows(rng, (n, 2, 8), "float8_e5m2")) for n in (3, 4)]
    return made, made.lens, list(made)[2], made[0], cukv.RaggedTensor.from_list(fp8)


@covers("RaggedMask.from_list", of_cupy=True)
def masks_from_list(there, rng):
    parts = [there(rng.random(shape) < 0.5) for shape in ((3, 5), (7, 2))]
    made = cukv.RaggedMask.from_list([parts[0], parts[1].T])
    return made, made[1]


@covers("RaggedMask.pack", "RaggedMask.indptr", "PackedMask.indptr")
def pack(there, rng):
    mask = there(masks(rng, (3, 6), (10, 40))[0])
    packed = mask.pack()
    return (
        mask.indptr,
        packed,
        cukv.PackedMask(packed.data, packed.qo_indptr, packed.kv_indptr).indptr,
    )


@covers("PageTable.from_seq_lens of a sequence", of_cupy=True)
def table_of_a_sequence(there, rng):
    ids = there(rng.permutation(8).astype(np.int32))
    return cukv.PageTable.from_seq_lens([45, 8, 25], 16, pages=ids)


@covers("PageTable.from_seq_lens without pages", of_cupy=True)
def table_without_pages(there, rng):
    return cukv.PageTable.from_seq_lens(there(np.array([45, 8])), 16, num_pages=9)


@covers("PageTable.from_seq_lens", "PageTable.from_block_table")
def tables_of_lengths(there, rng):
    lens, ids = there(np.array([45, 8, 25])), there(rng.permutation(6).astype(np.int32))
    blocks = there(rng.permutation(9).reshape(3, 3))
    return (
        cukv.PageTable.from_seq_lens(lens, 16, pages=ids),
        cukv.PageTable.from_block_table(blocks, lens, 16),
    )


@covers("PageTable.seq_lens", "PageTable.token_indptr", "PageTable.block_table")
def of_tables(there, rng):
    table = page_table(there, rng)
    return table.seq_lens, table.token_indptr, table.block_table(3)


@covers("PageTable.slot_mapping")
def slots(there, rng):
    table = page_table(there, rng)
    return table.slot_mapping(there(np.array([0, 2, -1])), there(np.array([44, 3, 0])))


@covers("PageTable.seq_lens_list", of_cupy=True)
def lengths(there, rng):
    table = page_table(there, rng)
    assert table.seq_lens_list() == [45, 0, 8, 25]
    table.validate()
    return table.seq_lens


@covers("MLAPagedCache.append", "MLAPagedCache.gather", "MLAPagedCache.copy_pages")
def latent_rows(there, rng):
    _, cache, table = latent(there, rng)
    ckv, kpe = (there(random_rows(rng, (4, n), "float16")) for n in (512, 64))
    cache.append(ckv, kpe, table)
    cache.copy_pages(there(np.array([1, 2])), there(np.array([2, 1])))
    return cache, cache.gather(table, nnz=78)


@covers("MLAPagedCache.decode", "MLAPagedCache.plan")
def latent_decode(there, rng):
    _, cache, table = latent(there, rng)
    found = []
    for heads in (16, 128):
        q, q_pe = (there(random_rows(rng, (4, heads, n), "float16")) for n in (512, 64))
        plan = cache.plan(q, table)
        plan.update()
        found.append(cache.decode(q, q_pe, table, sm_scale=0.1, plan=plan))
        rows = there(np.array([0, 2, 2, 3, 4]))
        out, lse = results(there, 4, heads, 512)
        options = {"sm_scale": 0.1, "qo_indptr": rows, "causal": True}
        found += cache.decode(q, q_pe, table, out=out, lse=lse, return_lse=True, **options)
    return tuple(found)


def levels_of(order=None):
    """Make levels in NumPy: 4 rows share 32 tokens, 1 and 3 of them have 5 and 9 more."""
    tables = (
        cukv.PageTable([0, 2], [6, 1], [16], 16),
        cukv.PageTable([0, 1, 2], [3, 0], [5, 9], 16),
    )
    return cukv.CascadeLevels(([0, 4], [0, 1, 4]), tables, order)


@covers("CascadeLevels.attend", "CascadeLevels.plan")
def cascade(there, rng):
    cache = there(cukv.PagedKVCache(random_rows(rng, (8, 2, 16, 2, 64), "float16")))
    q, levels = there(random_rows(rng, (4, 8, 64), "float16")), there(levels_of([2, 0, 3, 1]))
    plan = levels.plan(q, cache, window_left=20)
    plan.update()
    found = levels.attend(q, cache, window_left=20, plan=plan, return_lse=True)
    (out, lse), sinks = results(there, 4, 8, 64), there(random_rows(rng, (8,), "float32"))
    levels.attend(q, cache, causal=True, sinks=sinks, out=out, lse=lse)
    return *found, out, lse


@covers("CascadeLevels.from_prefixes", of_cupy=True)
def prefixes(there, rng):
    table = there(cukv.PageTable([0, 3, 6], [7, 2, 1, 7, 2, 5], [16, 9], 16))
    rows = there(np.array([0, 1, 2], np.int64))
    found = cukv.CascadeLevels.from_prefixes(table, qo_indptr=rows, min_saved_bytes=0)
    assert found.num_levels == 2
    return found, cukv.CascadeLevels.from_prefixes(table, qo_indptr=rows)


@covers("merge_state", "merge_states")
def merge(there, rng):
    o, lse = (there(random_rows(rng, (5, 3, 2, *n), "float32")) for n in ((8,), ()))
    states = [x[:, i] for i in (0, 1) for x in (o, lse)]
    out = results(there, 5, 2, 8)
    cukv.merge_states(o, lse, out=out)
    return *out, *cukv.merge_states(o, lse), *cukv.merge_state(*states)


@covers("packbits", "segment_packbits")
def pack_bits(there, rng):
    x, indptr = there(rng.random(50) < 0.5), there(np.array([0, 13, 50]))
    return cukv.packbits(x), *cukv.segment_packbits(x, indptr)


@covers("packbits of a transposed array", of_cupy=True)
def pack_transposed(there, rng):
    return cukv.packbits(there(rng.random((5, 7)) < 0.5).T)


@covers("batch_indices_positions")
def places(there, rng):
    indptr, lens = there(np.array([0, 3, 4])), there(np.array([10, 4]))
    return cukv.batch_indices_positions(indptr, lens, 6)


@covers("copies of a noun", of_cupy=True)
def copies(there, rng):
    rows = ragged(there, rng, 9, 2, (4, 5))
    return copy.deepcopy(rows), cp.from_dlpack(rows)


@covers("flashinfer.BatchDecodeWithPagedKVCacheWrapper", "flashinfer.append_paged_kv_cache")
def scripts_over_pages(there, rng):
    case = PagedCase((45, 0, 8, 25))
    data, *index = (there(x) for x in case.arrays(rng)[:4])
    where = there(np.array([0, 2, 3, 0])), there(np.array([44, 7, 24, 0]))
    rows = there(random_rows(rng, (4, 2, 64), "float16"))
    indptr, indices, last_page_len = index
    flashinfer.append_paged_kv_cache(rows, rows, *where, data, indices, indptr, last_page_len)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(there(np.zeros(16, np.uint8)))
    wrapper.plan(*index, 8, 2, 64, 16)
    q = there(case.queries(rng, 4, 8))
    return data, *wrapper.run(q, data, return_lse=True)


@covers("flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper", of_cupy=True)
def scripts_of_graphs(there, rng):
    case = PagedCase((45, 0, 8, 25))
    data, *index = (there(x) for x in case.arrays(rng)[:4])
    buffers = (there(np.zeros(x.shape, np.int32)) for x in index)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        there(np.zeros(16, np.uint8)), *buffers
    )
    wrapper.plan(*index, 8, 2, 64, 16)
    return wrapper.run(there(case.queries(rng, 4, 8)), data)


@covers("flashinfer.BatchPrefillWithPagedKVCacheWrapper")
def scripts_of_prompts(there, rng):
    case = PagedCase((45, 0, 8, 25))
    data, *index = (there(x) for x in case.arrays(rng)[:4])
    q, mask = there(case.queries(rng, 9, 8)), there(rng.random(3 * 45 + 8 + 5 * 25) < 0.5)
    qo_indptr = there(np.array([0, 3, 3, 4, 9], np.int32))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(there(np.zeros(16, np.uint8)))
    wrapper.plan(qo_indptr, *index, 8, 2, 64, 16, causal=True)
    found = wrapper.run(q, data, return_lse=True)
    wrapper.plan(qo_indptr, *index, 8, 2, 64, 16, custom_mask=mask)
    return *found, wrapper.run(q, data)


@covers("flashinfer.BatchPrefillWithRaggedKVCacheWrapper")
def scripts_of_packed_prompts(there, rng):
    q, k = (there(random_rows(rng, (n, h, 64), "float16")) for n, h in ((9, 8), (50, 2)))
    offsets = there(np.array([0, 3, 9], np.int32)), there(np.array([0, 10, 50], np.int32))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(there(np.zeros(16, np.uint8)))
    wrapper.plan(*offsets, 8, 2, 64, causal=True)
    return wrapper.run(q, k, k, return_lse=True)


@covers(
    "flashinfer.single_decode_with_kv_cache",
    "flashinfer.single_prefill_with_kv_cache",
    "flashinfer.single_prefill_with_kv_cache_return_lse",
    of_cupy=True,
)
def scripts_of_one_request(there, rng):
    q, k = (there(random_rows(rng, (n, h, 64), "float16")) for n, h in ((9, 8), (50, 2)))
    return (
        flashinfer.single_decode_with_kv_cache(q[0], k, k),
        flashinfer.single_prefill_with_kv_cache(q, k, k, causal=True),
        *flashinfer.single_prefill_with_kv_cache_return_lse(q, k, k),
    )


@covers("flashinfer.MultiLevelCascadeAttentionWrapper")
def scripts_of_levels(there, rng):
    levels, index = levels_of(), []
    for get in (lambda t: t.indptr, lambda t: t.indices, lambda t: t.last_page_len):
        index.append([there(get(table)) for table in levels.tables])
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, there(np.zeros(16, np.uint8)))
    wrapper.plan([there(rows) for rows in levels.qo_indptr], *index, 8, 2, 64, 16)
    q, data = (random_rows(rng, shape, "float16") for shape in ((4, 8, 64), (8, 2, 16, 2, 64)))
    return wrapper.run(there(q), there(data))


@covers("flashinfer.append_paged_mla_kv_cache")
def scripts_that_append_latents(there, rng):
    case = MLACase((45, 0, 8, 25))
    cache, table = case.nouns(case.arrays(rng))
    ckv, kpe = (there(np.ascontiguousarray(x)) for x in (cache.ckv, cache.kpe))
    rows = [there(random_rows(rng, (4, n), "float16")) for n in (512, 64)]
    where = there(np.array([0, 2, 3, 0])), there(np.array([44, 7, 24, 0]))
    index = (there(x) for x in (table.indices, table.indptr, table.last_page_len))
    flashinfer.append_paged_mla_kv_cache(*rows, *where, ckv, kpe, *index)
    return ckv, kpe


@covers("flashinfer.BatchMLAPagedAttentionWrapper", of_cupy=True)
def scripts_over_latents(there, rng):
    ckv, kpe = (there(random_rows(rng, (9, 16, n), "float16")) for n in (512, 64))
    q = [there(random_rows(rng, (2, 16, n), "float16")) for n in (512, 64)]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(there(np.zeros(16, np.uint8)))
    index = [there(np.array(x, np.int32)) for x in ([0, 1, 2], [0, 3, 5], range(5), [40, 20])]
    wrapper.plan(*index, 16, 512, 64, 16, False, 0.1, "float16", "float16")
    return wrapper.run(*q, ckv, kpe, return_lse=True, return_lse_base_on_e=True)


@covers("flashinfer.merge_state", "flashinfer.merge_states")
def scripts_of_states(there, rng):
    o, lse = (there(random_rows(rng, (5, 3, 2, *n), "float32")) for n in ((8,), ()))
    merged = flashinfer.merge_state(*(x[:, i] for i in (0, 1) for x in (o, lse)))
    return *merged, *flashinfer.merge_states(o, lse)


@covers("flashinfer.packbits")
def scripts_that_pack(there, rng):
    return flashinfer.packbits(there(rng.random(50) < 0.5))


@covers("flashinfer.get_seq_lens")
def scripts_of_lengths(there, rng):
    return flashinfer.get_seq_lens(there(np.array([0, 3, 3])), there(np.array([3, 9])), 16)


@covers("flashinfer.merge_state_in_place", of_cupy=True)
def scripts_that_merge(there, rng):
    mine, theirs = (there(random_rows(rng, (5, 2, 8), "float16")) for _ in range(2))
    lse, its_lse = (there(random_rows(rng, (5, 2), "float32")) for _ in range(2))
    flashinfer.merge_state_in_place(mine, lse, theirs, its_lse)
    flashinfer.merge_state_in_place(mine, lse, theirs, its_lse, there(np.arange(5) > 2))
    return mine, lse


@covers("flashinfer.get_batch_indices_positions", of_cupy=True)
def scripts_of_places(there, rng):
    found = there(np.zeros(6, np.int32)), there(np.zeros(6, np.int32))
    indptr, lens = there(np.array([0, 3, 4])), there(np.array([10, 4]))
    return flashinfer.get_batch_indices_positions(indptr, lens, 6, *found)


@covers("flashinfer.segment_packbits", of_cupy=True)
def scripts_of_bits(there, rng):
    return flashinfer.segment_packbits(there(rng.random(50) < 0.5), there(np.array([0, 13, 50])))


every_call = pytest.mark.parametrize("names", CALLS, ids=lambda names: names[0])


# What is covered


def test_every_public_name_is_called_or_works_on_no_device():
    found = set()
    for name in cukv.__all__:
        thing = getattr(cukv, name)
        if not (inspect.isclass(thing) and not issubclass(thing, Exception)):
            found.add(name)
            continue
        for base in thing.__mro__[:-1]:
            for member, value in vars(base).items():
                is_work = isinstance(value, (property, classmethod)) or inspect.isfunction(value)
                if is_work and not member.startswith("_"):
                    found.add(member if member in ON_NO_DEVICE else f"{name}.{member}")
    found |= {f"flashinfer.{name}" for name in set(flashinfer.__all__) - SUBMODULES}
    called = {name for names in CALLS for name in names}
    assert found - called - ON_NO_DEVICE == set()


# Moving


def real(device, x):
    """Copy an array of NumPy, or nouns of them, to a GPU."""
    with cp.cuda.Device(device):
        return moved(functools.partial(on, cp), x)


def arrays_of(results):
    """List the arrays of nouns and tuples."""
    if isinstance(results, (tuple, list)):
        return [array for each in results for array in arrays_of(each)]
    return _noun._arrays(results)


def astray(there, home, away, number):
    """Move arrays to one device, and the one of this number to another."""
    count = 0

    def move(array):
        nonlocal count
        count += 1
        return there(away if count - 1 == number and array.size else home, array)

    return lambda x: moved(move, x)


# GPUs that are not there


@pytest.fixture(params=["80", "90", "100"])
def gpus(request, monkeypatch):
    with FakeGpus(monkeypatch, request.param, count=2) as gpus:
        yield gpus


@pytest.mark.parametrize("device", [0, 1])
@every_call
def test_launches_and_memory_are_where_the_arrays_are(names, device, gpus, rng):
    if names in OF_CUPY:
        pytest.skip("CuPy's own work needs a GPU")
    gpus.current = 1 - device
    results = CALLS[names](functools.partial(fake, device), rng)
    assert gpus.current == 1 - device
    assert gpus.launches
    for launch in gpus.launches:
        assert launch[1:] == (device, device, device)
    assert set(gpus.allocated_on) <= {device}
    assert {array.data.device_id for array in arrays_of(results)} == {device}


def test_a_capture_on_the_arrays_device_is_what_counts(gpus, rng):
    case, cache, table = paged(functools.partial(fake, 1), rng)
    q, plan = fake(1, case.queries(rng, 4, 8)), None
    gpus.capturing.add(0)
    cache.decode(q, table)
    plan = cache.plan(q, table)
    gpus.capturing.add(1)
    cache.decode(q, table, plan=plan)
    with pytest.raises(ValueError, match="captured into a graph needs plan="):
        cache.decode(q, table)
    assert gpus.current == 0


@pytest.mark.parametrize("name", [0, 1, 2])  # the default stream, the legacy one, a thread's
def test_a_null_stream_is_that_of_the_arrays_device(name, gpus, monkeypatch):
    class NullStream:
        ptr = name

        def is_capturing(self):
            return gpus.current in gpus.capturing

    monkeypatch.setattr(cp.cuda, "get_current_stream", lambda device: NullStream())
    gpus.capturing.add(1)
    assert [_arrays.is_capturing(device) for device in (0, 1)] == [False, True]
    assert gpus.current == 0


def test_scratch_of_a_capture_is_on_the_arrays_device(gpus, rng, monkeypatch):
    taken, asked = [], []

    def own_memory(num_bytes):
        taken.append(gpus.current)
        return cp.empty(num_bytes, np.uint8)

    monkeypatch.setattr(_scratch, "_of_captures", {})
    monkeypatch.setattr(_scratch, "_own_memory", own_memory)
    monkeypatch.setattr(_scratch, "capture_id", lambda stream: asked.append(gpus.current))
    gpus.capturing.add(1)
    for call in (copy_pages, pack):
        _scratch._of_captures.clear()
        call(functools.partial(fake, 1), rng)
    assert taken == [1, 1]
    assert set(asked) == set(gpus.allocated_on) == {1}
    assert {launch[1:] for launch in gpus.launches} == {(1, 1, 1)}
    assert gpus.current == 0


def check_mixed(names, there):
    """Put each of a call's arrays on another device in turn."""
    rng = functools.partial(np.random.default_rng, 1)
    given = []
    with contextlib.suppress(cp.cuda.runtime.CUDARuntimeError):  # CuPy's work, without a GPU
        CALLS[names](lambda x: moved(lambda a: given.append(a) or there(0, a), x), rng())
    assert given
    for number, array in enumerate(given):
        if array.size and len(given) > 1:
            with pytest.raises(ValueError, match=r"on device"):
                CALLS[names](astray(there, 0, 1, number), rng())


@every_call
def test_mixed_devices_raise(names, gpus):
    if names[0] in CUPY_FIRST:
        pytest.skip("CuPy's own work, which needs a GPU, comes before some of the arrays")
    check_mixed(names, fake)
    assert gpus.current == 0


@every_call
def test_what_is_moved_as_a_whole_to_another_device_raises(names, gpus):
    """Nouns too, which with one array astray raise when they are made, not when they are used."""
    if names[0] in CUPY_FIRST:
        pytest.skip("CuPy's own work, which needs a GPU, comes before some of the arrays")
    rng, moves = functools.partial(np.random.default_rng, 1), []
    with contextlib.suppress(cp.cuda.runtime.CUDARuntimeError):  # CuPy's work
        CALLS[names](lambda x: moves.append(x) or fake(0, x), rng())
    if len(moves) == 1:
        pytest.skip("all there is is one whole")
    for number, whole in enumerate(moves):
        if not any(array.size for array in arrays_of(whole)):
            continue  # nothing is anywhere
        count = itertools.count()
        with pytest.raises(ValueError, match=r"on device"):
            CALLS[names](lambda x, c=count, n=number: fake(int(next(c) == n), x), rng())
    assert gpus.current == 0


# Two GPUs


@pytest.fixture(params=[0, 1])
def device(request):
    """Where arrays are while the other one of two GPUs is current."""
    with cp.cuda.Device(1 - request.param):
        yield request.param


@pytest.mark.two_gpus
@every_call
def test_bits_are_those_of_the_same_call_on_the_current_device(names, device):
    here, rng = 1 - device, functools.partial(np.random.default_rng, 1)
    got = arrays_of(CALLS[names](functools.partial(real, device), rng()))
    assert cp.cuda.Device().id == here
    want = arrays_of(CALLS[names](functools.partial(real, here), rng()))
    assert {array.data.device_id for array in got} == {device}
    for mine, theirs in zip(got, want, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.two_gpus
@every_call
def test_mixed_devices_raise_and_leave_the_current_one(names):
    check_mixed(names, real)
    assert cp.cuda.Device().id == 0


@pytest.mark.two_gpus
def test_a_graph_is_captured_and_replayed_on_the_device_that_is_not_current(device, rng):
    case, cache, table = paged(functools.partial(real, device), rng)
    q, other = (real(device, case.queries(rng, 4, 8)) for _ in range(2))
    out, plan = real(device, np.zeros((4, 8, 64), np.float16)), cache.plan(q, table)
    want = cache.decode(other, table)
    with cp.cuda.Device(device):
        cp.cuda.Device().synchronize()  # the arrays are there
        stream = cp.cuda.Stream(non_blocking=True)
    with cp.cuda.Device(device), stream, cp.cuda.Device(1 - device):
        cache.decode(q, table, plan=plan, out=out)  # loads the kernel
        with capturing(stream) as graphs:
            with pytest.raises(ValueError, match="captured into a graph needs plan="):
                cache.decode(q, table)
            plan.update()
            cache.decode(q, table, plan=plan, out=out)
    with cp.cuda.Device(device):
        q[...] = other
        cp.cuda.Device().synchronize()
        graphs[0].launch(stream)
        stream.synchronize()
    assert cp.cuda.Device().id == 1 - device
    assert_same_bits(out, want)


@pytest.mark.two_gpus
def test_who_takes_an_export_waits_for_the_stream_of_its_device(device):
    with cp.cuda.Device(device):
        ours, theirs = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
        slow, rows = cp.empty(1 << 30, np.uint8), cp.zeros((1, 2, 8), np.float16)
        noun = cukv.RaggedTensor(rows, cp.array([0, 1]))
        cp.cuda.Device().synchronize()
        with ours:
            slow.data.memset_async(1, slow.nbytes)  # takes longer than to queue the rest
            rows.fill(7)
            with cp.cuda.Device(1 - device):
                taken = noun.__dlpack__(stream=theirs.ptr)
        found = rows.get(stream=theirs)
        theirs.synchronize()
    assert (found == 7).all()
    del taken


@pytest.mark.two_gpus
def test_threads_may_work_on_both_at_once(monkeypatch):
    monkeypatch.setattr(_kernels, "_loaded", {})  # first calls on both
    calls = [(device, n) for n in range(4) for device in (0, 1)]

    def work(device, n):
        found = CALLS[DECODE](functools.partial(real, device), np.random.default_rng(1))
        return [to_numpy(array) for array in found]

    with ThreadPoolExecutor(len(calls)) as pool:
        first, *others = pool.map(work, *zip(*calls, strict=True))
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert_same_bits(mine, theirs)


@pytest.mark.two_gpus
@pytest.mark.filterwarnings("ignore")  # of torch, while it is imported
def test_torch_tensors_come_back_on_their_device(device, rng):
    torch = pytest.importorskip("torch")
    o, lse = random_rows(rng, (5, 3, 2, 8), "float16"), random_rows(rng, (5, 3, 2), "float32")
    there = [torch.from_numpy(x).to(f"cuda:{device}") for x in (o, lse)]
    merged = flashinfer.merge_states(*there)
    assert [x.device.index for x in merged] == [device] * 2
    assert (cp.cuda.Device().id, torch.cuda.current_device()) == (1 - device,) * 2
    for mine, theirs in zip(merged, cukv.merge_states(o, lse), strict=True):
        assert_close(mine.cpu().numpy(), theirs, MERGE[theirs.dtype.name], scale=max_abs(o))
