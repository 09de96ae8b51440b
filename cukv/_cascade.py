"""Cascade attention on a GPU: the requests of all levels as one batch, in two launches.

Levels divide the same rows into requests of their own. ``kernels/concat_levels.cu`` puts them one
behind the other into one page table, whose rows are those of each level in turn; one plan deals all
of them. The first launch attends to what leaves share, on the kernel for many rows, and leaves
states in float32. The second attends to the leaves themselves, and merges into each of their rows
what the first has left of it, with the sinks, once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import numpy as np

from cukv._arrays import FLOAT32, Array, empty
from cukv._attention import PagedCall
from cukv._index import pack_index
from cukv._kernels import BoundLaunch, kernel, num_sms, one_per_thread
from cukv._launches import pack_levels, require_eager
from cukv._plan import LONGEST_WINDOW, Plan
from cukv._sources import packer, struct_layout
from cukv.page_table import PageTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cukv._paged_attention import PagedAttention

_INT32 = np.dtype(np.int32)
_AT_ONCE = 8  # levels that a launch takes, in kernels/concat_levels.cu
_TILE_ROWS = 128  # of a tile of what is shared, or fewer
_MAX_STATES = 16  # of a row, of all levels above its leaf: each is a look-up of the leaf's
_pack_level = packer("Level", "concat_levels")
_LEVEL_BYTES = struct_layout("Level", "concat_levels").size


@dataclass(frozen=True, eq=False, repr=False)
class CascadePlan(Plan):
    """A plan of a cascade on a GPU: that of its levels as one batch, or of its only level."""

    flat: Plan | None = None
    levels: LevelBatch | None = None

    def update(self) -> None:
        """Follow the present contents of the index arrays: two launches, one if there is one level.

        Of more than eight levels every eight take one launch more.
        """
        if self.levels is not None:
            self.levels.update()
        if self.flat is not None:
            self.flat.update()


class CascadeCall(NamedTuple):
    """A cascade, but for the cache: what a plan of it must know."""

    op: str
    q: Array  # [nnz, num_qo_heads, head_dim]
    qo_indptr: tuple[Array, ...]
    tables: tuple[PageTable, ...]
    row_order: Array | None
    causal: bool
    window_left: int

    def batch(self, head_dim_vo: int) -> LevelBatch | None:
        """Put all levels into one batch; None: there is one level, or nothing to attend from."""
        if (len(self.tables) == 1 and self.row_order is None) or self.q.size == 0:
            return None
        return LevelBatch(self, head_dim_vo)

    def paged(self, levels: LevelBatch | None) -> PagedCall:
        """Give the call of that batch, or of the leaves alone."""
        requests = self.qo_indptr[-1], self.tables[-1]
        if levels is not None:
            requests = levels.qo_indptr, levels.table
        return PagedCall(self.op, self.q, *requests, self.causal, self.window_left, None, levels)


class LevelBatch:
    """The requests of all levels, those of the root first, as one batch in device memory.

    Row ``r`` of the leaves is row ``r`` of the batch, that of the level above them is row
    ``num_rows + r``, and so on. Between the requests of two levels is one without rows. ``o`` and
    ``lse`` take the states of rows over keys of other launches than the leaves' own: of a level
    that is cut into few items one behind the other, which the leaves merge (kernels/common/
    levels.cuh).
    """

    __slots__ = (
        "_given", "_launches", "_memory", "first_seen", "for_shared", "lse", "num_leaf_tokens",
        "num_leaves", "num_levels", "num_rows", "num_shared", "o", "packed", "qo_indptr",
        "signature", "table",
    )  # fmt: skip

    def __init__(self, call: CascadeCall, head_dim_vo: int) -> None:
        op, q, qo_indptr, tables, row_order, _, window_left = call
        num_levels, (num_q_rows, num_qo_heads, _) = len(tables), q.shape
        num_rows = num_q_rows if row_order is None else max(1, row_order.size)
        self.num_levels, self.num_rows = num_levels, num_rows
        self.num_leaves = tables[-1].batch_size
        self.num_leaf_tokens = tables[-1].indices.size * tables[-1].page_size
        sizes = {
            "indptr": sum(t.batch_size + 1 for t in tables),
            "indices": sum(t.indices.size for t in tables),
            "last_page_len": sum(t.batch_size + 1 for t in tables),
            "qo_indptr": sum(t.batch_size + 1 for t in tables),
            "q_rows": num_levels * num_rows,
            "o_rows": 0 if row_order is None else num_rows,
            "first_seen": num_levels * num_rows if window_left >= 0 else 0,
        }
        self.num_shared = sizes["indptr"] - (self.num_leaves + 1)
        memory = empty(op, (sum(sizes.values()),), _INT32, cp, like=q)
        ends = itertools.accumulate(sizes.values())
        parts = {
            name: memory[end - size : end]
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        self.qo_indptr = parts["qo_indptr"]
        self.first_seen = parts["first_seen"] if window_left >= 0 else None
        self.table = PageTable(
            parts["indptr"], parts["indices"], parts["last_page_len"][:-1], tables[0].page_size
        )
        # Into so many items a tile is cut if a level is all of the work.
        splits = num_sms(q.data.device_id) * _TILE_ROWS // (num_rows * num_qo_heads)
        splits = max(1, min(splits, _MAX_STATES // max(1, num_levels - 1)))
        num_states = 1 + (num_levels - 1) * splits  # of a row
        rows = (num_states * num_rows, num_qo_heads)
        self.o = empty(op, (*rows, head_dim_vo), FLOAT32, cp, like=q)
        self.lse = empty(op, rows, FLOAT32, cp, like=q)
        self.signature = (
            num_levels, num_rows, self.num_leaves, self.num_leaf_tokens, self.num_shared,
            self.first_seen is None,
        )  # fmt: skip
        pointers = {name: part.data.ptr if part.size else 0 for name, part in parts.items()}
        in_order = row_order is None
        sizes_of_rows = num_rows, num_levels, in_order
        of_shared = pack_levels(pointers["q_rows"], 0, 0, 0, *sizes_of_rows, splits, 0)
        self.for_shared = (
            self.o.data.ptr, self.lse.data.ptr, 0, pointers["first_seen"], of_shared
        )  # fmt: skip
        # Without an order, rows of the leaves are those of q and of the results.
        q_rows = 0 if row_order is None else pointers["q_rows"]
        self.packed = pack_levels(
            q_rows,
            pointers["o_rows"],
            self.o.data.ptr,
            self.lse.data.ptr,
            *sizes_of_rows,
            0,
            num_states,
        )
        self._memory, self._given = memory, (qo_indptr, tables, row_order)  # kept alive
        self._launches = list(self._bind(call, pointers))
        self.update()

    def _bind(self, call: CascadeCall, pointers: dict[str, int]) -> Iterator[BoundLaunch]:
        """Prepare the launches that fill the arrays, from the leaves up."""
        num_rows, num_qo_heads = self.num_rows, self.lse.shape[1]
        packed, page, request, row = [], 0, 0, (self.num_levels - 1) * num_rows
        for table, indptr in zip(call.tables, call.qo_indptr, strict=True):
            packed.append(_pack_level(table.packed, pack_index(indptr), page, request, row))
            page += table.indices.size
            request += table.batch_size + 1
            row -= num_rows
        num_states = self.lse.size - num_rows * num_qo_heads
        lse = self.lse.data.ptr + num_rows * num_qo_heads * FLOAT32.itemsize
        sizes = [n for t in call.tables for n in (t.indices.size, t.batch_size + 1)]
        num_threads = max(num_rows, num_states, *sizes)
        below = 0
        for first in range(0, self.num_levels, _AT_ONCE):
            levels = packed[::-1][first : first + _AT_ONCE]
            yield kernel("concat_levels", self.lse.data.device_id).bind(
                *one_per_thread(num_threads),
                per_call=(),
                levels=b"".join(levels).ljust(_AT_ONCE * _LEVEL_BYTES, b"\0"),
                row_order=pack_index(call.row_order),
                **pointers,
                lse=lse,
                below=below,
                num_states=num_states if first == 0 else 0,
                num_rows=num_rows,
                num_q_rows=len(call.q),
                window_left=min(call.window_left, LONGEST_WINDOW),
                num_levels=len(levels),
            )
            if self.first_seen is not None:
                below = self.first_seen[(first + _AT_ONCE - 1) * num_rows :].data.ptr

    def update(self) -> None:
        """Follow the present contents of the index arrays."""
        for launch in self._launches:
            launch()

    def require_arrays(self, call: CascadeCall) -> None:
        """Raise unless the batch was made from a call's index arrays."""
        given = call.qo_indptr, call.tables, call.row_order
        same = all(mine is theirs for mine, theirs in zip(self._given, given, strict=True))
        if not same and _packed(*self._given) != _packed(*given):
            raise ValueError(
                f"{call.op}: the plan was made from other levels; when it is updated, it follows "
                "changed contents of its own"
            )


