"""Attention from many rows to packed keys and values."""

from __future__ import annotations

import functools
from typing import Any

from cukv._check import truth
from cukv.flashinfer._caller import check_backend, data, refuse, refuse_positions, working_for
from cukv.flashinfer._prefill import PrefillWrapper
from cukv.flashinfer._wrapper import LseForm, Options
from cukv.ragged import RaggedTensor


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Attention from any number of rows per request to packed keys and values.

    Buffers of CUDA-graph mode as in the paged wrapper. The rows of q, k and v in a graph are those
    of its capture: pad them.
    """

    _op = "BatchPrefillWithRaggedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        *,
        variant_owns_mask: bool = False,
    ) -> None:
        """Name the home of the work by ``float_workspace_buffer``, of which nothing is used."""
        check_backend(self._op, backend)
        refuse(
            self._op,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
            variant_owns_mask=variant_owns_mask,
        )
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "kv_indptr_buf": kv_indptr_buf,
            "custom_mask_buf": custom_mask_buf,
            "mask_indptr_buf": mask_indptr_buf,
        }
        masks = ("custom_mask_buf", "mask_indptr_buf")
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, masks)

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Any = None,
        o_indptr: Any = None,
        *,
        qo_indptr_cpu: Any = None,
        kv_indptr_cpu: Any = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Take the offsets of a step, on the device or the CPU, its mask and its options.

        As in the paged wrapper. The copies ``qo_indptr_cpu`` and ``kv_indptr_cpu`` are not needed.
        """
        op = f"{self._op}.plan"
        refuse_positions(op, pos_encoding_mode, rope_scale, rope_theta)
        refuse(
            op,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr,
            seq_lens=seq_lens,
            seq_lens_q=seq_lens_q,
            max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv,
            v_indptr=v_indptr,
            o_indptr=o_indptr,
            uniform_q_len=uniform_q_len,
            use_token_head_sf=use_token_head_sf,
        )
        options = Options(
            self._op,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_qk if head_dim_vo is None else head_dim_vo,
            None,
            q_data_type,
            kv_data_type,
            o_data_type,
            causal=truth(op, "causal", causal),
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            batch_invariant=bool(fixed_split_size or disable_split_kv),
        )
        with self._planning(options):
            given = {"qo_indptr_buf": qo_indptr, "kv_indptr_buf": kv_indptr}
            arrays = self._match(op, given)
            mask = self._mask(op, custom_mask, packed_custom_mask, *arrays.values())
            rows, tokens = self._hold(arrays)
            self._set_nouns(rows, tokens, self._hold_mask(mask, rows, tokens))

    begin_forward = plan

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
        sinks: Any = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> Any:
        """Attend from ``q [nnz, num_qo_heads, head_dim]`` to packed ``k`` and ``v``.

        Results as in the paged wrapper.
        """
        op = f"{self._op}.run"
        options = self._planned(op)
        refuse(
            op,
            args=args or None,
            o_scale=None if o_scale == 1.0 else o_scale,
            kv_cache_sf=kv_cache_sf,
        )
        qo_indptr, kv_indptr, mask = self._nouns
        with working_for(q):
            rows = data(op, "q", q)
            keys, values = (
                RaggedTensor(data(op, name, x), kv_indptr, self._layout)
                for name, x in (("k", k), ("v", v))
            )
            options.check_call(op, rows, keys)
            if values.head_dim != options.head_dim_vo:
                raise ValueError(
                    f"{op}: plan was told head_dim_vo={options.head_dim_vo}, got {values.head_dim}"
                )
            queries = RaggedTensor(rows, qo_indptr)
            planned = {
                "causal": options.causal,
                "window_left": options.window_left,
                "custom_mask": mask,
            }
            logits = options.logits(q_scale, k_scale, v_scale, sinks)
            return self._attend(
                op,
                q,
                lambda: queries.plan(
                    keys, values, batch_invariant=options.batch_invariant, **planned
                ),
                lambda plan, **results: queries.prefill(
                    keys, values, plan=plan, **planned, **logits, **results
                ),
                rows,
                keys,
                (out, lse, return_lse),
                LseForm.of(op, lse_base, lse_layout),
            )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """Run with these options in place of those of ``begin_forward``."""
        self._replan(
            f"{self._op}.forward",
            causal,
            pos_encoding_mode,
            use_fp16_qk_reduction,
            window_left,
            logits_soft_cap,
            sm_scale,
            (rope_scale, rope_theta),
        )
        return self.run(q, k, v)

    def forward_return_lse(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """Run as ``forward``, and give ``(o, lse)``."""
        self._replan(
            f"{self._op}.forward_return_lse",
            causal,
            pos_encoding_mode,
            use_fp16_qk_reduction,
            window_left,
            logits_soft_cap,
            sm_scale,
            (rope_scale, rope_theta),
        )
        return self.run(q, k, v, return_lse=True)
