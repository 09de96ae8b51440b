"""GPU time of calls: CUDA graphs of them, timed by events, and what that makes of bytes and FLOPs.

A graph holds calls on inputs that are rotated past the L2. Each timed replay follows one that is
not timed: while that one runs, the host launches the next, so that no launch is in the time.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from capturing import capturing
from inputs import HOME, normal, poison

ROUNDS = 9
_CALLS, _MAX_CALLS = 32, 256  # of a graph
_SHORT, _LONG = 2e-3, 4e-3  # seconds: what a graph takes at least, and what _CALLS may take
_NOMINAL = 1e-6  # seconds that a rehearsed call is said to take


def arrays_in(result: Any) -> tuple[Any, ...]:
    """Give the arrays that a call returned."""
    if isinstance(result, (tuple, list)):
        return tuple(result)
    return () if result is None else (result,)


@dataclass
class Work:
    """Calls that do the same to different inputs, and what one of them costs."""

    calls: Sequence[Callable[[], Any]]
    nbytes: int = 0  # read and written, each byte once
    flops: int = 0
    # Given what the last call returned: raises unless it and what it wrote are right.
    check: Callable[[Any], None] = lambda result: None
    # Given the same: the arrays that the calls write whole, which are poisoned before the check.
    written: Callable[[Any], tuple[Any, ...]] = arrays_in
    eager: Callable[[], Any] | None = None  # one call that plans for itself
    plan: Any = None  # of the calls
    info: dict[str, Any] = field(default_factory=dict)


class GpuClock:
    """A clock for pytest-benchmark that stands still but for the seconds added to it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = GpuClock()


def rotations(num_calls: int, seconds: float) -> int:
    """Count how often a graph goes through its inputs if a call takes so long.

    2 ms of work make the ends of a replay count for nothing, unless that is too many calls; and 32
    calls are enough for a median, unless they take long.
    """
    seconds = max(seconds, 1e-7)  # events may not tell less from nothing
    calls = max(_SHORT / seconds, min(_CALLS, _LONG / seconds))
    return max(1, round(min(calls, _MAX_CALLS) / num_calls))


class Replay:
    """A CUDA graph of calls, on a stream of its own."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._calls = calls  # they own the arrays that the graph reads
        self._stream = cp.cuda.Stream(non_blocking=True)
        self._start, self._end = cp.cuda.Event(), cp.cuda.Event()
        self.result: Any = None  # of the last call; those before it are overwritten
        cp.cuda.Device().synchronize()  # arrays made before are there
        with self._stream:
            self._run(1)  # compiles, and takes the memory that the captured calls will take
            self._start.record()
            self._run(1)
            self._end.record()
            self._end.synchronize()
            times = rotations(len(calls), self._elapsed() / len(calls))
            self.num_calls = times * len(calls)
            with capturing(self._stream) as graphs:
                self._run(times)
            self._graph = graphs[0]
            self._graph.upload(self._stream)
            self._stream.synchronize()

    def _run(self, times: int) -> None:
        for _ in range(times):
            for call in self._calls:
                self.result = call()

    def _elapsed(self) -> float:
        return 1e-3 * float(cp.cuda.get_elapsed_time(self._start, self._end))

    def replay(self) -> None:
        """Replay once, after what other streams do, and wait."""
        cp.cuda.Device().synchronize()
        self._graph.launch(self._stream)
        self._stream.synchronize()

    def seconds(self) -> float:
        """Time one replay: seconds of a call."""
        with self._stream:
            self._graph.launch(self._stream)
            self._start.record()
            self._graph.launch(self._stream)
            self._end.record()
            self._end.synchronize()
        return self._elapsed() / self.num_calls


class Rehearsal:
    """What stands in for a Replay in NumPy: each replay makes the calls, none is timed."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._calls, self.num_calls = calls, len(calls)
        self.result: Any = None
        self.replay()

    def replay(self) -> None:
        """Make the calls."""
        for call in self._calls:
            self.result = call()

    def seconds(self) -> float:
        """Say that a call takes a microsecond."""
        return _NOMINAL


def checked_replay(work: Work) -> Replay | Rehearsal:
    """Make a graph, and raise unless what it writes is right."""
    replay = (Rehearsal if HOME.xp is np else Replay)(work.calls)
    for array in work.written(replay.result):
        poison(array)
    replay.replay()
    work.check(replay.result)
    return replay


