"""``cukv replay``: a serving workload on a paged cache, timed and checked.

Requests arrive in order, prompts are appended in chunks beside decoding, every live request attends
in every step, finished ones return their pages. This is the job: its sizes, its stopwatch and its
report. The schedule is host arithmetic, ``cukv/_workload.py``; ``cukv/_engine.py`` runs it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
from tqdm import tqdm

import cukv
from cukv._engine import TOLERANCE, Engine, Layers
from cukv._phrases import count, size_of
from cukv._workload import (
    MODELS,
    SEGMENT,
    FreePages,
    Limits,
    ReplayError,
    Request,
    Scheduler,
    built_in,
    read_trace,
)

CHECK_EVERY = 8  # steps
NUMPY_CACHE_BYTES = 2**30
GPU_CACHE_SHARE = 0.6  # of the memory that is free


# The job


@dataclass(frozen=True)
class Options:
    """What the command line says; None is for a default that fits the device and the model."""

    trace: Path | None = None
    common_prompt: int = 0
    requests: int | None = None
    steps: int | None = None
    model: str | None = None
    layers: int | None = None
    pages: int | None = None
    page_size: int = 16
    seed: int = 0
    device: str | None = None


@dataclass(frozen=True)
class Size:
    """How much is replayed where nothing else is asked for."""

    requests: int
    steps: int
    layers: int
    prompt_tokens: int  # of the built-in workload, typical
    output_tokens: int
    limits: Limits


GPU_SIZE = Size(256, 500, 4, 1024, 256, Limits(256, 512, 8192))
# NumPy attends in float64; these sizes end in a few seconds.
NUMPY_SIZE = Size(16, 128, 1, 96, 24, Limits(8, 128, 128))
NUMPY_LARGE_MODEL_SIZE = Size(8, 24, 1, 48, 8, Limits(4, 32, 64))


def replay(options: Options) -> None:
    """Run the job and print its table.

    Raises
    ------
    ReplayError
        The trace, the workload or the device does not allow it.
    MismatchError
        A sampled result was wrong.
    """
    xp = home(options.device)
    name = options.model or ("llama8b" if xp is cp else "tiny")
    size = default_size(xp, name)
    steps = options.steps or size.steps
    requests, held = read_requests(options, size)
    try:
        copy_speed = copy_bytes_per_second() if xp is cp else 0.0
        stopwatch = Stopwatch(xp)
        engine = build(options, name, size, requests, stopwatch)
        print(heading(options, engine, name, len(requests), held, steps, copy_speed), flush=True)
        seconds = run(engine, steps)
    except MemoryError as error:
        raise ReplayError(f"out of memory, try fewer --pages or --layers: {error}") from None
    print(table(stopwatch, copy_speed), summary(engine, seconds), sep="\n\n")


def home(device: str | None) -> Any:
    """Return the array module to work with: CuPy if there is a GPU, unless NumPy is asked for."""
    if device == "gpu" and not cukv.is_available():
        raise ReplayError("--device gpu: no NVIDIA GPU with a driver was found; cpu runs on NumPy")
    return cp if device != "cpu" and cukv.is_available() else np


def default_size(xp: Any, model: str) -> Size:
    """Return how much is replayed on this device unless the command line says otherwise."""
    if xp is cp:
        return GPU_SIZE
    return NUMPY_SIZE if model == "tiny" else NUMPY_LARGE_MODEL_SIZE


def read_requests(options: Options, size: Size) -> tuple[list[Request], int]:
    """Return the requests to replay, and how many the workload holds."""
    limit, common = options.requests or size.requests, options.common_prompt
    if common % SEGMENT or (common and options.trace is not None):
        what = "is for the built-in workload" if options.trace else f"must be in {SEGMENT}s"
        raise ReplayError(f"--common-prompt: {what}, got {common}")
    if options.trace is not None:
        return read_trace(options.trace, limit)
    return built_in(options.seed, limit, size.prompt_tokens, size.output_tokens, common), limit


def build(
    options: Options, name: str, size: Size, requests: list[Request], stopwatch: Stopwatch
) -> Engine:
    """Allocate caches and pools for the requests, and load the kernels."""
    model, page_size, xp = MODELS[name], options.page_size, stopwatch.xp
    layers = options.layers or min(size.layers, model.num_layers)
    if layers > model.num_layers:
        raise ReplayError(f"--layers must be at most {model.num_layers} for {name}, got {layers}")
    page_bytes = layers * page_size * model.token_bytes
    pages = num_pages(options, requests, page_bytes, xp)
    free = FreePages(pages, options.seed)
    scheduler = Scheduler(requests, free, page_size, size.limits)
    if xp is cp:
        cukv.warmup(dtypes=[model.dtype])  # so that no span holds a compilation
    caches = Layers(model, layers, pages, page_size, xp, options.seed)
    return Engine(caches, scheduler, stopwatch, options.seed)


def num_pages(options: Options, requests: list[Request], page_bytes: int, xp: Any) -> int:
    """Return how many pages to allocate: what the workload could use at most, if there is room."""
    needed = sum(-(-request.total_length // options.page_size) for request in requests)
    if xp is cp:
        free_bytes = cp.cuda.runtime.memGetInfo()[0] + cp.get_default_memory_pool().free_bytes()
        budget = int(GPU_CACHE_SHARE * free_bytes)
    else:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget = NUMPY_CACHE_BYTES
    if options.pages is None:
        for request in requests:
            needs = -(-request.total_length // options.page_size) * page_bytes
            if needs > budget:
                raise ReplayError(
                    f"{request.where}: does not fit: {count(request.total_length, 'token')} take "
                    f"{size_of(needs)} of pages, and {size_of(budget)} are for the cache"
                )
        return min(needed, budget // page_bytes)
    pages = min(needed, options.pages)
    if pages * page_bytes > free_bytes:
        raise ReplayError(
            f"--pages: {pages} pages of {options.page_size} tokens take "
            f"{pages * page_bytes / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free"
        )
    return pages


def run(engine: Engine, steps: int) -> float:
    """Step until all requests are served or the steps are used up; return the seconds."""
    begin = time.perf_counter()
    with tqdm(total=steps, unit="step", disable=None) as bar:
        while engine.steps < steps and not engine.scheduler.done:
            engine.step(check=engine.steps % CHECK_EVERY == 0 or engine.steps == steps - 1)
            bar.update()
    engine.finish()
    if engine.layers.xp is cp:
        cp.cuda.get_current_stream().synchronize()
    return time.perf_counter() - begin


# Timing

OPERATIONS = ("append", "plan", "decode", "cascade", "prefill", "gather")
SPACER_BYTES = 2**27  # more than an L2 holds, and longer to fill than a launch takes the host


@dataclass
class Operation:
    """What all timed calls of one operation add up to."""

    calls: int = 0
    tokens: int = 0  # rows written, attended or gathered
    moved_bytes: int = 0  # read and written, each once
    flops: int = 0
    spans: list[tuple[Any, Any]] = field(default_factory=list)
    has_kernel: bool = True


class Stopwatch:
    """Times calls by operation: by the clock in NumPy, else with CUDA events, read at the end.

    On a GPU the stream fills some memory before each span. So the host has launched the call by the
    time that the span begins, which then is the GPU's time alone, from a cold L2.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.operations = {name: Operation() for name in OPERATIONS}
        self._spacer = xp.empty(SPACER_BYTES, np.uint8) if xp is cp else None

    def __call__(
        self,
        name: str,
        call: Callable[[], Any],
        *,
        tokens: int = 0,
        moved_bytes: int = 0,
        flops: int = 0,
    ) -> Any:
        """Run and time a call that may be repeated; None if the operation has no kernel yet."""
        operation = self.operations[name]
        if not operation.has_kernel:
            return None
        try:
            if self._spacer is not None:
                if not operation.calls:
                    call()  # loads its kernels and grows CuPy's pool
                self._spacer.data.memset_async(0, SPACER_BYTES)
            begin = now(self.xp)
            result = call()
        except NotImplementedError:
            operation.has_kernel = False
            return None
        operation.spans.append((begin, now(self.xp)))
        operation.calls += 1
        operation.tokens += tokens
        operation.moved_bytes += moved_bytes
        operation.flops += flops
        return result


