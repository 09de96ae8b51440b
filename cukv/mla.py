"""MLAPagedCache: DeepSeek's latent cache in pages; append, gather, absorbed decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import cupy as cp
import numpy as np

from cukv import reference
from cukv._arrays import Array, as_array, as_dtype, empty, home
from cukv._attention import (
    check_options,
    check_queries,
    host_scales,
    no_kernel,
    plan_key,
    require_plan,
    run_on_host,
)
from cukv._check import check_indptr, match, match_dtype, match_index, values
from cukv._index import as_index
from cukv._noun import CacheNoun
from cukv._pages import PagePair, as_storage, as_storage_pair
from cukv._plan import Plan
from cukv.ragged import RaggedTensor

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
    >>> from cukv import MLAPagedCache
    >>> cache = MLAPagedCache.empty(8, 16, "float16", xp=np)
    >>> cache.ckv.shape, cache.kpe.shape
    ((8, 16, 512), (8, 16, 64))
    """

    data: Any
    head_dim_kpe: int = 64

    _pages: ClassVar[PagePair]  # ckv and kpe seen with one head

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
            width = int(self.head_dim_kpe)
            if not 0 <= width <= data.shape[-1]:
                raise ValueError(
                    f"{op}: head_dim_kpe must be 0 to {data.shape[-1]} columns, got {width}"
                )
            split = data.shape[-1] - width
            arrays, reasons = (data[..., :split], data[..., split:]), (reason, reason)
            self._set(data=data)
        axes = ("max_num_pages", "page_size")
        one_head = PagePair.of(op, names, axes, arrays, reasons, lambda array: array[:, :, None])
        self._set(_pages=one_head, head_dim_kpe=int(arrays[1].shape[-1]))

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
            float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
        head_dim_ckv, head_dim_kpe : int
            Elements of the compressed and the rotary part.
        kpe_dtype : dtype or name
            Dtype of kpe, if it differs.
        xp : module
            ``cupy`` or ``numpy``.

        Raises
        ------
        CudaUnavailableError
            ``xp`` is ``cupy`` and there is no GPU.
        """
        op = "MLAPagedCache.empty"
        kind = as_dtype(op, "dtype", dtype)
        kpe_kind = kind if kpe_dtype is None else as_dtype(op, "kpe_dtype", kpe_dtype)
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
            Packed rows, converted where their dtype is not the cache's.
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
        self._pages.append(op, *rows, table, indptr, batch_indices, positions, ckv_scale, kpe_scale)

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
        return RaggedTensor(ckv, indptr), RaggedTensor(kpe, indptr)

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
        q_nope = as_array(op, "q_nope", q_nope)
        _, key, xp = self._check_call(op, q_nope, table, qo_indptr, causal)
        if xp is cp:
            raise no_kernel("MLAPagedCache.plan")
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
            Queries after absorption.
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
            Factors of stored fp8 parts.
        plan : Plan
            Made by ``plan`` for such a call.
        out : [rows, num_qo_heads, head_dim_ckv] float16, bfloat16 or float32
            Where to write the output.
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
            On CuPy arrays, until the kernel exists.
        TypeError, ValueError
            Wrong home, dtype, shape or option, or a plan made for another call.
        """
        op = "MLAPagedCache.decode"
        q_nope, q_pe = as_array(op, "q_nope", q_nope), as_array(op, "q_pe", q_pe)
        qo_indptr, key, xp = self._check_call(op, q_nope, table, qo_indptr, causal)
        dims: dict[str, int | None] = {
            "rows": q_nope.shape[0],
            "num_qo_heads": q_nope.shape[1],
            "head_dim_kpe": self.head_dim_kpe,
        }
        match(op, "q_pe", q_pe, ("rows", "num_qo_heads", "head_dim_kpe"), dims)
        match_dtype(op, "q_pe", q_pe, q_nope.dtype)
        home(op, q_nope=q_nope, q_pe=q_pe)
        require_plan(op, plan, key)
        if sm_scale is None:
            raise TypeError(f"{op}: sm_scale has no default: it comes from before absorption")
        options = check_options(op, self.head_dim_ckv, q_nope.shape[1], sm_scale=sm_scale)
        if xp is cp:
            raise no_kernel(op)
        scales = host_scales(op, ckv_scale=ckv_scale, kpe_scale=kpe_scale)
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
                causal=causal,
                ckv_scale=scales["ckv_scale"],
                kpe_scale=scales["kpe_scale"],
            ),
            out,
            lse,
            return_lse,
        )

    def _check_call(
        self, op: str, q_nope: Array, table: PageTable, qo_indptr: Array | None, causal: bool
    ) -> tuple[Array | None, tuple[tuple[str, Any], ...], Any]:
        """Check queries against cache and table: (qo_indptr, what a plan depends on, home)."""
        self._pages.check_table(op, table)
        dims: dict[str, int | None] = {"head_dim_ckv": self.head_dim_ckv}
        if qo_indptr is None:
            dims["rows"] = table.batch_size
        else:
            qo_indptr = as_index(op, "qo_indptr", qo_indptr, table.indptr)
            match_index(op, "qo_indptr", qo_indptr, table.batch_size + 1)
        match(op, "q_nope", q_nope, ("rows", "num_qo_heads", "head_dim_ckv"), dims)
        check_queries(op, "q_nope", q_nope, self.dtype)
        ckv = self._pages.first.array
        xp = home(op, q_nope=q_nope, cache=ckv, table=table.indptr, qo_indptr=qo_indptr)
        key = plan_key(
            q_nope,
            cache=(self.page_size, self.head_dim_kpe, self.dtype.name, self.kpe_dtype.name),
            batch_size=table.batch_size,
            indices=len(table.indices),
            qo_indptr=qo_indptr is not None,
            causal=bool(causal),
        )
        return qo_indptr, key, xp


def _as_latent_rows(op: str, name: str, x: Array | RaggedTensor) -> Array:
    """Give rows with a head axis of 1."""
    if isinstance(x, RaggedTensor):
        return x.rows
    rows = as_array(op, name, x)
    return rows[:, None] if rows.ndim == 2 else rows
