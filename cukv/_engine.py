"""The engine of ``cukv replay``: caches, the arrays of a step, and the checks of its results.

Each token's rows are determined by its request (or hash id) and position, so that a sample of the
results can be checked against ``cukv.reference`` without remembering what was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

import cukv
from cukv import reference
from cukv._arrays import Array, as_dtype
from cukv._workload import SEGMENT, Live, Model, Scheduler

Int64 = npt.NDArray[np.int64]

POOL_ROWS = 4093  # distinct rows of random numbers; prime, so that no page size divides it
LAYER_SHIFT = 16  # layer l uses pool rows from 16 * l on
LOGIT_DEVIATION = 4.0  # few keys carry each output row, so that a wrong key moves it far
# |o - definition| <= TOLERANCE * (1 + |definition|). Values are of order 1, o is an average of them
# with weights in the dtype of q (half a step each, 2^-9 or 2^-12), rounded once more to that dtype.
TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9}


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

    def attention(
        self, name: str, queries: list[Array], step: Step
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of decode (single rows) or prefill (chunks): queries and a table."""
        singles = len(step.singles)
        if name == "decode":
            return [*(q[:singles] for q in queries), step.decode_table], {}
        queries = [q[singles:] for q in queries]
        if self.model.is_mla:
            return [*queries, step.prefill_table], {"qo_indptr": step.qo_indptr, "causal": True}
        rows = cukv.RaggedTensor(queries[0], step.qo_indptr)
        return [rows, step.prefill_table], {"causal": True}

    def plan(self, arguments: list[Any], options: dict[str, Any]) -> Any:
        """Prepare one kind of attention for all layers of the step."""
        return self.caches[0].plan(arguments[0], arguments[-1], **options)

    def attend(
        self,
        name: str,
        layer: int,
        arguments: list[Any],
        options: dict[str, Any],
        plan: cukv.Plan | None,
    ) -> Array:
        """Attend one kind of rows, [rows, num_qo_heads, dim]."""
        attend = getattr(self.caches[layer], "decode" if self.model.is_mla else name)
        return attend(*arguments, sm_scale=self.model.sm_scale, plan=plan, **options)

    def gather(self, layer: int, table: cukv.PageTable, nnz: int) -> list[Array]:
        """Copy the rows of a table's requests out of their pages."""
        return [ragged.data for ragged in self.caches[layer].gather(table, nnz=nnz)]


# Engine


class Engine:
    """Runs the schedule: one page table per step, shared by all layers.

    Parameters
    ----------
    layers, scheduler
        What is run, and when.
    timed : callable
        Called as ``timed(name, call, **work)`` for every operation; gives the result of ``call``,
        or None if there is no kernel for it yet.
    seed : int
        Of the samples that are checked.
    """

    def __init__(
        self, layers: Layers, scheduler: Scheduler, timed: Callable[..., Any], seed: int
    ) -> None:
        self.layers, self.scheduler = layers, scheduler
        self.steps = self.rows = self.unfinished = 0
        self.checks: Counter[str] = Counter()
        self._timed, self._rng = timed, np.random.default_rng(seed)

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
        write = partial(layers.append, layer, rows, step)
        self._timed("append", write, tokens=nnz, moved_bytes=2 * nnz * model.token_bytes)
        outputs = {}
        for name, part in (("decode", step.singles), ("prefill", step.chunks)):
            if part:
                attention = layers.attention(name, queries, step)
                if layer == 0:  # one plan serves all layers
                    plans[name] = self._timed("plan", partial(layers.plan, *attention))
                attend = partial(layers.attend, name, layer, *attention, plans[name])
                outputs[name] = self._timed(name, attend, **attention_work(part, model))
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
        gather = partial(layers.gather, layer, page_table(arrays, layers.page_size), nnz)
        moved_bytes = 2 * nnz * layers.model.token_bytes
        gathered = self._timed("gather", gather, tokens=nnz, moved_bytes=moved_bytes)
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
