"""Shared prefixes of a flat page table: which requests hold equal pages, and where sharing pays.

Works on the host, on NumPy arrays. Requests are sorted by the pages that they may share, so that
sharers stand side by side. Neighbours that have more pages in common than the sharers around them
have a run of their own: these runs form a tree, whose depth is the number of shared levels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cukv._check import values
from cukv.page_table import PageTable

# The cost model, in bytes of memory traffic, fitted to random prefix trees of 8 to 256 requests on
# an H200. A level more is one partial state more per row: 32 heads of 128 and their lse in float32,
# written and read. A run has tiles of its own. Splitting a call at all costs about 27 us: 64
# requests took 1.03 times as long as flat decode where 112 MB were saved, and 0.96 where 129 were.
# Of what is shared, flat decode finds half in the L2 anyway.
STATE_BYTES = 2 * 32 * (128 + 1) * 4
RUN_BYTES = 1_000_000
SPLIT_BYTES = 120_000_000
_NOT_IN_L2 = 2  # one byte in so many


class Levels(NamedTuple):
    """Fields of CascadeLevels."""

    qo_indptr: tuple[np.ndarray, ...]
    tables: tuple[PageTable, ...]
    row_order: np.ndarray | None


class _Run(NamedTuple):
    """Pages ``begin`` to ``end`` of the lists of sorted requests ``start`` to ``stop``."""

    start: int
    stop: int
    begin: int
    end: int
    level: int


def shared_levels(
    table: PageTable, qo_indptr: np.ndarray, page_bytes: int, min_saved_bytes: int | None
) -> Levels | None:
    """Divide a flat table into levels; None if there is nothing to share.

    ``min_saved_bytes`` is what a run must save to be shared, by the cost model if None.
    """
    table.validate()
    starts = values(table.indptr)
    row_starts = values(qo_indptr)
    qo_lens, kv_lens = np.diff(row_starts), values(table.seq_lens)
    # A request may share the whole pages before its last qo_len tokens.
    limits = np.where(qo_lens > 0, np.maximum(kv_lens - qo_lens, 0) // table.page_size, 0)
    ids = _compact(table.indices[: starts[-1]], int(limits.max(initial=0)))
    order = _by_prefix(ids, starts, limits, np.stack([kv_lens, qo_lens], 1))
    rows = np.concatenate([[0], np.cumsum(qo_lens[order])])
    common = _common_pages(ids, starts[:-1][order], limits[order])
    runs = _nest(_paying(common, rows, page_bytes, min_saved_bytes))
    if not runs or (min_saved_bytes is None and _gain(runs, rows, page_bytes) < SPLIT_BYTES):
        return None
    bounds, tables = zip(*_tables(table, order, runs), strict=True)
    row = np.arange(rows[-1])
    row_order = row + np.repeat(row_starts[order] - rows[:-1], qo_lens[order])
    return Levels(
        tuple(rows[b].astype(qo_indptr.dtype) for b in bounds),
        tables,
        None if np.array_equal(row_order, row) else row_order.astype(qo_indptr.dtype),
    )


def _compact(indices: np.ndarray, room: int) -> np.ndarray:
    """Copy page ids to 4 bytes if they fit, big-endian, with room for a window behind them."""
    size = 4 if indices.max(initial=0) < 2**32 else 8
    ids = np.zeros(len(indices) + room, f">u{size}")
    ids[: len(indices)] = indices
    return ids


def _by_prefix(
    ids: np.ndarray, starts: np.ndarray, limits: np.ndarray, ties: np.ndarray
) -> list[int]:
    """Sort requests by the pages they may share, then by their other pages, then by ``ties``."""
    # Big-endian bytes compare as the ids do, at the speed of memcmp and without padding.
    data = ids.tobytes()
    edges = (ids.itemsize * e for e in (starts[:-1], starts[:-1] + limits, starts[1:]))
    keys = [
        (data[start:limit], data[limit:stop], tie)
        for start, limit, stop, tie in zip(*(e.tolist() for e in edges), ties.tolist(), strict=True)
    ]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _common_pages(ids: np.ndarray, starts: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Count the pages that neighbours in sorted order may share, [batch_size - 1]."""
    ids = ids.view(f"u{ids.itemsize}")  # equal as they stand, without turning bytes round
    most = np.minimum(limits[1:], limits[:-1])
    common = np.zeros(len(most), np.int64)
    pairs, width = np.flatnonzero(most), 16
    while len(pairs):
        # Windows that double cost no more than the pages compared, twice.
        width = min(width, int((most - common)[pairs].max()))
        windows = np.lib.stride_tricks.sliding_window_view(ids, width)
        left, right = (windows[s[pairs] + common[pairs]] for s in (starts[:-1], starts[1:]))
        differ = left != right
        equal = np.where(differ.any(1), differ.argmax(1), width)
        common[pairs] += equal
        pairs = pairs[(equal == width) & (common[pairs] < most[pairs])]
        width *= 2
    shared: np.ndarray = np.minimum(common, most)
    return shared


