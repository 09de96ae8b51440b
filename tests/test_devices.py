"""Work is done where its arrays are, whichever device is the current one."""

import contextlib
import warnings

import cupy as cp
import numpy as np
import pytest
from cases import MLACase, PagedCase, random_rows
from tolerances import ATTENTION, LSE, assert_close, assert_same_bits, max_abs

import cukv
from cukv import flashinfer

pytestmark = pytest.mark.two_gpus


def elsewhere(x):
    """Copy an array or a noun to the second GPU, and leave the first the current one."""
    with cp.cuda.Device(1):
        return cp.asarray(x) if isinstance(x, np.ndarray) else x.to_device()


def assert_all_there(*results):
    assert [x.device.id for x in results] == [1] * len(results)
    assert cp.cuda.Device().id == 0


def assert_attends(got, want, v):
    assert_close(got[0], want[0], ATTENTION["float16"], scale=max_abs(v))
    assert_close(got[1], want[1], LSE)


@pytest.mark.parametrize("planned", [False, True])
def test_a_step_is_done_on_the_device_of_its_arrays(planned, rng):
    case = PagedCase((45, 8, 25, 300), page_size=16, head_dim=64)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays)
    there, its_table = elsewhere(cache), elsewhere(table)
    rows, q = random_rows(rng, (4, 2, 64), "float16"), case.queries(rng, 4, 8)
    there.append(elsewhere(rows), elsewhere(rows), its_table)
    cache.append(rows, rows, table)
    assert_same_bits(there.data, cache.data)

    plan = there.plan(elsewhere(q), its_table) if planned else None
    if plan is not None:
        plan.update()
    got = there.decode(elsewhere(q), its_table, plan=plan, return_lse=True)
    assert_attends(got, cache.decode(q, table, return_lse=True), arrays.v)
    ragged = cukv.RaggedTensor(case.queries(rng, 40, 8), np.array([0, 20, 21, 30, 40], np.int32))
    o = there.prefill(elsewhere(ragged), its_table, causal=True, return_lse=True)
    assert_attends(o, cache.prefill(ragged, table, causal=True, return_lse=True), arrays.v)
    k, v = there.gather(its_table, nnz=378)
    assert_same_bits(v.data, cache.gather(table, nnz=378)[1].data)
    assert_all_there(there.data, *got, *o, k.data, its_table.seq_lens)


def test_masks_cascades_and_states_are_on_the_device_of_their_arrays(rng):
    case = PagedCase((40, 40), page_size=16, head_dim=64)
    shared = cukv.PageTable(np.array([0, 3, 6]), np.array([5, 1, 2, 5, 1, 0]), [8, 8], 16)
    data = random_rows(rng, (6, 2, 16, 2, 64), "float16")
    cache, there = cukv.PagedKVCache(data), elsewhere(cukv.PagedKVCache(data))
    q = case.queries(rng, 2, 8)
    levels = cukv.CascadeLevels.from_prefixes(elsewhere(shared), min_saved_bytes=0)
    got = levels.attend(elsewhere(q), there, return_lse=True)
    assert_attends(got, cache.decode(q, shared, return_lse=True), data)

    mask = cukv.RaggedMask.from_list([rng.random((3, 9)) < 0.5, rng.random((1, 5)) < 0.5])
    packed = elsewhere(mask).pack()
    assert_same_bits(packed.data, mask.pack().data)
    o, lse = elsewhere(q)[:, None], elsewhere(rng.random((2, 1, 8)).astype(np.float32))
    merged = cukv.merge_states(o, lse)
    assert_same_bits(merged[0], q)
    assert_all_there(*got, packed.data, *merged)


def test_latent_attention_is_done_on_the_device_of_its_arrays(rng):
    case = MLACase((45, 8, 200), page_size=16, form="one")
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays)
    q, q_pe = (random_rows(rng, (3, 16, n), "float16") for n in (512, 64))
    got = elsewhere(cache).decode(
        elsewhere(q), elsewhere(q_pe), elsewhere(table), sm_scale=0.1, return_lse=True
    )
    want = cache.decode(q, q_pe, table, sm_scale=0.1, return_lse=True)
    assert_attends(got, want, arrays.k)
    assert_all_there(*got)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("streamed", [False, True])
def test_a_script_in_torch_works_on_the_device_of_its_tensors(streamed, rng):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
    case = PagedCase((45, 8, 25), page_size=16, head_dim=64)
    arrays = case.arrays(rng)
    cache, table = case.nouns(arrays)
    q = case.queries(rng, 3, 4)
    stream = torch.cuda.Stream("cuda:1") if streamed else None
    with torch.cuda.stream(stream) if streamed else contextlib.nullcontext():
        data, rows = (torch.from_numpy(x).to("cuda:1") for x in (arrays.data, q))
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(rows.new_empty(16).byte())
        csr = arrays.indptr, arrays.indices, arrays.last_page_len
        wrapper.plan(*map(torch.from_numpy, csr), 4, 2, 64, 16)
        o, lse = wrapper.run(rows, data, return_lse=True)
        assert o.device == rows.device
        got = o.cpu().numpy(), lse.cpu().numpy()
    assert_attends(got, cache.decode(q, table, return_lse=True), arrays.v)
