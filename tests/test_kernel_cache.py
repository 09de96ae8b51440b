"""Compiled kernels on disk and in the process: whole, shared, and never stale."""

import ctypes
import hashlib
import os
import pwd
import shutil
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cupy as cp
import numpy as np
import pytest
from cases import fake_cupy

from cukv import PagedKVCache, PageTable, _cubins, _kernels, _sources
from cukv._index import UNIT_SCALE, pack_index, pack_scale

ARCH = "sm_90a"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of a test's own, in a path with a space."""
    folder = tmp_path / "compiled kernels"
    use_cache(monkeypatch, folder)
    yield folder
    _cubins.cache_folder.cache_clear()


def use_cache(monkeypatch, folder):
    monkeypatch.setenv("CUKV_CACHE_DIR", str(folder))
    _cubins.cache_folder.cache_clear()


def count_compiles(monkeypatch):
    """Count calls of the compiler from here on."""
    calls = []
    compile_kernels = _cubins.compile_kernels

    def counted(*args):
        calls.append(args)
        return compile_kernels(*args)

    monkeypatch.setattr(_cubins, "compile_kernels", counted)
    return calls


# The key


def test_a_kernel_is_compiled_once_and_found_again(cache, monkeypatch):
    calls = count_compiles(monkeypatch)
    path, lowered = _cubins.cubin("seq_lens", ARCH, {})
    assert path.read_bytes().startswith(b"\x7fELF")
    assert lowered.startswith("_ZN4cukv8seq_lens")
    assert _cubins.cubin("seq_lens", ARCH, {}) == (path, lowered)
    assert len(calls) == 1


@pytest.mark.parametrize("edited", ["seq_lens.cu", "common/types.cuh", "common/index.cuh"])
def test_an_edited_source_never_finds_an_old_cubin(edited, cache, kernel_sources, refresh_sources):
    before, _ = _cubins.cubin("seq_lens", ARCH, {})
    path = kernel_sources / edited
    path.write_text(path.read_text() + "\n// edited\n")
    refresh_sources()
    after, _ = _cubins.cubin("seq_lens", ARCH, {})
    assert after != before
    assert after.exists()


def test_architecture_template_arguments_and_compiler_are_part_of_the_key(cache, monkeypatch):
    paths = {_cubins.cubin("copy_pages", ARCH, {"BYTES": size})[0] for size in (1, 2)}
    paths.add(_cubins.cubin("copy_pages", "sm_80", {"BYTES": 1})[0])
    monkeypatch.setattr(_cubins.nvrtc, "getVersion", lambda: (99, 0))
    paths.add(_cubins.cubin("copy_pages", ARCH, {"BYTES": 1})[0])
    assert len(paths) == 4


def test_sources_in_a_path_with_a_space_compile(cache, kernel_sources):
    assert " " in str(kernel_sources)
    path, _ = _cubins.cubin("slot_mapping", ARCH, {})
    assert path.exists()


@pytest.mark.parametrize("suffix", [".cubin", ".name"])
def test_a_half_removed_cache_entry_is_made_again(suffix, cache):
    path, lowered = _cubins.cubin("seq_lens", ARCH, {})
    path.with_suffix(suffix).unlink()
    assert _cubins.cubin("seq_lens", ARCH, {}) == (path, lowered)
    assert path.exists()


# Many at once

PROCESS = """
import hashlib, pathlib, sys, time
from cukv import _cubins
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.001)
path, lowered = _cubins.cubin("token_indptr", "sm_90a", {})
print(hashlib.sha256(path.read_bytes()).hexdigest(), lowered)
"""


