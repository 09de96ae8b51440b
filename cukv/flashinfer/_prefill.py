"""What the two prefill wrappers share."""

from __future__ import annotations

from typing import Any

from cukv._arrays import Array
from cukv.flashinfer._caller import data, refuse, refuse_positions
from cukv.flashinfer._wrapper import Wrapper
from cukv.masks import Mask, PackedMask, RaggedMask


class PrefillWrapper(Wrapper):
    """What the two prefill wrappers share: masks, and calls in the form of old scripts."""

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any
    ) -> None:
        """Do nothing: cukv sizes its own workspace."""

    def _mask(
        self, op: str, custom_mask: Any, packed_custom_mask: Any, qo_indptr: Array, kv_indptr: Array
    ) -> Mask | None:
        """Give the mask of a step; a graph reads the bits that were copied to its buffers.

        ``packed_custom_mask`` has each request on bytes of its own, as ``segment_packbits`` makes
        it; ``kv_indptr`` counts tokens.
        """
        mask: Mask
        if packed_custom_mask is not None:
            bits = data(op, "packed_custom_mask", packed_custom_mask)
            mask = PackedMask(bits, qo_indptr, kv_indptr)
        elif custom_mask is not None:
            flags = data(op, "custom_mask", custom_mask).reshape(-1)
            mask = RaggedMask(flags, qo_indptr, kv_indptr)
        else:
            return None
        if self.on_host:
            mask.validate()
        if not self._use_cuda_graph:
            return mask
        for name in ("custom_mask_buf", "mask_indptr_buf"):
            if name not in self._buffers:
                raise ValueError(f"{op}: use_cuda_graph=True with a mask needs {name}")
        target, offsets = self._buffers["custom_mask_buf"], self._buffers["mask_indptr_buf"]
        packed = mask if isinstance(mask, PackedMask) else mask.pack()
        least = len(mask.data) if isinstance(mask, PackedMask) else -(-len(mask.data) // 8)
        if len(target) < least:
            raise ValueError(
                f"{op}: custom_mask_buf holds [{len(target)}] bytes, the mask needs [{least}] "
                "or more"
            )
        size = min(len(target), len(packed.data))  # pack() leaves room, which is zero
        target[:size] = packed.data[:size]
        offsets[...] = packed.indptr
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
        options = self._planned(op)
        options.causal, options.window_left = bool(causal), window_left
        options.logits_soft_cap, options.sm_scale = logits_soft_cap, sm_scale
