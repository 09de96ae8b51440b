"""The caller's side: arrays of their framework in and out, their stream and memory, their options.

torch and JAX are never imported: where an array of theirs is given, they are there already.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

from cukv._arrays import Array, as_array, as_dtype, read_only_reason, to_dlpack, to_home
from cukv._check import match_writable

if TYPE_CHECKING:
    from collections.abc import Iterator

_CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_FRAMEWORKS = {"numpy": "numpy", "cupy": "cupy", "torch": "torch", "jax": "jax", "jaxlib": "jax"}
_BACKENDS = ("auto", "fa2", "fa3", "cudnn", "cutlass", "trtllm-gen", "cute-dsl", "cutile")


def framework(x: Any) -> str:
    """Name whose array ``x`` is: ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"`` or another's."""
    for kind in type(x).__mro__:  # of a subclass too
        package = kind.__module__.partition(".")[0]
        if package in _FRAMEWORKS:
            return _FRAMEWORKS[package]
    return type(x).__module__.partition(".")[0]


# ------------------------------------------------------------------------------------- arrays in


def detached(x: Any) -> Any:
    """Give a torch tensor outside of autograd, which exports nothing; all else as it is."""
    if isinstance(x, (tuple, list)):
        return tuple(detached(part) for part in x)
    return x.detach() if framework(x) == "torch" else x


def data(op: str, name: str, x: Any) -> Array:
    """Give an array of values as a CuPy or NumPy array, zero-copy; on the CPU only NumPy's."""
    return as_array(op, name, detached(x))


def index(op: str, name: str, x: Any, like: Array) -> Array:
    """Give an index array in the home of ``like``; one in CPU memory is copied there."""
    if isinstance(x, (list, tuple, range)):
        x = np.asarray(x, np.int32)
    elif _is_in_cpu_memory(x):
        x = np.from_dlpack(detached(x))
    x = as_array(op, name, detached(x))
    return to_home(x, like) if isinstance(x, np.ndarray) else x


def target(op: str, name: str, x: Any, like: Array | None = None) -> Array:
    """Give an array to be written as one over the same memory, or raise if it must not be.

    Beside a NumPy array ``like`` those of other libraries may be in CPU memory.
    """
    x = detached(x)
    if isinstance(like, np.ndarray) and framework(x) != "jax" and _is_in_cpu_memory(x):
        x = np.from_dlpack(x)
    # torch exports nothing read-only: its tensors need not be imported twice.
    if framework(x) != "torch" and (reason := read_only_reason(x)) is not None:
        raise TypeError(f"{op}: {name} is {reason}")
    array = as_array(op, name, x)
    match_writable(op, name, array)
    return array


def _is_in_cpu_memory(x: Any) -> bool:
    """Tell whether ``x`` is an array of another library, in memory that NumPy can read."""
    if isinstance(x, (cp.ndarray, np.ndarray)) or not hasattr(x, "__dlpack_device__"):
        return False
    return x.__dlpack_device__()[0] in _CPU_DEVICES


def dtype_of(op: str, name: str, dtype: Any) -> np.dtype[Any]:
    """Give the NumPy dtype of a dtype of any framework, or of its name."""
    words = str(dtype).split(".")  # "torch.bfloat16"
    is_torch = words[0] == "torch" or isinstance(dtype, str)
    return as_dtype(op, name, words[-1] if is_torch else dtype)


# ------------------------------------------------------------------------------------ arrays out


class _Exporter:
    """An array with its own DLPack type code, bfloat16 and fp8 included."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return to_dlpack(self._array, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def give_back(like: Any, *results: Array) -> Any:
    """Give results as arrays of the framework of ``like``; CuPy's or NumPy's where it has none."""
    name = framework(like)
    if name in ("torch", "jax"):
        module = sys.modules["torch"] if name == "torch" else sys.modules["jax"].numpy
        results = tuple(module.from_dlpack(_Exporter(x)) for x in results)
    return results[0] if len(results) == 1 else results


# ------------------------------------------------------------------------------ stream and memory


class _Stream:
    """A stream of another library, by its address."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._pointer)


def _torch_alloc(size: int, device: int) -> int:
    torch: Any = sys.modules["torch"]
    return int(torch.cuda.caching_allocator_alloc(size, device))


def _torch_free(pointer: int, device: int) -> None:
    torch: Any = sys.modules["torch"]
    torch.cuda.caching_allocator_delete(pointer)


_TORCH_MEMORY = cp.cuda.PythonFunctionAllocator(_torch_alloc, _torch_free)


@contextlib.contextmanager
def working_for(x: Any) -> Iterator[None]:
    """Work as the framework of ``x`` does: on its device and stream, in its memory.

    With a torch tensor that is torch's current stream and caching allocator, so that the work can
    be captured by ``torch.cuda.graph``. JAX outside of ``jit`` has no stream to name: the work is
    waited for, as XLA might else give memory of the arguments to others.
    """
    name = framework(x)
    if name == "torch" and x.is_cuda:
        torch: Any = sys.modules["torch"]
        stream = _Stream(torch.cuda.current_stream(x.device).cuda_stream)
        with (
            cp.cuda.Device(x.device.index),
            cp.cuda.Stream.from_external(stream),
            cp.cuda.using_allocator(_TORCH_MEMORY.malloc),
        ):
            yield
    elif (device := _gpu_of(x)) is None:
        yield
    else:
        with cp.cuda.Device(device):
            yield
            if name == "jax":
                cp.cuda.get_current_stream().synchronize()


def _gpu_of(x: Any) -> int | None:
    """Give the number of the GPU that has an array; None: it is no array, or in CPU memory."""
    if isinstance(x, cp.ndarray):
        return int(x.data.device_id)
    if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack_device__"):
        return None
    kind, device = x.__dlpack_device__()
    return int(device) if kind in _CUDA_DEVICES else None


# ---------------------------------------------------------------------------------------- options


def refuse(op: str, **given: Any) -> None:
    """Raise if an option that nothing here honours was given: anything but None, False and 0."""
    for name, value in given.items():
        is_off = value is None or value is False or (isinstance(value, (int, float)) and not value)
        if not is_off:
            raise NotImplementedError(f"{op}: cukv has no {name}: leave it out")


def refuse_positions(op: str, mode: str, rope_scale: Any, rope_theta: Any) -> None:
    """Raise unless positions are encoded before the call, as keys in a cache are."""
    if mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
        raise ValueError(f"{op}: pos_encoding_mode must be NONE, ROPE_LLAMA or ALIBI, got {mode!r}")
    if mode != "NONE":
        raise NotImplementedError(
            f"{op}: cukv encodes no positions: pos_encoding_mode must be NONE, got {mode!r}"
        )
    refuse(op, rope_scale=rope_scale, rope_theta=rope_theta)


def check_backend(op: str, backend: str) -> None:
    """Raise unless the backend is one of FlashInfer's names, which all mean cukv's own kernels."""
    if backend not in _BACKENDS:
        raise ValueError(f"{op}: backend must be one of {list(_BACKENDS)}, got {backend!r}")


def scale_or_one(scale: Any) -> Any:
    """Give a scale, 1.0 for None."""
    return 1.0 if scale is None else detached(scale)