def test_eight_processes_on_an_empty_cache_all_succeed_and_leave_whole_files(cache, tmp_path):
    go = tmp_path / "go"
    tree = Path(_cubins.__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(tree)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(go)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    go.touch()
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, results
    assert len({out for out, _ in results}) == 1
    assert sorted(p.suffix for p in cache.iterdir()) == [".cubin", ".name"]
    path, _ = _cubins.cubin("token_indptr", ARCH, {})
    assert hashlib.sha256(path.read_bytes()).hexdigest() == results[0][0].split()[0]


def test_many_threads_on_an_empty_cache_all_get_the_same_file(cache):
    names = ["seq_lens", "token_indptr", "page_indptr", "slot_mapping"] * 8
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda name: _cubins.cubin(name, ARCH, {}), names))
    assert len(set(found)) == 4
    assert sorted(p.suffix for p in cache.iterdir()) == [".cubin"] * 4 + [".name"] * 4


@pytest.fixture
def full_disk(cache, monkeypatch):
    """Folders, the cache's at first, in which no file can be put in its place."""
    full = [cache]
    replace = Path.replace

    def put(self, target):
        if any(folder in target.parents for folder in full):
            raise OSError("no space left")
        return replace(self, target)

    cache.mkdir()
    monkeypatch.setattr(Path, "replace", put)
    return full


def test_a_kernel_that_finds_no_room_goes_to_a_temporary_folder(cache, full_disk, caplog):
    path, lowered = _cubins.cubin("seq_lens", ARCH, {})
    assert list(cache.iterdir()) == []
    assert path.stat().st_size > 0
    assert path.with_suffix(".name").read_text() == lowered
    assert "no space left" in caplog.text
    shutil.rmtree(path.parent)


