"""Index arrays and scales as kernels take them: packed once, read through one device accessor."""

from __future__ import annotations

import functools
import math
from typing import Any

import cupy as cp
import numpy as np

from cukv._arrays import FLOAT32, INDEX_DTYPES, Array, as_array, home, require_on_host, to_home
from cukv._check import match_index
from cukv._sources import packer

_pack_index = packer("Index")
_pack_scale = packer("Scale")
_pack_divisor = packer("Divisor")

SEQUENCES = (list, tuple, range)  # what as_index makes an array of

NO_INDEX = _pack_index(0, 0, 0, 0)
UNIT_SCALE, NO_SCALE = _pack_scale(0, 1.0), _pack_scale(0, 0.0)
_UNIT_SCALES = (UNIT_SCALE,) * 3

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT64_MAX = np.iinfo(np.int64).max


def pack_index(array: Array | None) -> bytes:
    """Pack a 1-D int32 or int64 CuPy array as kernels/common/index.cuh's Index; None is none."""
    if array is None:
        return NO_INDEX
    return _pack_index(array.data.ptr, array.strides[0], array.shape[0], array.dtype.itemsize)


def pack_numbers(size: int) -> bytes:
    """Pack the index array 0, 1, ..., size - 1, which is not in memory."""
    return _pack_index(0, 0, size, 0)


def pack_index_argument(op: str, name: str, x: Array, size: int, like: Array) -> bytes:
    """Check and pack an index argument of ``size`` entries for a launch beside a table's."""
    if type(x) is not cp.ndarray:
        home(op, table=like, **{name: x})
    dtype, data = x.dtype, x.data
    if dtype not in INDEX_DTYPES or x.ndim != 1 or x.size != size:
        match_index(op, name, x, size)
    (stride,) = x.strides
    pointer, width = data.ptr, dtype.itemsize
    if (pointer | stride) % width:
        match_index(op, name, x, size)
    if data.device_id != like.data.device_id and size:
        home(op, table=like, **{name: x})
    return _pack_index(pointer, stride, size, width)


@functools.lru_cache(maxsize=1024)
def pack_divisor(divisor: int) -> bytes:
    """Pack a divisor so that ``n // divisor == (2 * n * magic >> 32) >> shift`` for n < 2**31.

    With ``shift = ceil(log2(divisor))``, the magic number ``2**(31 + shift) / divisor`` rounded up
    is too large by less than 1, which moves no quotient of such an n.
    """
    if divisor < 1 or divisor >= 1 << 31:
        return _pack_divisor(0, 0, 0)  # every such n gives 0
    shift = (divisor - 1).bit_length()
    return _pack_divisor(divisor, -(-(1 << (31 + shift)) // divisor), shift)


def as_index(op: str, name: str, x: Any, like: Array | None) -> Array:
    """Give an index array; a Python sequence becomes int32 (int64 if a value needs it)."""
    if not isinstance(x, SEQUENCES):
        return as_array(op, name, x)
    try:
        host = np.asarray(x) if len(x) else np.zeros(0, np.int64)
    except ValueError:
        raise TypeError(f"{op}: {name} must be integers, got sequences among them") from None
    if host.dtype.kind not in "iu":
        large = [n for n in x if isinstance(n, int) and not ~_INT64_MAX <= n <= _INT64_MAX]
        got = f"{large[0]}, which int64 does not hold" if large else host.dtype.name
        raise TypeError(f"{op}: {name} must be integers, got {got}")
    limits = np.iinfo(np.int32)
    if not host.size or (limits.min <= host.min() and host.max() <= limits.max):
        host = host.astype(np.int32)
    return to_home(host, like)


def pack_scale(op: str, name: str, scale: Any, device: int) -> bytes:
    """Pack a scale: a number, or a float32 CuPy array of one element that the kernel reads."""
    if type(scale) is float and scale == 1.0:
        return UNIT_SCALE
    if hasattr(scale, "__dlpack_device__") and not isinstance(scale, np.ndarray):
        scale = as_array(op, name, scale)
    if isinstance(scale, cp.ndarray):
        if scale.size != 1 or scale.dtype != FLOAT32:
            raise (TypeError if scale.dtype != FLOAT32 else ValueError)(
                f"{op}: {name} must be float32 [1], got {scale.dtype.name}{list(scale.shape)}"
            )
        if scale.data.device_id != device:
            raise ValueError(
                f"{op}: {name} is on device {scale.data.device_id}, the cache on {device}"
            )
        if scale.data.ptr % FLOAT32.itemsize:
            raise ValueError(f"{op}: {name} must be aligned to its 4-byte element")
        return _pack_scale(scale.data.ptr, 0.0)
    return _pack_scale(0, host_scale(op, name, scale))


def pack_scales(op: str, scales: tuple[Any, Any, Any], device: int) -> tuple[bytes, bytes, bytes]:
    """Pack the scales of q, k and v."""
    q, k, v = scales
    if type(q) is type(k) is type(v) is float and q == k == v == 1.0:  # by far the most calls
        return _UNIT_SCALES
    return (
        pack_scale(op, "q_scale", q, device),
        pack_scale(op, "k_scale", k, device),
        pack_scale(op, "v_scale", v, device),
    )


def host_scale(op: str, name: str, scale: Any) -> float:
    """Give a Python or NumPy scalar, 0-d or one-element NumPy array as a float."""
    if type(scale) is float and abs(scale) <= _FLOAT32_MAX:
        return scale
    require_on_host(op, name, scale)
    if type(scale) is int:  # NumPy has none above 64 bits
        beyond = math.inf if scale > 0 else -math.inf
        scale = float(scale) if scale.bit_length() <= 1000 else beyond
    array = np.asarray(scale)
    if array.size != 1 or (array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16"):
        raise TypeError(f"{op}: {name} must be one number, got {scale!r}")
    value = float(array.reshape(()).astype(np.float64))
    if not abs(value) <= _FLOAT32_MAX:
        where = " in float32" if math.isfinite(value) else ""
        raise ValueError(f"{op}: {name} must be finite{where}, got {scale}")
    return value