class Ceilings(NamedTuple):
    """What the card does at most, measured: what rates are given in percent of."""

    copy: float  # bytes per second, read and written
    matmul: float | None  # FLOP per second in 16 bits; None: there is no cuBLAS


def measure_ceilings() -> Ceilings:
    """Copy 1 GiB within the card's memory, and multiply matrices of 8192 x 8192."""
    if HOME.xp is np:
        return Ceilings(1e12, 1e15)
    source, target = normal(2**29), normal(2**29)
    copy = _best(lambda: target.data.copy_from_device_async(source.data, source.nbytes))
    size = 8192
    try:
        a, b = normal(size, size, dtype="float16"), normal(size, size, dtype="float16")
        out = cp.empty_like(a)
        matmul = 2 * size**3 / _best(lambda: cp.matmul(a, b, out=out))
    except (ImportError, RuntimeError):
        matmul = None
    return Ceilings(2 * source.nbytes / copy, matmul)


def _best(call: Callable[[], Any], rounds: int = 10) -> float:
    """Time calls that take much longer than their launches: the best of a few, in seconds."""
    start, end, found = cp.cuda.Event(), cp.cuda.Event(), []
    for _ in range(rounds):
        call()  # the host is ahead of the GPU
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(1e-3 * cp.cuda.get_elapsed_time(start, end))
    return float(min(found))


def rates(work: Work, seconds: float, ceilings: Ceilings) -> dict[str, Any]:
    """Say what a call reaches: GB/s, TFLOP/s, and their share of the measured ceilings."""
    found: dict[str, Any] = {}
    if work.nbytes:
        found |= {"bytes": work.nbytes, "gbs": work.nbytes / seconds / 1e9}
        found["of_copy"] = work.nbytes / seconds / ceilings.copy
    if work.flops:
        found |= {"flops": work.flops, "tflops": work.flops / seconds / 1e12}
        if ceilings.matmul is not None:
            found["of_matmul"] = work.flops / seconds / ceilings.matmul
    return found


class Measure:
    """The ``measure`` fixture: times Work under a test's ``benchmark``."""

    def __init__(self, benchmark: Any, ceilings: Ceilings) -> None:
        self._benchmark, self._ceilings = benchmark, ceilings

    def __call__(self, work: Work, shape: Any = None, **beside: Work) -> dict[str, float]:
        """Time one work, and others beside it in turns: the seconds of a call of each, by name.

        The benchmark's statistics are the first one's, which is called ``this``.
        """
        info = self._benchmark.extra_info
        if shape is not None:
            self._benchmark.params = shape.info()  # plain values, as JSON has
            info["shape"] = str(shape)
        replays = {"this": checked_replay(work)}
        replays |= {name: checked_replay(other) for name, other in beside.items()}
        samples: dict[str, list[float]] = {name: [] for name in replays}

        def turn() -> None:
            for name, replay in replays.items():
                samples[name].append(replay.seconds())
            CLOCK.seconds += samples["this"][-1]

        self._benchmark.pedantic(turn, rounds=ROUNDS, warmup_rounds=1)
        took = {name: statistics.median(found) for name, found in samples.items()}
        info |= rates(work, took["this"], self._ceilings)
        info |= {"sets": len(work.calls), "graph_calls": replays["this"].num_calls, **work.info}
        info |= {f"{name}_us": 1e6 * t for name, t in took.items() if name != "this"}
        return took

    def ask(self, limit: float, of: str, reached: float) -> None:
        """Record a limit: see the function."""
        ask(self._benchmark, limit, of, reached)


def ask(benchmark: Any, limit: float, of: str, reached: float) -> None:
    """Record what is asked of a benchmark, at most ``limit`` of a time or a unit, and what it is.

    A limit that is missed fails nothing, it is shown; only wrong answers fail.
    """
    benchmark.extra_info |= {"reached": reached, "asked": limit, "of": of}


def host_time(benchmark: Any, call: Callable[[], Any], rounds: int = 25) -> None:
    """Time what one call costs the host when nothing is queued, until it returns."""
    if HOME.xp is np:
        benchmark.pedantic(call)
    else:
        idle = cp.cuda.Device().synchronize
        benchmark.pedantic(call, setup=idle, rounds=rounds, warmup_rounds=rounds // 5)
