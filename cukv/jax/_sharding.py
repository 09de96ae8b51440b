"""Between devices: states of the parts of a sharded cache become those of the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from cukv.jax._arguments import Array


def pmerge_states(o: Array, lse: Array, axis_name: str) -> tuple[Array, Array]:
    """Combine the states that the devices along a mesh axis have, each of its own keys.

    For ``shard_map``, where queries are on all devices of the axis and keys are shared out. Each
    device sends its states to all, and merges them as ``merge_states`` does, in float32. That is
    left to XLA, which makes it one with what precedes and follows it.

    Parameters
    ----------
    o : [n, num_heads, head_dim]
        This device's outputs.
    lse : [n, num_heads] float32
        Their log2-sum-exp2; -inf where this device has no keys of a row: that ``o`` is not read.
    axis_name : str
        Of the mesh.

    Returns
    -------
    o, lse
        Of all keys, of the same shapes and dtypes, the same on every device: zeros and -inf for
        rows without keys.

    Raises
    ------
    TypeError
        lse is not float32.
    ValueError
        The shape of lse is not that of o without its last axis.
    """
    if lse.dtype != jnp.float32:
        raise TypeError(f"cukv.jax.pmerge_states: lse must be float32, got {lse.dtype}")
    if lse.shape != o.shape[:-1]:
        raise ValueError(
            f"cukv.jax.pmerge_states: lse must have the shape {o.shape[:-1]}, got {lse.shape}"
        )
    states, lses = (jax.lax.all_gather(x, axis_name) for x in (o, lse))  # [devices, ...]
    maximum = lses.max(0)
    maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    weights = jnp.exp2(lses - maximum)
    d = weights.sum(0)
    live = jnp.where(lses[..., None] > -jnp.inf, states.astype(jnp.float32), 0.0)
    merged = (weights[..., None] * live).sum(0) / jnp.where(d > 0, d, 1.0)[..., None]
    return merged.astype(o.dtype), maximum + jnp.log2(d)
