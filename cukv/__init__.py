"""KV-cache layouts and operations of FlashInfer for CuPy: nouns whose methods launch kernels.

Nouns are frozen dataclasses over CuPy arrays (or NumPy arrays, on which the same methods run the
definitions in ``cukv.reference``). ``cukv.jax`` has the methods as functions for ``jax.jit``, and
``cukv.flashinfer`` FlashInfer's names. See README.md for a tour.
"""

from cukv import _cupy_cache as _cupy_cache
from cukv._arrays import CudaUnavailableError, is_available
from cukv._kernels import warmup
from cukv._plan import Plan
from cukv.bits import packbits, segment_packbits
from cukv.cascade import CascadeLevels
from cukv.masks import PackedMask, RaggedMask
from cukv.merge import merge_state, merge_states
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache
from cukv.positions import batch_indices_positions
from cukv.ragged import RaggedTensor

__version__ = "0.1.0"

__all__ = [
    "CascadeLevels",
    "CudaUnavailableError",
    "MLAPagedCache",
    "PackedMask",
    "PageTable",
    "PagedKVCache",
    "Plan",
    "RaggedMask",
    "RaggedTensor",
    "batch_indices_positions",
    "is_available",
    "merge_state",
    "merge_states",
    "packbits",
    "segment_packbits",
    "warmup",
]
