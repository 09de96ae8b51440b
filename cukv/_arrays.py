"""Arrays in and out: what counts as an array, where it lives, its dtype, DLPack both ways.

A *home* is where arrays live and work is done: ``cupy`` (launches kernels) or ``numpy`` (runs the
definitions of ``cukv.reference``). Arrays of one call share one home and, on a GPU, one device.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import cupy as cp
import ml_dtypes
import numpy as np
from cupy_backends.cuda.api.runtime import getDevice

from cukv._recording import set_bytes_to_zero

Array = Any  # cupy.ndarray or numpy.ndarray; CuPy has no usable static types

FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FP8 = (FLOAT8_E4M3, FLOAT8_E5M2)
DTYPES = (FLOAT16, BFLOAT16, FLOAT32, *FP8)
INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))

_NAMED = {d.name: d for d in (*DTYPES, np.dtype(np.float64))}

# DLPack: device types on a CUDA device; codes of the floats that CuPy cannot carry; capsule layout.
_HOST_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost
_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_UINT, _BFLOAT = 1, 4
_FP8_CODES = {10: FLOAT8_E4M3, 12: FLOAT8_E5M2}
_EXPORT_CODES = {BFLOAT16: _BFLOAT, FLOAT8_E4M3: 10, FLOAT8_E5M2: 12}
_FLAGS_OFFSET, _VERSIONED_TENSOR_OFFSET, _CODE_OFFSET = 24, 32, 20
_READ_ONLY = 1

# Names of a stream of whichever device is current: the default, cudaStreamLegacy and -PerThread.
_NULL_STREAMS = (0, 1, 2)


# The functions of cukv.jax that do what operations do here, and what caches are written by.
_IN_JAX = {
    "PagedKVCache": "append",
    "PagedKVCache.append": "append",
    "PagedKVCache.gather": "gather",
    "PagedKVCache.decode": "decode",
    "PagedKVCache.prefill": "prefill",
    "MLAPagedCache": "mla_append",
    "MLAPagedCache.append": "mla_append",
    "MLAPagedCache.decode": "mla_decode",
    "RaggedTensor.prefill": "ragged_prefill",
    "CascadeLevels.attend": "cascade",
    "merge_states": "merge_states",
    "packbits": "packbits",
}

_NOUNS = (
    "CascadeLevels", "MLAPagedCache", "PackedMask", "PageTable", "PagedKVCache", "RaggedMask",
    "RaggedTensor",
)  # fmt: skip


class CudaUnavailableError(RuntimeError):
    """A kernel is needed and there is no NVIDIA GPU with a driver."""

    def __init__(self, op: str) -> None:
        super().__init__(
            f"{op}: needs an NVIDIA GPU and its driver, and none was found; what works on NumPy "
            "arrays (xp=numpy, .to_host()) needs none: it runs the definitions in cukv.reference"
        )


@functools.cache
def _device_count() -> int:
    return int(cp.cuda.runtime.getDeviceCount()) if cp.cuda.is_available() else 0


def is_available() -> bool:
    """Tell whether there is a GPU to launch kernels on."""
    return _device_count() > 0


# ------------------------------------------------------------------------------------------ dtypes


def as_dtype(op: str, name: str, dtype: Any) -> np.dtype[Any]:
    """Give the NumPy dtype of a dtype or its name, such as ``"bfloat16"``."""
    try:
        if dtype is not None:  # which NumPy takes for float64
            return _NAMED[dtype] if isinstance(dtype, str) else _NAMED[np.dtype(dtype).name]
    except (KeyError, TypeError):
        pass
    raise TypeError(f"{op}: {name} must be one of {list(_NAMED)}, got {dtype!r}") from None


def empty(
    op: str, shape: tuple[int, ...], dtype: np.dtype[Any], xp: Any, like: Array | None = None
) -> Array:
    """Allocate an array, on the device of ``like`` or the current one.

    CuPy cannot allocate fp8, but takes it as the dtype of a view of bytes.
    """
    if xp is np:
        return np.empty(shape, dtype)
    if xp is not cp:
        raise TypeError(f"{op}: xp must be cupy or numpy, got {xp!r}")
    if like is None:
        if not is_available():
            raise CudaUnavailableError(op)
    elif getDevice() != like.data.device_id:
        with on_device_of(like):
            return empty(op, shape, dtype, xp)
    if dtype in FP8:
        return cp.empty(shape, np.uint8).view(dtype)
    return cp.ndarray(shape, dtype)  # what cp.empty gives


# ------------------------------------------------------------------------------------- arrays in


def as_array(op: str, name: str, x: Any, like: Array | None = None) -> Array:
    """Give ``x`` as a CuPy or NumPy array, without a copy where it is one or speaks DLPack.

    A Python sequence becomes an array in the home of ``like``.
    """
    if isinstance(x, (cp.ndarray, np.ndarray)):
        return x if type(x) in (cp.ndarray, np.ndarray) else _plain(op, name, x)
    if isinstance(x, (list, tuple)) and like is not None:
        return to_home(np.asarray(x), like)
    of_jax = ""
    if _is_of_jax(x):
        if op in _NOUNS:
            of_jax = ", or make the noun by cukv.jax.noun"
        elif op in _IN_JAX:
            of_jax = f", or call cukv.jax.{_IN_JAX[op]}"
        else:
            of_jax = ", or work in cukv.jax"
    if not hasattr(x, "__dlpack_device__"):
        kind = type(x)
        raise TypeError(f"{op}: {name} must be a CuPy, NumPy or DLPack array, got {kind}{of_jax}")
    device = x.__dlpack_device__()[0]
    if device not in _CUDA_DEVICES:
        if type(x).__name__ in _NOUNS:
            raise TypeError(f"{op}: {name} must be an array, got a {type(x).__name__}: pass .data")
        if device not in _HOST_DEVICES:
            raise TypeError(
                f"{op}: {name} must be on a CUDA device, got DLPack's device type {device!r}"
            )
        raise TypeError(
            f"{op}: {name} is in CPU memory ({type(x).__name__}); pass numpy.from_dlpack({name}) "
            f"to work on it in NumPy, or move it to the GPU{of_jax}"
        )
    if not is_available():
        raise CudaUnavailableError(op)
    return _from_dlpack(x)[0]


def _plain(op: str, name: str, x: Array) -> Array:
    """Give an array of a subclass, such as ``numpy.memmap``, without what the subclass adds."""
    if isinstance(x, cp.ndarray):
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{op}: {name} is a masked array, whose mask would not be read; pass {name}.data or "
            f"{name}.filled()"
        )
    return x.view(np.ndarray)


def concatenate(parts: list[Array], axis: int = 0) -> Array:
    """Join arrays of one home, device and dtype, on their device."""
    dtype = parts[0].dtype
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis=axis)
    with on_device_of(parts[0]):
        # CuPy cannot concatenate fp8, which is joined as the bytes it is.
        bits = [p.view(np.uint8) for p in parts] if dtype in FP8 else parts
        return cp.concatenate(bits, axis=axis).view(dtype)


def set_to_zero(array: Array) -> None:
    """Set a contiguous GPU array to zero bytes, without a kernel, on the current stream."""
    if array.size:
        with on_device_of(array):
            set_bytes_to_zero(array.data.ptr, array.nbytes)


def flattened(array: Array) -> Array:
    """Give the elements of an array in C order, ``[size]``: a copy, unless they lie so already."""
    if isinstance(array, np.ndarray):
        return array.reshape(-1)
    with on_device_of(array):
        return array.reshape(-1)


def converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """Give an array in a dtype: itself, or a copy on its device."""
    if array.dtype == dtype or isinstance(array, np.ndarray):
        return array.astype(dtype, copy=False)
    with on_device_of(array):
        return array.astype(dtype)


def is_capturing(device: int) -> bool:
    """Tell whether launches on a device are being captured into a graph: by its current stream."""
    stream = cp.cuda.get_current_stream(device)
    if stream.ptr in _NULL_STREAMS and getDevice() != device:
        with cp.cuda.Device(device):
            return bool(stream.is_capturing())
    return bool(stream.is_capturing())


def to_home(host: np.ndarray[Any, Any], like: Array | None) -> Array:
    """Move a NumPy array to the home and device of ``like``; None keeps it in NumPy."""
    if like is None or isinstance(like, np.ndarray):
        return host
    with on_device_of(like):
        return cp.asarray(host)


def read_only_reason(x: Any, op: str = "") -> str | None:
    """Say why ``x`` must not be written through the array made of it; None if it may be.

    Of a jax.Array it names the function of cukv.jax that does the work of ``op``, if there is one.
    """
    if isinstance(x, cp.ndarray):
        return None
    if isinstance(x, np.ndarray):
        return None if x.flags.writeable else "a read-only NumPy array"
    if _is_of_jax(x):
        way_out = f": cukv.jax.{_IN_JAX[op]} gives back what it writes" if op in _IN_JAX else ""
        return f"a jax.Array, which is immutable{way_out}"
    if hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in _CUDA_DEVICES:
        return "exported read-only by its producer" if _from_dlpack(x)[1] else None
    return None


def _is_of_jax(x: Any) -> bool:
    """Tell whether ``x`` is a jax.Array or a tracer, without importing JAX."""
    return type(x).__module__.partition(".")[0] in ("jax", "jaxlib")


class _Importer:
    """Stands before a DLPack producer: notes the read-only flag, carries fp8 as bytes."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self.read_only = False
        self.fp8: np.dtype[Any] | None = None

    def __dlpack_device__(self) -> Any:
        return self._producer.__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        try:
            capsule = self._producer.__dlpack__(**kwargs)
        except TypeError:  # a producer from before DLPack 1.0
            capsule = self._producer.__dlpack__(stream=kwargs.get("stream"))
        code, flags = _capsule_fields(capsule)
        self.read_only = bool(flags & _READ_ONLY)
        if code.value in _FP8_CODES:
            self.fp8 = _FP8_CODES[code.value]
            code.value = _UINT
        return capsule


