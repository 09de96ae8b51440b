"""What calls of attention over pages share on a GPU: signatures, packed rows, kinds of plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cupy as cp

from cukv._arrays import Array, is_capturing
from cukv._attention import check_mask, require_plan
from cukv._index import pack_index
from cukv._sources import packer
from cukv._specialisations import KINDS
from cukv.page_table import PageTable

if TYPE_CHECKING:
    from cukv._attention import PagedCall
    from cukv._latent_attention import LatentCall
    from cukv._plan import Plan, WorkLists, WorkSizes
    from cukv.masks import Mask

pack_levels = packer("Levels")
_pack_query_rows = packer("QueryRows")

NO_LEVELS = pack_levels(0, 0, 0, 0, 0, 0, 1, 0, 0)

AS_GIVEN = (cp.ndarray, type(None))  # types that need no conversion


@dataclass(frozen=True, eq=False, slots=True)
class PlanKind:
    """What plans of one signature share. Compared by identity, so that calls find it at once."""

    key: tuple[tuple[str, Any], ...]
    device: int
    tiles: tuple[Any, ...] = ()  # of each work list; none: there is nothing to attend from
    sizes: WorkSizes | None = None


def require_planned_pages(op: str, planned: tuple[bool, int], aligned: bool, device: int) -> None:
    """Raise unless pages are aligned as those that a plan was made for, and on their device."""
    planned_aligned, planned_device = planned
    if planned_aligned != aligned:
        where = "at" if planned_aligned else "not at"
        raise ValueError(
            f"{op}: the plan was made for a cache of rows {where} multiples of 16 bytes, "
            "unlike this one"
        )
    if planned_device != device:
        raise ValueError(f"{op}: the plan was made for device={planned_device}, got {device}")


def make_work(kind: PlanKind, call: PagedCall | LatentCall) -> WorkLists | None:
    """Make work lists; None: there is nothing to attend from."""
    if kind.sizes is None:
        return None
    arrays = call.table, call.qo_indptr, call.custom_mask, call.first_seen
    return kind.sizes.make(*arrays, kind)


def work_of_call(
    call: PagedCall | LatentCall, plan: Plan | None, kind: PlanKind
) -> WorkLists | None:
    """Make the work lists of a call that brings none; None: there is nothing to attend from."""
    if plan is not None:
        require_plan(call.op, plan, kind.key)
        if kind.sizes is not None:
            raise ValueError(f"{call.op}: the plan was made for NumPy arrays")
    else:
        require_eager(call.op, kind.device)
    return make_work(kind, call)


def require_eager(op: str, device: int) -> None:
    """Raise where a call without a plan would be captured on a device."""
    if is_capturing(device):
        raise ValueError(
            f"{op}: a call that is captured into a graph needs plan=: memory of one made "
            "meanwhile would be given to others before the graph runs"
        )


def require_arrays(work: WorkLists, call: PagedCall | LatentCall) -> None:
    """Raise unless the lists were made from a call's index arrays: the kernels read both."""
    if work.table is call.table and work.qo_indptr is call.qo_indptr:  # by far the most calls
        return
    for name, mine, theirs in (
        ("table", work.table, call.table),
        ("qo_indptr", work.qo_indptr, call.qo_indptr),
    ):
        if _packed(mine) != _packed(theirs):
            raise ValueError(
                f"{call.op}: the plan was made from another {name}; when it is updated, it follows "
                "changed contents of its own"
            )


def _packed(x: PageTable | Array | None) -> bytes:
    """Pack index arrays as kernels take them: their addresses, strides and sizes."""
    return x.packed if isinstance(x, PageTable) else pack_index(x)


def array_signature(array: Array) -> tuple[Any, ...]:
    """Name what a launch depends on of an array, but for its address."""
    data = array.data
    return (array.shape, array.dtype, array.strides, data.ptr % 16, data.device_id)


def pack_query_rows(
    array: Array | None, vector_bytes: int, shape: tuple[int, ...] = (), dtype: Any = None
) -> bytes:
    """Pack an array [rows, heads, ...]; one that is not there yet will be contiguous."""
    if array is None:
        feats = shape[2] if len(shape) > 2 else 1
        row, head = shape[1] * feats * dtype.itemsize, feats * dtype.itemsize
        aligned = (row | head) % vector_bytes == 0
    else:
        (row, head), dtype = array.strides[:2], array.dtype
        aligned = are_aligned(array, vector_bytes)
    return _pack_query_rows(row, head, KINDS[dtype], aligned)


def are_aligned(rows: Array, vector_bytes: int) -> bool:
    """Tell whether every head of an array ``[rows, heads, ...]`` begins at such a multiple."""
    row, head = rows.strides[:2]
    return bool((rows.data.ptr | row | head) % vector_bytes == 0)


def mask_signature(call: PagedCall) -> tuple[Any, ...] | None:
    """Name what work lists depend on of a call's mask, but for its addresses."""
    mask = call.custom_mask
    if mask is None:
        return None
    check_mask(call.op, mask, call.table.batch_size)
    data = mask.data
    return (type(mask), data.shape, data.data.device_id if type(data) is cp.ndarray else None)


def require_mask(op: str, work: WorkLists, mask: Mask | None) -> None:
    """Raise unless a plan was made from this mask: its bits are in the work lists."""
    mine = work.mask
    if mine is None or mask is None or mine.data.data.ptr != mask.data.data.ptr:
        raise ValueError(f"{op}: the plan was made for another custom_mask")
