"""Ragged keys and values as pages of one token: so attention over pages serves them too."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp

from cukv._index import NO_INDEX, pack_divisor, pack_index, pack_numbers
from cukv._paged_attention import PagedAttention
from cukv._pages import PagePair
from cukv._rows import Pages
from cukv._sources import packer
from cukv.page_table import PageTable

if TYPE_CHECKING:
    from cukv._arrays import Array
    from cukv.ragged import RaggedTensor

_MAX_CHECKED = 256  # signatures of a pair

_pack_table = packer("PageTable")


class _RaggedPair(PagePair):
    """Ragged k and v; a plan is made from k alone."""

    __slots__ = ()

    @property
    def planned_head_dim_vo(self) -> int:
        return int(self.first.array.shape[3])

    @property
    def consecutive(self) -> bool:
        return True


class RaggedPages(NamedTuple):
    """Attention over the rows of k and v, and the table of their pages: token t is page t."""

    attention: PagedAttention
    table: PageTable
    checked: set[tuple[Any, ...]]  # signatures of queries that go with k and v

    def remember(self, q: Array, qo_indptr: Array) -> None:
        """Note that queries like these have been checked against k and v."""
        if len(self.checked) >= _MAX_CHECKED:
            self.checked.clear()
        self.checked.add(_signature(q, qo_indptr))


def _signature(q: Array, qo_indptr: Array) -> tuple[Any, ...]:
    return (q.shape, q.dtype, q.data.device_id, qo_indptr.shape)


class _OfKeys(NamedTuple):
    """What all values that go with some keys share, and the pages of each."""

    table: PageTable  # a plan is made from k alone, and serves calls with v
    of_values: weakref.WeakKeyDictionary[RaggedTensor, RaggedPages]


_found: weakref.WeakKeyDictionary[RaggedTensor, _OfKeys] = weakref.WeakKeyDictionary()


def checked_pages(k: Any, v: Any, q: Array, qo_indptr: Array) -> RaggedPages | None:
    """Find k and v as pages if queries like these have been checked against them."""
    of_keys = _found.get(k) if type(q) is cp.ndarray else None
    pages = None if of_keys is None else of_keys.of_values.get(v)
    return pages if pages is not None and _signature(q, qo_indptr) in pages.checked else None


def ragged_pages(op: str, k: RaggedTensor, v: RaggedTensor) -> RaggedPages:
    """Give k and v as pages; calls that bring the same nouns again find them."""
    of_keys = _found.get(k)
    if of_keys is None:
        of_keys = _found[k] = _OfKeys(_table(k), weakref.WeakKeyDictionary())
    table, of_values = of_keys
    pages = of_values.get(v)
    if pages is None:
        pair = _RaggedPair(
            *(Pages(op, name, x.rows[:, None], None) for name, x in (("k", k), ("v", v)))
        )
        pages = of_values[v] = RaggedPages(PagedAttention(pair), table, set())
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
