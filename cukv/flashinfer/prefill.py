"""FlashInfer's ``prefill``: attention from many rows, to pages or to packed keys and values."""

from cukv.flashinfer._paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from cukv.flashinfer._ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from cukv.flashinfer._single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
