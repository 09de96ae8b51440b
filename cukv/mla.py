"""MLAPagedCache: DeepSeek's latent cache in pages; append, gather, absorbed decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import cupy as cp
import numpy as np

from cukv import reference
from cukv._arrays import Array, as_array, as_dtype, empty
from cukv._attention import check_options, require_plan, run_on_host
from cukv._check import check_indptr, check_sizes, match, truth, values, whole_number
from cukv._latent_attention import (
    LatentAttention,
    LatentCall,
    check_latent_call,
    check_rotary_queries,
)
from cukv._noun import CacheNoun
from cukv._pages import PagePair, as_storage, as_storage_pair
from cukv._plan import Plan
from cukv.ragged import RaggedTensor, offsets_of_rows

if TYPE_CHECKING:
    from cukv.page_table import PageTable


@dataclass(frozen=True, eq=False, repr=False)
class MLAPagedCache(CacheNoun):
    """Latent rows of one layer in pages: a compressed part ``ckv`` and a rotary part ``kpe``.

    Token ``t`` of page ``p`` is ``ckv[p, t]`` and ``kpe[p, t]``, where:

        ckv, kpe = data[..., :-head_dim_kpe], data[..., -head_dim_kpe:]   # one array
        ckv, kpe = data                                                   # a pair

    Parameters
    ----------
    data : array or pair of arrays
        ``[max_num_pages, page_size, head_dim_ckv + head_dim_kpe]``, or ``(ckv, kpe)``. Any strides
        with a contiguous last axis. The dtypes of a pair may differ.
    head_dim_kpe : int
        Columns of kpe at the end of one array; a pair brings its own.

    Raises
    ------
    TypeError, ValueError
        Not arrays of one home and device; wrong shape, dtype or strides.

    Notes
    -----
    Layout: FlashInfer, "KV-Cache Layout in FlashInfer", section "Multi-head Latent Attention".

    Examples
    --------
    >>> import numpy as np
    >>> from cukv import MLAPagedCache, PageTable
    >>> cache = MLAPagedCache.empty(8, 16, "float16", xp=np)
    >>> cache.ckv.shape, cache.kpe.shape
    ((8, 16, 512), (8, 16, 64))
    >>> table = PageTable.from_seq_lens([17, 5], page_size=16, xp=np)
    >>> ckv, kpe = np.ones((22, 512), np.float16), np.ones((22, 64), np.float16)
    >>> cache.append(ckv, kpe, table, indptr=table.token_indptr)  # all tokens
    >>> q_nope, q_pe = np.ones((2, 128, 512), np.float16), np.ones((2, 128, 64), np.float16)
    >>> cache.decode(q_nope, q_pe, table, sm_scale=(128 + 64) ** -0.5).shape
    (2, 128, 512)
    """

    data: Any
    head_dim_kpe: int = 64

    _pages: ClassVar[PagePair]  # ckv and kpe seen with one head
    _attention: ClassVar[LatentAttention | None]  # on a GPU

    def __post_init__(self) -> None:
        """Check the structure once, and keep what every launch needs of it."""
        op = "MLAPagedCache"
        names = ("ckv", "kpe")
        if isinstance(self.data, (tuple, list)):
            arrays, reasons = zip(*as_storage_pair(op, names, self.data), strict=True)
            self._set(data=arrays)
        else:
            data, reason = as_storage(op, "data", self.data)
            match(op, "data", data, ("max_num_pages", "page_size", "head_dim"), {})
            width = whole_number(op, "head_dim_kpe", self.head_dim_kpe, 0)
            if width > data.shape[-1]:
                raise ValueError(
                    f"{op}: head_dim_kpe must be 0 to {data.shape[-1]} columns, got {width}"
                )
            split = data.shape[-1] - width
            arrays, reasons = (data[..., :split], data[..., split:]), (reason, reason)
            self._set(data=data)
        axes, widths = ("max_num_pages", "page_size"), ("head_dim_ckv", "head_dim_kpe")
        one_head = PagePair.of(
            op, names, axes, widths, arrays, reasons, lambda array: array[:, :, None]
        )
        on_gpu = one_head.first.device >= 0
        self._set(
            _pages=one_head,
            _attention=LatentAttention(one_head) if on_gpu else None,
            head_dim_kpe=int(arrays[1].shape[-1]),
        )

    @classmethod
    def empty(
        cls,
        max_num_pages: int,
        page_size: int,
        dtype: Any,
        head_dim_ckv: int = 512,
        head_dim_kpe: int = 64,
        kpe_dtype: Any = None,
        *,
        xp: Any = cp,
    ) -> MLAPagedCache:
        """Allocate a cache, uninitialised: one array, or a pair if kpe has its own dtype.

        Parameters
        ----------
        max_num_pages, page_size : int
            Sizes; ``page_size`` in tokens.
        dtype : dtype or name
            float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; in NumPy float64 too.
        head_dim_ckv, head_dim_kpe : int
            Elements of the compressed and the rotary part.
        kpe_dtype : dtype or name
            Dtype of kpe, if it differs.
        xp : module
            ``cupy`` or ``numpy``.

        Raises
        ------
        TypeError, ValueError
            Not a dtype or size that there is.
        CudaUnavailableError
            ``xp`` is ``cupy`` and there is no GPU.
        """
        op = "MLAPagedCache.empty"
        kind = as_dtype(op, "dtype", dtype)
        kpe_kind = kind if kpe_dtype is None else as_dtype(op, "kpe_dtype", kpe_dtype)
        check_sizes(
            op,
            max_num_pages=max_num_pages,
            page_size=page_size,
            head_dim_ckv=head_dim_ckv,
            head_dim_kpe=head_dim_kpe,
        )
        pages = (max_num_pages, page_size)
        if kpe_kind == kind:
            return cls(empty(op, (*pages, head_dim_ckv + head_dim_kpe), kind, xp), head_dim_kpe)
        ckv = empty(op, (*pages, head_dim_ckv), kind, xp)
        return cls((ckv, empty(op, (*pages, head_dim_kpe), kpe_kind, xp)))

    # --------------------------------------------------------------------------------- properties

    @property
    def ckv(self) -> Array:
        """Compressed rows, a view: ``[max_num_pages, page_size, head_dim_ckv]``."""
        return self._pages.first.array[:, :, 0]

    @property
    def kpe(self) -> Array:
        """Rotary rows, a view: ``[max_num_pages, page_size, head_dim_kpe]``."""
        return self._pages.second.array[:, :, 0]

    @property
    def max_num_pages(self) -> int:
        """Pages in storage."""
        return int(self._pages.first.array.shape[0])

    @property
    def page_size(self) -> int:
        """Tokens a page holds."""
        return int(self._pages.first.array.shape[1])

    @property
    def head_dim_ckv(self) -> int:
        """Elements of a compressed row."""
        return int(self._pages.first.array.shape[3])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of ckv."""
        return self._pages.first.array.dtype  # type: ignore[no-any-return]

    @property
    def kpe_dtype(self) -> np.dtype[Any]:
        """Dtype of kpe."""
        return self._pages.second.array.dtype  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------- memory verbs

    def append(
        self,
        ckv: Array | RaggedTensor,
        kpe: Array | RaggedTensor,
        table: PageTable,
        *,
        indptr: Array | None = None,
        batch_indices: Array | None = None,
        positions: Array | None = None,
        ckv_scale: Any = 1.0,
        kpe_scale: Any = 1.0,
    ) -> None:
        """Write new latent rows, in place, into pages that ``table`` already owns. One launch.

        Parameters
        ----------
        ckv, kpe : [nnz, head_dim_ckv], [nnz, head_dim_kpe], or with a head axis of 1
            Packed rows of one dtype, converted where it is not the cache's.
        table, indptr, batch_indices, positions
            As in ``PagedKVCache.append``.
        ckv_scale, kpe_scale : float, or float32 [1] on the device
            Divisors for fp8 parts; must be 1.0 for others.

        Raises
        ------
        TypeError, ValueError
            As in ``PagedKVCache.append``. Nothing is written then.

        Notes
        -----
        Current stream, no synchronisation. Source: kernels/append.cu.
        """
        op = "MLAPagedCache.append"
        rows = (_as_latent_rows(op, "ckv", ckv), _as_latent_rows(op, "kpe", kpe))
        if RaggedTensor in (type(ckv), type(kpe)):
            where = indptr, batch_indices, positions
            indptr = offsets_of_rows(op, self._pages, table, where, ckv=ckv, kpe=kpe)
        scales = (ckv_scale, kpe_scale)
        self._pages.append(op, *rows, table, indptr, batch_indices, positions, scales)

    def gather(
        self,
        table: PageTable,
        *,
        nnz: int | None = None,
        dtype: Any = None,
        ckv_scale: Any = 1.0,
        kpe_scale: Any = 1.0,
    ) -> tuple[RaggedTensor, RaggedTensor]:
        """Copy the latent rows of every request out of its pages, packed.

        Parameters
        ----------
        table, nnz, dtype
            As in ``PagedKVCache.gather``.
        ckv_scale, kpe_scale : float, or float32 [1] on the device
            Factors where ``dtype`` is not the part's own.

        Returns
        -------
        ckv, kpe : RaggedTensor
            ``[nnz, 1, head_dim_ckv]`` and ``[nnz, 1, head_dim_kpe]``, with ``table.token_indptr``.

        Raises
        ------
        TypeError, ValueError
            As in ``PagedKVCache.gather``.

        Notes
        -----
        Current stream, no synchronisation. Source: kernels/gather.cu.
        """
        op = "MLAPagedCache.gather"
        scales = (ckv_scale, kpe_scale)
        ckv, kpe, indptr = self._pages.gather(op, table, nnz, dtype, scales)
        return RaggedTensor._of(ckv, indptr), RaggedTensor._of(kpe, indptr)

    def copy_pages(self, src: Array, dst: Array) -> None:
        """Copy whole pages in place, as ``PagedKVCache.copy_pages`` does.

        Parameters
        ----------
        src, dst : [n] int32 or int64, or sequences
            Page ids; a pair with a negative id is skipped.

        Raises
        ------
        TypeError, ValueError
            As in ``PagedKVCache.copy_pages``.

        Notes
        -----
        As there. Source: kernels/copy_pages.cu.
        """
        self._pages.copy_pages("MLAPagedCache.copy_pages", src, dst)

    # ---------------------------------------------------------------------------------- attention

    def plan(
        self,
        q_nope: Array,
        table: PageTable,
        *,
        qo_indptr: Array | None = None,
        causal: bool = False,
    ) -> Plan:
        """Prepare ``decode`` for all layers.

        Parameters
        ----------
        q_nope, table, qo_indptr, causal
            As in the calls that the plan serves.

        Returns
        -------
        Plan
            ``plan.update()`` makes it follow changed contents of the same arrays.

        Raises
        ------
        NotImplementedError, TypeError, ValueError
            As ``decode``.

        Notes
        -----
        On the current stream, no synchronisation. Source: as ``decode``.
        """
        op = "MLAPagedCache.decode"
        call = LatentCall.of(op, self._pages, q_nope, qo_indptr, table, causal)
        if self._attention is not None:
            return self._attention.plan(call)
        key, _ = check_latent_call(call, self._pages)
        return Plan(op, key)

    def decode(
        self,
        q_nope: Array,
        q_pe: Array,
        table: PageTable,
        *,
        sm_scale: float,
        qo_indptr: Array | None = None,
        causal: bool = False,
        ckv_scale: Any = 1.0,
        kpe_scale: Any = 1.0,
        plan: Plan | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attend in the absorbed form: logits ``q_nope . ckv + q_pe . kpe``, values ``ckv``.

        Parameters
        ----------
        q_nope, q_pe : [rows, num_qo_heads, head_dim_ckv], [rows, num_qo_heads, head_dim_kpe]
            Queries after absorption, of one dtype: float16, bfloat16 or fp8, in NumPy float32 and
            float64 too; a 16-bit q and a 16-bit part of the cache share their dtype.
        table : PageTable
            Tokens of each request.
        sm_scale : float
            Multiplies the logits. No default: it comes from the head dimension *before*
            absorption, ``1 / sqrt(128 + 64)`` for DeepSeek.
        qo_indptr : [batch_size + 1] int32 or int64
            Offsets of each request's rows; one row per request by default.
        causal : bool
            Aligned to the end of each request.
        ckv_scale, kpe_scale : float, or float32 [1] on the device
            Factors of stored fp8 parts; must be 1.0 for others.
        plan : Plan
            Made by ``plan`` for such a call.
        out : [rows, num_qo_heads, head_dim_ckv] float16, bfloat16 or float32
            Where to write the output. It must overlap neither itself, ``lse``, nor what is read.
        lse : [rows, num_qo_heads] float32
            Where to write the log-sum-exp.
        return_lse : bool
            Give ``(o, lse)``.

        Returns
        -------
        o : [rows, num_qo_heads, head_dim_ckv]
            In q's dtype (bfloat16 for fp8 q); 0 for a row that sees no key.
        lse : [rows, num_qo_heads] float32
            **Base 2**; -inf for a row that sees no key.

        Raises
        ------
        NotImplementedError
            On a GPU: head dims other than 512 and 64, dtypes of ckv and kpe that no kernel takes
            (the message lists what exists), too little shared memory.
        TypeError, ValueError
            Wrong home, dtype, shape or option, or a plan made for another call; on a GPU, no plan
            for a call that is captured into a graph.

        Notes
        -----
        Current stream, no synchronisation. A call without ``plan`` makes one: one more launch and
        memory for its work. On Hopper, requests of more than 16 packed rows (query rows times
        heads) on average have a kernel of their own, those of fp8 if they have keys enough. It is
        fastest where ``page_size`` is a multiple of 8; fp8 caches of such pages, with rows at
        multiples of 16 bytes, have one for all other requests too. Source: kernels/mla_decode.cu,
        kernels/mla_stream_sm90.cu, kernels/mla_decode_sm90.cu, kernels/plan.cu.
        """
        op = "MLAPagedCache.decode"
        if sm_scale is None:
            raise TypeError(f"{op}: sm_scale has no default: it comes from before absorption")
        call = LatentCall.of(op, self._pages, q_nope, qo_indptr, table, causal)
        return_lse = truth(op, "return_lse", return_lse)
        if type(q_pe) is not cp.ndarray:
            q_pe = as_array(op, "q_pe", q_pe)
        scales = (ckv_scale, kpe_scale)
        if self._attention is not None:
            results = (out, lse, return_lse)
            return self._attention.attend(call, q_pe, sm_scale, scales, plan, results)
        key, _ = check_latent_call(call, self._pages)
        q_nope, qo_indptr = call.q_nope, call.qo_indptr
        check_rotary_queries(op, q_nope, q_pe, self._pages.second)
        require_plan(op, plan, key)
        options = check_options(op, self.head_dim_ckv, q_nope.shape[1], sm_scale=sm_scale)
        factors = self._pages.scales(op, scales)
        table.validate(self.max_num_pages)
        if qo_indptr is None:
            qo_indptr = np.arange(table.batch_size + 1)
        check_indptr(op, "qo_indptr", values(qo_indptr), len(q_nope), "rows")
        ckv, kpe = (pages.array for pages in self._pages)
        csr = (table.indptr, table.indices, table.last_page_len)
        return run_on_host(
            op,
            q_nope,
            self.head_dim_ckv,
            lambda: reference.mla_decode(
                q_nope,
                q_pe,
                qo_indptr,
                ckv,
                kpe,
                *csr,
                sm_scale=options["sm_scale"],
                causal=call.causal,
                ckv_scale=factors[0],
                kpe_scale=factors[1],
            ),
            out,
            lse,
            return_lse,
        )


def _as_latent_rows(op: str, name: str, x: Array | RaggedTensor) -> Array:
    """Give rows with a head axis of 1."""
    if isinstance(x, RaggedTensor):
        return x.rows
    rows = as_array(op, name, x)
    if rows.ndim != 2:
        return rows
    nnz, dim = rows.shape
    return rows.reshape(nnz, 1, dim)  # a view, at half of what rows[:, None] costs the host
