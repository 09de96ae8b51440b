"""CascadeLevels: prefixes shared by groups of requests, one page table per level; attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cukv import reference
from cukv._arrays import Array, converted, home, on_device_of
from cukv._attention import (
    check_heads,
    check_options,
    check_queries,
    check_window,
    host_scales,
    plan_key,
    require_plan,
    run_on_host,
)
from cukv._cascade import CascadeCall, attend_cascade, plan_cascade
from cukv._check import (
    check_indptr,
    match,
    match_index,
    narrow,
    truth,
    values,
    whole_number,
)
from cukv._index import as_index
from cukv._noun import Noun
from cukv._plan import Plan
from cukv._prefixes import shared_levels
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache
from cukv.ragged import RaggedTensor, as_rows

if TYPE_CHECKING:
    from collections.abc import Sequence


_MAX_ROWS = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False, repr=False)
class CascadeLevels(Noun):
    """Keys shared by groups of requests: level 0 is the root, the last level the leaves.

    Every level divides the same rows into its own requests, and has a page table for them. Row
    ``r`` belongs to request ``b`` of level ``l`` where
    ``qo_indptr[l][b] <= r < qo_indptr[l][b + 1]``, and attends to:

        keys[r] = concatenate([keys of r's request in tables[l] for l in range(num_levels)])

    Parameters
    ----------
    qo_indptr : tuple of [batch_size_l + 1] int32 or int64
        Offsets of each request's rows, one array per level; all end at the same number of rows.
    tables : tuple of PageTable
        Pages of each request, one table per level, of one page size. A request without pages adds
        no keys.
    row_order : [rows] int32 or int64
        Row ``r`` of the levels is row ``row_order[r]`` of q and of the results; None is ``r``
        itself. Entries at or past the number of rows are padding and may hold anything.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, shape, home or device, page sizes that differ. Values are checked by
        ``validate``.

    Notes
    -----
    Layout: FlashInfer, "KV-Cache Layout in FlashInfer", section "Multi-level Cascade Inference
    Data Layout". There a window or a row order is not possible.

    Rows attend level by level, those of a request together: what many requests share is not read
    again for each of them. ``from_prefixes`` finds what they share in a page table, as far as it
    pays.

    Examples
    --------
    >>> import numpy as np
    >>> from cukv import CascadeLevels, PageTable
    >>> table = PageTable([0, 3, 5, 8], [7, 8, 0, 9, 1, 7, 8, 2], [4, 1, 2], page_size=16)
    >>> levels = CascadeLevels.from_prefixes(table, min_saved_bytes=0)
    >>> levels.tables[0].indices, levels.qo_indptr[0], levels.row_order
    (array([7, 8], dtype=int32), array([0, 2, 3], dtype=int32), array([0, 2, 1], dtype=int32))
    >>> levels.tables[1].indices, levels.qo_indptr[1]
    (array([0, 2, 9, 1], dtype=int32), array([0, 1, 2, 3], dtype=int32))
    """

    qo_indptr: tuple[Array, ...]
    tables: tuple[PageTable, ...]
    row_order: Array | None = None

    def __post_init__(self) -> None:
        """Check the structure once; nothing of it can change afterwards."""
        op = "CascadeLevels"
        tables = _levels_of(op, "tables", self.tables)
        given = _levels_of(op, "qo_indptr", self.qo_indptr)
        if len(given) != len(tables) or not tables:
            raise ValueError(
                f"{op}: qo_indptr and tables must have one entry per level, one level or more, "
                f"got {len(given)} and {len(tables)}"
            )
        arrays = {}
        for level, table in enumerate(tables):
            if not isinstance(table, PageTable):
                raise TypeError(f"{op}: tables[{level}] must be a PageTable, got {type(table)}")
            if table.page_size != tables[0].page_size:
                raise ValueError(
                    f"{op}: tables[{level}] must have page_size={tables[0].page_size} as tables[0] "
                    f"has, got {table.page_size}"
                )
            arrays[f"tables[{level}]"] = table.indptr
        like = tables[0].indptr
        qo_indptr = []
        for level, (x, table) in enumerate(zip(given, tables, strict=True)):
            name = f"qo_indptr[{level}]"
            arrays[name] = as_index(op, name, x, like)
            match_index(op, name, arrays[name], table.batch_size + 1)
            qo_indptr.append(arrays[name])
        row_order = None
        if self.row_order is not None:
            row_order = as_index(op, "row_order", self.row_order, like)
            match_index(op, "row_order", row_order)
        home(op, **arrays, row_order=row_order)
        self._set(qo_indptr=tuple(qo_indptr), tables=tables, row_order=row_order)

    # ------------------------------------------------------------------------------- constructors

    @classmethod
    def from_prefixes(
        cls,
        table: PageTable,
        *,
        qo_indptr: Array | Sequence[int] | None = None,
        min_saved_bytes: int | None = None,
        bytes_per_token: int = 4096,
    ) -> CascadeLevels:
        """Find the page runs that requests of a flat table share. Synchronises on a GPU.

        Requests share a page that stands at the same place of their page lists behind shared
        pages, wherever they stand in the batch. Shared are full pages only, and every request
        keeps its last tokens in its leaf, as many as it has rows, so that causal attention equals
        flat prefill (where ``qo_len <= kv_len``).

        Parameters
        ----------
        table : PageTable
            All pages of each request.
        qo_indptr : [batch_size + 1] int32 or int64, or a sequence
            Offsets of each request's rows of q; one row per request by default. A request without
            rows shares nothing.
        min_saved_bytes : int
            A run is shared if that saves so many bytes or more, counted against reading its pages
            again for each of the runs and leaves below it; 0 shares all that can be shared. By
            default half of what is saved counts, since flat decode finds the other half in the L2.
            It must be worth what the run costs (1 MB, and 33 kB a row for partial states), and all
            runs together must save 120 MB more, which an H200 reads in 27 us.
        bytes_per_token : int
            Bytes of one token's keys and values, for counting what is saved; 4096 is 8 heads of
            128 in 16 bits.

        Returns
        -------
        CascadeLevels
            In the home and index dtype of ``table``. Levels are as many as runs lie upon each
            other, and the leaves; each request of a level lies within one of the level above.
            ``row_order`` makes sharers adjacent, in the order of their page ids. Where nothing is
            shared it is one level: ``table`` itself.

        Raises
        ------
        TypeError, ValueError
            Wrong home, dtype, shape or value.
        """
        op = "CascadeLevels.from_prefixes"
        if not isinstance(table, PageTable):
            raise TypeError(f"{op}: table must be a PageTable, got {type(table)}")
        bytes_per_token = whole_number(op, "bytes_per_token", bytes_per_token, 1)
        if min_saved_bytes is not None:
            min_saved_bytes = whole_number(op, "min_saved_bytes", min_saved_bytes, 0)
        given = range(table.batch_size + 1) if qo_indptr is None else qo_indptr
        flat_rows = as_index(op, "qo_indptr", given, table.indptr)
        home(op, table=table.indptr, qo_indptr=flat_rows)
        match_index(op, "qo_indptr", flat_rows, table.batch_size + 1)
        given_rows = values(flat_rows)
        check_indptr(op, "qo_indptr", given_rows, _MAX_ROWS, "rows")
        host_rows = narrow(f"{op}: qo_indptr", given_rows, table.indptr.dtype)
        flat_rows = converted(flat_rows, table.indptr.dtype)
        page_bytes = table.page_size * bytes_per_token
        found = shared_levels(table.to_host(), host_rows, page_bytes, min_saved_bytes)
        if found is None:
            return cls((flat_rows,), (table,))
        if isinstance(flat_rows, np.ndarray):
            return cls(*found)
        with on_device_of(flat_rows):
            return cls(*found).to_device()

    # --------------------------------------------------------------------------------- properties

    @property
    def num_levels(self) -> int:
        """Number of levels, root and leaves included."""
        return len(self.tables)

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return self.tables[0].page_size

    @property
    def batch_size(self) -> int:
        """Number of requests of the last level."""
        return self.tables[-1].batch_size

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Number of requests of each level."""
        return tuple(table.batch_size for table in self.tables)

    # --------------------------------------------------------------------------------- validation

    def validate(self, max_num_pages: int | None = None, nnz: int | None = None) -> None:
        """Check the values, on the host. Synchronises if the levels are on a GPU.

        Parameters
        ----------
        max_num_pages : int
            Pages of the cache that the levels are used with: every page id must be below it.
        nnz : int
            Rows of q. ``row_order`` must name different ones of them; without ``nnz`` it must be a
            permutation of the rows that the levels have.

        Raises
        ------
        TypeError
            Arguments that are not integers.
        ValueError
            Names the level, the request and the value.
        """
        op = "CascadeLevels.validate"
        if nnz is not None:
            nnz = whole_number(op, "nnz", nnz, 0)
        if max_num_pages is not None:
            max_num_pages = whole_number(op, "max_num_pages", max_num_pages, 0)
        rows = -1
        for level, (indptr, table) in enumerate(zip(self.qo_indptr, self.tables, strict=True)):
            starts = values(indptr)
            check_indptr(
                op, f"qo_indptr[{level}]", starts, _MAX_ROWS if nnz is None else nnz, "rows"
            )
            if level and starts[-1] != rows:
                raise ValueError(
                    f"{op}: all levels must have the same rows, but qo_indptr[0] ends at {rows} "
                    f"and qo_indptr[{level}] at {starts[-1]}"
                )
            rows = int(starts[-1])
            try:
                table.validate(max_num_pages)
            except ValueError as error:
                message = str(error).partition(": ")[2]
                raise ValueError(f"{op}: tables[{level}]: {message}") from None
        if self.row_order is not None:
            _check_order(op, values(self.row_order), rows, rows if nnz is None else nnz)

    # ---------------------------------------------------------------------------------- attention

    def plan(
        self,
        q: Array | RaggedTensor,
        cache: PagedKVCache,
        *,
        causal: bool = False,
        window_left: int = -1,
    ) -> Plan:
        """Prepare ``attend`` for all layers.

        Parameters
        ----------
        q : [nnz, num_qo_heads, head_dim] array, or RaggedTensor
            As in the calls that the plan serves: shape and dtype count, values do not.
        cache : PagedKVCache
            As in the calls, of any layer.
        causal, window_left
            As in the calls.

        Returns
        -------
        Plan
            ``plan.update()`` makes it follow changed contents of the same arrays. On a GPU it holds
            the partial states of a call, of ``num_qo_heads * (head_dim_vo + 1)`` numbers of float32
            each: one for each row and level; where rows are few, and so CTAs share the keys of a
            level, up to 17 for each row.

        Raises
        ------
        NotImplementedError, TypeError, ValueError
            As ``attend``.

        Notes
        -----
        On the current stream, no synchronisation. Source: as ``attend``.
        """
        op = "CascadeLevels.attend"
        causal = truth(op, "causal", causal)
        key = self._check_call(op, q, cache, causal, window_left)
        if cache._attention is None:
            return Plan(op, key)
        call = self._call(op, as_rows(op, "q", q), causal, window_left)
        return plan_cascade(call, cache._attention, cache.head_dim_vo, key)

    def attend(
        self,
        q: Array | RaggedTensor,
        cache: PagedKVCache,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sinks: Array | None = None,
        q_scale: Any = 1.0,
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
        plan: Plan | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend from each row to the keys of its requests in all levels, as if concatenated.

        Equals flat prefill over the concatenation wherever a request has no more rows than its
        leaf has tokens.

        Parameters
        ----------
        q : [nnz, num_qo_heads, head_dim] array, or RaggedTensor
            Rows in the caller's order, which ``row_order`` translates. Rows that the levels do not
            name are padding. A RaggedTensor's own indptr is not consulted.
        cache : PagedKVCache
            Holds the pages of all levels.
        causal : bool
            Acts inside the last level, aligned to its end: query ``i`` of a leaf of ``leaf_len``
            tokens sees its key ``j`` iff ``j <= i + leaf_len - qo_len``, and all keys above.
        sm_scale : float
            Multiplies ``q.k``; ``1 / sqrt(head_dim)`` by default.
        window_left : int
            Tokens to the left of its own position that a query sees; -1 is all. Positions count
            over the concatenation, so that a window may end in any level.
        logits_soft_cap : float
            ``cap * tanh(logits / cap)`` before masking; None, 0 and numbers from 2**80 on are off.
        sinks : [num_qo_heads] float16, bfloat16 or float32
            Natural-log logit per head, not scaled, added once (not per level) to the denominator.
        q_scale, k_scale, v_scale : float, or float32 [1] on the device
            ``q.k`` is times ``q_scale * k_scale``, the output times ``v_scale``.
        plan : Plan
            Made by ``plan`` for such a call.
        out : [nnz, num_qo_heads, head_dim_vo] float16, bfloat16 or float32
            Where to write the output. It must overlap neither itself, ``lse``, nor what is read.
        lse : [nnz, num_qo_heads] float32
            Where to write the log-sum-exp.
        return_lse : bool
            Give ``(o, lse)``.

        Returns
        -------
        o : [nnz, num_qo_heads, head_dim_vo]
            In q's dtype (bfloat16 for fp8 q), in q's order; 0 for a row that sees no key.
        lse : [nnz, num_qo_heads] float32
            **Base 2**, over the keys of all levels; -inf for a row that sees no key,
            ``sink * log2(e)`` if it has a sink.

        Raises
        ------
        NotImplementedError
            What ``PagedKVCache.prefill`` does not take on a GPU.
        TypeError, ValueError
            Wrong home, dtype, shape or option, or a plan made for another call; on a GPU, no plan
            for a call that is captured into a graph.

        Notes
        -----
        On a GPU: two launches on the current stream, whatever the number of levels, and before them
        those of ``Plan.update`` if there is no plan; no synchronisation. Source:
        kernels/prefill_sm90.cu, kernels/prefill_sm80.cu, kernels/decode.cu, kernels/plan.cu,
        kernels/concat_levels.cu.
        """
        op = "CascadeLevels.attend"
        causal, return_lse = truth(op, "causal", causal), truth(op, "return_lse", return_lse)
        key = self._check_call(op, q, cache, causal, window_left)
        require_plan(op, plan, key)
        rows = as_rows(op, "q", q)
        options = check_options(
            op,
            cache.head_dim,
            rows.shape[1],
            like=rows,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
        )
        if cache._attention is not None:
            return attend_cascade(
                self._call(op, rows, causal, window_left),
                cache._attention,
                cache.head_dim_vo,
                (options["sm_scale"], options["logits_soft_cap"], options["sinks"]),
                (q_scale, k_scale, v_scale),
                plan,
                (out, lse, return_lse),
            )
        options |= host_scales(op, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        self.validate(cache.max_num_pages, len(rows))
        k, v = (pages.array for pages in cache._pages)
        csr = [(table.indptr, table.indices, table.last_page_len) for table in self.tables]
        return run_on_host(
            op,
            rows,
            cache.head_dim_vo,
            lambda: reference.cascade(
                rows, self.qo_indptr, k, v, csr, row_order=self.row_order, causal=causal, **options
            ),
            out,
            lse,
            return_lse,
        )

    def _call(self, op: str, rows: Array, causal: bool, window_left: int) -> CascadeCall:
        """Give a checked call to the GPU."""
        levels = self.qo_indptr, self.tables, self.row_order
        return CascadeCall(op, rows, *levels, causal, int(window_left))

    def _check_call(
        self,
        op: str,
        q: Array | RaggedTensor,
        cache: PagedKVCache,
        causal: bool,
        window_left: int,
    ) -> tuple[tuple[str, Any], ...]:
        """Check queries and cache against the levels: what a plan depends on."""
        if not isinstance(cache, PagedKVCache):
            raise TypeError(f"{op}: cache must be a PagedKVCache, got {type(cache)}")
        rows = as_rows(op, "q", q)
        match(op, "q", rows, ("nnz", "num_qo_heads", "head_dim"), {"head_dim": cache.head_dim})
        check_heads(op, rows.shape[1], cache.num_kv_heads)
        check_queries(op, "q", rows, cache.dtype)
        if self.page_size != cache.page_size:
            raise ValueError(
                f"{op}: the levels' page_size is {self.page_size}, the cache's {cache.page_size}"
            )
        key = plan_key(
            rows,
            cache=(cache.page_size, cache.num_kv_heads, cache.head_dim_vo, cache.dtype.name),
            levels=tuple((table.batch_size, len(table.indices)) for table in self.tables),
            row_order=None if self.row_order is None else len(self.row_order),
            causal=causal,
            window_left=check_window(op, window_left),
        )
        home(op, q=rows, cache=cache.k, levels=self.qo_indptr[0])
        return key


def _levels_of(op: str, name: str, x: Any) -> tuple[Any, ...]:
    if not isinstance(x, (tuple, list)):
        raise TypeError(f"{op}: {name} must be a tuple with one entry per level, got {type(x)}")
    return tuple(x)


def _check_order(op: str, order: np.ndarray, rows: int, nnz: int) -> None:
    """Raise unless the first ``rows`` entries name different rows of ``nnz``."""
    if len(order) < rows:
        raise ValueError(f"{op}: row_order must be [rows={rows}], got [{len(order)}]")
    order = order[:rows]
    bad = np.flatnonzero((order < 0) | (order >= nnz))
    if len(bad):
        row = int(bad[0])
        raise ValueError(f"{op}: row_order[{row}] must be a row of {nnz}, got {order[row]}")
    by_target = np.argsort(order, kind="stable")
    again = by_target[1:][order[by_target[1:]] == order[by_target[:-1]]]
    if len(again):
        row = int(again.min())
        raise ValueError(f"{op}: row_order[{row}] names row {order[row]} a second time")
