"""Ragged keys and values as pages of one token: so attention over pages serves them too."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import numpy as np

from cukv._decode import PagedDecode
from cukv._pages import PagePair
from cukv._rows import Pages
from cukv.page_table import PageTable

if TYPE_CHECKING:
    from cukv._arrays import Array
    from cukv.ragged import RaggedTensor


class _RaggedPair(PagePair):
    """Ragged k and v; a plan is made from k alone."""

    __slots__ = ()

    @property
    def planned_head_dim_vo(self) -> int:
        return int(self.first.array.shape[3])


class RaggedPages(NamedTuple):
    """Attention over the rows of k and v, and the table of their pages: token t is page t."""

    attention: PagedDecode
    table: PageTable


_found: weakref.WeakKeyDictionary[RaggedTensor, tuple[Any, RaggedPages]] = (
    weakref.WeakKeyDictionary()
)


def ragged_pages(op: str, k: RaggedTensor, v: RaggedTensor) -> RaggedPages:
    """Give k and v as pages; the layers of a step, which bring the same nouns, find them again."""
    known_v, pages = _found.get(k, (None, None))
    if pages is not None and known_v is not None and known_v() is v:
        return pages
    device = k.rows.data.device_id
    as_pages = [Pages(op, name, x.rows[:, None], None) for name, x in (("k", k), ("v", v))]
    numbers, ones = _numbers(device, _capacity(k.nnz)), _ones(device, _capacity(k.batch_size))
    table = PageTable(k.indptr, numbers[: k.nnz], ones[: k.batch_size], 1)
    pages = RaggedPages(PagedDecode(_RaggedPair(*as_pages)), table)
    _found[k] = (weakref.ref(v), pages)
    return pages


def _capacity(size: int) -> int:
    """Round a size up, so that few arrays serve all: 1024 or more, and at most twice what fits."""
    return max(1024, 1 << (size - 1).bit_length()) if size else 1024


@functools.cache
def _numbers(device: int, size: int) -> Array:
    with cp.cuda.Device(device):
        return cp.arange(size, dtype=np.int32)


@functools.cache
def _ones(device: int, size: int) -> Array:
    with cp.cuda.Device(device):
        return cp.ones(size, dtype=np.int32)