def test_a_write_that_fails_leaves_nothing(cache, full_disk, monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    full_disk.append(elsewhere)
    monkeypatch.setattr(_cubins.tempfile, "mkdtemp", lambda prefix: str(elsewhere))
    with pytest.raises(OSError, match="no space left"):
        _cubins.cubin("seq_lens", ARCH, {})
    assert list(cache.iterdir()) == list(elsewhere.iterdir()) == []


# The folder


def test_a_home_that_cannot_be_written_falls_back_to_a_temporary_folder(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").touch()  # a folder below a file cannot be made, not even by root
    use_cache(monkeypatch, tmp_path / "file" / "cache")
    path, _ = _cubins.cubin("seq_lens", ARCH, {})
    assert path.exists()
    assert tmp_path not in path.parents
    assert "cannot write" in caplog.text
    shutil.rmtree(path.parent)
    _cubins.cache_folder.cache_clear()


def test_a_user_without_a_home_gets_a_folder(monkeypatch, tmp_path):
    def no_user(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_user)
    monkeypatch.chdir(tmp_path)
    use_cache(monkeypatch, "")
    folder = _cubins.cache_folder()
    assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []  # no folder named "~" where the process happens to be
    _cubins.cache_folder.cache_clear()


# Loading


class FakeModule:
    """Stands for a loaded module and its function; counts how many were made."""

    made = 0
    max_dynamic_shared_size_bytes = 1024
    lock = threading.Lock()

    def __init__(self, path):
        self.path = path
        with FakeModule.lock:
            FakeModule.made += 1

    def get_function(self, name):
        return self

    class kernel:  # noqa: N801
        """The part of a CuPy function that a launch needs."""

        ptr = 1


class FakeDevice:
    """Stands for a device made current by ``with``."""

    current = 0
    compute_capability = "80"

    def __init__(self, device):
        self._device = device

    def __enter__(self):
        self._previous, FakeDevice.current = FakeDevice.current, self._device

    def __exit__(self, *error):
        FakeDevice.current = self._previous


@pytest.fixture
def fake_gpu(monkeypatch, cache):
    """Load without a device: modules are fakes, launches are noted in the list given."""
    launches = []
    FakeModule.made = 0
    monkeypatch.setattr(_kernels, "_loaded", {})
    monkeypatch.setattr(_kernels, "_locks", {})
    monkeypatch.setattr(_kernels, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(_kernels.cp, "RawModule", FakeModule)
    monkeypatch.setattr(_kernels.cp.cuda, "Device", FakeDevice)
    monkeypatch.setattr(_kernels, "getDevice", lambda: FakeDevice.current)
    monkeypatch.setattr(_kernels, "get_current_stream", lambda: FakeModule.kernel)
    monkeypatch.setattr(_kernels, "launchKernel", lambda *args: launches.append(args))
    return launches


def test_threads_that_want_the_same_kernel_load_it_once(fake_gpu):
    with ThreadPoolExecutor(16) as pool:
        loaded = list(pool.map(lambda _: _kernels.kernel("seq_lens", 0), range(64)))
    assert len({id(kernel) for kernel in loaded}) == 1
    assert FakeModule.made == 1
    assert _kernels.kernel("seq_lens", 1) is not loaded[0]  # a device has its own


def test_template_arguments_mean_the_same_in_any_order(fake_gpu):
    half, single = np.dtype("float16"), np.dtype("float32")
    there = _kernels.kernel("gather", 0, FROM=half, TO=single, VEC=4)
    back = _kernels.kernel("gather", 0, TO=half, FROM=single, VEC=4)
    assert there._raw.path != back._raw.path


def test_a_launch_outside_the_table_is_not_implemented_and_lists_what_is():
    with pytest.raises(
        NotImplementedError, match=r"packbits: no specialisation .*BYTES.*3.*\('8',\)"
    ):
        _kernels.kernel("packbits", 0, BYTES=3)
    with pytest.raises(NotImplementedError, match="gather: no specialisation"):
        _kernels.kernel("gather", 0, FROM=np.dtype(np.float64), TO=np.dtype(np.float64), VEC=2)


def packed(arguments, layout):
    """Read the parameters that the driver was given by this thread's last launch."""
    return ctypes.string_at(ctypes.c_void_p.from_address(arguments[9]).value, layout.size)


def test_a_launch_packs_parameters_by_name(fake_gpu):
    launch = _kernels.kernel("page_indptr", 0)
    layout = _sources.struct_layout("PageIndptrParams", "page_indptr")
    width = _sources.struct_layout("Index").size
    values = {"seq_lens": b"s" * width, "indptr": b"i" * width, "last_page_len": b"l" * width}
    backwards = dict(reversed(values.items()))
    launch(3, 128, 64, page_size=16, **backwards)
    (arguments,) = fake_gpu
    assert arguments[1:8] == (3, 1, 1, 128, 1, 1, 64)
    assert packed(arguments, layout) == b"".join(values.values()) + (16).to_bytes(8, "little")


def test_a_launch_goes_to_the_kernels_device_and_leaves_the_current_one(fake_gpu, monkeypatch):
    seen = []
    monkeypatch.setattr(_kernels, "launchKernel", lambda *_: seen.append(FakeDevice.current))
    launch = _kernels.kernel("page_indptr", 1)
    index = b"i" * _sources.struct_layout("Index").size
    launch(1, 32, seq_lens=index, indptr=index, last_page_len=index, page_size=16)
    assert (seen, FakeDevice.current) == ([1], 0)


def test_a_launch_with_missing_or_unknown_parameters_raises(fake_gpu):
    launch = _kernels.kernel("page_indptr", 0)
    with pytest.raises(TypeError, match="page_indptr: takes 4 parameters"):
        launch(1, 32, page_size=16)
    with pytest.raises((TypeError, KeyError)):
        launch(1, 32, seq_lens=b"", indptr=b"", last_page_len=b"", pages=16)
    assert fake_gpu == []


PADDED = """
struct PaddedParams {
    int32_t first;
    Index second;  // padded to 8
    float third;
    int64_t fourth;  // padded to 8
    int32_t fifth;
};
"""


@pytest.fixture
def padded(fake_gpu, kernel_sources):
    """A kernel whose parameters have padding before, between and behind them."""
    (kernel_sources / "padded.cu").write_text(PADDED)
    return _kernels.Kernel("padded", 0, FakeModule(None))


@pytest.mark.parametrize("first", range(6))
def test_a_bound_launch_packs_what_a_call_by_name_packs(first, padded, fake_gpu):
    layout = _sources.struct_layout("PaddedParams", "padded")
    values = {"first": 1, "second": bytes(range(1, 33)), "third": 2.5, "fourth": 3, "fifth": 4}
    padded(3, 128, 64, **values)
    by_name = packed(fake_gpu[0], layout)
    assert by_name[:40] == b"\1" + bytes(7) + values["second"]

    per_call = tuple(values)[:first]
    fixed = {name: values[name] for name in reversed(values) if name not in per_call}
    launch = padded.bind(3, 128, 64, per_call=per_call, **fixed)
    memory = _kernels._staging().places[0]
    ctypes.memset(memory, 255, len(memory))
    launch(*(values[name] for name in per_call))
    assert fake_gpu[0] == fake_gpu[1]
    assert packed(fake_gpu[1], layout) == by_name


def test_a_bound_launch_goes_to_its_kernels_device(fake_gpu, monkeypatch):
    seen = []
    monkeypatch.setattr(_kernels, "launchKernel", lambda *_: seen.append(FakeDevice.current))
    index = b"i" * _sources.struct_layout("Index").size
    launch = _kernels.kernel("page_indptr", 1).bind(
        1, 32, per_call=("seq_lens", "indptr"), last_page_len=index, page_size=16
    )
    launch(index, index)
    assert (seen, FakeDevice.current) == ([1], 0)


@pytest.mark.parametrize(
    "per_call",
    [("second",), ("second", "first"), ("first", "third"), ("first", "nothing"),
     ("first", "second", "third", "fourth", "fifth", "sixth")],
)  # fmt: skip
def test_each_call_gives_the_first_parameters_in_order(per_call, padded):
    with pytest.raises(TypeError, match=r"padded: per_call must be the first of \['first', "):
        padded.bind(1, 32, per_call=per_call)


def test_a_bound_launch_with_missing_or_unknown_parameters_raises(padded, fake_gpu):
    with pytest.raises(
        TypeError, match=r"padded: bind takes \['fourth', 'fifth'\], got \['fifth'\]"
    ):
        padded.bind(1, 32, per_call=("first", "second", "third"), fifth=4)
    with pytest.raises((TypeError, KeyError)):
        padded.bind(1, 32, per_call=("first", "second", "third"), fifth=4, sixth=5)
    launch = padded.bind(1, 32, per_call=("first", "second", "third"), fourth=3, fifth=4)
    with pytest.raises(struct.error):
        launch(1, b"")
    assert fake_gpu == []


def test_more_shared_memory_than_48_kb_is_asked_for_once_and_never_lowered(padded, monkeypatch):
    asked = []

    class Function(FakeModule):
        @property
        def max_dynamic_shared_size_bytes(self):
            return asked[-1][1] if asked else 1024

        @max_dynamic_shared_size_bytes.setter
        def max_dynamic_shared_size_bytes(self, size):
            asked.append((FakeDevice.current, size))

    values = {"first": 1, "second": b"", "third": 2.5, "fourth": 3, "fifth": 4}
    launch = _kernels.Kernel("padded", 1, Function(None))
    launch(1, 32, 48 * 1024, **values)
    launch.bind(1, 32, 48 * 1024, per_call=(), **values)
    assert asked == []
    launch.bind(1, 32, 100_000, per_call=(), **values)
    launch(1, 32, 60_000, **values)
    launch(1, 32, 100_000, **values)
    launch(1, 32, 200_000, **values)
    assert asked == [(1, 100_000), (1, 200_000)]  # on the kernel's device


@pytest.mark.parametrize(("capability", "early"), [("80", False), ("90", True), ("100", True)])
def test_kernels_that_wait_by_themselves_are_launched_early_where_that_exists(
    capability, early, fake_gpu, monkeypatch
):
    configs = []

    def launch_ex(config, function, parameters, extra):
        fields = struct.unpack("=7I4xQQI4x", ctypes.string_at(config, 56))
        attribute = struct.unpack("=IIi60x", ctypes.string_at(fields[8], 72))
        configs.append((fields[:8], fields[9], attribute, function, extra))
        return 0

    monkeypatch.setattr(FakeDevice, "compute_capability", capability)
    monkeypatch.setattr(_kernels, "_cu_launch_kernel_ex", lambda: launch_ex)

    def launch(name):
        layout = _sources.struct_layout(_sources.params_struct(name), name)
        zeros = struct.unpack(layout.format, bytes(layout.size))
        params = dict(zip(layout.names, zeros, strict=True))
        _kernels.Kernel(name, 0, FakeModule(None))(3, 64, 1024, **params)

    launch("plan")
    if early:  # grid, CTA, shared memory, stream; one attribute: programmatic serialisation
        assert configs == [((3, 1, 1, 64, 1, 1, 1024, 1), 1, (6, 0, 1), 1, None)]
        assert fake_gpu == []
        monkeypatch.setattr(_kernels, "_cu_launch_kernel_ex", lambda: lambda *_: 1)
        with pytest.raises(RuntimeError, match="cuLaunchKernelEx gave CUDA error 1"):
            launch("plan")
    else:
        assert configs == []
        assert len(fake_gpu) == 1
    fake_gpu.clear()
    launch("seq_lens")
    assert len(fake_gpu) == 1  # does not wait by itself


@pytest.mark.parametrize("way", ["indptr", "positions", "last"])
def test_an_append_gives_its_kernel_each_array_where_it_belongs(way, fake_gpu, monkeypatch):
    monkeypatch.setattr("cukv._rows.num_sms", lambda device: 132)
    # No two arrays start at the same of these addresses, where nothing is.
    cache = PagedKVCache(fake_cupy((9, 2, 4, 2, 8))[1:])
    fp8 = PagedKVCache(fake_cupy((9, 2, 4, 2, 8), "float8_e4m3fn")[3:])
    k, v = fake_cupy((30, 2, 8))[2:7], fake_cupy((30, 2, 8))[3:8]
    integers = fake_cupy(99, "int32")
    table = PageTable(integers[1:5], integers[2:9], integers[3:6], 4)
    scales = cp.ndarray((1,), np.float32, integers[40:].data), 1.0
    where = {"indptr": integers[4:8]} if way == "indptr" else {}
    if way == "positions":
        where = {"batch_indices": integers[5:10], "positions": integers[6:11]}
    if way == "last":
        k, v = k[:3], v[:3]

    layout = _sources.struct_layout("AppendParams", "append")
    for pages, factors in ((cache, (1.0, 1.0)), (fp8, scales), (fp8, scales)):
        pages.append(k, v, table, **where, k_scale=factors[0], v_scale=factors[1])
        raw = packed(fake_gpu[-1], layout)
        got = dict(zip(layout.names, struct.unpack_from(layout.format, raw), strict=True))
        assert got["table"] == table.packed
        assert (got["k"], got["v"]) == (k.data.ptr, v.data.ptr)
        assert (got["k_cache"], got["v_cache"]) == tuple(p.packed for p in pages._pages)
        for name in ("indptr", "batch_indices", "positions"):
            assert got[name] == pack_index(where.get(name)), name
        assert got["k_scale"] == pack_scale("", "", factors[0], 0)
        assert got["v_scale"] == UNIT_SCALE
        assert (got["nnz"], got["requests_per_row"]) == (len(k), np.float32(3 / len(k)))
        for name, array in (("k_rows", k), ("v_rows", v)):
            assert struct.unpack_from("=qq", got[name]) == array.strides[:2]
        assert fake_gpu[-1][1] == got["k_ctas"] + got["v_ctas"]
    assert len(fake_gpu) == 3
    assert fake_gpu[1] == fake_gpu[2]


def test_every_parameter_struct_fits_the_staging_memory():
    for name in _kernels.specialisations():
        struct_name = _sources.params_struct(name)
        size = _sources.struct_layout(struct_name, name).size
        assert _kernels._CONFIG_BYTES + size <= len(_kernels._staging().places[0])
