"""What the two prefill wrappers share."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukv._arrays import Array
from cukv._check import match, match_dtype, match_index, truth
from cukv.flashinfer._caller import data, refuse, refuse_positions
from cukv.flashinfer._wrapper import Wrapper
from cukv.masks import Mask, PackedMask, RaggedMask

_UINT8 = np.dtype(np.uint8)


class PrefillWrapper(Wrapper):
    """What the two prefill wrappers share: masks, and calls in the form of old scripts."""

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any
    ) -> None:
        """Do nothing: cukv sizes its own workspace."""

    def _mask(
        self, op: str, custom_mask: Any, packed_custom_mask: Any, qo_indptr: Array, kv_indptr: Array
    ) -> Mask | None:
        """Give the mask of a step, as bits that fit the buffers where a graph is to read it.

        ``packed_custom_mask`` has each request on bytes of its own, as ``segment_packbits`` makes
        it; ``kv_indptr`` counts tokens.
        """
        mask: Mask
        if packed_custom_mask is not None:
            bits = data(op, "packed_custom_mask", packed_custom_mask)
            mask = PackedMask(bits, qo_indptr, kv_indptr)
        elif custom_mask is not None:
            flags = data(op, "custom_mask", custom_mask)
            most_axes = 2 if len(qo_indptr) == 2 else 1  # a single request's may be as it is
            if not 1 <= flags.ndim <= most_axes:
                raise ValueError(
                    f"{op}: custom_mask must be the masks of the requests, flattened, one behind "
                    f"the other, [sum of qo_len * kv_len], got {list(flags.shape)}"
                )
            mask = RaggedMask(flags.reshape(-1), qo_indptr, kv_indptr)
        else:
            return None
        if self.on_host:
            mask.validate()
        if not self._use_cuda_graph:
            return mask
        for name in ("custom_mask_buf", "mask_indptr_buf"):
            if name not in self._buffers:
                raise ValueError(f"{op}: use_cuda_graph=True with a mask needs {name}")
        target = self._buffers["custom_mask_buf"]
        match(op, "custom_mask_buf", target, ("bytes",), {})
        match_dtype(op, "custom_mask_buf", target, _UINT8)
        match_index(op, "mask_indptr_buf", self._buffers["mask_indptr_buf"], len(qo_indptr))
        packed = mask if isinstance(mask, PackedMask) else mask.pack()
        least = len(mask.data) if isinstance(mask, PackedMask) else -(-len(mask.data) // 8)
        if len(target) < least:
            raise ValueError(
                f"{op}: custom_mask_buf holds [{len(target)}] bytes, the mask needs [{least}] "
                "or more"
            )
        return packed

    def _hold_mask(self, mask: Mask | None, qo_indptr: Array, kv_indptr: Array) -> Mask | None:
        """Give the mask of a step: itself, or the buffers that its bits are copied into."""
        if not self._use_cuda_graph or not isinstance(mask, PackedMask):
            return mask
        target, offsets = self._buffers["custom_mask_buf"], self._buffers["mask_indptr_buf"]
        size = min(len(target), len(mask.data))  # pack() leaves room, which is zero
        target[:size] = mask.data[:size]
        offsets[...] = mask.indptr
        return PackedMask(target, qo_indptr, kv_indptr, offsets)

    def _replan(
        self,
        op: str,
        causal: bool,
        pos_encoding_mode: str,
        use_fp16_qk_reduction: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope: tuple[float | None, float | None],
    ) -> None:
        """Take the options of a ``forward`` in place of those of its ``begin_forward``."""
        refuse(op, use_fp16_qk_reduction=use_fp16_qk_reduction)
        refuse_positions(op, pos_encoding_mode, *rope)
        options, causal = self._planned(op), truth(op, "causal", causal)
        options.shape_logits(op, sm_scale, window_left, logits_soft_cap)
        options.causal = causal
