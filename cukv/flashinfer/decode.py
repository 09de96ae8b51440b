"""FlashInfer's ``decode``: attention from one row per request, or a few."""

from __future__ import annotations

import functools
from typing import Any

import cupy as cp
import numpy as np

from cukv._check import truth
from cukv.flashinfer._caller import (
    check_backend,
    data,
    refuse,
    refuse_positions,
    working_for,
)
from cukv.flashinfer._single import attend_alone
from cukv.flashinfer._wrapper import Options, Wrapper
from cukv.page_table import PageTable
from cukv.ragged import RaggedTensor

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "single_decode_with_kv_cache",
]


def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend from ``q [num_qo_heads, head_dim]`` to all of ``k`` and ``v``.

    ``k`` and ``v`` are ``[kv_len, num_kv_heads, head_dim]`` (HND: heads first). Gives
    ``[num_qo_heads, head_dim]``, with ``return_lse`` the base-2 lse ``[num_qo_heads]`` too.
    ``use_tensor_cores`` changes nothing: shapes choose the kernel. Makes its own plan, so it cannot
    be captured into a graph.
    """
    op = "single_decode_with_kv_cache"
    if getattr(q, "ndim", None) != 2:
        got = list(data(op, "q", q).shape)
        raise ValueError(f"{op}: q must be [num_qo_heads, head_dim], got {got}")
    found = attend_alone(
        op,
        q[None],
        k,
        v,
        kv_layout=kv_layout,
        positions=(pos_encoding_mode, rope_scale, rope_theta),
        scales=(q_scale, k_scale, v_scale),
        return_lse=return_lse,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
    )
    return (found[0][0], found[1][0]) if return_lse else found[0]


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Attention from one row per request, or ``q_len_per_req`` rows, to its pages.

    ``use_tensor_cores`` and ``backend`` change nothing: shapes choose the kernel. With
    ``use_cuda_graph`` the three buffers are what the graph reads.
    """

    _op = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        *,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Name the home of the work by ``float_workspace_buffer``, of which nothing is used."""
        check_backend(self._op, backend)
        refuse(self._op, jit_args=jit_args, jit_kwargs=jit_kwargs)
        self._use_tensor_cores = truth(self._op, "use_tensor_cores", use_tensor_cores)
        self._row_indptrs: dict[tuple[int, int], Any] = {}
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)

    @property
    def use_tensor_cores(self) -> bool:
        """What the wrapper was made with."""
        return self._use_tensor_cores

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any
    ) -> None:
        """Do nothing: cukv sizes its own workspace."""

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Take the page table of a step, on the device or the CPU, and the options of its runs.

        ``q_len_per_req`` rows of each request attend causally unless ``is_causal`` is False.
        ``fixed_split_size`` and ``disable_split_kv`` ask for bits that do not depend on the batch.
        Nothing is waited for, whatever ``non_blocking`` says.
        """
        op = f"{self._op}.plan"
        refuse_positions(op, pos_encoding_mode, rope_scale, rope_theta)
        refuse(
            op,
            block_tables=block_tables,
            seq_lens=seq_lens,
            window_right=window_right,
            use_token_head_sf=use_token_head_sf,
        )
        if q_len_per_req < 1:
            raise ValueError(f"{op}: q_len_per_req must be 1 or more, got {q_len_per_req}")
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        options = Options(
            self._op,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            head_dim,
            page_size,
            "float16" if q_data_type is None else q_data_type,
            kv_data_type,
            o_data_type,
            causal=q_len_per_req > 1 if is_causal is None else truth(op, "is_causal", is_causal),
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            batch_invariant=bool(fixed_split_size or disable_split_kv),
        )
        with self._planning(options):
            given = {
                "paged_kv_indptr_buffer": indptr,
                "paged_kv_indices_buffer": indices,
                "paged_kv_last_page_len_buffer": last_page_len,
            }
            arrays = self._match(op, given)
            indptr, indices, last_page_len = arrays.values()
            table = PageTable(indptr, indices, last_page_len, page_size)
            if self._use_cuda_graph:
                indptr, indices, last_page_len = self._hold(arrays)
                table = PageTable(indptr, indices, last_page_len, page_size)
            row_indptr = self._row_indptr(table, int(q_len_per_req))
            self._set_nouns(table, row_indptr, int(q_len_per_req))

    begin_forward = plan

    def _argument(self, buffer: str) -> str:
        return buffer.removeprefix("paged_kv_").removesuffix("_buffer")

    def _row_indptr(self, table: PageTable, rows_each: int) -> Any:
        """Give the offsets of each request's rows, if it has several; a graph reads the same."""
        if rows_each == 1:
            return None
        key = (table.batch_size, rows_each)
        if key not in self._row_indptrs:
            xp = np if isinstance(table.indptr, np.ndarray) else cp
            rows = np.arange(table.batch_size + 1, dtype=np.int32) * rows_each
            self._row_indptrs[key] = xp.asarray(rows)
        return self._row_indptrs[key]

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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attend from ``q [batch_size * q_len_per_req, num_qo_heads, head_dim]``.

        Gives the output, with ``return_lse`` the base-2 lse ``[rows, num_qo_heads]`` too.
        ``enable_pdl`` changes nothing.
        """
        op = f"{self._op}.run"
        options = self._planned(op)
        refuse(
            op,
            args=args or None,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )
        self._check_window(op, window_left)
        table, row_indptr, rows_each = self._nouns
        if q_len_per_req is not None and q_len_per_req != rows_each:
            raise ValueError(f"{op}: plan was told q_len_per_req={rows_each}, got {q_len_per_req}")
        with working_for(q):
            cache = self._cache_of(op, paged_kv_cache)
            rows = data(op, "q", q)
            options.check_call(op, rows, cache)
            planned: dict[str, Any] = {"window_left": options.window_left}
            queries, attend = rows, cache.decode
            if row_indptr is not None:
                if len(rows) != table.batch_size * rows_each:
                    raise ValueError(
                        f"{op}: q must be [{table.batch_size * rows_each} rows, "
                        f"num_qo_heads, head_dim], got {list(rows.shape)}"
                    )
                queries, attend = RaggedTensor(rows, row_indptr), cache.prefill
                planned["causal"] = options.causal
            logits = options.logits(q_scale, k_scale, v_scale, sinks)
            return self._attend(
                op,
                q,
                lambda: cache.plan(
                    queries, table, batch_invariant=options.batch_invariant, **planned
                ),
                lambda plan, **results: attend(
                    queries, table, plan=plan, **planned, **logits, **results
                ),
                rows,
                cache,
                (out, lse, return_lse),
            )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """Run with these options in place of those of ``begin_forward``."""
        op = f"{self._op}.forward"
        refuse_positions(op, pos_encoding_mode, rope_scale, rope_theta)
        self._planned(op).shape_logits(op, sm_scale, window_left, logits_soft_cap)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: Any,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """Run as ``forward``, and give ``(o, lse)``."""
        op = f"{self._op}.forward_return_lse"
        refuse_positions(op, pos_encoding_mode, rope_scale, rope_theta)
        self._planned(op).shape_logits(op, sm_scale, window_left, logits_soft_cap)
        return self.run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True
        )


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper in CUDA-graph mode."""

    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: Any,
        indices_buffer: Any,
        last_page_len_buffer: Any,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        """Make the wrapper over the buffers that the graph reads."""
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )
