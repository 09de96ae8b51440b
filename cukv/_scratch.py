"""Scratch: memory through which one launch of a call hands something to the next."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

from cukv._arrays import empty
from cukv._recording import recorder

if TYPE_CHECKING:
    from cukv._arrays import Array

_BYTE = np.dtype(np.uint8)

# What captured calls use, by capture, stream and device. The last of a list is the largest.
_of_captures: dict[tuple[int, int, int], list[Array]] = {}


def allocate_scratch(op: str, shape: tuple[int, ...], dtype: np.dtype[Any], like: Array) -> Array:
    """Allocate memory for the launches of one call, which takes scratch once.

    Replays of a captured call use its scratch, so that it must not go back to the pool; and it is
    kept for the life of the process, as nothing tells when a graph is gone. What one capture sees
    of one stream runs one after the other: those calls share their scratch, and a capture needs no
    more memory than the same calls need in a pool. Of launches that are recorded, whoever records
    them gives the memory.
    """
    stream = cp.cuda.get_current_stream()
    if recorder.work is not None or not stream.is_capturing():
        return empty(op, shape, dtype, cp, like=like)
    num_bytes = math.prod(shape) * dtype.itemsize
    key = _capture_id(stream.ptr), stream.ptr, like.data.device_id
    kept = _of_captures.setdefault(key, [])
    if not kept or kept[-1].nbytes < num_bytes:
        kept.append(empty(op, (num_bytes,), _BYTE, cp, like=like))
    return kept[-1][:num_bytes].view(dtype).reshape(shape)


def _capture_id(stream: int) -> int:
    """Number that the driver gives to a capture, and to no other of this process."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _cu_stream_get_capture_info()(
        stream, ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error:
        raise RuntimeError(f"cukv: cuStreamGetCaptureInfo gave CUDA error {error}")
    return number.value


@functools.cache
def _cu_stream_get_capture_info() -> Any:
    """Find the driver's question about a capture, which CuPy does not ask."""
    ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    ask.argtypes = (ctypes.c_void_p,) * 6
    return ask
