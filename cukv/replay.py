"""``cukv replay``: a serving workload on a paged cache, timed and checked.

Requests arrive in order, prompts are appended in chunks beside decoding, every live request attends
in every step, finished ones return their pages. Each token's rows are determined by its request (or
hash id) and position, so that a sample of the results can be checked against ``cukv.reference``
without remembering what was written. The schedule is host arithmetic: ``cukv/_workload.py``.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

import cukv
from cukv import reference
from cukv._arrays import as_dtype
from cukv._workload import (
    GPU_SIZE,
    MODELS,
    NUMPY_LARGE_MODEL_SIZE,
    NUMPY_SIZE,
    SEGMENT,
    FreePages,
    Live,
    Model,
    ReplayError,
    Request,
    Scheduler,
    Size,
    built_in,
    read_trace,
)

Array = Any
Int64 = npt.NDArray[np.int64]

POOL_ROWS = 4093  # distinct rows of random numbers; prime, so that no page size divides it
LAYER_SHIFT = 16  # layer l uses pool rows from 16 * l on
CHECK_EVERY = 8  # steps
LOGIT_DEVIATION = 4.0  # few keys carry each output row, so that a wrong key moves it far
# |o - definition| <= TOLERANCE * (1 + |definition|). Values are of order 1, o is an average of them
# with weights in the dtype of q (half a step each, 2^-9 or 2^-12), rounded once more to that dtype.
TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
NUMPY_CACHE_BYTES = 2**30
GPU_CACHE_SHARE = 0.6  # of the memory that is free


class MismatchError(Exception):
    """A sampled result is not what the definition says."""


# Rows and caches


class Pool:
    """Random rows on the host and in the home; token t of layer l has row ``ids[t] + 16 * l``."""

    def __init__(
        self, shape: tuple[int, ...], model: Model, layers: int, xp: Any, rng: Any, scale: float = 1
    ) -> None:
        rows = POOL_ROWS + LAYER_SHIFT * layers
        values = rng.standard_normal((rows, *shape), np.float32) * np.float32(scale)
        self.host = values.astype(as_dtype("cukv replay", "dtype", model.dtype))
        self._xp, self._bits = xp, xp.asarray(self.host.view(np.uint16))

    def rows(self, ids: Array, layer: int) -> Array:
        """Copy the rows of tokens, in the home, [nnz, *shape]."""
        bits = self._xp.take(self._bits[LAYER_SHIFT * layer :], ids, axis=0)
        return bits.view(self.host.dtype)

    def host_rows(self, ids: Int64, layer: int) -> Array:
        """Copy the rows of tokens, on the host, [nnz, *shape]."""
        return self.host[ids + LAYER_SHIFT * layer]


def row_ids(live: Live, begin: int, end: int) -> Int64:
    """Return which pool row each token of ``[begin, end)`` has: its hash id's, or its request's."""
    ids = 1597 * (live.number + 1) + np.arange(begin, end)
    segments = live.request.hash_ids[: -(-end // SEGMENT)]
    for segment in range(begin // SEGMENT, len(segments)):
        first, last = max(begin, segment * SEGMENT), min(end, (segment + 1) * SEGMENT)
        start = segments[segment] * 2654435761 % POOL_ROWS + first % SEGMENT
        ids[first - begin : last - begin] = start + np.arange(last - first)
    return ids % POOL_ROWS


def to_host(array: Array) -> Array:
    """Copy an array to the host, which waits for the stream."""
    return array if isinstance(array, np.ndarray) else cp.asnumpy(array)


@dataclass(frozen=True)
class Step:
    """The arrays of one step: single rows stand first and decode, chunks follow and prefill."""

    batch: list[Live]
    singles: list[Live]
    chunks: list[Live]
    ids: Array  # pool row of each token
    row_indptr: Array
    table: cukv.PageTable
    decode_table: cukv.PageTable
    prefill_table: cukv.PageTable
    qo_indptr: Array  # rows of the chunks

    @classmethod
    def of(cls, batch: list[Live], page_size: int, xp: Any) -> Step:
        """Build the step's arrays on the host and move them home in one copy."""
        singles = [live for live in batch if live.rows == 1]
        chunks = batch[len(singles) :]
        ids = np.concatenate(
            [row_ids(live, live.kv_len - live.rows, live.kv_len) for live in batch]
        )
        arrays = [ids, indptr_of(live.rows for live in batch), indptr_of(r.rows for r in chunks)]
        for part in (batch, singles, chunks):
            arrays += table_of(part, page_size)
        packed = xp.asarray(np.concatenate(arrays).astype(np.int32))
        ends = np.cumsum([len(array) for array in arrays])
        home = [packed[end - len(array) : end] for array, end in zip(arrays, ends, strict=True)]
        table, decode_table, prefill_table = (
            page_table(home[i : i + 3], page_size) for i in (3, 6, 9)
        )
        batches = (batch, singles, chunks)
        return cls(*batches, home[0], home[1], table, decode_table, prefill_table, home[2])


