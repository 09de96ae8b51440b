"""RaggedTensor: rows of all requests packed without padding; ragged prefill attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import cupy as cp
import numpy as np

from cukv import reference
from cukv._arrays import DTYPES, Array, as_array, concatenate, home, on_device_of
from cukv._attention import (
    PagedCall,
    check_heads,
    check_mask,
    check_options,
    check_queries,
    check_window,
    flat_mask,
    host_scales,
    plan_key,
    require_plan,
    run_on_host,
)
from cukv._check import (
    bits_hint,
    check_indptr,
    match,
    match_dtype,
    match_index,
    match_indptr,
    match_rows,
    request_number,
    truth,
    values,
)
from cukv._index import as_index
from cukv._noun import ArrayNoun
from cukv._plan import Plan
from cukv._ragged_pages import checked_pages, ragged_pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cukv._pages import PagePair
    from cukv.masks import Mask
    from cukv.page_table import PageTable

LAYOUTS = ("NHD", "HND")
_FLOAT64 = np.dtype(np.float64)


@dataclass(frozen=True, eq=False, repr=False)
class RaggedTensor(ArrayNoun):
    """Rows of a batch of requests, packed: request ``i`` is ``data[indptr[i]:indptr[i + 1]]``.

    With ``layout="HND"`` the head axis comes first: ``data[:, indptr[i]:indptr[i + 1]]``.

    Parameters
    ----------
    data : [nnz, num_heads, head_dim]
        HND: ``[num_heads, nnz, head_dim]``. Any strides with a contiguous last axis. Rows at or
        past ``indptr[-1]`` are padding and may hold anything.
    indptr : [batch_size + 1] int32 or int64, or a sequence
        Offsets of each request's rows; starts at 0.
    layout : {"NHD", "HND"}
        Order of the token and head axes.

    Raises
    ------
    TypeError, ValueError
        Not arrays of one home and device; wrong shape or layout.

    Notes
    -----
    Layout: FlashInfer, "KV-Cache Layout in FlashInfer", section "Ragged Tensor".

    Examples
    --------
    >>> import numpy as np
    >>> from cukv import RaggedTensor
    >>> r = RaggedTensor(np.zeros((5, 2, 64), np.float16), [0, 3, 5])
    >>> len(r), r[1].shape, r.lens
    (2, (2, 2, 64), array([3, 2], dtype=int32))
    """

    data: Array
    indptr: Array
    layout: str = "NHD"

    rows: ClassVar[Array]  # [nnz, num_heads, head_dim], `data` in NHD order, a view

    def __post_init__(self) -> None:
        """Check the structure once."""
        op = "RaggedTensor"
        check_layout(op, self.layout)
        data = as_array(op, "data", self.data)
        indptr = as_index(op, "indptr", self.indptr, data)
        home(op, data=data, indptr=indptr)
        axes = ("nnz", "num_heads") if self.layout == "NHD" else ("num_heads", "nnz")
        match(op, "data", data, (*axes, "head_dim"), {})
        hint = bits_hint(data.dtype)
        if hint or data.dtype.kind in "OcSUMm" or not data.dtype.isnative:
            raise TypeError(f"{op}: data must be of a float dtype, got {data.dtype}{hint}")
        match_indptr(op, "indptr", indptr)
        rows = data if self.layout == "NHD" else data.swapaxes(0, 1)
        self._set(data=data, indptr=indptr, rows=rows)

    @classmethod
    def _of(cls, rows: Array, indptr: Array) -> RaggedTensor:
        """Make one of NHD rows and offsets that were just made for it: they are not checked."""
        made = object.__new__(cls)
        made._set(data=rows, indptr=indptr, layout="NHD", rows=rows)
        return made

    @classmethod
    def from_list(cls, arrays: Sequence[Array], layout: str = "NHD") -> RaggedTensor:
        """Pack one array per request.

        Parameters
        ----------
        arrays : sequence of [len, num_heads, head_dim]
            One or more; HND: ``[num_heads, len, head_dim]``.
        layout : {"NHD", "HND"}
            Layout of the arrays and of the result.

        Returns
        -------
        RaggedTensor
            Owns its data; int32 indptr (int64 for more rows than int32 counts).

        Raises
        ------
        TypeError, ValueError
            No arrays, an unknown layout, or arrays that differ in home, device, dtype, heads or
            head_dim.
        """
        op = "RaggedTensor.from_list"
        check_layout(op, layout)
        arrays = list(arrays)
        if not len(arrays):
            raise ValueError(f"{op}: needs one array at least: none has no shape, dtype or home")
        parts = [as_array(op, f"arrays[{i}]", a) for i, a in enumerate(arrays)]
        home(op, **{f"arrays[{i}]": a for i, a in enumerate(parts)})
        axis = 0 if layout == "NHD" else 1
        dims: dict[str, int | None] = {}
        for i, part in enumerate(parts):
            name = f"arrays[{i}]"
            axes = (f"len_{i}", "num_heads") if layout == "NHD" else ("num_heads", f"len_{i}")
            match(op, name, part, (*axes, "head_dim"), dims)
            match_dtype(op, name, part, parts[0].dtype)
        indptr = [0]
        for part in parts:
            indptr.append(indptr[-1] + part.shape[axis])
        return cls(concatenate(parts, axis), indptr, layout)

    # --------------------------------------------------------------------------------- properties

    @property
    def nnz(self) -> int:
        """Length of the row axis, padding included."""
        return int(self.rows.shape[0])

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return len(self.indptr) - 1

    @property
    def num_heads(self) -> int:
        """Heads of a row."""
        return int(self.rows.shape[1])

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return int(self.rows.shape[2])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the data."""
        return self.data.dtype  # type: ignore[no-any-return]

    @property
    def lens(self) -> Array:
        """Rows of each request, ``[batch_size]``, computed from the present contents."""
        indptr = self.indptr
        if isinstance(indptr, np.ndarray):
            return indptr[1:] - indptr[:-1]
        with on_device_of(indptr):  # CuPy computes on the current device
            return indptr[1:] - indptr[:-1]

    def __len__(self) -> int:
        """Number of requests."""
        return self.batch_size

    def __getitem__(self, i: int) -> Array:
        """Rows of request ``i``, a view in this layout. Synchronises if the indptr is on a GPU."""
        request = request_number("RaggedTensor", i, len(self))
        if isinstance(self.indptr, np.ndarray):
            self.validate()
        start, stop = (int(x) for x in values(self.indptr[request:][:2]))
        return self.data[start:stop] if self.layout == "NHD" else self.data[:, start:stop]

    def __iter__(self) -> Iterator[Array]:
        """Views of the requests in turn. Synchronises once if the indptr is on a GPU."""
        if isinstance(self.indptr, np.ndarray):
            self.validate()
        indptr = values(self.indptr)
        for start, stop in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True):
            yield self.data[start:stop] if self.layout == "NHD" else self.data[:, start:stop]

    def validate(self) -> None:
        """Check that indptr starts at 0, never falls and ends inside the data, on the host.

        Raises
        ------
        ValueError
            Names the request and the value. Synchronises if the indptr is on a GPU.
        """
        check_indptr("RaggedTensor.validate", "indptr", values(self.indptr), self.nnz, "rows")

    # ---------------------------------------------------------------------------------- attention

    def plan(
        self,
        k: RaggedTensor,
        v: RaggedTensor | None = None,
        *,
        causal: bool = False,
        window_left: int = -1,
        custom_mask: Mask | None = None,
        batch_invariant: bool = False,
    ) -> Plan:
        """Prepare ``prefill`` for all layers; ``self`` is q.

        Parameters
        ----------
        k : RaggedTensor
            As in the calls that the plan serves.
        v : RaggedTensor, optional
            Likewise. By default values are taken to be as wide as keys, and narrower ones are
            served too, maybe not by the fastest kernel there is for them.
        causal, window_left, custom_mask
            As in the calls.
        batch_invariant : bool
            Make a request's bits independent of its batch mates.

        Returns
        -------
        Plan
            ``plan.update()`` makes it follow changed contents of the same arrays.

        Raises
        ------
        NotImplementedError
            On a GPU: what ``prefill`` does not take.
        TypeError, ValueError
            As ``prefill``.

        Notes
        -----
        On a GPU: one launch on the current stream, two with a mask, no synchronisation. Source:
        kernels/plan.cu, kernels/mask_tiles.cu.
        """
        op = "RaggedTensor.prefill"
        causal = truth(op, "causal", causal)
        batch_invariant = truth(op, "batch_invariant", batch_invariant)
        key, xp = self._check_call(op, k, v, causal, window_left, custom_mask)
        if xp is np:
            return Plan(op, key, batch_invariant=batch_invariant)
        pages = ragged_pages(op, k, k if v is None else v)
        sides = self.rows, self.indptr, pages.table
        call = PagedCall(op, *sides, causal, window_left, custom_mask)
        return pages.attention.plan(call, batch_invariant)

    def prefill(
        self,
        k: RaggedTensor,
        v: RaggedTensor,
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
        """Attend from these query rows to packed keys and values, request by request.

        Parameters
        ----------
        k, v : RaggedTensor
            ``[kv_nnz, num_kv_heads, head_dim]`` and ``[kv_nnz, num_kv_heads, head_dim_vo]``, with
            equal indptr.
        causal : bool
            Aligned to the end: query ``i`` sees key ``j`` iff ``j <= i + kv_len - qo_len``.
        custom_mask : RaggedMask or PackedMask
            True = attend; replaces ``causal``. The window still applies.
        sm_scale : float
            Multiplies ``q.k``; ``1 / sqrt(head_dim)`` by default.
        window_left : int
            Tokens to the left of ``i + kv_len - qo_len`` that query ``i`` sees; -1 is all.
        logits_soft_cap : float
            ``cap * tanh(logits / cap)`` before masking; None, 0 and numbers from 2**80 on are off.
        sinks : [num_qo_heads] float16, bfloat16 or float32
            Natural-log logit per head, not scaled, added once to the denominator.
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
            In q's dtype (bfloat16 for fp8 q); 0 for a row that sees no key.
        lse : [nnz, num_qo_heads] float32
            **Base 2**; -inf for a row that sees no key, ``sink * log2(e)`` if it has a sink.

        Raises
        ------
        NotImplementedError
            On a GPU: float32 keys, a head_dim that is no multiple of 8 up to 256, a plan whose
            tiles are too narrow for v (where ``head_dim_vo`` exceeds ``head_dim``).
        TypeError, ValueError
            Wrong home, dtype, shape, option or mask, or a plan made for another call; on a GPU, a
            plan made from other index arrays or another mask, and no plan for a call that is
            captured into a graph.

        Notes
        -----
        On a GPU: current stream, no synchronisation; without ``plan`` each call plans by one more
        launch, two with a mask, and raises while the stream is captured. A plan holds the bits of
        its mask. Unequal indptrs of k and v raise on NumPy only; on a GPU k's counts. On Hopper,
        where q, k and v are e4m3, heads have 128 elements and there is no mask and no cap, softmax
        weights may be rounded to e4m3 too, each by 1/16 of itself or 2^-18 of the row's
        largest at most (so that many tiny ones vanish), and sums keep 14 bits: values of one sign
        come out smaller by up to 2^-21 for each key. Source: kernels/decode.cu,
        kernels/prefill_sm80.cu, kernels/prefill_sm90.cu, kernels/plan.cu, kernels/mask_tiles.cu.
        """
        op = "RaggedTensor.prefill"
        if type(k) is not RaggedTensor or type(v) is not RaggedTensor:
            require_ragged(op, k=k, v=v)
        causal, return_lse = truth(op, "causal", causal), truth(op, "return_lse", return_lse)
        pages = checked_pages(k, v, self.rows, self.indptr)
        if pages is None:
            key, xp = self._check_call(op, k, v, causal, window_left, custom_mask)
            if xp is cp:
                pages = ragged_pages(op, k, v)
                pages.remember(self.rows, self.indptr)
        if pages is not None:
            sides = self.rows, self.indptr, pages.table
            return pages.attention.attend(
                PagedCall(op, *sides, causal, window_left, custom_mask),
                (sm_scale, logits_soft_cap, sinks),
                (q_scale, k_scale, v_scale),
                plan,
                (out, lse, return_lse),
            )
        require_plan(op, plan, key)
        options = check_options(
            op,
            self.head_dim,
            self.num_heads,
            like=self.rows,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sinks=sinks,
        )
        options |= host_scales(op, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        for ragged in (self, k, v):
            ragged.validate()
        if custom_mask is not None:
            options["custom_mask"] = flat_mask(op, custom_mask, self.indptr, k.indptr)
        return run_on_host(
            op,
            self.rows,
            v.head_dim,
            lambda: reference.ragged_prefill(
                self.rows, self.indptr, k.rows, v.rows, k.indptr, causal=causal, **options
            ),
            out,
            lse,
            return_lse,
        )

    def _check_call(
        self,
        op: str,
        k: RaggedTensor,
        v: RaggedTensor | None,
        causal: bool,
        window_left: int,
        custom_mask: Mask | None,
    ) -> tuple[tuple[tuple[str, Any], ...], Any]:
        """Check queries against keys and values: (what a plan depends on, home)."""
        require_ragged(op, k=k, **({} if v is None else {"v": v}))
        arrays = {"q": self.data, "k": k.data}
        dims: dict[str, int | None] = {"head_dim": self.head_dim}
        match(op, "k", k.rows, ("kv_nnz", "num_kv_heads", "head_dim"), dims)
        on_host = isinstance(k.rows, np.ndarray)
        match_dtype(op, "k", k.rows, *DTYPES, *((_FLOAT64,) if on_host else ()))
        if v is not None:
            match(op, "v", v.rows, ("kv_nnz", "num_kv_heads", "head_dim_vo"), dims)
            match_dtype(op, "v", v.rows, k.dtype)
            arrays["v"] = v.data
        for name, ragged in (("k", k), ("v", v)):
            if ragged is not None and on_host:  # on a GPU launches check strides
                match_rows(op, name, ragged.rows)
            if ragged is not None and ragged.batch_size != self.batch_size:
                raise ValueError(
                    f"{op}: {name} must have batch_size={self.batch_size} requests, "
                    f"got {ragged.batch_size}"
                )
        check_heads(op, self.num_heads, k.num_heads)
        check_queries(op, "q", self.rows, k.dtype)
        if custom_mask is not None:
            check_mask(op, custom_mask, self.batch_size)
            arrays["custom_mask"] = custom_mask.data
        xp = home(op, **arrays)
        if xp is np and v is not None and not np.array_equal(k.indptr, v.indptr):
            raise ValueError(f"{op}: k and v must have equal indptr")
        key = plan_key(
            self.rows,
            k=(tuple(k.rows.shape), k.dtype.name),
            batch_size=self.batch_size,
            causal=causal,
            window_left=check_window(op, window_left),
            mask=custom_mask,
        )
        return key, xp


def require_ragged(op: str, **arguments: Any) -> None:
    """Raise unless the arguments are RaggedTensors."""
    for name, x in arguments.items():
        if not isinstance(x, RaggedTensor):
            raise TypeError(f"{op}: {name} must be a RaggedTensor, got {type(x)}")


def check_layout(op: str, layout: str) -> None:
    """Raise unless ``layout`` is "NHD" or "HND"."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f'{op}: layout must be "NHD" or "HND", got {layout!r}')


def swap_layout(array: Array) -> Array:
    """Exchange the token and head axes of pages, a view: HND seen as NHD and back."""
    return array.swapaxes(1, 2)


def offsets_of_rows(
    op: str,
    pages: PagePair,
    table: PageTable,
    where: tuple[Array | None, Array | None, Array | None],
    **rows: Array | RaggedTensor,
) -> Array | None:
    """Give the ``indptr`` of an append: without any of ``where`` that of RaggedTensors among rows.

    ``where`` is (indptr, batch_indices, positions). Of several RaggedTensors offsets must be the
    same, which is checked in NumPy only.
    """
    found = {f"{name}.indptr": x.indptr for name, x in rows.items() if isinstance(x, RaggedTensor)}
    if not found or any(x is not None for x in where):
        return where[0]
    pages.check_table(op, table)
    for name, indptr in found.items():
        match_index(op, name, indptr, table.batch_size + 1)
    first, *others = found.values()
    on_host = all(isinstance(indptr, np.ndarray) for indptr in found.values())
    if on_host and not all(np.array_equal(first, indptr) for indptr in others):
        raise ValueError(f"{op}: {' and '.join(found)} must be the same")
    return first


def as_rows(op: str, name: str, x: Array | RaggedTensor) -> Array:
    """Give rows in NHD order: a RaggedTensor's as its layout says, an array as it is."""
    if type(x) is cp.ndarray:
        return x
    return x.rows if isinstance(x, RaggedTensor) else as_array(op, name, x)