def _packed(
    qo_indptr: tuple[Array, ...], tables: tuple[PageTable, ...], row_order: Array | None
) -> list[bytes]:
    """Pack index arrays as kernels take them: their addresses, strides and sizes."""
    return [*map(pack_index, (*qo_indptr, row_order)), *(table.packed for table in tables)]


def plan_cascade(
    call: CascadeCall,
    attention: PagedAttention,
    head_dim_vo: int,
    key: tuple[tuple[str, Any], ...],
) -> CascadePlan:
    """Put the levels into one batch, and make its work lists."""
    levels = call.batch(head_dim_vo)
    flat = attention.plan(call.paged(levels), batch_invariant=False)
    return CascadePlan(call.op, key, flat=flat, levels=levels)


def attend_cascade(
    call: CascadeCall,
    attention: PagedAttention,
    head_dim_vo: int,
    logits: tuple[float, float | None, Any],
    scales: tuple[Any, Any, Any],
    plan: Plan | None,
    results: tuple[Any, Any, bool],
) -> Any:
    """Attend by a plan, or by one made for this call.

    ``logits``, ``scales`` and ``results`` are those of ``PagedAttention.attend``.
    """
    if plan is None:
        require_eager(call.op, call.q.data.device_id)
        levels, flat = call.batch(head_dim_vo), None
    elif isinstance(plan, CascadePlan):
        levels, flat = plan.levels, plan.flat
        if levels is not None:
            levels.require_arrays(call)
    else:
        raise ValueError(f"{call.op}: the plan was made for NumPy arrays")
    return attention.attend(call.paged(levels), logits, scales, flat, results)
