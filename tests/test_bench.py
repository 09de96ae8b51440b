"""The benchmarks of tests/bench without a GPU: rehearsed in NumPy, their timing with fakes."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import inputs
import numpy as np
import pytest
import readme
import timing
import works
from inputs import HOME, Shape
from timing import CLOCK, Ceilings, Replay, Work, rates, rotations

TREE = Path(__file__).parent.parent
HIDDEN = os.environ | {"CUDA_VISIBLE_DEVICES": "", "CUKV_REQUIRE_GPU": "0"}


def bench(*options, cwd=TREE):
    """Run the benchmarks without a GPU and give what they print."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/bench", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *map(str, options)], cwd=cwd, env=HIDDEN, capture_output=True, text=True
    )
    return run.returncode, run.stdout + run.stderr


def trace(path):
    """Write a Mooncake trace of requests that share their first segment."""
    lines = [
        {"timestamp": i, "input_length": 520 + i, "output_length": 1, "hash_ids": [7, 8 + i]}
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_every_benchmark_gives_right_answers_in_a_rehearsal(tmp_path):
    path = tmp_path / "bench.json"
    mooncake = trace(tmp_path / "trace.jsonl")
    options = ("--mooncake", mooncake, "--ignore", "tests/bench/test_jax_devices.py")
    code, printed = bench("--rehearse", *options, "--benchmark-json", path)
    assert code == 0, printed
    found = json.loads(path.read_text(encoding="utf-8"))
    assert "rehearsed" in found["machine_info"]["gpu"]["device"]
    assert "node" not in found["machine_info"]
    assert found["ceilings"] == {"copy": 1e12, "matmul": 1e15}
    assert found["partial"] is None
    # All that is asked has a line of the README's table.
    asked = {b["name"].partition("[")[0] for b in found["benchmarks"] if "asked" in b["extra_info"]}
    assert asked == set(readme._ASKED) - {"test_a_step_in_a_graph_of_cupy"}  # that needs JAX
    groups = {b["group"] for b in found["benchmarks"]}
    assert groups == {path.stem[11:] for path in (TREE / "tests/bench").glob("test_bench_*.py")}
    for benchmark in found["benchmarks"]:
        info, group = benchmark["extra_info"], benchmark["group"]
        if group in ("append", "pages", "merge", "decode", "mla", "cascade", "prefill"):
            assert info["bytes"] > 0, benchmark["name"]
            assert info["gbs"] == pytest.approx(info["bytes"] / 1e3)
            assert info["of_copy"] == pytest.approx(info["gbs"] / 1e3)
        if group in ("decode", "mla", "cascade", "prefill"):
            assert info["flops"] > 0, benchmark["name"]
            assert info["tflops"] == pytest.approx(info["flops"] / 1e6)
            assert info["of_matmul"] == pytest.approx(info["tflops"] / 1e3)
    assert "UNSERIALIZABLE" not in json.dumps(found["benchmarks"])


def test_without_a_gpu_benchmarks_are_skipped_with_one_reason(tmp_path):
    code, printed = bench("--benchmark-json", tmp_path / "bench.json")
    assert code == 0, printed
    assert printed.count("SKIPPED") == 1
    assert "needs an NVIDIA GPU" in printed


def test_benchmarks_run_once_where_timing_is_disabled():
    code, printed = bench("--rehearse", "--benchmark-disable", "-k", "test_merge_states")
    assert code == 0, printed


def test_a_run_out_of_time_leaves_what_it_measured_and_says_that_it_was_cut_short(tmp_path):
    path = tmp_path / "bench.json"
    code, printed = bench("--rehearse", "--within", 1e-9, "--benchmark-json", path)
    assert code == pytest.ExitCode.INTERRUPTED, printed
    found = json.loads(path.read_text(encoding="utf-8"))
    assert len(found["benchmarks"]) == 1
    assert found["partial"].startswith("1 of ")
    assert f"Cut short: {found['partial']}." in printed


WRONG = """
import os, signal
import numpy as np, works

def wrong(*args): raise AssertionError("this answer\\nis wrong")

works.assert_same_bits = wrong

def pytest_runtest_teardown(item):
    if "test_gather" in item.name:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_has_said_what_failed_and_leaves_what_it_measured(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    path = tmp_path / "bench.json"
    command = [sys.executable, "-m", "pytest", "-q", "tests/bench", "-p", "no:cacheprovider"]
    chosen = ["-p", "wrong", "--rehearse", "-k", "(test_merge_state or test_gather) and not grows"]
    run = subprocess.run(
        [*command, *chosen, "--benchmark-json", path],
        cwd=TREE,
        env=HIDDEN | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == -signal.SIGKILL, run.stdout + run.stderr
    line = "FAILED test_gather[b64_kv1024_h32x8_d128_p16]: AssertionError: this answer is wrong"
    assert line in run.stdout.splitlines()
    found = json.loads(path.read_text(encoding="utf-8"))
    names = [b["name"].partition("[")[0] for b in found["benchmarks"]]
    assert set(names) == {"test_merge_states", "test_merge_state"}
    assert found["partial"] == f"{len(names)} of {len(names) + 4} benchmarks were run or skipped"


def test_two_runs_can_be_compared(tmp_path):
    chosen = ("--rehearse", "-k", "test_merge_state", f"--benchmark-storage=file://{tmp_path}")
    assert bench(*chosen, "--benchmark-autosave")[0] == 0
    code, printed = bench(*chosen, "--benchmark-compare")
    assert code == 0, printed
    assert "(NOW)" in printed
    assert "(0001_" in printed


# Answers


@pytest.fixture
def at_home(monkeypatch):
    """Make benchmarks' inputs in NumPy, in this process."""
    monkeypatch.setattr(HOME, "xp", np)
    inputs._block.cache_clear()
    yield
    inputs._block.cache_clear()


SMALL = Shape(3, 40, num_qo_heads=4, num_kv_heads=2, head_dim=16)
PROMPTS = Shape(3, 40, 40, num_qo_heads=4, num_kv_heads=2, head_dim=16)
WORKS = {
    "decode": lambda: works.paged(SMALL),
    "decode HND": lambda: works.paged(replace(SMALL, layout="HND")),
    "paged prefill": lambda: works.paged(replace(PROMPTS, qo_len=7)),
    "mixed": lambda: works.paged(SMALL, [1, 5, 1]),
    "ragged prefill": lambda: works.ragged(PROMPTS),
    "full": lambda: works.ragged(replace(PROMPTS, causal=False)),
    "tree": lambda: works.ragged(PROMPTS, works.tree(PROMPTS)),
    "mla": lambda: works.mla(Shape(3, 40, 2, 4, 1, 576)),
    "cascade": lambda: works.shared(*works.common_prompt(SMALL, 32), SMALL)[0],
    "flat": lambda: works.shared(*works.common_prompt(SMALL, 32), SMALL)[1],
}


@pytest.mark.parametrize("name", WORKS)
def test_an_answer_that_is_off_is_seen(name, at_home):
    work = WORKS[name]()
    right = work.calls[-1]()
    work.check(right)
    for row in (0, len(right) - 1):
        for wrong in (0, 1.05, np.nan):
            got = right.copy()
            got[row] = (got[row].astype(np.float32) * wrong).astype(got.dtype)
            with pytest.raises(AssertionError):
                work.check(got)
    with pytest.raises(AssertionError):  # of other inputs
        work.check(work.calls[0]())


def test_rows_that_were_not_appended_or_gathered_are_seen(at_home):
    for make in (works.append, works.append_mla):
        shape = SMALL if make is works.append else Shape(3, 40, 1, 1, 1, 576)
        work = make(shape)
        work.calls[-1]()
        work.check(None)
        (data,) = work.written(None)
        data[...] = 1
        with pytest.raises(AssertionError):
            work.check(None)
    work = works.gather(SMALL)
    found = work.calls[-1]()
    work.check(found)
    found[1].data[-1] = 1
    with pytest.raises(AssertionError):
        work.check(found)
    work = works.copy_pages(SMALL)
    with pytest.raises(AssertionError):
        work.check(None)


# Counting


@pytest.mark.parametrize(
    ("num_calls", "seconds", "want"),
    [
        (1, 2.4e-6, 256),  # as many as a graph may hold
        (64, 2.4e-6, 4),
        (60, 6e-6, 4),
        (1, 20e-6, 100),  # 2 ms
        (2, 1e-4, 16),  # 32 calls
        (1, 5e-4, 8),  # 4 ms
        (1, 2e-3, 2),
        (1, 5e-3, 1),
        (1, 1.0, 1),
        (64, 1e-3, 1),  # each input once
    ],
)
def test_a_graph_holds_whole_rotations_of_a_few_milliseconds(num_calls, seconds, want):
    assert rotations(num_calls, seconds) == want


def test_rates_are_bytes_and_flops_per_second_and_shares_of_the_ceilings():
    work = Work([], nbytes=4_000_000, flops=10**9)
    found = rates(work, 2e-6, Ceilings(4e12, 8e14))
    assert found["gbs"] == pytest.approx(2000)
    assert found["of_copy"] == pytest.approx(0.5)
    assert found["tflops"] == pytest.approx(500)
    assert found["of_matmul"] == pytest.approx(0.625)
    assert "of_matmul" not in rates(work, 2e-6, Ceilings(4e12, None))
    assert rates(Work([]), 2e-6, Ceilings(4e12, None)) == {}


# A graph's time, on a GPU that is a clock


class FakeCuda:
    """A device whose calls take time, in stream order, eager or in a graph."""

    def __init__(self, launch_seconds):
        self.now, self.capturing, self.launch_seconds, self.log = 0.0, None, launch_seconds, []
        self.runtime = SimpleNamespace(streamCaptureModeGlobal=0)

    def call(self, seconds):
        """A call that takes so long on the device."""

        def launch():
            if self.capturing is None:
                self.log.append("eager")
                self.now += self.launch_seconds + seconds
            else:
                self.capturing.append(seconds)

        return launch

    def Device(self):  # noqa: N802
        return SimpleNamespace(synchronize=lambda: self.log.append("synchronize"))

    def Stream(self, non_blocking):  # noqa: N802
        assert non_blocking
        return FakeStream(self)

    def Event(self):  # noqa: N802
        event = SimpleNamespace(at=None, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        return event

    def get_elapsed_time(self, start, end):
        return 1e3 * (end.at - start.at)


class FakeStream:
    def __init__(self, cuda):
        self.cuda = cuda

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def synchronize(self):
        pass

    def begin_capture(self, mode):
        assert mode == self.cuda.runtime.streamCaptureModeGlobal
        self.cuda.capturing = []

    def end_capture(self):
        calls, self.cuda.capturing = self.cuda.capturing, None

        def launch(stream):
            assert stream is self
            self.cuda.log.append("replay")
            self.cuda.now += sum(calls)

        return SimpleNamespace(launch=launch, upload=lambda stream: None)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda(launch_seconds=15e-6)
    monkeypatch.setattr(timing, "cp", SimpleNamespace(cuda=fake))
    return fake


def test_a_replay_takes_what_its_calls_take_on_the_gpu_without_their_launches(cuda):
    replay = Replay([cuda.call(2e-6), cuda.call(4e-6)])
    assert cuda.log == ["synchronize", *["eager"] * 4]
    assert replay.num_calls == 2 * round(2e-3 / 18e-6 / 2)
    del cuda.log[:]
    assert replay.seconds() == pytest.approx(3e-6)
    assert cuda.log == ["replay", "replay"]  # the first is not timed
    replay.replay()
    assert cuda.log[2:] == ["synchronize", "replay"]


def test_a_capture_that_fails_is_closed(cuda):
    def fail():
        if cuda.capturing is not None:
            raise ValueError("no plan")
        cuda.now += 1e-6

    with pytest.raises(ValueError, match="no plan"):
        Replay([fail])
    assert cuda.capturing is None


class FakeBenchmark:
    def __init__(self):
        self.extra_info, self.durations, self.params = {}, [], None

    def pedantic(self, target, rounds, warmup_rounds):
        for i in range(rounds + warmup_rounds):
            start = CLOCK()
            target()
            if i >= warmup_rounds:
                self.durations.append(CLOCK() - start)


def test_works_take_turns_and_the_clock_counts_the_first(cuda):
    benchmark = FakeBenchmark()
    measure = timing.Measure(benchmark, Ceilings(1e12, None))
    work = Work([cuda.call(2e-6)], nbytes=1_000_000, info={"levels": 2})
    took = measure(work, other=Work([cuda.call(8e-6)]))
    assert took == pytest.approx({"this": 2e-6, "other": 8e-6})
    assert benchmark.durations == pytest.approx([2e-6] * timing.ROUNDS)
    info = benchmark.extra_info
    assert info["other_us"] == pytest.approx(8)
    assert info["of_copy"] == pytest.approx(0.5)
    assert info["levels"] == 2
    measure.ask(3, "of the other", took["other"] / took["this"])  # missed: recorded, no failure
    assert info["reached"] == pytest.approx(4)
    assert (info["asked"], info["of"]) == (3, "of the other")


def test_a_wrong_answer_is_never_timed(cuda):
    def check(result):
        raise AssertionError("wrong")

    benchmark = FakeBenchmark()
    with pytest.raises(AssertionError, match="wrong"):
        timing.Measure(benchmark, Ceilings(1e12, None))(
            Work([cuda.call(1e-6)], check=check, written=lambda result: ())
        )
    assert benchmark.durations == []


def test_outputs_are_poisoned_before_they_are_checked(cuda):
    out, seen = np.zeros(3, np.float32), []
    work = Work([lambda: (cuda.call(1e-6)(), out)[1]], check=lambda r: seen.append(r.copy()))
    timing.checked_replay(work)
    assert np.isnan(seen[0]).all()  # the fake's replays write nothing
