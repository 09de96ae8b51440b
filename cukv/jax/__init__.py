"""cukv's operations inside ``jax.jit``, ``lax.scan`` and ``shard_map``.

Nouns are pytrees: their arrays are leaves, layouts and sizes are static. ``noun`` makes one over
JAX arrays or tracers, and ``jax.tree.map(jax.numpy.asarray, a_noun_of_NumPy_arrays)`` turns one
into the other. Such a noun is a bundle of arrays for the functions here, which take the data first;
of its methods ``validate`` works, outside of ``jit``.

On JAX for a GPU the functions launch cukv's kernels on XLA's stream. They copy nothing, allocate
nothing that XLA does not know of, and are captured into XLA's command buffers (CUDA graphs), where
XLA makes one: of five operations in a row or more. Shapes, dtypes and options are checked when a
function is traced. On JAX for the CPU they run the NumPy definitions, so that a model can be tested
on a laptop; values are checked too then, and all of it when the function runs: what is raised is
JAX's own JaxRuntimeError, which ends with cukv's message.

- **In place.** ``append`` gives the cache back. Donate the cache (``donate_argnums``) and its
  memory is the result's. Whatever else holds that memory, as a CuPy, torch or NumPy view of it
  does, turns donation into a copy: drop it before.
- **Plans.** Attention plans its work anew in each call, or takes a ``plan``, made once per step for
  all layers. Calls that take one must follow each other on a device, and do: leave
  ``xla_gpu_command_buffer_scheduling_mode`` as it is, not ``CONCURRENT``.
- **Devices.** Heads shard as they are, and so do keys: states over disjoint keys merge by their
  base-2 lse (``pmerge_states``). Shard by ``shard_map``: of calls that are only jitted over sharded
  arrays XLA gathers the arrays. On a CPU, devices may wait for one in vain, and XLA then ends the
  process: for one whose call has raised, whose message is logged, and where more than 32 calls of a
  jitted function are under way.
- **Inference.** ``jax.grad`` and ``jax.vmap`` through a function raise and name it, but for
  ``pmerge_states``, which is XLA's own. Requests are the batch axis.

Examples
--------
>>> import jax, numpy as np, cukv, cukv.jax
>>> table = cukv.PageTable.from_seq_lens([17, 5], page_size=16, xp=np)
>>> cache = cukv.PagedKVCache(np.zeros((8, 2, 16, 2, 64), np.float16))
>>> table, cache = jax.tree.map(jax.numpy.asarray, (table, cache))
>>> rows = jax.numpy.ones((2, 2, 64), "float16")
>>> cache = jax.jit(cukv.jax.append, donate_argnums=0)(cache, rows, rows, table)
>>> o = jax.jit(cukv.jax.decode)(jax.numpy.ones((2, 4, 64), "float16"), cache, table)
>>> o.shape, o.dtype
((2, 4, 64), dtype('float16'))
"""

from cukv.jax._attention import (
    cascade,
    decode,
    merge_states,
    mla_decode,
    prefill,
    ragged_prefill,
)
from cukv.jax._memory import append, gather, mla_append, packbits
from cukv.jax._nouns import noun
from cukv.jax._plans import Plan, plan
from cukv.jax._sharding import pmerge_states

__all__ = [
    "Plan",
    "append",
    "cascade",
    "decode",
    "gather",
    "merge_states",
    "mla_append",
    "mla_decode",
    "noun",
    "packbits",
    "plan",
    "pmerge_states",
    "prefill",
    "ragged_prefill",
]
