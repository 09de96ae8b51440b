"""Markers and fixtures that every test file may use."""

import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import cupy as cp
import hypothesis
import numpy as np
import pytest

from cukv import _arrays, _cubins, _kernels, _sources
from cukv._arrays import is_available

pytest_plugins = ["gpu_record"]

BENCH = Path(__file__).parent / "bench"
MANY_GPU_TESTS = 1000  # want most kernels
MANY_BENCHMARKS = 100  # want most kernels of these dtypes
BENCHMARK_DTYPES = {"bfloat16", "float32", "float8_e4m3fn"}

# Same examples in every run; no deadline, since a first kernel call compiles.
hypothesis.settings.register_profile("cukv", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("cukv")


def pytest_ignore_collect(collection_path, config):
    """Benchmarks run only where the command line names their folder or a file in it."""
    if collection_path != BENCH:
        return None
    named = [
        Path(config.invocation_params.dir, a.partition("::")[0]).resolve() for a in config.args
    ]
    return None if any(BENCH in (path, *path.parents) for path in named) else True


def pytest_collection_modifyitems(config, items):
    if "long" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def dtypes_of(template_args):
    return {value.name for value in template_args.values() if isinstance(value, np.dtype)}


def pytest_collection_finish(session):
    """Compile kernels on all cores where most are wanted: one by one they take minutes."""
    gpu_tests = [item for item in session.items if item.get_closest_marker("gpu")]
    benchmarks = [item for item in gpu_tests if BENCH in item.path.parents]
    every = len(gpu_tests) - len(benchmarks) >= MANY_GPU_TESTS
    if not every and len(benchmarks) < MANY_BENCHMARKS:
        return
    if session.config.option.collectonly or not is_available():
        return
    if hasattr(session.config, "workerinput"):  # pytest -n: workers share the cache on disk
        return
    arch = _kernels.arch_of(cp.cuda.Device().id)
    chosen = [
        (name, arch, args)
        for name, table in _kernels.specialisations().items()
        if _kernels.runs_on(name, arch)
        for args in table
        if every or BENCHMARK_DTYPES.issuperset(dtypes_of(args))
    ]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_cubins.cubin, *zip(*chosen, strict=True), chunksize=4))


def pytest_runtest_setup(item):
    rehearsed = item.config.getoption("rehearse", False)  # tests/bench/conftest.py
    if item.get_closest_marker("gpu") and not rehearsed and not is_available():
        if os.environ.get("CUKV_REQUIRE_GPU") == "1":
            pytest.fail("CUKV_REQUIRE_GPU=1, and there is no GPU", pytrace=False)
        pytest.skip("needs an NVIDIA GPU")
    if item.get_closest_marker("beside") and not is_available():
        pytest.skip("needs an NVIDIA GPU, and FlashInfer")
    if item.get_closest_marker("two_gpus") and _arrays._device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")


@pytest.fixture
def rng():
    """Random numbers: the same in every run of a test, whatever runs before it."""
    return np.random.default_rng(20240)


@pytest.fixture(
    params=[pytest.param(np, id="numpy"), pytest.param(cp, id="cupy", marks=pytest.mark.gpu)]
)
def xp(request):
    """Home of the arrays: the definition on NumPy, the kernels on CuPy."""
    return request.param


@pytest.fixture
def refresh_sources():
    """Give a function that makes the loader read its sources again; called at the end too."""
    cached = (_sources.source, _sources._headers, _sources.digest, _sources.struct_layout)

    def refresh():
        for function in cached:
            function.cache_clear()

    yield refresh
    refresh()


@pytest.fixture
def kernel_sources(tmp_path, monkeypatch, refresh_sources):
    """Copy the kernels to a folder that the test may edit, and make the loader read that."""
    folder = shutil.copytree(_sources.ROOT, tmp_path / "edited kernels")
    monkeypatch.setattr(_sources, "ROOT", folder)
    refresh_sources()
    return folder