def _paying(
    common: np.ndarray, rows: np.ndarray, page_bytes: int, min_saved_bytes: int | None
) -> list[tuple[int, int, int]]:
    """Find the runs worth sharing as (start, stop, end), those below before those above them.

    A run's pages are read once instead of by each of its readers: the runs and requests right
    below it. Where that does not pay they fall to its readers, who then read from the run above.
    """
    found = []
    above = [(0, 0, 0)]  # open runs as (start, end, requests less than readers)
    for stop, height in enumerate([*common.tolist(), 0], start=1):
        start, fewer = stop - 1, 0
        while above[-1][1] > height:
            start, end, inner = above.pop()
            fewer += inner
            pages = end - max(height, above[-1][1])
            cost = min_saved_bytes
            if cost is None:
                cost = _NOT_IN_L2 * _cost(int(rows[stop] - rows[start]), 1)
            if (stop - start - fewer - 1) * pages * page_bytes >= cost:
                found.append((start, stop, end))
                fewer = stop - start - 1
        if above[-1][1] == height:
            start, _, inner = above.pop()
            fewer += inner
        above.append((start, height, fewer))
    return found


def _nest(found: list[tuple[int, int, int]]) -> list[_Run]:
    """Give each run its level and the page where the run around it ends, outer runs first."""
    runs: list[_Run] = []
    around: list[_Run] = []
    for start, stop, end in reversed(found):
        while around and start < around[-1].start:
            around.pop()
        begin = around[-1].end if around else 0
        around.append(_Run(start, stop, begin, end, len(around)))
        runs.append(around[-1])
    return runs


def _gain(runs: list[_Run], rows: np.ndarray, page_bytes: int) -> int:
    """Count the bytes that the runs save, less what they and their rows' partial states cost."""
    pages = sum((run.stop - run.start - 1) * (run.end - run.begin) for run in runs)
    states = sum(int(rows[run.stop] - rows[run.start]) for run in runs)
    return pages * page_bytes // _NOT_IN_L2 - _cost(states, len(runs))


def _cost(states: int, runs: int) -> int:
    """Count the bytes that cost as much as runs and the partial states of their rows."""
    return states * STATE_BYTES + runs * RUN_BYTES


def _tables(
    flat: PageTable, order: list[int], runs: list[_Run]
) -> list[tuple[np.ndarray, PageTable]]:
    """Make each level's table, and where its requests start among the sorted ones."""
    batch_size, starts = len(order), values(flat.indptr)
    first, stops = starts[:-1][order], starts[1:][order]
    bounds, levels = np.array([0, batch_size]), []
    for level in range(1 + max(run.level for run in runs)):
        here = sorted(run for run in runs if run.level == level)
        edges = [edge for run in here for edge in (run.start, run.stop)]
        bounds = np.union1d(bounds, edges)
        counts = np.zeros(len(bounds) - 1, np.int64)
        counts[np.searchsorted(bounds, edges[::2])] = [run.end - run.begin for run in here]
        spans = [(first[r.start] + r.begin, first[r.start] + r.end) for r in here]
        levels.append((bounds, _table(flat, counts, spans, np.where(counts, flat.page_size, 0))))
    own = first.copy()
    for run in runs:
        own[run.start : run.stop] = first[run.start : run.stop] + run.end
    spans = list(zip(own.tolist(), stops.tolist(), strict=True))
    leaves = _table(flat, stops - own, spans, flat.last_page_len[order])
    return [*levels, (np.arange(batch_size + 1), leaves)]


def _table(
    flat: PageTable, counts: np.ndarray, spans: list[tuple[int, int]], last_page_len: np.ndarray
) -> PageTable:
    """Make a table of stretches of a flat one's indices, in its dtypes."""
    return PageTable(
        np.append(0, np.cumsum(counts)).astype(flat.indptr.dtype),
        np.concatenate([flat.indices[begin:end] for begin, end in spans]),
        last_page_len.astype(flat.last_page_len.dtype),
        flat.page_size,
    )
