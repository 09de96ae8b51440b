"""Arguments of the functions: what is static of them, and what is traced."""

from __future__ import annotations

from typing import Any

import jax

Array = Any  # jax.Array or a tracer of one


def present(**arrays: Any) -> dict[str, Any]:
    """Give the arguments that were given."""
    return {name: x for name, x in arrays.items() if x is not None}


def split_scales(scales: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part scales into numbers, which are static, and arrays."""
    traced = {name: x for name, x in scales.items() if isinstance(x, jax.Array)}
    return {name: x for name, x in scales.items() if name not in traced}, traced


def like(x: Array) -> Any:
    """Describe an array of the same shape and dtype."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
