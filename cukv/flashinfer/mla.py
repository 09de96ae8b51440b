"""FlashInfer's ``mla``: absorbed attention over DeepSeek's latent cache in pages."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from cukv._arrays import Array
from cukv._check import match_index, truth
from cukv.flashinfer._caller import (
    check_backend,
    data,
    detached,
    refuse,
    scale_or_one,
    working_for,
)
from cukv.flashinfer._wrapper import LseForm, Options, Wrapper
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable

__all__ = ["BatchMLAPagedAttentionWrapper"]

_LSE_MODES = ("none", "base2", "basee")


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Attention in the absorbed form; ``kv_len_arr`` says how many tokens of its pages each has.

    ``backend`` changes nothing: shapes choose the kernel. With ``use_cuda_graph`` the four buffers
    take each step's index arrays.
    """

    _op = "BatchMLAPagedAttentionWrapper"

    def __init__(
        self,
        float_workspace_buffer: Any,
        use_cuda_graph: bool = False,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        backend: str = "auto",
    ) -> None:
        """Name the home of the work by ``float_workspace_buffer``, of which nothing is used."""
        check_backend(self._op, backend)
        buffers = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, buffers)

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: Any,
        kv_data_type: Any,
        use_profiler: bool = False,
        *,
        metadata: Any = None,
        cum_seq_lens_q: Any = None,
        block_tables: Any = None,
        seq_lens: Any = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: Any = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Take the index arrays of a step, on the device or the CPU, and the options of its runs.

        ``kv_len_arr`` is in tokens, and may be shorter than the pages of ``kv_indptr`` allow. Runs
        must ask for the lse that ``lse_mode``, ``"base2"`` or ``"basee"``, says; after ``"none"``
        each says for itself. ``enable_pdl`` changes nothing.
        """
        op = f"{self._op}.plan"
        refuse(
            op,
            use_profiler=use_profiler,
            metadata=metadata,
            cum_seq_lens_q=cum_seq_lens_q,
            block_tables=block_tables,
            seq_lens=seq_lens,
            max_q_len=max_q_len,
            query_layout=None if query_layout == "split" else query_layout,
            kv_cache_layout=None if kv_cache_layout == "split" else kv_cache_layout,
            output_scale=None if output_scale == "none" else output_scale,
            scale_mode=None if scale_mode in ("default", "kv-per-tensor") else scale_mode,
            skip_softmax=skip_softmax,
            use_sinks=use_sinks,
        )
        if lse_mode not in _LSE_MODES:
            raise ValueError(f"{op}: lse_mode must be one of {_LSE_MODES}, got {lse_mode!r}")
        if sm_scale is None:
            raise TypeError(f"{op}: sm_scale has no default: it comes from before absorption")
        options = Options(
            self._op,
            num_heads,
            1,
            head_dim_ckv,
            head_dim_ckv,
            page_size,
            q_data_type,
            kv_data_type,
            output_dtype,
            causal=truth(op, "causal", causal),
            sm_scale=sm_scale,
        )
        with self._planning(options):
            given = {
                "qo_indptr": qo_indptr,
                "kv_indptr": kv_indptr,
                "kv_indices": kv_indices,
                "kv_len_arr": kv_len_arr,
            }
            arrays = self._match(op, given)
            _, pages, indices, lens = arrays.values()
            match_index(op, "kv_len_arr", lens, len(pages) - 1)
            PageTable(pages, indices, lens, page_size)  # raises before a buffer is written
            _check_lens(op, pages, lens, page_size)
            rows, pages, indices, lens = self._hold(arrays)
            csr = _pages_in_use(pages, indices, lens, page_size)
            if self._use_cuda_graph and self._nouns:  # the graph reads the first step's arrays
                table = self._nouns[0]
                held = (table.indptr, table.indices, table.last_page_len)
                for target, array in zip(held, csr, strict=True):
                    target[...] = array
            else:
                table = PageTable(*csr, page_size)
            self._set_nouns(table, rows, head_dim_kpe, lse_mode)

    begin_forward = plan

    def run(
        self,
        q_nope: Any,
        q_pe: Any,
        ckv_cache: Any,
        kpe_cache: Any,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        profiler_buffer: Any = None,
        kv_len: Any = None,
        page_table: Any = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: Any = None,
        ckv_scale_arr: Any = None,
        kpe_scale: Any = None,
        sinks: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Any:
        """Attend from ``q_nope [rows, heads, 512]`` and ``q_pe [rows, heads, 64]``.

        Gives ``[rows, heads, 512]``, with ``return_lse`` the lse ``[rows, heads]`` too, in base 2
        unless ``return_lse_base_on_e``.
        """
        op = f"{self._op}.run"
        options = self._planned(op)
        refuse(
            op,
            profiler_buffer=profiler_buffer,
            kv_len=kv_len,
            page_table=page_table,
            o_scale=None if o_scale == 1.0 else o_scale,
            query=query,
            kv_cache=kv_cache,
            ckv_scale_arr=ckv_scale_arr,
            sinks=sinks,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
        )
        asked = "none"
        if return_lse or lse is not None or return_lse_base_on_e:
            asked = "basee" if return_lse_base_on_e else "base2"
        table, row_indptr, head_dim_kpe, lse_mode = self._nouns
        if lse_mode not in ("none", asked):
            raise ValueError(f"{op}: plan was told lse_mode={lse_mode!r}, got {asked!r}")
        with working_for(q_nope):
            cache = self._noun_of(
                (ckv_cache, kpe_cache), lambda given: MLAPagedCache(detached(tuple(given)))
            )
            rows = data(op, "q_nope", q_nope)
            self._check_call(op, options, head_dim_kpe, rows, cache)
            planned = {"qo_indptr": row_indptr, "causal": options.causal}
            return self._attend(
                op,
                q_nope,
                lambda: cache.plan(rows, table, **planned),
                lambda plan, **results: cache.decode(
                    rows,
                    data(op, "q_pe", q_pe),
                    table,
                    sm_scale=options.sm_scale,
                    ckv_scale=scale_or_one(ckv_scale),
                    kpe_scale=scale_or_one(kpe_scale),
                    plan=plan,
                    **planned,
                    **results,
                ),
                rows,
                cache,
                (out, lse, return_lse),
                LseForm(natural=truth(op, "return_lse_base_on_e", return_lse_base_on_e)),
            )

    @staticmethod
    def _check_call(
        op: str, options: Options, head_dim_kpe: int, q: Array, cache: MLAPagedCache
    ) -> None:
        """Raise unless a call is of the shapes and dtypes that were planned."""
        if q.ndim != 3:
            raise ValueError(
                f"{op}: q_nope must be [rows, num_heads, head_dim_ckv], got {list(q.shape)}"
            )
        for name, wanted, got in (
            ("q_data_type", options.q_data_type, q.dtype),
            ("kv_data_type", options.kv_data_type, cache.dtype),
            ("num_heads", options.num_qo_heads, q.shape[1]),
            ("head_dim_ckv", options.head_dim_qk, cache.head_dim_ckv),
            ("head_dim_kpe", head_dim_kpe, cache.head_dim_kpe),
            ("page_size", options.page_size, cache.page_size),
        ):
            if got != wanted:
                raise ValueError(f"{op}: plan was told {name}={wanted}, got {got}")


def _check_lens(op: str, indptr: Array, lens: Array, page_size: int) -> None:
    """Raise in NumPy if a request is longer than its pages; on the device nothing is read."""
    if not isinstance(lens, np.ndarray):
        return
    owned = np.diff(indptr)
    bad = np.flatnonzero((lens < 0) | (lens > owned * page_size))
    if len(bad):
        b = int(bad[0])
        raise ValueError(
            f"{op}: kv_len_arr[{b}] must be 0 to {owned[b] * page_size} tokens, as many as "
            f"its pages hold, got {lens[b]}"
        )


def _pages_in_use(
    indptr: Array, indices: Array, lens: Array, page_size: int
) -> tuple[Array, Array, Array]:
    """Give the page table of requests that use only the first pages of those they own.

    A page table in CSR form has no room between requests, so that page ids move up. On the device
    nothing is read on the host, and a length beyond a request's pages is cut.
    """
    xp = np if isinstance(lens, np.ndarray) else cp
    owned = indptr[1:] - indptr[:-1]
    lens = xp.minimum(lens, owned * page_size)
    used = (lens + (page_size - 1)) // page_size
    used_indptr = xp.zeros(len(indptr), indptr.dtype)
    used_indptr[1:] = xp.cumsum(used)
    last_page_len = (lens - (used - 1) * page_size).astype(indptr.dtype)
    if not len(lens) or not len(indices):
        return used_indptr, indices, last_page_len
    places = xp.arange(len(indices), dtype=used_indptr.dtype)
    request = xp.searchsorted(used_indptr, places, side="right") - 1
    request = xp.minimum(request, len(lens) - 1)  # places past the last page are padding
    source = places - used_indptr[request] + indptr[request]
    return used_indptr, indices[xp.minimum(source, len(indices) - 1)], last_page_len
