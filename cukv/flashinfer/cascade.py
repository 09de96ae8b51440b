"""FlashInfer's ``cascade``: merging of attention states, and attention over shared prefixes."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from cukv import merge as _merge
from cukv._arrays import FLOAT32, Array, converted, home
from cukv._check import match, match_aligned, match_dtype
from cukv._specialisations import STATE_DTYPES
from cukv.cascade import CascadeLevels
from cukv.flashinfer._caller import (
    data,
    give_back,
    refuse,
    refuse_positions,
    target,
    working_for,
)
from cukv.flashinfer._wrapper import Options, Wrapper
from cukv.page_table import PageTable

__all__ = [
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[Any, Any]:
    """Merge two attention states: outputs ``[n, heads, head_dim]``, base-2 lse ``[n, heads]``."""
    op = "merge_state"
    with working_for(v_a):
        v, s = _merge.merge_state(
            data(op, "v_a", v_a),
            _lse(op, "s_a", s_a),
            data(op, "v_b", v_b),
            _lse(op, "s_b", s_b),
        )
        v, s = give_back(v_a, v, s)
        return v, s


def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any = None) -> None:
    """Merge another state into ``v`` and ``s``, which may be of any of the floats of states.

    Rows where ``mask``, bool ``[n]``, is False stay as they are.
    """
    op = "merge_state_in_place"
    with working_for(v):
        # Neither is written where the other must not be.
        target_v, target_s = target(op, "v", v), target(op, "s", s)
        extra = (np.dtype(np.float64),) if isinstance(target_s, np.ndarray) else ()
        match_dtype(op, "s", target_s, *STATE_DTYPES, *extra)
        match_aligned(op, "s", target_s)
        merged_v, merged_s = _merge.merge_state(
            target_v,
            converted(target_s, FLOAT32),
            data(op, "v_other", v_other),
            _lse(op, "s_other", s_other),
        )
        if mask is None:
            target_v[...], target_s[...] = merged_v, merged_s
            return
        kept = data(op, "mask", mask)
        match(op, "mask", kept, ("n",), {"n": target_v.shape[0]})
        if kept.dtype != np.bool_:
            raise TypeError(f"{op}: mask must be bool, got {kept.dtype.name}")
        home(op, v=target_v, mask=kept)
        bits = f"u{target_v.dtype.itemsize}"  # CuPy selects among bits of any dtype
        xp = np if isinstance(target_v, np.ndarray) else cp
        where = kept[:, None]
        xp.copyto(target_v.view(bits), merged_v.view(bits), where=where[:, :, None])
        xp.copyto(target_s, merged_s.astype(target_s.dtype), where=where)


def merge_states(v: Any, s: Any) -> tuple[Any, Any]:
    """Merge ``k`` states: ``v [n, k, heads, head_dim]``, base-2 ``s [n, k, heads]``."""
    op = "merge_states"
    with working_for(v):
        merged, lse = give_back(v, *_merge.merge_states(data(op, "v", v), _lse(op, "s", s)))
        return merged, lse


def _lse(op: str, name: str, s: Any) -> Array:
    return converted(data(op, name, s), FLOAT32)


class MultiLevelCascadeAttentionWrapper(Wrapper):
    """Attention over levels of shared prefixes: level 0 is the root, the last level the leaves.

    ``causal`` acts inside the last level; a window counts positions over all of a request's levels.
    With ``use_cuda_graph`` the buffers, one of each per level, are what the graph reads.
    """

    _op = "MultiLevelCascadeAttentionWrapper"

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Any] | None = None,
        paged_kv_indptr_buf_arr: list[Any] | None = None,
        paged_kv_indices_buf_arr: list[Any] | None = None,
        paged_kv_last_page_len_buf_arr: list[Any] | None = None,
    ) -> None:
        """Name the home of the work by ``float_workspace_buffer``, of which nothing is used."""
        self._num_levels = num_levels
        arrays = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        for name, given in arrays.items():
            if given is not None:
                _check_levels(self._op, name, given, num_levels)
        buffers = {
            f"{name}[{level}]": None if given is None else given[level]
            for name, given in arrays.items()
            for level in range(num_levels)
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)

    def plan(
        self,
        qo_indptr_arr: list[Any],
        paged_kv_indptr_arr: list[Any],
        paged_kv_indices_arr: list[Any],
        paged_kv_last_page_len: list[Any],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Take the index arrays of every level, on the device or the CPU, and the options."""
        op = f"{self._op}.plan"
        refuse(op, use_fp16_qk_reduction=use_fp16_qk_reduction)
        refuse_positions(op, pos_encoding_mode, rope_scale, rope_theta)
        given = {
            "qo_indptr": qo_indptr_arr,
            "paged_kv_indptr": paged_kv_indptr_arr,
            "paged_kv_indices": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, arrays in given.items():
            _check_levels(op, name, arrays, self._num_levels)
        with self._planning(
            Options(
                self._op,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                head_dim,
                page_size,
                q_data_type,
                kv_data_type,
                None,
                causal=causal,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
            )
        ):
            matched = self._match(
                op,
                {
                    f"{name}_buf_arr[{level}]": array
                    for name, arrays in given.items()
                    for level, array in enumerate(arrays)
                },
            )
            levels = self._levels(list(matched.values()), page_size)
            if self._use_cuda_graph:
                levels = self._levels(self._hold(matched), page_size)
            self._set_nouns(levels)

    begin_forward = plan

    def _levels(self, arrays: list[Array], page_size: int) -> CascadeLevels:
        """Make the noun of index arrays: of all levels the first, of all the second, and so on."""
        levels = self._num_levels
        qo_indptr, *csr = (
            tuple(arrays[start : start + levels]) for start in range(0, 4 * levels, levels)
        )
        tables = tuple(
            PageTable(indptr, indices, last_page_len, page_size)
            for indptr, indices, last_page_len in zip(*csr, strict=True)
        )
        return CascadeLevels(qo_indptr, tables)

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        sinks: Any = None,
    ) -> Any:
        """Attend from rows ``q [nnz, num_qo_heads, head_dim]`` to the keys of all their levels.

        The keyword-only arguments are cukv's own.
        """
        op = f"{self._op}.run"
        options = self._planned(op)
        (levels,) = self._nouns
        with working_for(q):
            cache = self._cache_of(op, paged_kv_cache)
            rows = data(op, "q", q)
            options.check_call(op, rows, cache)
            mask_and_window = {"causal": options.causal, "window_left": options.window_left}
            return self._attend(
                op,
                q,
                lambda: levels.plan(rows, cache, **mask_and_window),
                lambda plan, **results: levels.attend(
                    rows,
                    cache,
                    plan=plan,
                    **mask_and_window,
                    **options.logits(q_scale, k_scale, v_scale, sinks),
                    **results,
                ),
                rows,
                cache,
                (out, lse, return_lse),
            )

    forward = run

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffers: list[Any]
    ) -> None:
        """Do nothing: cukv sizes its own workspace."""


def _check_levels(op: str, name: str, arrays: list[Any], num_levels: int) -> None:
    """Raise unless there is one array per level."""
    if len(arrays) != num_levels:
        raise ValueError(
            f"{op}: {name} must have one array per level, {num_levels}, got {len(arrays)}"
        )
