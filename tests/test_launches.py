"""The host's half of every attention operation, on a GPU that is not there."""

import cupy as cp
import pytest
from cases import fake_cupy

import cukv
from cukv import _arrays, _kernels, _latent_attention, _paged_attention, _plan, _tensor_maps

# What remembers devices or what was loaded on them.
KNOWN_DEVICES = (
    _kernels.num_sms,
    _kernels.smem_limits,
    _kernels.arch_of,
    _latent_attention._kinds_of,
    _paged_attention._kinds_of,
)

BATCH, HEADS, KV_HEADS, NNZ, PAGE_SIZE = 4, 16, 2, 40, 16


class Device:
    """Stands for a GPU of an H200's size; its compute capability is what a test says."""

    id = 0
    compute_capability = "90"
    attributes = {  # noqa: RUF012
        "MultiProcessorCount": 132,
        "MaxSharedMemoryPerBlockOptin": 232_448,
        "MaxSharedMemoryPerMultiprocessor": 233_472,
    }

    def __init__(self, device=0):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Module:
    """Stands for a loaded module and its function."""

    max_dynamic_shared_size_bytes = _kernels._UNASKED_SMEM_BYTES
    kernel = type("Function", (), {"ptr": 1})

    def __init__(self, path):
        pass

    def get_function(self, name):
        return self


class Stream:
    """A stream that no graph captures."""

    ptr = 0

    def is_capturing(self):
        return False


def allocate(num_bytes):
    """Give memory that is not there, at an address that any vector is aligned to."""
    return cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(1 << 30, num_bytes, None, 0), 0)


@pytest.fixture(params=["80", "90", "100"])
def launched(request, monkeypatch):
    """Give the names of the kernels launched: none is compiled, and no array is touched."""
    names = []
    launch = _kernels.Kernel._launch

    def note(kernel, *args):
        launch(kernel, *args)
        names.append(kernel._name)

    monkeypatch.setattr(Device, "compute_capability", request.param)
    monkeypatch.setattr(cp.cuda, "Device", Device)
    monkeypatch.setattr(cp.cuda, "get_current_stream", Stream)
    monkeypatch.setattr(cp.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cp, "RawModule", Module)
    monkeypatch.setattr(_arrays, "is_available", lambda: True)
    monkeypatch.setattr(_plan, "getDevice", lambda: 0)
    monkeypatch.setattr(_kernels, "getDevice", lambda: 0)
    monkeypatch.setattr(_kernels, "get_current_stream", Stream)
    monkeypatch.setattr(_kernels, "launchKernel", lambda *args: None)
    monkeypatch.setattr(_kernels, "launch_early", lambda *args: None)
    monkeypatch.setattr(_kernels, "_cubin", lambda *args: ("", ""))
    monkeypatch.setattr(_kernels, "_loaded", {})
    monkeypatch.setattr(_kernels, "_locks", {})
    monkeypatch.setattr(_kernels.Kernel, "_launch", note)
    monkeypatch.setattr(_tensor_maps, "_cu_tensor_map_encode_tiled", lambda: lambda *args: 0)
    for function in KNOWN_DEVICES:
        function.cache_clear()
    before = cp.cuda.get_allocator()
    cp.cuda.set_allocator(allocate)
    yield names
    cp.cuda.set_allocator(before)
    for function in KNOWN_DEVICES:
        function.cache_clear()


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
def test_decode_plans_and_attends(dtype, head_dim, table, launched):
    q, cache = queries(BATCH, head_dim), pages(dtype, head_dim)
    assert cache.decode(q, table, window_left=5).shape == q.shape
    assert launched == ["plan", "decode"]
    plan = cache.plan(q, table)
    launched.clear()
    cache.decode(q, table, plan=plan, sinks=fake_cupy(HEADS, "float32"), k_scale=2.0)
    plan.update()
    assert launched == ["decode", "plan"]


@pytest.mark.parametrize("window_left", [-1, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill_plans_and_attends(causal, window_left, table, launched):
    q = cukv.RaggedTensor(queries(NNZ), fake_cupy(BATCH + 1, "int32"))
    k = cukv.RaggedTensor(fake_cupy((NNZ, KV_HEADS, 128), "bfloat16"), q.indptr)
    how = {"causal": causal, "window_left": window_left}
    wants = ["prefill_sm90" if Device.compute_capability == "90" else "prefill_sm80"]
    for mask in masks():
        planned = ["plan"] if mask is None else ["plan", "mask_tiles"]
        for call in (pages().prefill, q.prefill):
            keys = (q, table) if call != q.prefill else (k, k)
            launched.clear()
            call(*keys, custom_mask=mask, **how)
            assert (sorted(launched[:-1]), launched[-1:]) == (sorted(planned), wants)


@pytest.mark.parametrize("num_qo_heads", [16, 128])
def test_latent_decode_plans_and_attends(num_qo_heads, table, launched):
    cache = cukv.MLAPagedCache(fake_cupy((12, PAGE_SIZE, 576), "bfloat16"))
    nope, pe = (fake_cupy((BATCH, num_qo_heads, width), "bfloat16") for width in (512, 64))
    cache.decode(nope, pe, table, sm_scale=0.1)
    assert launched[0] == "plan"
    assert launched[1].startswith("mla_decode")


@pytest.mark.parametrize("window_left", [-1, 7])
def test_a_cascade_attends_to_every_level(window_left, table, launched):
    shared = cukv.PageTable(
        fake_cupy(2, "int32"), fake_cupy(12, "int32"), fake_cupy(1, "int32"), PAGE_SIZE
    )
    indptrs = fake_cupy(2, "int32"), fake_cupy(BATCH + 1, "int32")
    levels = cukv.CascadeLevels(indptrs, (shared, table))
    q = queries(BATCH)
    assert levels.attend(q, pages(), causal=True, window_left=window_left).shape == q.shape
    assert launched.count("plan") >= 1
    assert "decode" in launched