def _from_dlpack(x: Any) -> tuple[Array, bool]:
    """Import a CUDA producer, ordered after its stream: (array, read-only?)."""
    importer = _Importer(x)
    array = cp.from_dlpack(importer)
    return (array if importer.fp8 is None else array.view(importer.fp8)), importer.read_only


def _capsule_fields(capsule: Any) -> tuple[ctypes.c_uint8, int]:
    """Give the type code of a capsule, in place, and its flags."""
    get_name, get_pointer = (
        ctypes.pythonapi.PyCapsule_GetName,
        ctypes.pythonapi.PyCapsule_GetPointer,
    )
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = get_name(capsule)
    address = get_pointer(capsule, name)
    if name == b"dltensor_versioned":
        flags = ctypes.c_uint64.from_address(address + _FLAGS_OFFSET).value
        address += _VERSIONED_TENSOR_OFFSET
    else:
        flags = 0
    return ctypes.c_uint8.from_address(address + _CODE_OFFSET), flags


# ------------------------------------------------------------------------------------- arrays out


def to_dlpack(array: Array, **kwargs: Any) -> Any:
    """Export an array with its own type code, bfloat16 and fp8 included."""
    if isinstance(array, cp.ndarray) and getDevice() != array.data.device_id:
        # CuPy has the consumer wait for the current stream of the current device.
        with on_device_of(array):
            return to_dlpack(array, **kwargs)
    if array.dtype not in _EXPORT_CODES:
        return array.__dlpack__(**kwargs)
    bits = array.view(np.uint8 if array.dtype.itemsize == 1 else np.uint16)
    capsule = bits.__dlpack__(**kwargs)
    _capsule_fields(capsule)[0].value = _EXPORT_CODES[array.dtype]
    return capsule


