"""Plan: the work lists of attention calls, made on the device once for all layers of a step.

A tile is a few packed query rows (row times head in group) of one request; an item a run of its
keys; a part the items of one CTA. ``kernels/plan.cu`` deals the items, ``kernels/common/work.cuh``
says what an item is, ``kernels/common/mask.cuh`` what becomes of a custom mask. The machinery knows
nothing of the kernel that works a list off but how it cuts its work (``Cut``).
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
from cupy_backends.cuda.api.runtime import getDevice

from cukv._index import pack_divisor, pack_index
from cukv._kernels import WARP, BoundLaunch, kernel, num_sms
from cukv._sources import packer, struct_layout
from cukv.masks import PackedMask, given_indptr

if TYPE_CHECKING:
    from collections.abc import Callable

    from cukv._arrays import Array
    from cukv.masks import Mask
    from cukv.page_table import PageTable

_pack_work_list = packer("WorkList")
_pack_tile_list = packer("TileList")
_pack_mask_tiles = packer("MaskTiles")
_pack_mask_source = packer("MaskSource", "mask_tiles")

_NO_LIST = bytes(struct_layout("TileList").size)
_NO_MASK = bytes(struct_layout("MaskTiles").size)

LONGEST_WINDOW = 1 << 30  # MAX_TOKENS in kernels/common/tiles.cuh: no request is longer
_ITEM_BYTES = 48  # sizeof(Item) in kernels/common/work.cuh
_PLAN_THREADS = 512  # MAX_THREADS in kernels/plan.cu
_TEAM_THREADS = 2048  # of all requests' teams, if there are fewer requests: each thread sums up all
_MASK_THREADS = 256  # MASK_THREADS in kernels/mask_tiles.cu
_MASK_CTAS_PER_SM = 4
_MASK_STEP = 128  # keys, kernels/common/mask.cuh
_COST_BITS = 29  # of all tiles' cost; kernels/plan.cu takes one bit more
_SECTION = 256  # bytes at which sections of the workspace begin

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
    a time. A captured graph works in the memory of its plans: they must live as long as it is
    replayed, as must all arrays that it reads and writes. On NumPy arrays there is nothing to
    prepare: a plan only compares shapes, dtypes and options.
    """

    op: str
    key: tuple[tuple[str, Any], ...]
    work: WorkLists | None = None  # on a GPU
    batch_invariant: bool = False

    def update(self) -> None:
        """Follow the present contents of the index arrays and the mask that the plan was made from.

        One launch on the current stream, one more with a mask, no synchronisation, no allocation;
        may be captured.
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
        fields = [*self.key, ("batch_invariant", self.batch_invariant)]
        return f"Plan({self.op}, {', '.join(f'{n}={v}' for n, v in fields)})"


class Cut(NamedTuple):
    """How a kernel cuts its work."""

    rows: int  # packed query rows of a tile, a power of two
    head_dim_vo: int  # floats that a row's state takes beside its maximum and denominator
    step_tokens: int  # keys of one step of a warp, a power of two
    round_steps: int  # steps that a CTA takes side by side, a power of two
    item_steps: int  # what an item costs beside its keys (its queries, the merge of its warps)
    num_parts: int  # CTAs per KV head that run at a time
    min_rows: int = 0  # it serves requests of min_rows to max_rows packed rows
    max_rows: int = (1 << 31) - 1
    cut_cost: int = 0  # steps that tiles cut at both ends of a part cost it; 0: little
    merges: bool = False  # of a cascade: it has every leaf, but keys only of those that it serves


class Batch(NamedTuple):
    """Sizes of a call that bound what its index arrays can hold."""

    batch_size: int
    num_tokens: int  # that the table has room for
    num_rows: int  # of q
    group_size: int
    num_kv_heads: int
    one_row: bool  # of each request
    mask_elements: int | None  # of all requests; None: there is no mask
    num_shared: int = 0  # requests of a cascade that come before its leaves


class _ListSizes:
    """Sizes of the work list of one kernel. No contents of the index arrays exceed them."""

    __slots__ = (
        "_list_offsets", "_mask", "_state_offsets", "_tail", "_work", "list_bytes", "max_tiles",
        "state_bytes", "ticket_bytes",
    )  # fmt: skip

    def __init__(self, cut: Cut, batch: Batch, batch_invariant: bool) -> None:
        batch_size, num_tokens, num_rows, group_size, num_kv_heads, one_row, elements, _ = batch
        # Tiles of all requests; the last tile of each may be short.
        tiles_of_row = -(-group_size // cut.rows)
        self.max_tiles = max_tiles = batch_size * tiles_of_row
        if not one_row:
            self.max_tiles = max_tiles = num_rows * group_size // cut.rows + batch_size
        most = _MAX_FIXED_ITEMS[one_row]
        if batch_invariant:
            cuts = num_tokens // _FIXED_ITEM_TOKENS  # requests with a cut, or cuts, at most
            max_slots = min(batch_size, cuts) * most
            if one_row:
                max_slots = min(max_slots, 2 * cuts * tiles_of_row)
            max_items = max_tiles + max_slots
        else:
            # Every part but the first may begin inside a tile, and adds an item to it.
            max_slots = 2 * cut.num_parts
            max_items = max_tiles + cut.num_parts
        max_entries = mask_tiles = tile_queries = 0
        if elements is not None:
            # A request has a row of steps for each tile. Rounding up either adds one, and so does
            # a mask that ends inside of a tile.
            steps = num_tokens // _MASK_STEP + 1
            max_entries = elements * group_size // (cut.rows * _MASK_STEP) + 1
            max_entries += max_tiles + 2 * steps
            mask_tiles = max_tiles
            tile_queries = cut.rows // group_size
            if cut.rows % group_size:
                tile_queries = (cut.rows - 2) // group_size + 2
        states = max_slots * num_kv_heads * cut.rows * 4
        # What calls read, tickets, which they find and leave at zero, and what they write.
        self._list_offsets, self.list_bytes = _lay_out(
            max_items * _ITEM_BYTES,
            cut.num_parts * _ITEM_BYTES,
            cut.num_parts * 4,
            cut.num_parts * 4,
            max_entries * 4,
            max_entries * tile_queries * _MASK_STEP // 8,
            mask_tiles * 8,
        )
        _, self.ticket_bytes = _lay_out((max_slots + 2) * num_kv_heads * 4)
        self._state_offsets, self.state_bytes = _lay_out(states * 2, states * cut.head_dim_vo)
        self._work = (max_items, max_slots, cut.num_parts, num_kv_heads)
        row_bits = cut.rows.bit_length() - 1
        self._mask = (max_entries, mask_tiles, tile_queries, row_bits) if mask_tiles else None
        # Where tiles are few, every part has about one item, and costs would only shift cuts.
        # What leaves share are a few long tiles, whatever the leaves are.
        few = max_tiles <= cut.num_parts or (batch.num_shared > 0 and not cut.merges)
        item_cost = 0 if few else cut.item_steps
        # A unit of cost is a step, or more for calls whose steps int32 might not count.
        max_steps = -(-num_tokens // cut.step_tokens)
        # Each key is a step of one request's tiles only.
        most_rows = min(num_rows * group_size, cut.max_rows)
        tiles = tiles_of_row if one_row else -(-most_rows // cut.rows)
        most_steps = tiles * max_steps + max_tiles * (item_cost + cut.round_steps)
        self._tail = (
            row_bits,
            cut.min_rows,
            cut.max_rows,
            cut.step_tokens.bit_length() - 1,
            cut.round_steps.bit_length() - 1,
            item_cost,
            max(0, most_steps.bit_length() - _COST_BITS),
            cut.cut_cost,
            _FIXED_ITEM_TOKENS,
            most,
            batch.num_shared,
            cut.merges,
        )

    def pack(self, base: int, tickets: int, states: int) -> tuple[bytes, bytes]:
        """Pack a list at these addresses, as WorkList and as TileList of kernels/common."""
        *items, entries, words, tiles = (base + offset for offset in self._list_offsets)
        mask = _NO_MASK
        if self._mask is not None:
            mask = _pack_mask_tiles(entries, words, tiles, *self._mask)
        written = (states + offset for offset in self._state_offsets)
        packed = _pack_work_list(*items, tickets, *written, *self._work, mask)
        return packed, _pack_tile_list(packed, *self._tail)


# Lists as kernels/common/work.cuh's WorkList, which calls take, and as two TileLists for the plan.
_Packed = tuple[tuple[bytes, ...], tuple[bytes, ...]]


def _lay_out(*sections: int) -> tuple[list[int], int]:
    """Give the offsets of sections of so many bytes, and the bytes of all."""
    rounded = [-(-size // _SECTION) * _SECTION for size in sections]
    *offsets, num_bytes = itertools.accumulate(rounded, initial=0)
    return offsets, num_bytes


class _Placement(threading.local):
    """Where this thread's plans lie; None: in memory of CuPy's allocator."""

    # Gives the addresses of so many bytes of lists, of tickets and of states.
    place: Callable[[int, int, int], tuple[int, int, int]] | None = None


placement = _Placement()


class WorkSizes:
    """Sizes of the work lists of one signature, and the launches that fill them.

    There is one list per ``Cut``, at most two.
    """

    __slots__ = ("_at", "_bytes", "_fills", "_lists")

    def __init__(
        self,
        cuts: tuple[Cut, ...],
        batch: Batch,
        device: int,
        *,
        causal: bool,
        window_left: int,
        batch_invariant: bool,
        mask_kind: type | None = None,
    ) -> None:
        self._lists = [_ListSizes(cut, batch, batch_invariant) for cut in cuts]
        self._bytes = (
            sum(sizes.list_bytes for sizes in self._lists),
            sum(sizes.ticket_bytes for sizes in self._lists),
            sum(sizes.state_bytes for sizes in self._lists),
        )
        # Memory of a pool comes back at the same address: lists as they were packed there.
        self._at: tuple[tuple[int, int, int], _Packed] = (-1, -1, -1), ((), ())
        max_tiles = max(sizes.max_tiles for sizes in self._lists)
        window_left = min(window_left, LONGEST_WINDOW)
        shared = {"group": pack_divisor(batch.group_size), "num_q_rows": batch.num_rows}
        fill_mask: BoundLaunch | None = None
        if mask_kind is not None:
            num_ctas = min(max_tiles, num_sms(device) * _MASK_CTAS_PER_SM)
            is_bits = str(mask_kind is PackedMask).lower()
            fill_mask = kernel("mask_tiles", device, BITS=is_bits).bind(
                num_ctas * len(cuts),
                _MASK_THREADS,
                per_call=("table", "qo_indptr", "first", "second", "source"),
                num_ctas=num_ctas,
                window_left=window_left,
                **shared,
            )
            causal, window_left = False, -1  # the mask replaces the one, and has the other
        # As many threads to a request as it may have tiles, if requests are few.
        one_tile = batch.one_row and max_tiles == batch.batch_size
        # Of a cascade as many as one CTA has, which knows of all tiles whether whole ones suit.
        team_threads = _PLAN_THREADS if batch.num_shared else _TEAM_THREADS
        most = 1 if one_tile else min(max_tiles, _PLAN_THREADS, team_threads // batch.batch_size)
        team_bits = max(most, 1).bit_length() - 1
        num_threads = batch.batch_size << team_bits
        threads = min(-(-num_threads // WARP) * WARP, _PLAN_THREADS)
        num_ctas = -(-num_threads // threads)
        template_args = {
            "ONE_TILE": str(one_tile).lower(),
            "FIXED": str(batch_invariant).lower(),
        }
        fill: BoundLaunch = kernel("plan", device, **template_args).bind(
            num_ctas * len(cuts),
            threads,
            per_call=("table", "qo_indptr", "first", "second", "first_seen"),
            num_ctas=num_ctas,
            team_bits=team_bits,
            causal=causal,
            window_left=window_left,
            **shared,
        )
        self._fills = fill, fill_mask

    def make(
        self,
        table: PageTable,
        qo_indptr: Array | None,
        mask: Mask | None,
        first_seen: Array | None,
        kind: Any,
    ) -> WorkLists:
        """Allocate work lists and fill them from the present contents of the arrays.

        ``kind`` is what their maker wants to know them by; ``first_seen`` is ``PagedCall``'s.
        """
        list_bytes, ticket_bytes, state_bytes = self._bytes
        memory = None
        if placement.place is not None:
            addresses = placement.place(list_bytes, ticket_bytes, state_bytes)
        else:
            memory = _alloc(list_bytes + ticket_bytes + state_bytes, table.device)
            tickets = memory.ptr + list_bytes
            addresses = memory.ptr, tickets, tickets + ticket_bytes
        packed_at, packed = self._at
        if packed_at != addresses:
            packed = self._pack(*addresses)
            self._at = addresses, packed
        lists = WorkLists(self._fills, table, qo_indptr, mask, first_seen, memory, packed, kind)
        lists.update()
        return lists

    def _pack(self, base: int, tickets: int, states: int) -> _Packed:
        """Pack the lists, which lie one after the other from these addresses."""
        packed = []
        for sizes in self._lists:
            packed.append(sizes.pack(base, tickets, states))
            base += sizes.list_bytes
            tickets += sizes.ticket_bytes
            states += sizes.state_bytes
        of_calls, of_plan = zip(*packed, strict=True)
        return of_calls, (*of_plan, *(_NO_LIST,) * (2 - len(packed)))


class WorkLists:
    """The work lists of a plan in device memory, and the arrays that they follow."""

    __slots__ = (
        "_arguments", "_fills", "_first_seen", "_memory", "_source", "kind", "mask", "packed",
        "qo_indptr", "table",
    )  # fmt: skip

    def __init__(
        self,
        fills: tuple[BoundLaunch, BoundLaunch | None],
        table: PageTable,
        qo_indptr: Array | None,
        mask: Mask | None,
        first_seen: Array | None,
        memory: cp.cuda.MemoryPointer | None,
        packed: _Packed,
        kind: Any,
    ) -> None:
        self.table, self.qo_indptr, self.mask, self.kind = table, qo_indptr, mask, kind
        self._first_seen, self._memory, self._fills = first_seen, memory, fills
        self.packed, lists = packed
        self._arguments = (table.packed, pack_index(qo_indptr), *lists)
        self._source = b"" if mask is None else _pack_mask(mask)

    def update(self) -> None:
        """Fill the lists from the present contents of the arrays."""
        fill, fill_mask = self._fills
        if fill_mask is not None:
            fill_mask(*self._arguments, self._source)
        fill(*self._arguments, 0 if self._first_seen is None else self._first_seen.data.ptr)


def _pack_mask(mask: Mask) -> bytes:
    """Pack a mask as it lies in memory; where its requests start is worked out by the kernel."""
    given = given_indptr(mask) if isinstance(mask, PackedMask) else None
    return _pack_mask_source(
        mask.data.data.ptr,
        mask.data.strides[0],
        mask.data.shape[0],
        pack_index(mask.qo_indptr),
        pack_index(mask.kv_indptr),
        pack_index(given),
    )


def _alloc(num_bytes: int, device: int) -> cp.cuda.MemoryPointer:
    """Allocate bytes on a device, without the array around them, which costs as much again."""
    if getDevice() == device:
        return cp.cuda.alloc(num_bytes)
    with cp.cuda.Device(device):
        return cp.cuda.alloc(num_bytes)
