"""Inputs of benchmarks: shapes, random arrays, pages in random order.

They are on the GPU. A rehearsal, which ``conftest.py`` starts, has them small and in NumPy: there
every call runs the definition.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import cupy as cp
import numpy as np
import pytest

from cukv import PageTable
from cukv._arrays import FP8, as_dtype

HOME = SimpleNamespace(xp=cp)  # numpy in a rehearsal

# What the inputs of all calls of a graph take together: four times what an H200's L2 holds, so that
# a call finds none of its inputs there. More sets than these make no call colder.
ROTATED_BYTES, MAX_SETS = 240_000_000, 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: by default of a Llama-8B layer in bfloat16."""

    batch_size: int = 64
    kv_len: int = 1024  # tokens of each request
    qo_len: int = 1  # query or appended rows of each request
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"  # of the cache
    layout: str = "NHD"
    causal: bool = True

    def __str__(self) -> str:
        rows = f"_q{self.qo_len}" if self.qo_len > 1 else ""
        parts = [f"b{self.batch_size}{rows}_kv{self.kv_len}_h{self.num_qo_heads}"]
        parts += [f"x{self.num_kv_heads}_d{self.head_dim}_p{self.page_size}"]
        parts += [f"_{self.dtype}" if self.dtype != "bfloat16" else ""]
        parts += [f"_{self.layout}" if self.layout != "NHD" else ""]
        return "".join([*parts, "" if self.causal or self.qo_len == 1 else "_full"])

    @property
    def nnz(self) -> int:
        """Query or appended rows of all requests."""
        return self.batch_size * self.qo_len

    @property
    def row_dtype(self) -> str:
        """Dtype of queries and of rows before they are appended."""
        return "bfloat16" if as_dtype("bench", "dtype", self.dtype) in FP8 else self.dtype

    def info(self) -> dict[str, Any]:
        """Fields by name, for a benchmark's record."""
        return asdict(self)

    def small(self) -> "Shape":
        """Give a shape of the same kind that NumPy attends to at once."""
        group = min(self.num_qo_heads // self.num_kv_heads, 4)
        num_kv_heads = min(self.num_kv_heads, 2)
        return replace(
            self,
            batch_size=min(self.batch_size, 3),
            qo_len=min(self.qo_len, 19),
            kv_len=min(self.kv_len, 83),
            num_qo_heads=group * num_kv_heads,
            num_kv_heads=num_kv_heads,
        )


def shapes(*each: Shape, name: Callable[[Shape], str] = str) -> Any:
    """Parametrize a benchmark by shapes, under ids that ``name`` gives."""
    return pytest.mark.parametrize("shape", each, ids=name, indirect=True)


def growth(base: Shape, **axes: tuple[Any, ...]) -> Any:
    """Parametrize a benchmark by shapes that differ from one in one field at a time.

    The ids, such as ``kv_len=4096``, say how the time is to be plotted. An axis ``heads`` counts KV
    heads, each with as many query heads as the base has.
    """
    group = base.num_qo_heads // base.num_kv_heads

    def grown(axis: str, value: Any) -> Shape:
        if axis == "heads":
            return replace(base, num_kv_heads=value, num_qo_heads=value * group)
        if axis == "tokens":  # prompts: queries and keys
            return replace(base, qo_len=value, kv_len=value)
        return replace(base, **{axis: value})

    found = [
        pytest.param(grown(axis, value), id=f"{axis}={value}")
        for axis, values in axes.items()
        for value in values
    ]
    return pytest.mark.parametrize("shape", found, indirect=True)


# Arrays

_BLOCK = 16_777_213  # values, a prime: they repeat at no boundary of rows, heads or pages
_STEP = 7_368_787
_numbers = itertools.count()


@functools.cache
def _block(dtype: Any) -> Any:
    """Draw values once, on the host: cuRAND is not among what cukv needs."""
    size = _BLOCK if HOME.xp is cp else 65_537
    values = np.random.default_rng(0).standard_normal(size, np.float32).astype(dtype)
    return HOME.xp.asarray(bits(values))


def bits(array: Any) -> Any:
    """View an array as unsigned integers, which CuPy computes with whatever the dtype."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def normal(*shape: int, dtype: Any = "bfloat16") -> Any:
    """Make an array of normal values, other ones at each call."""
    kind = as_dtype("bench", "dtype", dtype)
    block = _block(kind)
    out = HOME.xp.empty(math.prod(shape), block.dtype)
    start, done = next(_numbers) * _STEP % len(block), 0
    while done < out.size:
        piece = block[start : start + out.size - done]
        out[done : done + len(piece)] = piece
        start, done = 0, done + len(piece)
    return out.view(kind).reshape(shape)


def empty(*shape: int, dtype: Any = "bfloat16") -> Any:
    """Allocate an array to write."""
    kind = as_dtype("bench", "dtype", dtype)
    return HOME.xp.empty(shape, f"u{kind.itemsize}").view(kind)


def truth_values(size: int, seed: int) -> Any:
    """Make booleans, half of them True."""
    some = HOME.xp.asarray(np.random.default_rng(seed).random(min(size, 1 << 20)) < 0.5)
    out = HOME.xp.empty(size, bool)
    for start in range(0, size, some.size):
        out[start : start + some.size] = some[: size - start]
    return out


def offsets(lens: Any) -> Any:
    """Give the prefix sum of lengths, int32, from 0."""
    return HOME.xp.asarray(np.cumsum([0, *lens]).astype(np.int32))


def poison(array: Any) -> None:
    """Fill an array with NaN, or with what is no result where there is none."""
    bits(array)[...] = 2 ** (8 * array.dtype.itemsize - 1) - 1


def take(array: Any, ids: Any) -> Any:
    """Copy entries of the first axis, of dtypes too whose bits are all that CuPy knows."""
    return bits(array)[ids].view(array.dtype)


def to_host(array: Any) -> Any:
    """Copy an array of either home and any dtype to NumPy."""
    return array if HOME.xp is np else bits(array).get().view(array.dtype)


# Pages


def num_pages(lens: Any, page_size: int) -> int:
    """Count the pages of requests."""
    return sum(-(-n // page_size) for n in lens)


def page_table(lens: Any, page_size: int) -> PageTable:
    """Hand out all pages in random order."""
    ids = np.random.default_rng(0).permutation(num_pages(lens, page_size)).astype(np.int32)
    return PageTable.from_seq_lens(list(lens), page_size, HOME.xp.asarray(ids))


def num_sets(nbytes: int) -> int:
    """Count the sets of inputs to rotate if a call reads and writes so many bytes."""
    if HOME.xp is np:
        return 2
    return max(1, min(MAX_SETS, -(-ROTATED_BYTES // max(nbytes, 1))))
