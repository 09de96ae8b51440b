"""FlashInfer's names over cukv: change the import of a script, and it runs on cukv's kernels.

Signatures are those of FlashInfer 0.6.13, with the spellings of 0.7.4 beside them. Arrays of
torch, JAX and CuPy are taken without a copy, and results come back as the same kind. Work for torch
tensors goes on torch's current stream, in memory of torch's allocator, and can be captured by
``torch.cuda.graph``. NumPy arrays run the definitions of ``cukv.reference``.

Meanings are FlashInfer's documented ones, as README.md has them for cukv. Arguments that only
choose among FlashInfer's kernels or bound its memory (``backend``, ``use_tensor_cores``,
``enable_pdl``, ``non_blocking``, ``max_total_num_rows``, the contents of workspace buffers) change
nothing. Others that cukv cannot honour raise NotImplementedError; none is ignored.
"""

from cukv.flashinfer import cascade, decode, mla, page, prefill, quantization
from cukv.flashinfer.cascade import (
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from cukv.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from cukv.flashinfer.mla import BatchMLAPagedAttentionWrapper
from cukv.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from cukv.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from cukv.flashinfer.quantization import packbits, segment_packbits

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "cascade",
    "decode",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "packbits",
    "page",
    "prefill",
    "quantization",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
