"""Plan: the work list of attention calls, made on the device once for all layers of a step.

A tile is a few packed query rows (row times head in group) of one request; an item a run of its
keys; a part the items of one CTA. ``kernels/plan.cu`` deals the items, ``kernels/common/work.cuh``
says what an item is. The machinery knows nothing of the kernel that works the list off but how it
cuts its work (``Cut``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
from cupy_backends.cuda.api.runtime import getDevice

from cukv._index import pack_divisor, pack_index
from cukv._kernels import WARP, BoundLaunch, kernel, packer

if TYPE_CHECKING:
    from cukv._arrays import Array
    from cukv.page_table import PageTable

_pack_work_list = packer("WorkList")

_ITEM_BYTES = 48  # sizeof(Item) in kernels/common/work.cuh
_PLAN_THREADS = 512  # MAX_THREADS in kernels/plan.cu
_COST_BITS = 29  # of all tiles' cost; kernels/plan.cu takes one bit more
_SECTION = 256  # bytes at which sections of the workspace begin

# What an item costs beside its keys (its queries, the merge of its warps), in rounds of steps.
_ITEM_ROUNDS = 2

# Batch-invariant items. 2048 keys are long enough that states cost under 1 % of the keys' bytes,
# and cut a million keys into a machine full of items.
_FIXED_ITEM_TOKENS = 2048
_MAX_FIXED_ITEMS = {True: 512, False: 16}  # of a request, if one row per request or if many


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Prepared attention work; made by a noun's ``plan`` and passed to its calls as ``plan=``.

    A plan belongs to shapes, dtypes and options, and raises when a call's differ. It keeps its
    index arrays and follows their contents when ``update`` is called; without that, a call under
    changed lengths touches no foreign memory but gives unspecified values. It serves one stream at
    a time. On NumPy arrays there is nothing to prepare: a plan only checks that its calls are the
    ones it was made for.
    """

    op: str
    key: tuple[tuple[str, Any], ...]
    work: WorkList | None = None  # on a GPU

    def update(self) -> None:
        """Follow the present contents of the index arrays that the plan was made from.

        One launch on the current stream, no synchronisation, no allocation; may be captured.
        """
        if self.work is not None:
            self.work.update()

    def _require(self, op: str, key: tuple[tuple[str, Any], ...]) -> None:
        """Raise unless a call is the one that this plan serves."""
        if self.key is key or self.key == key:
            return
        for (name, wanted), (_, got) in zip(self.key, key, strict=True):
            if wanted != got:
                raise ValueError(f"{op}: the plan was made for {name}={wanted}, got {got}")

    def __repr__(self) -> str:
        return f"Plan({self.op}, {', '.join(f'{n}={v}' for n, v in self.key)})"


class Cut(NamedTuple):
    """How a kernel cuts its work."""

    rows: int  # packed query rows of a tile
    head_dim_vo: int  # floats that a row's state takes beside its maximum and denominator
    step_tokens: int  # keys of one step of a warp, a power of two
    round_steps: int  # steps that a CTA takes side by side, a power of two
    num_parts: int  # CTAs per KV head that run at a time