def now(xp: Any) -> Any:
    """Return the time, or an event that takes the time when the stream comes to it."""
    if xp is np:
        return time.perf_counter()
    event = cp.cuda.Event()
    event.record()
    return event


def durations(xp: Any, spans: list[tuple[Any, Any]]) -> list[float]:
    """Return the seconds of spans, which stand in stream order; waits for the last one."""
    if xp is np:
        return [end - begin for begin, end in spans]
    if spans:
        spans[-1][1].synchronize()
    return [1e-3 * cp.cuda.get_elapsed_time(*span) for span in spans]


def copy_bytes_per_second() -> float:
    """Measure a copy within the GPU's memory, bytes read and written, far past the L2."""
    nbytes = min(2**30, cp.cuda.runtime.memGetInfo()[0] // 8)
    source, target = cp.zeros(nbytes, np.uint8), cp.empty(nbytes, np.uint8)
    spans = []
    for _ in range(10):
        begin = now(cp)
        target.data.copy_from_device_async(source.data, nbytes)
        spans.append((begin, now(cp)))
    return float(2 * nbytes / min(durations(cp, spans)))


# The report


def heading(
    options: Options, engine: Engine, name: str, some: int, held: int, steps: int, copy: float
) -> str:
    """Say what is replayed, on what."""
    layers, model = engine.layers, engine.layers.model
    if layers.xp is cp:
        gpu = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["name"].decode()
        device = f"on {gpu}, which copies its own memory at {copy / 1e9:,.0f} GB/s"
    else:
        why = "as asked" if options.device else "no GPU was found"
        device = f"on NumPy, in float64 ({why}): a small size, which --requests and --steps change"
    what = options.trace or f"the built-in workload, seed {options.seed}"
    if options.common_prompt:
        what = f"{what}, a common prompt of {options.common_prompt:,} tokens"
    pages, limits = engine.scheduler.capacity, engine.scheduler.limits
    num_bytes = pages * layers.page_size * model.token_bytes * len(layers.caches)
    lines = [
        f"replaying {what}: {some:,} of {count(held, 'request')}, at most {count(steps, 'step')} "
        f"of {limits.batch_size} requests and {limits.step_tokens:,} tokens",
        f"{name}: {model}; {len(layers.caches)} of {model.num_layers} layers",
        f"{count(pages, 'page')} of {count(layers.page_size, 'token')}, {size_of(num_bytes)}",
        device,
    ]
    return "\n".join(lines)


def table(stopwatch: Stopwatch, copy: float) -> str:
    """Return one line per operation; shares of the copy speed and FLOPs only on a GPU."""
    names = ["", "calls", "tokens", "ms", "GB/s"] + ["of copy", "TFLOP/s"] * (copy > 0)
    lines = ["".join([f"{names[0]:10}"] + [f"{name:>12}" for name in names[1:]])]
    for name, operation in stopwatch.operations.items():
        seconds = sum(durations(stopwatch.xp, operation.spans))
        if not operation.has_kernel:
            lines.append(f"{name:10}  has no kernel yet")
            continue
        cells = [f"{operation.calls:,}", f"{operation.tokens:,}", f"{seconds * 1e3:,.1f}"]
        if operation.moved_bytes and seconds:
            rate = operation.moved_bytes / seconds
            cells.append(f"{rate / 1e9:,.1f}" if rate >= 1e10 else f"{rate / 1e9:.3f}")
            if copy:
                cells.append(f"{rate / copy:.1%}")
        if copy and operation.flops and seconds:
            cells.append(f"{operation.flops / seconds / 1e12:,.1f}")
        lines.append("".join([f"{name:10}"] + [f"{cell:>12}" for cell in cells]).rstrip())
    return "\n".join(lines)


def summary(engine: Engine, seconds: float) -> str:
    """Return what became of the requests, and what was checked."""
    scheduler, checks = engine.scheduler, engine.checks
    counts = f"{count(scheduler.finished, 'request')} finished, {engine.unfinished:,} live, "
    counts += f"{len(scheduler.waiting):,} waiting after {count(engine.steps, 'step')}"
    counts += f" in {seconds:.1f} s"
    reference_note = f"{scheduler.tokens_by_reference:,} taken by reference"
    if not scheduler.shares:
        reference_note = f"none by reference: {SEGMENT} tokens are not whole pages"
    bits = [f"{count(checks['rows'], 'gathered row')} bit for bit"]
    attention = ("decode", "cascade", "prefill")
    bits += [count(checks[name], f"{name} row") for name in attention if checks[name]]
    tolerance = f"2^{math.log2(TOLERANCE[engine.layers.model.dtype]):.0f} * (1 + |o|)"
    within = f" within {tolerance} of the float64 definition" if len(bits) > 1 else ""
    lines = [
        counts,
        f"{count(engine.rows, 'token')} appended per layer, {reference_note}",
        sharing(engine),
        f"{scheduler.most_pages:,} of {count(scheduler.capacity, 'page')} in use at most, "
        "all returned",
        f"checked: {', '.join(bits)}{within}",
    ]
    return "\n".join(lines)


def sharing(engine: Engine) -> str:
    """Say what cascades over shared pages saved of decoding's reads."""
    decoded = engine.decoded
    note = f"{decoded['cascades']:,} of {count(decoded['steps'], 'decode step')} were cascades"
    if decoded["saved"]:
        share = decoded["saved"] / decoded["bytes"]
        note += f", which saved {decoded['saved'] / 1e9:,.3f} GB of keys and values, {share:.1%}"
    return note
