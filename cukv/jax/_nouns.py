"""Nouns as pytrees: their arrays are leaves, layouts and sizes are static."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import cupy as cp
import jax
import numpy as np

from cukv.cascade import CascadeLevels
from cukv.masks import PackedMask, RaggedMask
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache
from cukv.ragged import RaggedTensor

if TYPE_CHECKING:
    from cukv._noun import Noun

_STATIC = ("layout", "page_size", "head_dim_kpe")  # fields of nouns that are no arrays
_NOUNS = (
    RaggedTensor, PageTable, PagedKVCache, MLAPagedCache, RaggedMask, PackedMask, CascadeLevels
)  # fmt: skip


def noun(kind: type[Noun], *fields: Any, **named: Any) -> Any:
    """Make a noun over JAX arrays or tracers, which are not looked at.

    Parameters
    ----------
    kind : type
        ``PagedKVCache``, ``PageTable`` or another noun.
    fields, named
        As the noun itself takes them.

    Returns
    -------
    kind
        A pytree for the functions of this module.

    Raises
    ------
    TypeError
        Fields that the noun does not have, or lacks.
    """
    specs = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [f.name for f in specs] + (["indptr"] if kind is PackedMask else [])
    given = dict(zip(names, fields, strict=False)) | named
    defaults = {f.name: f.default for f in specs if f.default is not dataclasses.MISSING}
    if kind is PackedMask:
        defaults["indptr"] = None
    values = defaults | given
    if len(fields) > len(names) or set(values) != set(names):
        raise TypeError(f"noun: {kind.__name__} takes {names}, got {list(given)}")
    made = object.__new__(kind)
    if kind is PackedMask:
        values["_indptr"] = values.pop("indptr")
    made._set(**values)
    return made


def _flatten(x: Noun) -> tuple[list[Any], tuple[Any, ...]]:
    fields = x._fields()
    arrays = [name for name in fields if name not in _STATIC]
    static = tuple((name, value) for name, value in fields.items() if name in _STATIC)
    return [fields[name] for name in arrays], (tuple(arrays), static)


def _unflatten(kind: type[Noun], aux: tuple[Any, ...], children: Any) -> Any:
    """Make the noun again: of NumPy or CuPy arrays the noun itself, which checks them."""
    names, static = aux
    fields = dict(zip(names, children, strict=True)) | dict(static)
    leaves = jax.tree.leaves(list(children))
    for home in (np.ndarray, cp.ndarray):
        if leaves and all(isinstance(leaf, home) for leaf in leaves):
            return kind(**fields)
    return noun(kind, **fields)


for _kind in _NOUNS:
    jax.tree_util.register_pytree_node(_kind, _flatten, functools.partial(_unflatten, _kind))