class WorkSizes:
    """Sizes of the work lists of one signature, and the launch that fills them.

    Capacities are what shapes allow, so no contents of the index arrays exceed them.
    """

    __slots__ = ("_bytes", "_cut", "_fill", "_max_items", "_max_slots", "_num_kv_heads", "_offsets")

    def __init__(
        self,
        cut: Cut,
        table: PageTable,
        num_rows: int,
        group_size: int,
        num_kv_heads: int,
        *,
        one_row: bool,
        causal: bool,
        window_left: int,
        batch_invariant: bool,
    ) -> None:
        self._cut, self._num_kv_heads = cut, num_kv_heads
        batch_size, num_tokens = table.batch_size, table.indices.shape[0] * table.page_size
        # Tiles of all requests; the last tile of each may be short.
        tiles_of_row = -(-group_size // cut.rows)
        max_tiles = batch_size * tiles_of_row
        if not one_row:
            max_tiles = num_rows * group_size // cut.rows + batch_size
        most = _MAX_FIXED_ITEMS[one_row]
        if batch_invariant:
            cuts = num_tokens // _FIXED_ITEM_TOKENS  # requests with a cut, or cuts, at most
            self._max_slots = min(batch_size, cuts) * most
            if one_row:
                self._max_slots = min(self._max_slots, 2 * cuts * tiles_of_row)
            self._max_items = max_tiles + self._max_slots
        else:
            # Every part but the first may begin inside a tile, and adds an item to it.
            self._max_slots = 2 * cut.num_parts
            self._max_items = max_tiles + cut.num_parts
        states = self._max_slots * num_kv_heads * cut.rows * 4
        sections = (
            self._max_items * _ITEM_BYTES,
            cut.num_parts * _ITEM_BYTES,
            cut.num_parts * 4,
            cut.num_parts * 4,
            self._max_slots * num_kv_heads * 4,
            states * 2,
            states * cut.head_dim_vo,
        )
        self._offsets, self._bytes = [], 0
        for size in sections:
            self._offsets.append(self._bytes)
            self._bytes += -(-size // _SECTION) * _SECTION
        # Where tiles are few, every part has about one item, and costs would only shift cuts.
        item_cost = _ITEM_ROUNDS * cut.round_steps if max_tiles > cut.num_parts else 0
        # A unit of cost is a step, or more for calls whose steps int32 might not count.
        max_steps = -(-num_tokens // cut.step_tokens)
        most_steps = max_tiles * (max_steps + item_cost + cut.round_steps)
        if one_row:  # each key is a step of one request's tiles only
            most_steps = tiles_of_row * max_steps + max_tiles * (item_cost + cut.round_steps)
        one_tile = str(one_row and tiles_of_row == 1).lower()
        fixed = str(batch_invariant).lower()
        threads = min(-(-batch_size // WARP) * WARP, _PLAN_THREADS)
        fill = kernel("plan", table.device, ONE_TILE=one_tile, FIXED=fixed)
        self._fill: BoundLaunch = fill.bind(
            -(-batch_size // threads),
            threads,
            per_call=("table", "qo_indptr", "work"),
            group=pack_divisor(group_size),
            rows_per_tile=pack_divisor(cut.rows),
            num_q_rows=num_rows,
            step_bits=cut.step_tokens.bit_length() - 1,
            round_bits=cut.round_steps.bit_length() - 1,
            item_cost=item_cost,
            cost_bits=max(0, most_steps.bit_length() - _COST_BITS),
            reserved=0,
            fixed_item_tokens=_FIXED_ITEM_TOKENS,
            max_fixed_items=most,
            causal=causal,
            window_left=min(window_left, 1 << 30),
        )

    def make(self, table: PageTable, qo_indptr: Array | None, kind: Any) -> WorkList:
        """Allocate a work list and fill it from the present contents of the arrays.

        ``kind`` is what its maker wants to know it by.
        """
        memory = _alloc(self._bytes, table.device)
        base = memory.ptr
        packed = _pack_work_list(
            *[base + offset for offset in self._offsets],
            self._max_items,
            self._max_slots,
            self._cut.num_parts,
            self._num_kv_heads,
        )
        work = WorkList(self._fill, table, qo_indptr, memory, packed, kind)
        work.update()
        return work


class WorkList:
    """The work list of a plan in device memory, and the arrays that it follows."""

    __slots__ = ("_fill", "_indptr", "_memory", "_qo_indptr", "_table", "kind", "packed")

    def __init__(
        self,
        fill: BoundLaunch,
        table: PageTable,
        qo_indptr: Array | None,
        memory: cp.cuda.MemoryPointer,
        packed: bytes,
        kind: Any,
    ) -> None:
        self._fill, self._table, self._qo_indptr, self._memory = fill, table, qo_indptr, memory
        self._indptr = pack_index(qo_indptr)
        self.packed = packed  # as kernels/common/work.cuh's WorkList
        self.kind = kind

    def update(self) -> None:
        """Fill the list from the present contents of the index arrays: one launch."""
        self._fill(self._table.packed, self._indptr, self.packed)


def _alloc(num_bytes: int, device: int) -> cp.cuda.MemoryPointer:
    """Allocate bytes on a device, without the array around them, which costs as much again."""
    if getDevice() == device:
        return cp.cuda.alloc(num_bytes)
    with cp.cuda.Device(device):
        return cp.cuda.alloc(num_bytes)
