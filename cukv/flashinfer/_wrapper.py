"""What FlashInfer's wrappers share: options, index arrays held for a step, plans and results.

A wrapper's ``plan`` takes index arrays; cukv's own plan, which depends on the shape of q too, is
made by the first ``run`` of each shape and serves the runs that follow. In CUDA-graph mode index
arrays are copied into fixed buffers, and ``plan`` brings the work that the graph reads up to date.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy as cp
import numpy as np

from cukv._arrays import FLOAT32, Array, empty, home
from cukv._attention import check_soft_cap, check_window
from cukv._check import match, match_aligned, match_dtype, match_index, narrow, truth, values
from cukv._index import host_scale
from cukv.flashinfer._caller import (
    data,
    detached,
    dtype_of,
    framework,
    give_back,
    index,
    scale_or_one,
    target,
    working_for,
)
from cukv.flashinfer.page import paged_cache
from cukv.ragged import check_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cukv._plan import Plan
    from cukv.paged import PagedKVCache


@dataclass
class Options:
    """What ``plan`` was told about the calls to come."""

    op: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int | None  # None: there are no pages
    q_data_type: Any
    kv_data_type: Any = None
    o_data_type: Any = None
    causal: bool = False
    sm_scale: float | None = None
    window_left: int = -1
    logits_soft_cap: float | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        """Turn the dtypes of any framework into NumPy's, and check what shapes the logits."""
        op = f"{self.op}.plan"
        self.q_data_type = dtype_of(op, "q_data_type", self.q_data_type)
        kv = self.q_data_type if self.kv_data_type is None else self.kv_data_type
        self.kv_data_type = dtype_of(op, "kv_data_type", kv)
        if self.o_data_type is not None:
            self.o_data_type = dtype_of(op, "o_data_type", self.o_data_type)
        self.shape_logits(op, self.sm_scale, self.window_left, self.logits_soft_cap)

    def shape_logits(self, op: str, sm_scale: Any, window_left: Any, logits_soft_cap: Any) -> None:
        """Check what shapes the logits, and take it."""
        scale = None if sm_scale is None else host_scale(op, "sm_scale", sm_scale)
        window, cap = check_window(op, window_left), check_soft_cap(op, logits_soft_cap)
        self.sm_scale, self.window_left, self.logits_soft_cap = scale, window, cap

    def check_call(self, op: str, q: Array, kv: Any) -> None:
        """Raise unless a call is of the shapes and dtypes that were planned.

        ``kv`` is the cache, or the keys where there are no pages.
        """
        if q.ndim != 3:
            raise ValueError(f"{op}: q must be [nnz, num_qo_heads, head_dim], got {list(q.shape)}")
        found = {
            "q_data_type": q.dtype,
            "kv_data_type": kv.dtype,
            "num_qo_heads": q.shape[1],
        }
        if self.page_size is None:
            found |= {"num_kv_heads": kv.num_heads, "head_dim_qk": kv.head_dim}
        else:
            found |= {
                "num_kv_heads": kv.num_kv_heads,
                "head_dim_qk": kv.head_dim,
                "head_dim_vo": kv.head_dim_vo,
                "page_size": kv.page_size,
            }
        for name, got in found.items():
            if got != (wanted := getattr(self, name)):
                raise ValueError(f"{op}: plan was told {name}={wanted}, got {got}")

    def logits(self, q_scale: Any, k_scale: Any, v_scale: Any, sinks: Any) -> dict[str, Any]:
        """Give what shapes the logits, as the nouns' verbs take it."""
        return {
            "sm_scale": self.sm_scale,
            "logits_soft_cap": self.logits_soft_cap,
            "sinks": None if sinks is None else detached(sinks),
            "q_scale": scale_or_one(q_scale),
            "k_scale": scale_or_one(k_scale),
            "v_scale": scale_or_one(v_scale),
        }


