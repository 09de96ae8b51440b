"""Scratch: memory through which one launch of a call hands something to the next."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

from cukv._arrays import empty, is_capturing, on_device_of
from cukv._captures import capture_id, driver
from cukv._recording import recorder

if TYPE_CHECKING:
    from cukv._arrays import Array

# What captured calls use, by capture, stream and device. The last of a list is the largest.
_of_captures: dict[tuple[int, int, int], list[Array]] = {}


def allocate_scratch(op: str, shape: tuple[int, ...], dtype: np.dtype[Any], like: Array) -> Array:
    """Allocate memory for the launches of one call, which takes scratch once.

    Replays of a captured call use its scratch, so that it must not go back to the pool; and it is
    kept for the life of the process, as nothing in CuPy tells when a graph is gone. What one
    capture sees of one stream runs one after the other: those calls share their scratch. It is
    memory of its own: all that a warm pool holds is left for results, which need no more than they
    did when they had what scratch gave back. Of launches that are recorded, whoever records them
    gives the memory.
    """
    device = like.data.device_id
    if recorder.work is not None or not is_capturing(device):
        return empty(op, shape, dtype, cp, like=like)
    stream = cp.cuda.get_current_stream(device).ptr
    num_bytes = math.prod(shape) * dtype.itemsize
    with on_device_of(like):
        kept = _of_captures.setdefault((capture_id(stream), stream, device), [])
        if not kept or kept[-1].nbytes < num_bytes:
            kept.append(_own_memory(num_bytes))
    return kept[-1][:num_bytes].view(dtype).reshape(shape)


def _own_memory(num_bytes: int) -> Array:
    """Allocate bytes outside of CuPy's pool, which a capture in global mode allows of this call."""
    mode = ctypes.c_int(cp.cuda.runtime.streamCaptureModeRelaxed)
    exchange = driver("cuThreadExchangeStreamCaptureMode", ctypes.POINTER(ctypes.c_int))
    exchange(mode)
    try:
        memory = cp.cuda.Memory(max(num_bytes, 1))
    finally:
        exchange(mode)
    return cp.ndarray((num_bytes,), np.uint8, cp.cuda.MemoryPointer(memory, 0))