# ---------------------------------------------------------------------------------- homes, devices


def require_on_host(op: str, name: str, x: Any) -> None:
    """Raise if a number is in an array on a GPU, whichever library's: who read it would wait."""
    if isinstance(x, (int, float)):
        return
    if isinstance(x, cp.ndarray) or (
        hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] not in _HOST_DEVICES
    ):
        raise TypeError(f"{op}: {name} must be a number on the host, got an array on the GPU")


def home(op: str, /, **arrays: Array | None) -> Any:
    """Give ``cupy`` or ``numpy``, whichever all the arrays given belong to; None is skipped."""
    kind: Any = None
    first = ""
    device = -1
    for name, x in arrays.items():
        if x is None:
            continue
        on_host = isinstance(x, np.ndarray)
        if not first:
            first, kind = name, on_host
            device = -1 if on_host else x.data.device_id
        elif on_host is not kind:
            where = ("on the GPU", "in NumPy")
            raise TypeError(f"{op}: {first} is {where[kind]} but {name} is {where[on_host]}")
        elif not on_host and x.size and x.data.device_id != device:
            raise ValueError(
                f"{op}: {first} is on device {device} but {name} is on device {x.data.device_id}"
            )
    return np if kind else cp


def on_device_of(array: Array) -> Any:
    """Make a CuPy array's device the current one, on which CuPy allocates and works."""
    return cp.cuda.Device(array.data.device_id)


def device_of(array: Array) -> int:
    """Give the number of an array's device; -1 for NumPy arrays."""
    return array.data.device_id if type(array) is cp.ndarray else -1


def alignment(*strides_and_pointers: int) -> int:
    """Largest power of two up to 16 that divides every byte stride and pointer."""
    return math.gcd(16, *strides_and_pointers)