def indptr_of(lens: Iterable[int]) -> Int64:
    """Return the prefix sum of lengths, from 0."""
    return np.cumsum([0, *lens])


def table_of(batch: list[Live], page_size: int) -> list[Array]:
    """Return indptr, indices and last_page_len of requests, on the host."""
    pages = [np.frombuffer(live.pages, np.int32) for live in batch]
    last = [(live.kv_len - 1) % page_size + 1 for live in batch]
    empty = np.zeros(0, np.int32)  # NumPy concatenates nothing only if told of which dtype
    return [indptr_of(map(len, pages)), np.concatenate([empty, *pages]), np.array(last, np.int32)]


def page_table(arrays: Iterable[Array], page_size: int) -> cukv.PageTable:
    """Make a table of indptr, indices and last_page_len."""
    indptr, indices, last_page_len = arrays
    return cukv.PageTable(indptr, indices, last_page_len, page_size)


class Layers:
    """The caches of some layers, with the pools of their rows; one method per operation."""

    def __init__(
        self, model: Model, layers: int, max_num_pages: int, page_size: int, xp: Any, seed: int
    ) -> None:
        self.model, self.page_size, self.xp = model, page_size, xp
        rng = np.random.default_rng(seed)
        dims = model.head_dim + model.head_dim_kpe
        scale = LOGIT_DEVIATION / (model.sm_scale * dims**0.5)
        pools = (model, layers, xp, rng)
        self.row_pools = [Pool(shape, *pools) for shape in model.row_shapes]
        self.query_pools = [Pool(shape, *pools, scale) for shape in model.query_shapes]
        self.caches = [self._empty(max_num_pages) for _ in range(layers)]

    def _empty(self, max_num_pages: int) -> Any:
        m, pages = self.model, (max_num_pages, self.page_size)
        if m.is_mla:
            dims = (m.head_dim, m.head_dim_kpe)
            return cukv.MLAPagedCache.empty(*pages, m.dtype, *dims, xp=self.xp)
        return cukv.PagedKVCache.empty(*pages, m.num_kv_heads, m.head_dim, m.dtype, xp=self.xp)

    def append(self, layer: int, rows: list[Array], step: Step) -> None:
        """Write the rows of all requests of the step."""
        self.caches[layer].append(*rows, step.table, indptr=step.row_indptr)

    def plan(self, name: str, queries: list[Array], step: Step) -> Any:
        """Prepare one kind of attention for all layers of the step."""
        (*q, table), options = self._attention(name, queries, step)
        return self.caches[0].plan(q[0], table, **options)

    def attend(
        self, name: str, layer: int, queries: list[Array], step: Step, plan: cukv.Plan | None
    ) -> Array:
        """Attend the single rows (decode) or the chunks (prefill), [rows, num_qo_heads, dim]."""
        arguments, options = self._attention(name, queries, step)
        method = getattr(self.caches[layer], "decode" if self.model.is_mla else name)
        return method(*arguments, sm_scale=self.model.sm_scale, plan=plan, **options)

    def _attention(
        self, name: str, queries: list[Array], step: Step
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the queries and the table of a kind of attention, and what a plan depends on."""
        singles = len(step.singles)
        if name == "decode":
            return [*(q[:singles] for q in queries), step.decode_table], {}
        queries = [q[singles:] for q in queries]
        if self.model.is_mla:
            return [*queries, step.prefill_table], {"qo_indptr": step.qo_indptr, "causal": True}
        rows = cukv.RaggedTensor(queries[0], step.qo_indptr)
        return [rows, step.prefill_table], {"causal": True}

    def gather(self, layer: int, table: cukv.PageTable, nnz: int) -> list[Array]:
        """Copy the rows of a table's requests out of their pages."""
        return [ragged.data for ragged in self.caches[layer].gather(table, nnz=nnz)]


# Timing


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
    """Times calls by operation: with CUDA events on a GPU, read at the end, else by the clock."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.operations: dict[str, Operation] = {
            name: Operation() for name in ("append", "plan", "decode", "prefill", "gather")
        }

    def __call__(
        self,
        name: str,
        call: Callable[[], Any],
        tokens: int = 0,
        moved_bytes: int = 0,
        flops: int = 0,
    ) -> Any:
        """Run and time a call that may be repeated; None if the operation has no kernel yet."""
        operation = self.operations[name]
        if not operation.has_kernel:
            return None
        try:
            if self.xp is cp and not operation.calls:
                call()  # compiles
            begin = self._now()
            result = call()
        except NotImplementedError:
            operation.has_kernel = False
            return None
        operation.spans.append((begin, self._now()))
        operation.calls += 1
        operation.tokens += tokens
        operation.moved_bytes += moved_bytes
        operation.flops += flops
        return result

    def _now(self) -> Any:
        if self.xp is np:
            return time.perf_counter()
        event = cp.cuda.Event()
        event.record()
        return event

    def seconds(self, operation: Operation) -> float:
        """Add up the spans of an operation, which waits for the last."""
        if self.xp is np:
            return float(sum(end - begin for begin, end in operation.spans))
        if operation.spans:
            operation.spans[-1][1].synchronize()
        return 1e-3 * float(sum(cp.cuda.get_elapsed_time(*span) for span in operation.spans))


def copy_bytes_per_second() -> float:
    """Measure a copy within the GPU's memory, bytes read and written, far past the L2."""
    nbytes = int(min(2**30, cp.cuda.runtime.memGetInfo()[0] // 8))
    source, target = cp.zeros(nbytes, np.uint8), cp.empty(nbytes, np.uint8)
    stopwatch = Stopwatch(cp)
    for _ in range(10):
        call = partial(target.data.copy_from_device_async, source.data, nbytes)
        stopwatch("gather", call, nbytes, 2 * nbytes)
    cp.cuda.get_current_stream().synchronize()
    spans = stopwatch.operations["gather"].spans
    return 2e3 * nbytes / float(min(cp.cuda.get_elapsed_time(*span) for span in spans))


# Engine


class Engine:
    """Runs the schedule: one page table per step, shared by all layers."""

    def __init__(self, layers: Layers, scheduler: Scheduler, seed: int) -> None:
        self.layers, self.scheduler = layers, scheduler
        self.stopwatch = Stopwatch(layers.xp)
        self.steps = self.rows = self.unfinished = 0
        self.checks: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)

    def step(self, check: bool = False) -> None:
        """Append and attend the next rows of all live requests; check some of them if asked."""
        batch = self.scheduler.next_batch()
        if batch:
            step = Step.of(batch, self.layers.page_size, self.layers.xp)
            checked = int(self._rng.integers(len(self.layers.caches))) if check else -1
            plans: dict[str, Any] = {}
            for layer in range(len(self.layers.caches)):
                outputs = self._run_layer(layer, step, plans)
                if layer == checked:
                    self._check(layer, step, outputs)
            self.rows += len(step.ids)
        self.scheduler.end_step()
        self.steps += 1

    def finish(self) -> None:
        """Retire who is still live; every page must have come back."""
        self.unfinished = len(self.scheduler.live)
        for live in list(self.scheduler.live):
            self.scheduler.retire(live)
        if self.scheduler.pages_in_use:
            raise MismatchError(f"{self.scheduler.pages_in_use} pages did not come back")

    def _run_layer(self, layer: int, step: Step, plans: dict[str, Any]) -> dict[str, Array]:
        layers, model = self.layers, self.layers.model
        rows = [pool.rows(step.ids, layer) for pool in layers.row_pools]
        queries = [pool.rows(step.ids, layer) for pool in layers.query_pools]
        nnz = len(step.ids)
        call: Callable[[], Any] = partial(layers.append, layer, rows, step)
        self.stopwatch("append", call, nnz, 2 * nnz * model.token_bytes)
        outputs = {}
        for name, part in (("decode", step.singles), ("prefill", step.chunks)):
            if part:
                if layer == 0:  # one plan serves all layers
                    call = partial(layers.plan, name, queries, step)
                    plans[name] = self.stopwatch("plan", call)
                call = partial(layers.attend, name, layer, queries, step, plans[name])
                outputs[name] = self.stopwatch(name, call, **attention_work(part, model))
        return outputs

    def _check(self, layer: int, step: Step, outputs: dict[str, Array]) -> None:
        """Check all rows of one request, and one output row of each kind of attention."""
        self._check_rows(layer, step.batch[self._rng.integers(len(step.batch))])
        for name, part in (("decode", step.singles), ("prefill", step.chunks)):
            if outputs.get(name) is not None:
                index = int(self._rng.integers(len(part)))
                live = part[index]
                row = int(self._rng.integers(live.rows))
                o = outputs[name][sum(r.rows for r in part[:index]) + row]
                self._check_output(name, layer, live, live.kv_len - live.rows + row, to_host(o))

    def _check_rows(self, layer: int, live: Live) -> None:
        """Gather a request's rows and compare them with those that were appended, bit for bit."""
        layers, nnz = self.layers, live.kv_len
        arrays = map(layers.xp.asarray, table_of([live], layers.page_size))
        call = partial(layers.gather, layer, page_table(arrays, layers.page_size), nnz)
        gathered = self.stopwatch("gather", call, nnz, 2 * nnz * layers.model.token_bytes)
        if gathered is None:
            return
        ids = row_ids(live, 0, nnz)
        for pool, rows in zip(layers.row_pools, gathered, strict=True):
            want = pool.host_rows(ids, layer).view(np.uint16)
            got = to_host(rows).view(np.uint16).reshape(want.shape)
            wrong = np.flatnonzero((got != want).reshape(nnz, -1).any(1))
            if wrong.size:
                raise MismatchError(
                    f"step {self.steps}, layer {layer}, {live.request.where}: {wrong.size} of "
                    f"{nnz} gathered rows are not those appended, first token {wrong[0]}"
                )
        self.checks["rows"] += nnz

    def _check_output(self, name: str, layer: int, live: Live, position: int, o: Array) -> None:
        """Compare the output row of one position with the float64 definition over its keys."""
        kv_head = int(self._rng.integers(self.layers.model.num_kv_heads))
        heads, want = definition(self.layers, layer, live, position, kv_head)
        tolerance = TOLERANCE[self.layers.model.dtype]
        got = o[heads].astype(np.float64)
        wrong = np.argwhere(~(np.abs(got - want) <= tolerance * (1 + np.abs(want))))
        if wrong.size:
            head, feat = wrong[0]
            raise MismatchError(
                f"step {self.steps}, layer {layer}, {live.request.where}: {name} of token "
                f"{position}, head {heads.start + head} must be {want[head, feat]:.5f} at feature "
                f"{feat}, got {got[head, feat]:.5f}"
            )
        self.checks[name] += 1


def attention_work(part: list[Live], model: Model) -> dict[str, int]:
    """Return what attention of some requests costs at least: each row is read or written once."""
    nnz, keys = sum(live.rows for live in part), sum(live.kv_len for live in part)
    # A chunk's row sees the keys up to its own position.
    pairs = sum(live.rows * live.kv_len - live.rows * (live.rows - 1) // 2 for live in part)
    moved_bytes = keys * model.token_bytes + nnz * model.query_bytes
    return {"tokens": nnz, "moved_bytes": moved_bytes, "flops": pairs * model.pair_flops}


def definition(
    layers: Layers, layer: int, live: Live, position: int, kv_head: int
) -> tuple[slice, Array]:
    """Return which query heads share a kv head, and their float64 output at a position."""
    model = layers.model
    ids = row_ids(live, 0, position + 1)
    k, v = (pool.host_rows(ids, layer) for pool in layers.row_pools)
    q = np.concatenate([pool.host_rows(ids[-1:], layer) for pool in layers.query_pools], -1)
    if model.is_mla:
        k, v = np.concatenate([k, v], -1)[:, None], k[:, None]
    group_size = model.num_qo_heads // model.num_kv_heads
    heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
    keys = (k[:, [kv_head]], v[:, [kv_head]])
    seen = reference.visible(1, position + 1)
    return heads, reference.attend(q[:, heads], *keys, seen, sm_scale=model.sm_scale)[0][0]


# The job


@dataclass(frozen=True)
class Options:
    """What the command line says; None is for a default that fits the device and the model."""

    trace: Path | None = None
    requests: int | None = None
    steps: int | None = None
    model: str | None = None
    layers: int | None = None
    pages: int | None = None
    page_size: int = 16
    seed: int = 0
    device: str | None = None


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
        engine = build(options, name, size, requests, xp)
        print(heading(options, engine, name, len(requests), held, steps, copy_speed), flush=True)
        seconds = run(engine, steps)
    except MemoryError as error:
        raise ReplayError(f"out of memory, try fewer --pages or --layers: {error}") from None
    print(table(engine.stopwatch, copy_speed), summary(engine, seconds), sep="\n\n")


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
    count = options.requests or size.requests
    if options.trace is not None:
        return read_trace(options.trace, count)
    return built_in(options.seed, count, size.prompt_tokens, size.output_tokens), count


def build(options: Options, name: str, size: Size, requests: list[Request], xp: Any) -> Engine:
    """Allocate caches and pools for the requests."""
    model, page_size = MODELS[name], options.page_size
    layers = options.layers or min(size.layers, model.num_layers)
    if layers > model.num_layers:
        raise ReplayError(f"--layers: {name} has {model.num_layers}, got {layers}")
    page_bytes = layers * page_size * model.token_bytes
    pages = num_pages(options, requests, page_bytes, xp)
    free = FreePages(pages, options.seed)
    scheduler = Scheduler(requests, free, page_size, size.limits)
    return Engine(
        Layers(model, layers, pages, page_size, xp, options.seed), scheduler, options.seed
    )


def num_pages(options: Options, requests: list[Request], page_bytes: int, xp: Any) -> int:
    """Return how many pages to allocate: what the workload could use at most, if there is room."""
    needed = sum(-(-request.total_length // options.page_size) for request in requests)
    if xp is cp:
        free_bytes = cp.cuda.runtime.memGetInfo()[0]
        budget = int(GPU_CACHE_SHARE * free_bytes)
    else:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget = NUMPY_CACHE_BYTES
    if options.pages is None:
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


# The report


def heading(
    options: Options, engine: Engine, name: str, count: int, held: int, steps: int, copy: float
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
    pages, limits = engine.scheduler.capacity, engine.scheduler.limits
    gigabytes = pages * layers.page_size * model.token_bytes * len(layers.caches) / 1e9
    size = f"{gigabytes:,.1f} GB" if gigabytes > 1 else f"{1e3 * gigabytes:,.1f} MB"
    lines = [
        f"replaying {what}: {count:,} of {held:,} requests, at most {steps:,} steps "
        f"of {limits.batch_size} requests and {limits.step_tokens:,} tokens",
        f"{name}: {model}; {len(layers.caches)} of {model.num_layers} layers",
        f"{pages:,} pages of {layers.page_size} tokens, {size}",
        device,
    ]
    return "\n".join(lines)


def table(stopwatch: Stopwatch, copy: float) -> str:
    """Return one line per operation; shares of the copy speed and FLOPs only on a GPU."""
    names = ["", "calls", "tokens", "ms", "GB/s"] + ["of copy", "TFLOP/s"] * (copy > 0)
    lines = ["".join([f"{names[0]:10}"] + [f"{name:>12}" for name in names[1:]])]
    for name, operation in stopwatch.operations.items():
        seconds = stopwatch.seconds(operation)
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
    counts = f"{scheduler.finished:,} requests finished, {engine.unfinished:,} live, "
    counts += f"{len(scheduler.waiting):,} waiting after {engine.steps:,} steps in {seconds:.1f} s"
    reference_note = f"{scheduler.tokens_by_reference:,} taken by reference"
    if not scheduler.shares:
        reference_note = f"none by reference: {SEGMENT} tokens are not whole pages"
    bits = [f"{checks['rows']:,} gathered rows bit for bit"]
    bits += [f"{checks[name]:,} {name} rows" for name in ("decode", "prefill") if checks[name]]
    tolerance = f"2^{math.log2(TOLERANCE[engine.layers.model.dtype]):.0f} * (1 + |o|)"
    within = f" within {tolerance} of the float64 definition" if len(bits) > 1 else ""
    lines = [
        counts,
        f"{engine.rows:,} tokens appended per layer, {reference_note}",
        f"{scheduler.most_pages:,} of {scheduler.capacity:,} pages in use at most, all returned",
        f"checked: {', '.join(bits)}{within}",
    ]
    return "\n".join(lines)
