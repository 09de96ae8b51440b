"""Benchmarks of every operation, for pytest-benchmark: GPU time from events under graph replay.

``pytest tests/bench --benchmark-json bench.json`` runs them on a GPU. ``--rehearse`` runs each once
in NumPy, at small sizes and without timing: what can be tested where there is no GPU.
"""

import numpy as np
import pytest
from gpu_record import digest, machine
from inputs import HOME
from timing import CLOCK, Measure, measure_ceilings

from cukv._arrays import is_available

REHEARSAL = "none: rehearsed in NumPy, nothing was timed"
ROWS, CEILINGS = pytest.StashKey(), pytest.StashKey()
_COLUMNS = {"gbs": "GB/s", "of_copy": "of copy", "tflops": "TFLOP/s", "of_matmul": "of matmul"}


def pytest_addoption(parser):
    group = parser.getgroup("cukv")
    group.addoption(
        "--rehearse",
        action="store_true",
        help="run every benchmark once in NumPy at small sizes, checked and not timed",
    )
    group.addoption(
        "--mooncake",
        metavar="FILE",
        help="a Mooncake trace, whose requests' shared prefixes are attended as cascades",
    )


def pytest_configure(config):
    config.stash[ROWS] = []
    if config.option.rehearse:
        HOME.xp = np


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "_grows" in item.name)  # last: a run cut short has all the rest
    for item in items:
        if "measure" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=CLOCK))


@pytest.fixture(scope="session")
def ceilings(pytestconfig):
    """Measure what the card does at most, once."""
    pytestconfig.stash[CEILINGS] = found = measure_ceilings()
    return found


@pytest.fixture
def measure(benchmark, ceilings, request):
    """Give what times Work: see timing.py."""
    yield Measure(benchmark, ceilings)
    if benchmark.extra_info and benchmark.stats is not None:
        median = benchmark.stats.stats.median
        request.config.stash[ROWS].append((request.node.name, median, benchmark.extra_info))


@pytest.fixture(autouse=True)
def grouped_and_alone(request):
    """Group benchmarks by operation; give the memory of each back."""
    if "benchmark" in request.fixturenames:
        benchmark = request.getfixturevalue("benchmark")
        benchmark.group = request.node.path.stem.removeprefix("test_bench_")
    yield
    if is_available():
        import cupy as cp

        cp.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def shape(request):
    """Give the shape of a benchmark, a small one to rehearse."""
    return request.param.small() if HOME.xp is np else request.param


def pytest_benchmark_update_machine_info(config, machine_info):
    """Say which GPU it was, with which driver and CUDA; and not which computer."""
    machine_info.pop("node", None)
    machine_info.get("cpu", {}).pop("flags", None)
    if config.option.rehearse:
        machine_info["gpu"] = {"device": REHEARSAL}
    elif is_available():
        machine_info["gpu"] = machine()


def pytest_benchmark_update_json(config, output_json):
    """Say what the card was measured to do at most, per second, and which sources were timed."""
    ceilings = config.stash.get(CEILINGS, None)
    output_json["ceilings"] = ceilings and ceilings._asdict()
    output_json["digest"] = digest()


def pytest_terminal_summary(terminalreporter, config):
    """List what was reached, which pytest-benchmark's table has no columns for."""
    rows = config.stash[ROWS]
    if not rows or config.option.rehearse:
        return
    width = max(len(name) for name, *_ in rows)
    terminalreporter.section("GPU time, rates, and their share of the measured ceilings")
    heads = "".join(f"{head:>11}" for head in ("us", *_COLUMNS.values(), "ratio"))
    terminalreporter.write_line(f"{'':{width}}{heads}")
    for name, seconds, info in rows:
        cells = [f"{1e6 * seconds:11.2f}"]
        for key in (*_COLUMNS, "ratio"):
            value = info.get(key)
            form = "11.1%" if key.startswith("of_") else "11.3f" if key == "ratio" else "11.1f"
            cells.append(" " * 11 if value is None else f"{value:{form}}")
        terminalreporter.write_line(f"{name:{width}}{''.join(cells)}".rstrip())
