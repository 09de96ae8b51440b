"""Between devices: states of the parts of a sharded cache become those of the whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cukv._arrays import FLOAT32
from cukv._check import match, match_dtype
from cukv._specialisations import STATE_DTYPES
from cukv.jax._arguments import Array, require_arrays

_FLOAT64 = np.dtype(np.float64)  # of JAX for the CPU, as the definitions give it


def pmerge_states(o: Array, lse: Array, axis_name: str | tuple[str, ...]) -> tuple[Array, Array]:
    """Combine the states that the devices along a mesh axis have, each of its own keys.

    For ``shard_map``, where queries are on all devices of the axis and keys are shared out. Each
    device sends its states to all, and merges them as ``merge_states`` does, in float32. That is
    left to XLA, which makes it one with what precedes and follows it.

    Parameters
    ----------
    o : [n, num_heads, head_dim] float16, bfloat16 or float32
        This device's outputs.
    lse : [n, num_heads] float32
        Their log2-sum-exp2; -inf where this device has no keys of a row: that ``o`` is not read.
        +inf and NaN are no lse: unspecified for their row.
    axis_name : str or tuple of str
        Of the mesh; several, where keys are shared out along several.

    Returns
    -------
    o, lse
        Of all keys, of the same shapes and dtypes: zeros and -inf for rows without keys. They are
        the same on every device, and JAX knows it: ``out_specs`` need not name the axis, and a loop
        may carry them.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype; wrong shape.

    Notes
    -----
    Options of a call hold for this device's keys: ``causal`` and ``window_left`` count from their
    end, and each device adds the sinks. So give sinks to one device and -inf to the others, by
    ``jax.lax.axis_index``, and say by a custom mask which keys a row sees.
    """
    op = "cukv.jax.pmerge_states"
    require_arrays("pmerge_states", o=o, lse=lse)
    dims: dict[str, int | None] = {}
    match(op, "o", o, ("n", "num_heads", "head_dim"), dims)
    match(op, "lse", lse, ("n", "num_heads"), dims)
    match_dtype(op, "o", o, *STATE_DTYPES, _FLOAT64)
    match_dtype(op, "lse", lse, FLOAT32)
    states, lses = (_of_all(x, axis_name) for x in (o, lse))
    maximum = lses.max(0, keepdims=True)
    maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    weights = jnp.exp2(lses - maximum)
    d = weights.sum(0, keepdims=True)
    shares = weights / jnp.where(d > 0, d, 1.0)
    live = jnp.where(lses[..., None] > -jnp.inf, states.astype(jnp.float32), 0.0)
    merged = (shares[..., None] * live).sum(0)
    return merged.astype(o.dtype), (maximum + jnp.log2(d))[0]


def _of_all(x: Array, axis_name: str | tuple[str, ...]) -> Any:
    """Give what all devices have, ``[devices, ...]``, known to be the same on each of them."""
    if hasattr(jax.lax, "all_gather_invariant"):  # before all_gather took `to`
        return jax.lax.all_gather_invariant(x, axis_name)
    return jax.lax.all_gather(x, axis_name, to="invarying")