class LseForm(NamedTuple):
    """How the caller wants log-sum-exps: base-2 ``[rows, heads]`` unless told otherwise."""

    natural: bool = False
    heads_first: bool = False

    @classmethod
    def of(cls, op: str, lse_base: str, lse_layout: str) -> LseForm:
        """Read FlashInfer's names for it."""
        if lse_base not in ("log2", "ln"):
            raise ValueError(f'{op}: lse_base must be "log2" or "ln", got {lse_base!r}')
        if lse_layout not in ("NH", "HN"):
            raise ValueError(f'{op}: lse_layout must be "NH" or "HN", got {lse_layout!r}')
        return cls(lse_base == "ln", lse_layout == "HN")

    def check(self, op: str, q: Array, lse: Array) -> None:
        """Raise unless log-sum-exps of ``q`` fit an array in this form, before work is done."""
        rows, heads = ("rows", q.shape[0]), ("num_qo_heads", q.shape[1])
        shape: dict[str, int | None] = dict((heads, rows) if self.heads_first else (rows, heads))
        home(op, q=q, lse=lse)
        match(op, "lse", lse, tuple(shape), shape)
        match_dtype(op, "lse", lse, FLOAT32)
        match_aligned(op, "lse", lse)


def new_output(op: str, q: Array, head_dim_vo: int, dtype: np.dtype[Any]) -> Array:
    """Allocate an output of another dtype than that of q."""
    xp = np if isinstance(q, np.ndarray) else cp
    return empty(op, (*q.shape[:2], head_dim_vo), dtype, xp, like=q)


class _Known(NamedTuple):
    """A noun made of the caller's arrays, and what it was made of."""

    parts: tuple[weakref.ref[Any], ...]
    places: tuple[Any, ...]
    noun: Any


@dataclass
class _Step:
    """What belongs to the latest ``plan``."""

    options: Options | None = None
    nouns: tuple[Any, ...] = ()
    plans: dict[Any, Plan] = field(default_factory=dict)


