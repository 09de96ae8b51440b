"""Merging of attention states over disjoint keys."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from cukv import reference
from cukv._arrays import FLOAT32, Array, alignment, as_array, empty, home, read_only_reason
from cukv._check import match, match_aligned, match_dtype, match_rows, match_writable
from cukv._kernels import kernel, one_per_thread
from cukv._sources import struct_layout
from cukv._specialisations import STATE_DTYPES, vector_size

_FLOAT64 = np.dtype(np.float64)
_VECS_PER_LANE = 2  # what a team covers at a time, see kernels/merge_states.cu
_CTA_THREADS = 128  # the __launch_bounds__ there
_MAX_TEAM_BITS = 5  # a team is a warp at most
_pack_states = struct.Struct(struct_layout("States", "merge_states").format).pack

# o [n, heads, head_dim] and lse [n, heads] of one or more states, as a kernel takes them: pointers
# of o and lse, their row, head and state strides.
_States = tuple[int, int, tuple[int, int, int], tuple[int, int, int]]


def merge_states(
    o: Array, lse: Array, *, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Combine the attention states of k disjoint sets of keys, per row and head.

    The result is the state of all keys together:

        lse = log2(sum_j 2 ** lse[:, j])        o = sum_j 2 ** (lse[:, j] - lse) * o[:, j]

    Parameters
    ----------
    o : [n, k, heads, head_dim] float16, bfloat16 or float32; in NumPy float64 too
        Outputs. Any strides with a contiguous last axis; any k, 0 too.
    lse : [n, k, heads] float32
        Log-sum-exps in **base 2**. A state with lse -inf has no key: its o may hold anything.
        +inf and NaN are no lse: ValueError on NumPy, unspecified for their row on the device.
    out : (o, lse)
        Arrays to write, ``[n, heads, head_dim]`` of any of the dtypes and ``[n, heads]`` float32.
        They may be those of one state, exactly, but must not overlap the states otherwise.

    Returns
    -------
    o : [n, heads, head_dim]
        Dtype of ``o``. 0 where no state has a key. One live state comes out bit for bit.
    lse : [n, heads] float32
        Base 2; -inf where no state has a key.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, shape, home or device; on NumPy also an lse of +inf or NaN.

    Notes
    -----
    Current stream, no synchronisation. Source: kernels/merge_states.cu.

    Examples
    --------
    >>> import numpy as np
    >>> o = np.array([0, 1], np.float32).reshape(1, 2, 1, 1)  # a row of two states
    >>> lse = np.log2(np.array([2, 8], np.float32)).reshape(1, 2, 1)
    >>> o, lse = merge_states(o, lse)
    >>> o.shape, f"{o.item():.3f}", f"{2 ** lse.item():.3f}"
    ((1, 1, 1), '0.800', '10.000')
    """
    op = "merge_states"
    o, lse = as_array(op, "o", o), as_array(op, "lse", lse)
    xp = home(op, o=o, lse=lse)
    dims: dict[str, int | None] = {}
    match(op, "o", o, ("n", "k", "heads", "head_dim"), dims)
    match(op, "lse", lse, ("n", "k", "heads"), dims)
    _match_state(op, "o", o, "lse", lse, xp)
    n, k, num_heads, head_dim = o.shape
    o_out, lse_out = _outputs(op, (n, num_heads, head_dim), o, out, xp)
    if xp is np:
        return _store(reference.merge_states(o, lse), o_out, lse_out)
    row, state, head, _ = o.strides
    lse_row, lse_state, lse_head = lse.strides
    strides, lse_strides = (row, head, state), (lse_row, lse_head, lse_state)
    first = (o.data.ptr, lse.data.ptr, strides, lse_strides)
    rest = (o.data.ptr + state, lse.data.ptr + lse_state, strides, lse_strides)
    _launch(first, rest, k, o.dtype, o_out, lse_out)
    return o_out, lse_out


