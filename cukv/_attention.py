"""What every attention call shares: checks, options, plans, and results in the caller's arrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cukv import reference
from cukv._arrays import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FP8,
    Array,
    as_array,
    home,
    read_only_reason,
    require_on_host,
)
from cukv._check import as_whole, is_boolean, match, match_dtype, match_rows, match_writable
from cukv._index import host_scale
from cukv._plan import Plan
from cukv.masks import Mask, PackedMask, RaggedMask

if TYPE_CHECKING:
    from collections.abc import Callable

    from cukv._cascade import LevelBatch
    from cukv._pages import PagePair
    from cukv.page_table import PageTable

_FLOAT64 = np.dtype(np.float64)
_HALVES = (FLOAT16, BFLOAT16)
_OUTPUTS = (*_HALVES, FLOAT32)
_SMALLEST, _LARGEST = float(np.finfo(FLOAT32).tiny), float(np.finfo(FLOAT32).max)
# Caps from here on are off: they would take nothing of any logits that may be met, and kernels
# divide by them in float32.
NO_SOFT_CAP = 2.0**80
_LONGEST_WINDOW = (1 << 31) - 1  # no request is longer


# ------------------------------------------------------------------------------------------ checks


def check_queries(op: str, name: str, q: Array, cache_dtype: np.dtype[Any]) -> None:
    """Raise unless q's dtype goes with the dtype of the keys.

    Strides are checked in NumPy only, where no launch does.
    """
    on_host = isinstance(q, np.ndarray)
    if on_host:
        match_rows(op, name, q)
    match_dtype(op, name, q, *_HALVES, *FP8, *((FLOAT32, _FLOAT64) if on_host else ()))
    if q.dtype != cache_dtype and q.dtype in _HALVES and cache_dtype in _HALVES:
        raise TypeError(
            f"{op}: {name} and a 16-bit cache share a dtype, got {q.dtype.name} "
            f"and {cache_dtype.name}"
        )


def check_heads(op: str, num_qo_heads: int, num_kv_heads: int) -> None:
    """Raise unless the query heads fall into whole groups, one per KV head."""
    if num_kv_heads == 0 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"{op}: num_qo_heads must be a multiple of num_kv_heads={num_kv_heads}, "
            f"got {num_qo_heads}"
        )


def check_options(
    op: str,
    head_dim: int,
    num_qo_heads: int,
    *,
    sm_scale: float | None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    like: Array | None = None,
) -> dict[str, Any]:
    """Check the options that shape the logits, and give them as the definitions take them.

    ``sinks`` must be in the home of ``like``.
    """
    # Heads without elements have logits of 0, at any scale.
    default = 1.0 / math.sqrt(max(head_dim, 1))
    scale = default if sm_scale is None else host_scale(op, "sm_scale", sm_scale)
    cap = check_soft_cap(op, logits_soft_cap)
    if sinks is not None:
        sinks = as_array(op, "sinks", sinks, like)
        match(op, "sinks", sinks, ("num_qo_heads",), {"num_qo_heads": num_qo_heads})
        extra = (_FLOAT64,) if home(op, q=like, sinks=sinks) is np else ()
        match_dtype(op, "sinks", sinks, *_OUTPUTS, *extra)
        if isinstance(sinks, np.ndarray) and not (sinks.astype(np.float64) < np.inf).all():
            raise ValueError(f"{op}: sinks must be numbers or -inf, got NaN or inf")
    return {
        "sm_scale": scale,
        "window_left": check_window(op, window_left),
        "logits_soft_cap": cap or None,
        "sinks": sinks,
    }


def check_window(op: str, window_left: int) -> int:
    """Give the window as an int: keys to the left of the query's own position; -1 is off."""
    window = as_whole(op, "window_left", window_left)
    if window is None or window < -1:
        raise ValueError(f"{op}: window_left must be a whole number, -1 = off, got {window_left}")
    return min(window, _LONGEST_WINDOW)