class Wrapper:
    """Base of the wrappers: a home, fixed buffers in CUDA-graph mode, and the plans of a step."""

    _op: str

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str,
        use_cuda_graph: bool,
        buffers: dict[str, Any],
        optional: tuple[str, ...] = (),
    ) -> None:
        check_layout(self._op, kv_layout)
        self._layout = kv_layout
        self._workspace = float_workspace_buffer
        self._use_cuda_graph = truth(self._op, "use_cuda_graph", use_cuda_graph)
        self._buffers: dict[str, Array] = {}
        self._step = _Step()
        self._known: dict[tuple[int, ...], _Known] = {}
        with working_for(float_workspace_buffer):
            self._like = data(self._op, "float_workspace_buffer", float_workspace_buffer)
            for name, given in buffers.items():
                if given is not None:
                    take = target if use_cuda_graph else data  # a graph's are written
                    self._buffers[name] = take(self._op, name, given)
                    home(self._op, workspace=self._like, **{name: self._buffers[name]})
                elif use_cuda_graph and name not in optional:
                    raise ValueError(f"{self._op}: use_cuda_graph=True needs {name}")

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether index arrays are copied into fixed buffers, which a CUDA graph reads."""
        return self._use_cuda_graph

    @property
    def on_host(self) -> bool:
        """Whether the work is that of the NumPy definitions."""
        return isinstance(self._like, np.ndarray)

    def end_forward(self) -> None:
        """Do nothing: FlashInfer's scripts call it."""

    # ------------------------------------------------------------------------------- a step's plan

    def _match(self, op: str, given: dict[str, Any]) -> dict[str, Array]:
        """Give the index arrays of a step, or raise if one does not fit its buffer.

        ``given`` has them by the names of their buffers. Page ids may be fewer than their buffer
        holds; all else fills it. Values are read in NumPy; on the device they are not, and those
        that the buffer's dtype does not hold are cut.
        """
        arrays = {}
        for buffer, x in given.items():
            name = self._argument(buffer)
            arrays[buffer] = array = index(op, name, x, self._like)
            home(op, workspace=self._like, **{name: array})
            match_index(op, name, array)
        for buffer, array in arrays.items() if self._use_cuda_graph else ():
            held = self._buffers[buffer]
            match_index(op, buffer, held)
            size, room = len(array), len(held)
            if size > room or (size < room and "indices" not in buffer):
                raise ValueError(f"{op}: {buffer} holds [{room}], what is planned is [{size}]")
            if isinstance(array, np.ndarray):
                narrow(f"{op}: {buffer}", values(array), held.dtype)
        return arrays

    def _argument(self, buffer: str) -> str:
        """Name the argument of ``plan`` that a buffer takes."""
        return buffer.replace("_buf_arr", "_arr").removesuffix("_buf")

    def _hold(self, arrays: dict[str, Array]) -> list[Array]:
        """Give the index arrays of a step: themselves, or the buffers that they are copied into.

        Whatever can raise has been done before: a plan that raises writes nothing.
        """
        if not self._use_cuda_graph:
            return list(arrays.values())
        for buffer, array in arrays.items():
            self._buffers[buffer][: len(array)] = array
        return [self._buffers[buffer] for buffer in arrays]

    @contextlib.contextmanager
    def _planning(self, options: Options) -> Iterator[None]:
        """Take a step's index arrays; plans that a CUDA graph reads then follow them."""
        with working_for(self._workspace):
            yield
            self._step.options = options
            if not self._use_cuda_graph:
                self._step.plans = {}
            for plan in self._step.plans.values():
                plan.update()

    def _set_nouns(self, *nouns: Any) -> None:
        self._step.nouns = nouns

    @property
    def _nouns(self) -> tuple[Any, ...]:
        return self._step.nouns

    def _planned(self, op: str) -> Options:
        """Give the options of the step, or raise if there was no plan."""
        if self._step.options is None:
            raise ValueError(f"{op}: call plan first")
        return self._step.options

    def _check_window(self, op: str, window_left: int | None) -> None:
        """Raise if a run is given another window than its plan."""
        wanted = self._planned(op).window_left
        if window_left is not None and check_window(op, window_left) != wanted:
            raise ValueError(f"{op}: plan was told window_left={wanted}, got {window_left}")

    # ------------------------------------------------------------------------------------- a run

    def _noun_of(self, given: Any, make: Callable[[Any], Any]) -> Any:
        """Make the noun of the caller's arrays; torch's, layer by layer, are remembered.

        Nothing keeps a tensor alive: what was made of it goes when it does.
        """
        parts = given if isinstance(given, (tuple, list)) else (given,)
        if not all(framework(part) == "torch" for part in parts):
            return make(given)
        key = tuple(id(part) for part in parts)
        places = tuple((part.data_ptr(), part.shape, part.stride()) for part in parts)
        known = self._known.get(key)
        if known is None or known.places != places:
            forget = lambda _: self._known.pop(key, None)  # noqa: E731
            refs = tuple(weakref.ref(part, forget) for part in parts)
            known = self._known[key] = _Known(refs, places, make(given))
        return known.noun

    def _cache_of(self, op: str, paged_kv_cache: Any) -> PagedKVCache:
        """Make the noun of a run's cache."""
        noun: PagedKVCache = self._noun_of(
            paged_kv_cache, lambda given: paged_cache(op, given, self._layout)
        )
        return noun

    def _attend(
        self,
        op: str,
        caller: Any,
        make_plan: Callable[[], Plan],
        attend: Callable[..., Any],
        q: Array,
        kv: Any,
        results: tuple[Any, Any, bool],
        form: LseForm | None = None,
    ) -> Any:
        """Run a verb by the plan of its shape, and give results as the caller has arrays."""
        out, lse, return_lse = results
        return_lse = truth(op, "return_lse", return_lse)
        form = form or LseForm()
        options = self._planned(op)
        key = (
            q.shape,
            q.dtype,
            type(kv).__name__,
            getattr(kv, "nnz", None),
            options.causal,
            options.window_left,
            options.batch_invariant,
            tuple(type(noun).__name__ for noun in self._nouns),
        )
        plan = self._step.plans.get(key)
        if plan is None:
            plan = self._step.plans[key] = make_plan()
        o = None if out is None else target(op, "out", out)
        if o is None and options.o_data_type is not None:
            o = new_output(op, q, options.head_dim_vo, options.o_data_type)
        s = None if lse is None else target(op, "lse", lse)
        as_it_is = form == LseForm()
        if s is not None and not as_it_is:
            form.check(op, q, s)
        found = attend(plan, out=o, lse=s if as_it_is else None, return_lse=True)
        if not as_it_is:
            own = found[1]
            if form.natural:
                own *= np.float32(math.log(2))
            if form.heads_first:
                own = own.T
            if s is not None:
                s[...] = own
            found = (found[0], own)
        o_back = give_back(caller, found[0]) if out is None else out
        if not return_lse:
            return o_back
        return o_back, give_back(caller, found[1]) if lse is None else lse