def merge_state(
    o_a: Array,
    lse_a: Array,
    o_b: Array,
    lse_b: Array,
    *,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Combine two attention states over disjoint keys: ``merge_states`` of two, without a copy.

    Parameters
    ----------
    o_a, o_b : [n, heads, head_dim] float16, bfloat16 or float32; in NumPy float64 too
        Outputs, of one dtype. Any strides with a contiguous last axis.
    lse_a, lse_b : [n, heads] float32
        Log-sum-exps in **base 2**; -inf where a state has no key.
    out : (o, lse)
        Arrays to write, as in ``merge_states``; ``out=(o_a, lse_a)`` merges in place.

    Returns
    -------
    o : [n, heads, head_dim], lse : [n, heads] float32
        As ``merge_states``.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, shape, home or device; on NumPy also an lse of +inf or NaN.

    Notes
    -----
    Current stream, no synchronisation. Source: kernels/merge_states.cu.
    """
    op = "merge_state"
    o_a, lse_a = as_array(op, "o_a", o_a), as_array(op, "lse_a", lse_a)
    o_b, lse_b = as_array(op, "o_b", o_b), as_array(op, "lse_b", lse_b)
    xp = home(op, o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
    dims: dict[str, int | None] = {}
    match(op, "o_a", o_a, ("n", "heads", "head_dim"), dims)
    match(op, "lse_a", lse_a, ("n", "heads"), dims)
    match(op, "o_b", o_b, ("n", "heads", "head_dim"), dims)
    match(op, "lse_b", lse_b, ("n", "heads"), dims)
    _match_state(op, "o_a", o_a, "lse_a", lse_a, xp)
    _match_state(op, "o_b", o_b, "lse_b", lse_b, xp)
    match_dtype(op, "o_b", o_b, o_a.dtype)
    o_out, lse_out = _outputs(op, o_a.shape, o_a, out, xp)
    if xp is np:
        return _store(reference.merge_state(o_a, lse_a, o_b, lse_b), o_out, lse_out)
    _launch(_one_state(o_a, lse_a), _one_state(o_b, lse_b), 2, o_a.dtype, o_out, lse_out)
    return o_out, lse_out


# ------------------------------------------------------------------------------------------- parts


def _match_state(op: str, o_name: str, o: Array, lse_name: str, lse: Array, xp: Any) -> None:
    extra = (_FLOAT64,) if xp is np else ()
    match_dtype(op, o_name, o, *STATE_DTYPES, *extra)
    match_dtype(op, lse_name, lse, FLOAT32, *extra)
    match_rows(op, o_name, o)
    match_aligned(op, lse_name, lse)
    if not o.shape[-1]:
        raise ValueError(f"{op}: {o_name} must have a head_dim of 1 or more, got {list(o.shape)}")


def _outputs(
    op: str, shape: tuple[int, ...], like: Array, out: tuple[Array, Array] | None, xp: Any
) -> tuple[Array, Array]:
    """Give the arrays to write: new ones, or those given, checked."""
    if out is None:
        lse = empty(op, shape[:2], FLOAT32, xp, like=like)
        return empty(op, shape, like.dtype, xp, like=like), lse
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"{op}: out must be a pair (o, lse) of arrays, got {type(out)}")
    o, lse = (as_array(op, f"out[{i}]", x) for i, x in enumerate(out))
    home(op, o=like, **{"out[0]": o, "out[1]": lse})
    dims: dict[str, int | None] = dict(zip(("n", "heads", "head_dim"), shape, strict=True))
    match(op, "out[0]", o, ("n", "heads", "head_dim"), dims)
    match(op, "out[1]", lse, ("n", "heads"), dims)
    _match_state(op, "out[0]", o, "out[1]", lse, xp)
    for i, (given, array) in enumerate(zip(out, (o, lse), strict=True)):
        if reason := read_only_reason(given, op):
            raise TypeError(f"{op}: out[{i}] is {reason}")
        match_writable(op, f"out[{i}]", array)
    return o, lse


def _store(merged: tuple[Array, Array], o: Array, lse: Array) -> tuple[Array, Array]:
    """Round the definition's float64 into the arrays to write."""
    with np.errstate(over="ignore", invalid="ignore"):
        o[...], lse[...] = merged[0].astype(o.dtype), merged[1].astype(lse.dtype)
    return o, lse


def _one_state(o: Array, lse: Array) -> _States:
    row, head, _ = o.strides
    lse_row, lse_head = lse.strides
    return o.data.ptr, lse.data.ptr, (row, head, 0), (lse_row, lse_head, 0)


def _launch(
    first: _States, rest: _States, k: int, dtype: np.dtype[Any], o: Array, lse: Array
) -> None:
    """Merge state 0, of ``first``, with the k - 1 states of ``rest``; all are of one dtype."""
    n, num_heads, head_dim = o.shape
    if n * num_heads == 0:
        return
    out = _one_state(o, lse)
    vec = vector_size(dtype, o.dtype)
    if head_dim % vec or (
        alignment(first[0], *first[2], rest[0], *rest[2]) % (vec * dtype.itemsize)
        or alignment(out[0], *out[2]) % (vec * o.itemsize)
    ):
        vec = 1
    lanes = -(-head_dim // (vec * _VECS_PER_LANE))
    team_bits = min(_MAX_TEAM_BITS, (lanes - 1).bit_length())
    num_teams = n * num_heads
    kernel("merge_states", o.data.device_id, FROM=dtype, TO=o.dtype, VEC=vec)(
        *one_per_thread(num_teams << team_bits, _CTA_THREADS),
        out=_pack_states(*out[:2], *out[2], *out[3]),
        first=_pack_states(*first[:2], *first[2], *first[3]),
        rest=_pack_states(*rest[:2], *rest[2], *rest[3]),
        num_teams=num_teams,
        num_heads=num_heads,
        k=k,
        head_dim=head_dim,
        team_bits=team_bits,
    )
