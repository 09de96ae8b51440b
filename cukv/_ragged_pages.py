"""Ragged keys and values as pages of one token: so attention over pages serves them too."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import cupy as cp

from cukv._index import NO_INDEX, pack_divisor, pack_index, pack_numbers
from cukv._kernels import packer
from cukv._paged_attention import PagedAttention
from cukv._pages import PagePair
from cukv._rows import Pages
from cukv.page_table import PageTable

if TYPE_CHECKING:
    from cukv.ragged import RaggedTensor

_pack_table = packer("PageTable")


class _RaggedPair(PagePair):
    """Ragged k and v; a plan is made from k alone."""

    __slots__ = ()

    @property
    def planned_head_dim_vo(self) -> int:
        return int(self.first.array.shape[3])


class RaggedPages(NamedTuple):
    """Attention over the rows of k and v, and the table of their pages: token t is page t."""

    attention: PagedAttention
    table: PageTable


_Found = weakref.WeakKeyDictionary["RaggedTensor", RaggedPages]
_found: weakref.WeakKeyDictionary[RaggedTensor, _Found] = weakref.WeakKeyDictionary()


def ragged_pages(op: str, k: RaggedTensor, v: RaggedTensor) -> RaggedPages:
    """Give k and v as pages; calls that bring the same nouns again find them."""
    of_v = _found.get(k)
    if of_v is None:
        of_v = _found[k] = weakref.WeakKeyDictionary()
    pages = of_v.get(v)
    if pages is None:
        pair = _RaggedPair(
            *(Pages(op, name, x.rows[:, None], None) for name, x in (("k", k), ("v", v)))
        )
        pages = of_v[v] = RaggedPages(PagedAttention(pair), _table(k))
    return pages


def _table(k: RaggedTensor) -> PageTable:
    """Make the table in which request b owns pages indptr[b], ..., indptr[b + 1] - 1, all full.

    Its page ids and lengths are worked out, not read: the arrays that stand for them are views of
    one entry, and kernels are told that there are none.
    """
    ids, lens = (cp.broadcast_to(k.indptr[:1], (n,)) for n in (k.nnz, k.batch_size))
    table = PageTable(k.indptr, ids, lens, 1)
    index = pack_index(k.indptr), pack_numbers(k.nnz), NO_INDEX
    table._set(packed=_pack_table(*index, k.batch_size, 1, pack_divisor(1)))
    return table
