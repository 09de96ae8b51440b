"""Attention of one request, from one row or many."""

from __future__ import annotations

import functools
from typing import Any

from cukv._check import truth
from cukv.flashinfer._caller import (
    check_backend,
    data,
    dtype_of,
    give_back,
    refuse,
    refuse_positions,
    scale_or_one,
    working_for,
)
from cukv.flashinfer._wrapper import new_output
from cukv.masks import Mask, PackedMask, RaggedMask
from cukv.ragged import RaggedTensor, check_layout


def single_prefill_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    *,
    q_scale: Any = None,
) -> Any:
    """Attend from ``q [qo_len, num_qo_heads, head_dim]`` to ``k`` and ``v`` of one request.

    ``k`` and ``v`` are ``[kv_len, num_kv_heads, head_dim]`` (HND: heads first). A mask, bool
    ``[qo_len, kv_len]`` or little-endian bits of it, replaces ``causal``; of both kinds the packed
    one counts. Gives ``[qo_len, num_qo_heads, head_dim_vo]``, with ``return_lse`` the base-2 lse
    ``[qo_len, num_qo_heads]`` too. Makes its own plan, so it cannot be captured into a graph.
    """
    op = "single_prefill_with_kv_cache"
    refuse(op, use_fp16_qk_reduction=use_fp16_qk_reduction, kv_cache_sf=kv_cache_sf)
    refuse(op, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)  # those of each head
    check_backend(op, backend)
    return attend_alone(
        op,
        q,
        k,
        v,
        kv_layout=kv_layout,
        positions=(pos_encoding_mode, rope_scale, rope_theta),
        o_dtype=o_dtype,
        custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
        scales=(q_scale, k_scale, v_scale),
        return_lse=return_lse,
        causal=causal,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
    )


def attend_alone(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    kv_layout: str,
    positions: tuple[str, float | None, float | None],
    scales: tuple[Any, Any, Any],
    return_lse: bool,
    o_dtype: Any = None,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    **options: Any,
) -> Any:
    """Attend for ``op`` from the rows of one request; ``options`` are those of ``prefill``."""
    refuse_positions(op, *positions)
    check_layout(op, kv_layout)
    return_lse = truth(op, "return_lse", return_lse)
    with working_for(q):
        rows = data(op, "q", q)
        if rows.ndim != 3:
            raise ValueError(
                f"{op}: q must be [qo_len, num_qo_heads, head_dim], got {list(rows.shape)}"
            )
        keys, values = data(op, "k", k), data(op, "v", v)
        lens = (0, len(rows)), (0, keys.shape[0 if kv_layout == "NHD" else 1])
        mask: Mask | None = None
        if packed_custom_mask is not None:
            mask = PackedMask(data(op, "packed_custom_mask", packed_custom_mask), *lens)
        elif custom_mask is not None:
            flags = data(op, "custom_mask", custom_mask)
            shape = (lens[0][1], lens[1][1])
            if flags.shape not in (shape, (shape[0] * shape[1],)):
                raise ValueError(
                    f"{op}: custom_mask must be [qo_len={shape[0]}, kv_len={shape[1]}], or "
                    f"flattened, got {list(flags.shape)}"
                )
            mask = RaggedMask(flags.reshape(-1), *lens)
        kv = (RaggedTensor(x, lens[1], kv_layout) for x in (keys, values))
        if o_dtype is not None:
            options["out"] = new_output(op, rows, values.shape[2], dtype_of(op, "o_dtype", o_dtype))
        q_scale, k_scale, v_scale = map(scale_or_one, scales)
        o, lse = RaggedTensor(rows, lens[0]).prefill(
            *kv,
            custom_mask=mask,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=True,
            **options,
        )
        return give_back(q, o, lse) if return_lse else give_back(q, o)


single_prefill_with_kv_cache_return_lse = functools.partial(
    single_prefill_with_kv_cache, return_lse=True
)
