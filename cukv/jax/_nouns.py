"""Nouns as pytrees: their arrays are leaves, layouts and sizes are static."""

from __future__ import annotations

import dataclasses
from typing import Any

import cupy as cp
import jax
import numpy as np

from cukv._noun import Noun
from cukv.cascade import CascadeLevels
from cukv.jax._arguments import is_numbers
from cukv.masks import PackedMask, RaggedMask
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache
from cukv.ragged import RaggedTensor

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
        Not a noun; fields that it does not have, lacks or is given twice; numbers for an array.
    """
    if not (isinstance(kind, type) and issubclass(kind, Noun)):
        raise TypeError(f"noun: kind must be a noun, such as cukv.PageTable, got {kind!r}")
    specs = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [f.name for f in specs] + (["indptr"] if kind is PackedMask else [])
    given = dict(zip(names, fields, strict=False)) | named
    defaults = {f.name: f.default for f in specs if f.default is not dataclasses.MISSING}
    if kind is PackedMask:
        defaults["indptr"] = None
    values = defaults | given
    if len(fields) > len(names) or set(values) != set(names):
        raise TypeError(f"noun: {kind.__name__} takes {names}, got {list(given)}")
    if twice := set(names[: len(fields)]) & set(named):
        raise TypeError(f"noun: {kind.__name__} is given {sorted(twice)[0]} twice")
    for name, x in values.items():
        if is_numbers(x):
            raise TypeError(f"noun: {kind.__name__}'s {name} must be an array, got {type(x)}")
    made = object.__new__(kind)
    if kind is PackedMask:
        values["_indptr"] = values.pop("indptr")
    made._set(**values)
    return made


def _register(kind: type[Noun]) -> None:
    """Make nouns of a kind pytrees.

    ``jax.jit`` flattens what it is given, and unflattens what it gives, in each call, while the GPU
    waits: in a step that takes and gives a cache of each layer this is most of what Python does.
    So names are found here, once, and what comes back as arrays of JAX is not looked at.
    """
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    names += ["_indptr"] if kind is PackedMask else []
    num_arrays = sum(name not in _STATIC for name in names)  # of each kind they come first
    arrays, static = names[:num_arrays], names[num_arrays:]

    def flatten(x: Noun) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(x, name) for name in arrays], tuple([getattr(x, name) for name in static])

    def unflatten(values: tuple[Any, ...], children: Any) -> Any:
        fields = *children, *values
        if _are_checked(children):
            return kind(*fields)
        made = object.__new__(kind)
        vars(made).update(zip(names, fields, strict=True))
        return made

    jax.tree_util.register_pytree_node(kind, flatten, unflatten)


def _are_checked(children: Any) -> bool:
    """Whether nouns check these: leaves that are all arrays of NumPy, or all of CuPy."""
    first = children[0]
    while isinstance(first, tuple) and first:
        first = first[0]
    for home in (np.ndarray, cp.ndarray):
        if isinstance(first, home):
            return all(isinstance(leaf, home) for leaf in jax.tree.leaves(list(children)))
    return False


for _kind in _NOUNS:
    _register(_kind)
