"""Attention from many rows to pages."""

from __future__ import annotations

import functools
from typing import Any

from cukv._arrays import Array
from cukv._check import truth
from cukv.flashinfer._caller import check_backend, data, refuse, refuse_positions, working_for
from cukv.flashinfer._prefill import PrefillWrapper
from cukv.flashinfer._wrapper import LseForm, Options
from cukv.page_table import PageTable
from cukv.ragged import RaggedTensor


class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper):
    """Attention from any number of rows per request to its pages.

    ``backend`` changes nothing: shapes choose the kernel. With ``use_cuda_graph`` the four buffers
    are what the graph reads; with a mask it also needs ``custom_mask_buf``, uint8 as long as the
    packed mask may be, and ``mask_indptr_buf``. ``max_total_num_rows`` changes nothing: the rows
    of a step are bounded by nothing but the q that a graph was captured with.
    """

    _op = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        *,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
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
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
            "custom_mask_buf": custom_mask_buf,
            "mask_indptr_buf": mask_indptr_buf,
        }
        masks = ("custom_mask_buf", "mask_indptr_buf")
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers, masks)
        self._token_indptr: Array | None = None  # in tokens, for masks that a graph reads

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
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
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Take the index arrays of a step, on the device or the CPU, its mask and its options.

        A mask, the flattened booleans of all requests or their little-endian bits with each request
        on bytes of its own, replaces ``causal``; of both kinds the packed one counts.
        ``fixed_split_size`` and ``disable_split_kv`` ask for bits that do not depend on the batch.
        Nothing is waited for, whatever ``non_blocking`` says.
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
            block_tables=block_tables,
            max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv,
            uniform_q_len=uniform_q_len,
            use_token_head_sf=use_token_head_sf,
        )
        options = Options(
            self._op,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_qk if head_dim_vo is None else head_dim_vo,
            page_size,
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
            given = {
                "qo_indptr_buf": qo_indptr,
                "paged_kv_indptr_buf": paged_kv_indptr,
                "paged_kv_indices_buf": paged_kv_indices,
                "paged_kv_last_page_len_buf": paged_kv_last_page_len,
            }
            arrays = self._match(op, given)
            rows, indptr, indices, last_page_len = arrays.values()
            table = PageTable(indptr, indices, last_page_len, page_size)
            mask = None
            if custom_mask is not None or packed_custom_mask is not None:
                tokens = table.token_indptr
                mask = self._mask(op, custom_mask, packed_custom_mask, rows, tokens)
            if self._use_cuda_graph:
                rows, indptr, indices, last_page_len = self._hold(arrays)
                table = PageTable(indptr, indices, last_page_len, page_size)
                if mask is not None:
                    mask = self._hold_mask(mask, rows, self._hold_tokens(tokens))
            self._set_nouns(rows, table, mask)

    begin_forward = plan

    def _hold_tokens(self, tokens: Array) -> Array:
        """Give the offsets of tokens that masks are read by; a graph reads the first step's."""
        if self._token_indptr is None:
            self._token_indptr = tokens
        else:
            self._token_indptr[...] = tokens
        return self._token_indptr

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> Any:
        """Attend from ``q [nnz, num_qo_heads, head_dim]``.

        Gives the output, with ``return_lse`` the lse too, in base 2 and ``[nnz, num_qo_heads]``
        unless ``lse_base`` and ``lse_layout`` say otherwise. ``enable_pdl`` changes nothing.
        """
        op = f"{self._op}.run"
        options = self._planned(op)
        refuse(
            op,
            args=args or None,
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )
        self._check_window(op, window_left)
        qo_indptr, table, mask = self._nouns
        with working_for(q):
            cache = self._cache_of(op, paged_kv_cache)
            rows = data(op, "q", q)
            options.check_call(op, rows, cache)
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
                lambda: cache.plan(
                    queries, table, batch_invariant=options.batch_invariant, **planned
                ),
                lambda plan, **results: cache.prefill(
                    queries, table, plan=plan, **planned, **logits, **results
                ),
                rows,
                cache,
                (out, lse, return_lse),
                LseForm.of(op, lse_base, lse_layout),
            )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
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
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: Any,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
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
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)
