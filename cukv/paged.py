"""PagedKVCache: keys and values in fixed-size pages; append, gather, decode, prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import cupy as cp
import numpy as np

from cukv import reference
from cukv._arrays import Array, as_array, as_dtype, empty
from cukv._attention import (
    PagedCall,
    check_options,
    check_paged_call,
    flat_mask,
    host_scales,
    require_plan,
    run_on_host,
)
from cukv._check import check_indptr, check_sizes, match, match_dtype, truth
from cukv._noun import CacheNoun
from cukv._paged_attention import PagedAttention
from cukv._pages import PagePair, as_storage, as_storage_pair
from cukv._plan import Plan
from cukv.ragged import (
    RaggedTensor,
    as_rows,
    check_layout,
    offsets_of_rows,
    require_ragged,
    swap_layout,
)

if TYPE_CHECKING:
    from cukv.masks import Mask
    from cukv.page_table import PageTable


@dataclass(frozen=True, eq=False, repr=False)
class PagedKVCache(CacheNoun):
    """K and V of one layer in pages; which request owns which page is a ``PageTable``'s business.

    With ``layout="NHD"`` token ``t`` of page ``p`` is ``k[p, t, head]`` and ``v[p, t, head]``; with
    ``"HND"`` it is ``k[p, head, t]`` and ``v[p, head, t]``, where:

        k, v = data[:, 0], data[:, 1]   # one 5-D array
        k, v = data                     # a pair of 4-D arrays, whose last axes may differ

    Parameters
    ----------
    data : array or pair of arrays
        ``[max_num_pages, 2, page_size, num_kv_heads, head_dim]`` (HND: ``[max_num_pages, 2,
        num_kv_heads, page_size, head_dim]``), or ``(k, v)`` without the axis of 2. Any strides
        with a contiguous last axis, those of K and V independent.
    layout : {"NHD", "HND"}
        Order of the token and head axes.

    Raises
    ------
    TypeError, ValueError
        Not arrays of one home, device and dtype; wrong shape, layout or strides.

    Notes
    -----
    Memory at or past a request's ``kv_len``, and pages that nobody owns, may hold anything, NaN
    too. The structure is frozen, the contents are not: ``append`` writes in place. Layout:
    FlashInfer, "KV-Cache Layout in FlashInfer".

    Examples
    --------
    >>> import numpy as np
    >>> from cukv import PagedKVCache, PageTable
    >>> cache = PagedKVCache.empty(8, 16, 2, 64, "float16", xp=np)
    >>> table = PageTable.from_seq_lens([17, 5], page_size=16, xp=np)
    >>> rows = np.ones((2, 2, 64), np.float16)
    >>> cache.append(rows, rows, table)  # the last token of both requests
    >>> cache.k[1, 0, 0, :3], cache.k[2, 4, 0, :3]
    (array([1., 1., 1.], dtype=float16), array([1., 1., 1.], dtype=float16))
    """

    data: Any
    layout: str = "NHD"

    _pages: ClassVar[PagePair]  # K and V seen as NHD
    _attention: ClassVar[PagedAttention | None]  # on a GPU

    def __post_init__(self) -> None:
        """Check the structure once, and keep what every launch needs of it."""
        op = "PagedKVCache"
        check_layout(op, self.layout)
        axes = ("page_size", "num_kv_heads")
        axes = axes if self.layout == "NHD" else axes[::-1]
        if isinstance(self.data, (tuple, list)):
            arrays, reasons = zip(*as_storage_pair(op, ("k", "v"), self.data), strict=True)
            self._set(data=arrays)
        else:
            data, reason = as_storage(op, "data", self.data)
            match(op, "data", data, ("max_num_pages", "2", *axes, "head_dim"), {"2": 2})
            arrays, reasons = (data[:, 0], data[:, 1]), (reason, reason)
            self._set(data=data)
        match_dtype(op, "v", arrays[1], arrays[0].dtype)
        nhd = swap_layout if self.layout == "HND" else lambda array: array
        stored = ("max_num_pages", *axes)
        widths = ("head_dim", "head_dim_vo")
        pages = PagePair.of(op, ("k", "v"), stored, widths, arrays, reasons, nhd)
        self._set(
            _pages=pages, _attention=PagedAttention(pages) if pages.first.device >= 0 else None
        )

    @classmethod
    def empty(
        cls,
        max_num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any,
        layout: str = "NHD",
        head_dim_vo: int | None = None,
        *,
        xp: Any = cp,
    ) -> PagedKVCache:
        """Allocate a cache, uninitialised: one 5-D array, or a pair if K and V differ.

        Parameters
        ----------
        max_num_pages, page_size, num_kv_heads, head_dim : int
            Sizes; ``page_size`` in tokens.
        dtype : dtype or name
            float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; in NumPy float64 too.
        layout : {"NHD", "HND"}
            Order of the token and head axes.
        head_dim_vo : int
            Size of a value, if it differs from ``head_dim``.
        xp : module
            ``cupy`` or ``numpy``.

        Raises
        ------
        TypeError, ValueError
            Not a dtype, layout or size that there is.
        CudaUnavailableError
            ``xp`` is ``cupy`` and there is no GPU.
        """
        op = "PagedKVCache.empty"
        check_layout(op, layout)
        kind = as_dtype(op, "dtype", dtype)
        check_sizes(
            op,
            max_num_pages=max_num_pages,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_vo=head_dim if head_dim_vo is None else head_dim_vo,
        )
        token = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
        if head_dim_vo is None or head_dim_vo == head_dim:
            return cls(empty(op, (max_num_pages, 2, *token, head_dim), kind, xp), layout)
        pair = (empty(op, (max_num_pages, *token, d), kind, xp) for d in (head_dim, head_dim_vo))
        return cls(tuple(pair), layout)

    # --------------------------------------------------------------------------------- properties

    @property
    def k(self) -> Array:
        """Keys as stored, a view: ``[max_num_pages, *page, head_dim]`` in the cache's layout."""
        return self.data[0] if isinstance(self.data, tuple) else self.data[:, 0]

    @property
    def v(self) -> Array:
        """Values as stored, a view: ``[max_num_pages, *page, head_dim_vo]``."""
        return self.data[1] if isinstance(self.data, tuple) else self.data[:, 1]

    @property
    def max_num_pages(self) -> int:
        """Pages in storage."""
        return int(self._pages.first.array.shape[0])

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return int(self._pages.first.array.shape[1])

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return int(self._pages.first.array.shape[2])

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        return int(self._pages.first.array.shape[3])

    @property
    def head_dim_vo(self) -> int:
        """Elements of a value."""
        return int(self._pages.second.array.shape[3])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of K and V."""
        return self._pages.first.array.dtype  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------ memory verbs

    def append(
        self,
        k: Array | RaggedTensor,
        v: Array | RaggedTensor,
        table: PageTable,
        *,
        indptr: Array | None = None,
        batch_indices: Array | None = None,
        positions: Array | None = None,
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
    ) -> None:
        """Write new K and V rows, in place, into pages that ``table`` already owns. One launch.

        Where rows go is found from ``indptr``, or from ``batch_indices`` and ``positions``. With
        none of them the indptr of a RaggedTensor counts, which k and v share if both are. Of arrays
        row ``b`` is then request ``b``'s last token, and rows past the last request are padding;
        the row of a request without tokens is skipped.

        Parameters
        ----------
        k, v : [nnz, num_kv_heads, head_dim], [nnz, num_kv_heads, head_dim_vo]
            Packed rows in NHD order (a RaggedTensor's own layout counts). Where their dtype is not
            the cache's they are converted; to fp8 as ``value / scale``, saturating to the largest
            finite value, NaN staying NaN.
        table : PageTable
            Counts the new tokens already.
        indptr : [batch_size + 1] int32 or int64, or a sequence
            Offsets of each request's rows, which are the last tokens of its sequence. Rows at or
            past ``indptr[-1]`` are padding and skipped.
        batch_indices, positions : [nnz] int32 or int64, or sequences
            Request of each row and its token index there. A request that the table does not have,
            and a position outside the request's own pages, skips the row.
        k_scale, v_scale : float, or float32 [1] on the device
            Divisors for an fp8 cache; must be 1.0 for others. Rows that are of the cache's own
            fp8 dtype are stored as they are.

        Raises
        ------
        TypeError, ValueError
            Wrong home, dtype, shape, device or strides; storage that is read-only or repeats
            memory; one of ``batch_indices`` and ``positions`` without the other. Index values are
            read on NumPy only; ``table.validate(max_num_pages, indptr)`` checks them, and that
            sequences are as long as their rows. Nothing is written then.

        Notes
        -----
        Of two rows for one slot either may land, element by element. Current stream, no
        synchronisation. Source: kernels/append.cu.
        """
        op = "PagedKVCache.append"
        if type(k) is not cp.ndarray or type(v) is not cp.ndarray:
            given = {"k": k, "v": v}
            k, v = (as_rows(op, name, x) for name, x in given.items())
            where = indptr, batch_indices, positions
            indptr = offsets_of_rows(op, self._pages, table, where, **given)
        scales = (k_scale, v_scale)
        self._pages.append(op, k, v, table, indptr, batch_indices, positions, scales)

    def gather(
        self,
        table: PageTable,
        *,
        nnz: int | None = None,
        dtype: Any = None,
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
    ) -> tuple[RaggedTensor, RaggedTensor]:
        """Copy the tokens of every request out of its pages, packed, NHD.

        Parameters
        ----------
        table : PageTable
            Whose tokens to copy.
        nnz : int
            Length of the row axis; ``len(table.indices) * page_size`` by default, which holds any
            contents. Rows past ``token_indptr[-1]`` are padding and hold anything.
        dtype : dtype or name
            Dtype of the rows. The cache's own by default, bit for bit; another one gives
            ``value * scale``.
        k_scale, v_scale : float, or float32 [1] on the device
            Factors where ``dtype`` is not the cache's.

        Returns
        -------
        k, v : RaggedTensor
            ``[nnz, num_kv_heads, head_dim]`` and ``[nnz, num_kv_heads, head_dim_vo]``, with
            ``table.token_indptr``. A token whose page id is out of range is zero.

        Raises
        ------
        TypeError, ValueError
            Wrong home, device, dtype or page size; on NumPy also bad table values and a small nnz.

        Notes
        -----
        Current stream, no synchronisation. Source: kernels/gather.cu.
        """
        op = "PagedKVCache.gather"
        k, v, indptr = self._pages.gather(op, table, nnz, dtype, (k_scale, v_scale))
        return RaggedTensor._of(k, indptr), RaggedTensor._of(v, indptr)

    def copy_pages(self, src: Array, dst: Array) -> None:
        """Copy whole pages of K and V in place, as if all sources were read before the call.

        Parameters
        ----------
        src, dst : [n] int32 or int64, or sequences
            Page ids; a pair with a negative id is skipped. Of two copies to one page either may
            land.

        Raises
        ------
        TypeError, ValueError
            Wrong home, dtype, shape or device; on NumPy also an id out of range, which on the
            device skips its pair.

        Notes
        -----
        Current stream, no synchronisation. Pages of K, then of V, go through scratch. That of calls
        captured into a graph is allocated outside of CuPy's pool, once for a capture and a stream
        (again where a later call needs more), shared by the calls there, and kept for the life of
        the process. Source: kernels/copy_pages.cu.
        """
        self._pages.copy_pages("PagedKVCache.copy_pages", src, dst)

    # ---------------------------------------------------------------------------------- attention

    def plan(
        self,
        q: Array | RaggedTensor,
        table: PageTable,
        *,
        causal: bool = False,
        window_left: int = -1,
        custom_mask: Mask | None = None,
        batch_invariant: bool = False,
    ) -> Plan:
        """Prepare ``decode`` (q an array) or ``prefill`` (q a RaggedTensor) for all layers.

        Parameters
        ----------
        q : [batch_size, num_qo_heads, head_dim] array, or RaggedTensor
            As in the calls that the plan serves: shape, dtype and indptr count, values do not.
        table : PageTable
            As in the calls.
        causal, window_left, custom_mask
            As in the calls; ``decode`` has a window only.
        batch_invariant : bool
            Make a request's bits independent of its batch mates.

        Returns
        -------
        Plan
            ``plan.update()`` makes it follow changed contents of the same arrays.

        Raises
        ------
        NotImplementedError
            As ``decode`` and ``prefill``, on a GPU.
        TypeError, ValueError
            Wrong home, dtype, shape, option or mask.

        Notes
        -----
        One launch on the current stream, two with a mask, no synchronisation. Source:
        kernels/plan.cu, kernels/mask_tiles.cu.
        """
        ragged = isinstance(q, RaggedTensor)
        op = "PagedKVCache.prefill" if ragged else "PagedKVCache.decode"
        rows, qo_indptr = as_rows(op, "q", q), q.indptr if ragged else None
        causal = truth(op, "causal", causal)
        batch_invariant = truth(op, "batch_invariant", batch_invariant)
        if not ragged and (causal or custom_mask is not None):
            raise ValueError(f"{op}: takes no {'causal' if causal else 'custom_mask'}")
        call = PagedCall(op, rows, qo_indptr, table, causal, window_left, custom_mask)
        if self._attention is not None:
            return self._attention.plan(call, batch_invariant)
        key, _ = check_paged_call(call, self._pages)
        return Plan(op, key, batch_invariant=batch_invariant)

    def decode(
        self,
        q: Array,
        table: PageTable,
        *,
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
        """Attend from one query row per request to all its tokens.

        Parameters
        ----------
        q : [batch_size, num_qo_heads, head_dim]
            float16, bfloat16 or fp8, in NumPy float32 and float64 too; a 16-bit q and a 16-bit
            cache share their dtype. Query head ``h`` reads KV head ``h // group_size``.
        table : PageTable
            Tokens of each request.
        sm_scale : float
            Multiplies ``q.k``; ``1 / sqrt(head_dim)`` by default.
        window_left : int
            Tokens to the left of the query's own that it sees; -1 is all.
        logits_soft_cap : float
            ``cap * tanh(logits / cap)`` before masking; None, 0 and numbers from 2**80 on are off.
        sinks : [num_qo_heads] float16, bfloat16 or float32
            Natural-log logit per head, not scaled, added once to the denominator.
        q_scale, k_scale, v_scale : float, or float32 [1] on the device
            ``q.k`` is times ``q_scale * k_scale``, the output times ``v_scale``.
        plan : Plan
            Made by ``plan`` for such a call.
        out : [batch_size, num_qo_heads, head_dim_vo] float16, bfloat16 or float32
            Where to write the output. It must overlap neither itself, ``lse``, nor what is read.
        lse : [batch_size, num_qo_heads] float32
            Where to write the log-sum-exp.
        return_lse : bool
            Give ``(o, lse)``.

        Returns
        -------
        o : [batch_size, num_qo_heads, head_dim_vo]
            In q's dtype (bfloat16 for fp8 q); 0 for a request without tokens.
        lse : [batch_size, num_qo_heads] float32
            **Base 2**: ``log2(sum(2 ** (logits * log2(e))))``; -inf without tokens.
            A sink counts as a token without a value: alone it gives ``sink * log2(e)``.

        Raises
        ------
        NotImplementedError
            On a GPU: a float32 cache; a head_dim or head_dim_vo that is not a multiple of 8 up to
            256, or needs more shared memory than this GPU has.
        TypeError, ValueError
            Wrong home, dtype, shape, option, or a plan made for another call; on a GPU, a plan made
            from another table, and no plan for a call that is captured into a graph.

        Notes
        -----
        Current stream, no synchronisation. A call without ``plan`` makes one: one more launch and
        memory for its work. Source: kernels/decode.cu, kernels/prefill_sm80.cu, kernels/plan.cu.
        """
        op = "PagedKVCache.decode"
        if type(q) is not cp.ndarray:
            if isinstance(q, RaggedTensor):
                raise TypeError(f"{op}: q must be an array; prefill takes a RaggedTensor")
            q = as_array(op, "q", q)
        return_lse = truth(op, "return_lse", return_lse)
        attend = self._attend_on_host if self._attention is None else self._attention.attend
        return attend(
            PagedCall(op, q, None, table, False, window_left),
            (sm_scale, logits_soft_cap, sinks),
            (q_scale, k_scale, v_scale),
            plan,
            (out, lse, return_lse),
        )

    def prefill(
        self,
        q: RaggedTensor,
        table: PageTable,
        *,
        causal: bool = False,
        custom_mask: Mask | None = None,
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
        """Attend from any number of query rows per request: prefill, append, mixed batches.

        Parameters
        ----------
        q : RaggedTensor
            ``[nnz, num_qo_heads, head_dim]``, one request per request of the table.
        table : PageTable
            Tokens of each request.
        causal : bool
            Aligned to the end: query ``i`` sees key ``j`` iff ``j <= i + kv_len - qo_len``.
        custom_mask : RaggedMask or PackedMask
            True = attend; replaces ``causal``. The window still applies.
        sm_scale, window_left, logits_soft_cap, sinks, q_scale, k_scale, v_scale, plan, out, lse, \
return_lse
            As in ``decode``; the window reaches from ``i + kv_len - qo_len``.

        Returns
        -------
        o : [nnz, num_qo_heads, head_dim_vo]
            In q's dtype (bfloat16 for fp8 q); 0 for a row that sees no key.
        lse : [nnz, num_qo_heads] float32
            Base 2; -inf for a row that sees no key, ``sink * log2(e)`` if it has a sink.

        Raises
        ------
        NotImplementedError
            On a GPU: what ``decode`` does not take there.
        TypeError, ValueError
            Wrong home, dtype, shape, option or mask, or a plan made for another call; on a GPU, a
            plan made from other index arrays or another mask, and no plan for a call that is
            captured into a graph.

        Notes
        -----
        Current stream, no synchronisation. A call without ``plan`` makes one: one more launch, two
        with a mask, and memory for its work. A plan holds the bits of its mask. Requests of few
        query rows and of many are served by different kernels. On Hopper, where q and the cache
        are e4m3, heads have 128 elements and there is no mask and no cap, softmax weights may be
        rounded to e4m3 too, each by 1/16 of itself or 2^-18 of the row's largest at most (so
        that many tiny ones vanish), and sums keep 14 bits: values of one sign come out smaller by
        up to 2^-21 for each key. Source: kernels/decode.cu, kernels/prefill_sm80.cu,
        kernels/prefill_sm90.cu, kernels/plan.cu, kernels/mask_tiles.cu.
        """
        op = "PagedKVCache.prefill"
        if type(q) is not RaggedTensor:
            require_ragged(op, q=q)
        causal, return_lse = truth(op, "causal", causal), truth(op, "return_lse", return_lse)
        attend = self._attend_on_host if self._attention is None else self._attention.attend
        return attend(
            PagedCall(op, q.rows, q.indptr, table, causal, window_left, custom_mask),
            (sm_scale, logits_soft_cap, sinks),
            (q_scale, k_scale, v_scale),
            plan,
            (out, lse, return_lse),
        )

    def _attend_on_host(
        self,
        call: PagedCall,
        logits: tuple[Any, float | None, Any],
        scales: tuple[Any, Any, Any],
        plan: Plan | None,
        results: tuple[Any, Any, bool],
    ) -> Any:
        """Attend by the definition: ``PagedAttention.attend`` on NumPy arrays."""
        op, q, qo_indptr, table, causal, window_left, custom_mask, _ = call
        key, _ = check_paged_call(call, self._pages)
        require_plan(op, plan, key)
        options = check_options(
            op,
            self.head_dim,
            q.shape[1],
            sm_scale=logits[0],
            window_left=window_left,
            logits_soft_cap=logits[1],
            sinks=logits[2],
            like=q,
        )
        options |= host_scales(op, q_scale=scales[0], k_scale=scales[1], v_scale=scales[2])
        table.validate(self.max_num_pages)
        if qo_indptr is None:
            qo_indptr = np.arange(len(q) + 1)
        check_indptr(op, "q.indptr", qo_indptr, len(q), "rows")
        if custom_mask is not None:
            options["custom_mask"] = flat_mask(op, custom_mask, qo_indptr, table.token_indptr)
        k, v = (pages.array for pages in self._pages)
        csr = (table.indptr, table.indices, table.last_page_len)
        return run_on_host(
            op,
            q,
            self.head_dim_vo,
            lambda: reference.prefill(q, qo_indptr, k, v, *csr, causal=causal, **options),
            *results,
        )
