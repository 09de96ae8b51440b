"""Arguments of the functions: what is static of them, and what is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cukv._index import SEQUENCES
from cukv.ragged import RaggedTensor

Array = Any  # jax.Array or a tracer of one


def present(**arrays: Any) -> dict[str, Any]:
    """Give the arguments that were given; of Python numbers, arrays, not a leaf for each."""
    given = {name: x for name, x in arrays.items() if x is not None}
    return {n: jnp.asarray(list(x)) if is_numbers(x) else x for n, x in given.items()}


def is_numbers(x: Any) -> bool:
    """Whether ``x`` is a Python sequence of numbers."""
    return isinstance(x, SEQUENCES) and any(isinstance(n, (int, float)) for n in x)


def split_scales(scales: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part scales into numbers, which are static, and arrays."""
    traced = {name: x for name, x in scales.items() if isinstance(x, jax.Array)}
    return {name: x for name, x in scales.items() if name not in traced}, traced


def require(op: str, kind: type, **nouns: Any) -> None:
    """Raise unless arguments are nouns of a kind."""
    for name, x in nouns.items():
        if not isinstance(x, kind):
            article = "an" if kind.__name__.startswith("MLA") else "a"
            wanted = f"{article} {kind.__name__}"
            raise TypeError(f"cukv.jax.{op}: {name} must be {wanted}, got {type(x)}")


def require_arrays(op: str, **arrays: Any) -> None:
    """Raise unless arguments are arrays, of JAX or NumPy, or tracers of them."""
    for name, x in arrays.items():
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(f"cukv.jax.{op}: {name} must be an array, got {type(x)}")


def require_rows(op: str, **rows: Any) -> None:
    """Raise unless arguments are arrays, or ragged tensors of them."""
    require_arrays(op, **{n: x for n, x in rows.items() if not isinstance(x, RaggedTensor)})


def require_static(op: str, options: dict[str, Any]) -> None:
    """Raise where an option that must be known when a call is traced is traced itself."""
    for name, x in options.items():
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"cukv.jax.{op}: {name} is static, and must be known when the call is traced: bind "
                "it before jax.jit, as with functools.partial, or name it in static_argnames"
            )


def like(x: Array) -> Any:
    """Describe an array of the same shape and dtype."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