def check_soft_cap(op: str, logits_soft_cap: Any) -> float | None:
    """Give the soft cap as a float; None is off, and so are 0 and caps above all logits."""
    if logits_soft_cap is None:
        return None
    require_on_host(op, "logits_soft_cap", logits_soft_cap)
    if isinstance(logits_soft_cap, np.ndarray) and logits_soft_cap.size == 1:  # as scales may be
        logits_soft_cap = logits_soft_cap.reshape(())[()]
    if isinstance(logits_soft_cap, (str, bytes)):
        raise TypeError(f"{op}: logits_soft_cap must be one number, got {logits_soft_cap!r}")
    try:
        cap = float(logits_soft_cap)
    except (TypeError, ValueError, OverflowError):
        cap = math.nan
    # As float32, which a kernel takes it in: smaller numbers are 0 there, and would be off.
    if not (cap == 0 or _SMALLEST <= cap <= _LARGEST) or is_boolean(logits_soft_cap):
        raise ValueError(
            f"{op}: logits_soft_cap must be finite and 0 or more (0 = off), in float32, "
            f"got {logits_soft_cap}"
        )
    return cap if cap < NO_SOFT_CAP else None


def check_mask(op: str, mask: Any, batch_size: int) -> None:
    """Raise unless a custom mask is a mask of this batch."""
    if not isinstance(mask, (RaggedMask, PackedMask)):
        raise TypeError(f"{op}: custom_mask must be a RaggedMask or PackedMask, got {type(mask)}")
    got = len(mask.qo_indptr) - 1
    if got != batch_size:
        raise ValueError(f"{op}: custom_mask must have batch_size={batch_size} requests, got {got}")


def flat_mask(op: str, mask: Mask, qo_indptr: Array, kv_indptr: Array) -> Array:
    """Give a NumPy mask as flat booleans, checked against the lengths of the call."""
    for name, mine, theirs in (
        ("qo_len", mask.qo_indptr, qo_indptr),
        ("kv_len", mask.kv_indptr, kv_indptr),
    ):
        lens, wanted = np.diff(mine), np.diff(theirs)
        wrong = np.flatnonzero(lens != wanted)
        if len(wrong):
            b = int(wrong[0])
            raise ValueError(
                f"{op}: custom_mask has {name}={lens[b]} for request {b}, the call {wanted[b]}"
            )
    mask.validate()
    if isinstance(mask, PackedMask):
        return reference.unpack_mask(mask.data, mask.indptr, mask.qo_indptr, mask.kv_indptr)
    return mask.data[: int(mask.indptr[-1])]


# ------------------------------------------------------------------------------------------- plans


def plan_key(q: Array, *, mask: Mask | None = None, **parts: Any) -> tuple[tuple[str, Any], ...]:
    """Name what a plan depends on: shapes, dtypes and the options that change the work."""
    kind = None if mask is None else type(mask).__name__
    return (("q", (tuple(q.shape), q.dtype.name)), *parts.items(), ("custom_mask", kind))


def require_plan(op: str, plan: Plan | None, key: tuple[tuple[str, Any], ...]) -> None:
    """Raise unless the call was given no plan, or the plan made for it."""
    if plan is None:
        return
    if not isinstance(plan, Plan):
        raise TypeError(f"{op}: plan must be a Plan, got {type(plan)}")
    if plan.op != op:
        raise ValueError(f"{op}: the plan was made for {plan.op}")
    plan._require(op, key)


class PagedCall(NamedTuple):
    """Attention over pages, but for the cache: what a plan of it must know."""

    op: str
    q: Array  # [rows, num_qo_heads, head_dim]
    qo_indptr: Array | None  # rows of each request; without it there is one
    table: PageTable
    causal: bool
    window_left: int
    custom_mask: Mask | None = None
    levels: LevelBatch | None = None  # of a cascade on a GPU, whose requests `table` has

    @property
    def first_seen(self) -> Array | None:
        """Where each row's window begins, ``[rows]`` int32; None: at its position's distance."""
        return None if self.levels is None else self.levels.first_seen


def check_paged_call(call: PagedCall, pages: PagePair) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """Check a call against a paged cache: (what a plan depends on, home)."""
    op, q, qo_indptr, table, causal, window_left, custom_mask, _ = call
    pages.check_table(op, table)
    k, _ = pages
    _, page_size, num_kv_heads, head_dim = k.array.shape
    dims: dict[str, int | None] = {"batch_size": table.batch_size, "head_dim": head_dim}
    first = "batch_size" if qo_indptr is None else "nnz"
    match(op, "q", q, (first, "num_qo_heads", "head_dim"), dims)
    if qo_indptr is not None and len(qo_indptr) - 1 != table.batch_size:
        raise ValueError(
            f"{op}: q must have batch_size={table.batch_size} requests, got {len(qo_indptr) - 1}"
        )
    check_heads(op, q.shape[1], num_kv_heads)
    check_queries(op, "q", q, k.dtype)
    arrays = {"q": q, "cache": k.array, "table": table.indptr}
    if custom_mask is not None:
        check_mask(op, custom_mask, table.batch_size)
        arrays["custom_mask"] = custom_mask.data
    key = plan_key(
        q,
        cache=(page_size, num_kv_heads, pages.planned_head_dim_vo, k.dtype.name),
        batch_size=table.batch_size,
        indices=len(table.indices),
        causal=causal,
        window_left=check_window(op, window_left),
        mask=custom_mask,
    )
    return key, home(op, **arrays)


# ----------------------------------------------------------------------------------------- results


def check_results(
    op: str, q: Array, head_dim_vo: int, out: Any, lse: Any
) -> tuple[Array | None, Array | None]:
    """Give the arrays for the results, checked, where they were given."""
    rows, num_qo_heads = q.shape[:2]
    shape = {"rows": rows, "num_qo_heads": num_qo_heads, "head_dim_vo": head_dim_vo}
    extra = (_FLOAT64,) if isinstance(q, np.ndarray) else ()
    checked = []
    for name, given, dtypes in (("out", out, (*_OUTPUTS, *extra)), ("lse", lse, (FLOAT32,))):
        array = None if given is None else as_array(op, name, given)
        checked.append(array)
        if array is None:
            continue
        home(op, q=q, **{name: array})
        match(op, name, array, tuple(shape)[: 3 if name == "out" else 2], dict(shape))
        match_dtype(op, name, array, *dtypes)
        if (reason := read_only_reason(given, op)) is not None:
            raise TypeError(f"{op}: {name} is {reason}")
        match_writable(op, name, array)
        match_rows(op, name, array)
    return checked[0], checked[1]


def output_dtype(q: Array) -> np.dtype[Any]:
    """Give the dtype of an output that the caller brought no array for."""
    return BFLOAT16 if q.dtype in FP8 else q.dtype  # type: ignore[no-any-return]


def run_on_host(
    op: str,
    q: Array,
    head_dim_vo: int,
    definition: Callable[[], tuple[Array, Array]],
    out: Array | None,
    lse: Array | None,
    return_lse: bool,
) -> Any:
    """Run a definition and give its results in q's dtype or in the arrays given for them."""
    out, lse = check_results(op, q, head_dim_vo, out, lse)
    o, exact_lse = definition()
    if out is None:
        out = np.empty(o.shape, output_dtype(q))
    # Through float32, as the kernels round: their accumulators are float32.
    with np.errstate(over="ignore"):  # a value beyond the dtype is infinite
        out[...] = o.astype(np.float32).astype(out.dtype) if out.dtype != _FLOAT64 else o
    if lse is None:
        lse = exact_lse.astype(np.float32)
    else:
        lse[...] = exact_lse
    return (out, lse) if return_lse else out


def host_scales(op: str, **scales: Any) -> dict[str, float]:
    """Give scales as floats, for the definitions."""
    return {name: host_scale(op, name, value) for name, value in scales.items()}
