"""Truth values to bits: booleans and numbers, as one run or by segments."""

from __future__ import annotations

import functools
from typing import Any, Literal

import cupy as cp
import numpy as np

from cukv import reference
from cukv._arrays import (
    DTYPES,
    INDEX_DTYPES,
    Array,
    as_array,
    empty,
    home,
    on_device_of,
    set_to_zero,
)
from cukv._check import check_indptr, match, match_aligned, match_indptr, values
from cukv._index import as_index, pack_index
from cukv._kernels import ONE_SCAN, kernel, one_per_warp
from cukv._scratch import allocate_scratch
from cukv._sources import packer

BitOrder = Literal["little", "big"]

_TILE_BITS = 2048  # what one warp packs, see kernels/common/bits.cuh
_UINT8, _INT64 = np.dtype(np.uint8), INDEX_DTYPES[1]
_pack_elements = packer("Elements")


def packbits(x: Array, bitorder: BitOrder = "little") -> Array:
    """Pack truth values into bits, eight to a byte, as ``numpy.packbits`` packs booleans.

    Parameters
    ----------
    x : [n] or any shape; bool, integers or floats
        Flattened in C order, which copies an array of several axes unless it is contiguous. Any
        value but 0 is True, NaN too; -0.0 is False.
    bitorder : {"little", "big"}
        Whether a byte's first element is its lowest or its highest bit. Masks are little.

    Returns
    -------
    [ceil(n / 8)] uint8
        The unused bits of the last byte are 0.

    Raises
    ------
    TypeError, ValueError
        Not an array, a dtype without truth values, an unknown bit order.

    Notes
    -----
    Current stream, no synchronisation. The copy of an array that is not contiguous goes to scratch;
    calls captured into a graph share it as those of ``PagedKVCache.copy_pages`` do, and keep it for
    the life of the process. Source: kernels/packbits.cu.

    Examples
    --------
    >>> import numpy as np
    >>> packbits(np.array([1, 1, 0, 0, 0, 0, 0, 0, 1]))
    array([3, 1], dtype=uint8)
    """
    return pack_bits("packbits", x, bitorder)


def pack_bits(op: str, x: Array, bitorder: BitOrder, out: Array | None = None) -> Array:
    """Pack truth values as ``packbits`` does, into ``out [ceil(n / 8)]`` uint8 if it is given."""
    x, big = as_array(op, "x", x), _is_big(op, bitorder)
    truth_mask = _truth_mask(op, x.dtype)
    if isinstance(x, np.ndarray):
        with np.errstate(invalid="ignore"):  # NaN is True
            packed = reference.packbits(x, bitorder)
        if out is None:
            return packed
        out[...] = packed
        return out
    if x.ndim != 1:
        x = _flattened_for_this_call(op, x)
    match_aligned(op, "x", x)
    size = x.shape[0]
    if out is None:
        out = empty(op, (-(-size // 8),), _UINT8, cp, like=x)
    if size == 0:
        return out
    kernel("packbits", x.data.device_id, BYTES=x.itemsize)(
        *one_per_warp(-(-size // _TILE_BITS)),
        out=out.data.ptr,
        x=_pack_elements(x.data.ptr, x.strides[0], size, truth_mask),
        big=big,
    )
    return out


def segment_packbits(x: Array, indptr: Array, bitorder: BitOrder = "little") -> tuple[Array, Array]:
    """Pack each segment ``x[indptr[s]:indptr[s + 1]]`` into bits, each on bytes of its own.

    Parameters
    ----------
    x : [n] bool, integers or floats
        Truth values, as in ``packbits``; any stride. Past ``indptr[-1]`` lies padding.
    indptr : [segments + 1] int32 or int64, or a sequence
        Offsets of each segment's elements; starts at 0. On the device, a negative length counts as
        0, and elements outside ``x`` as False.
    bitorder : {"little", "big"}
        Whether a byte's first element is its lowest or its highest bit. Masks are little.

    Returns
    -------
    bytes : [(n + 7 * segments) // 8] uint8
        As many as any segments of x can need; 0 at and past ``byte_indptr[-1]``.
    byte_indptr : [segments + 1] int64
        Where each segment starts in ``bytes``:
        ``byte_indptr[1:] == cumsum(ceil((indptr[1:] - indptr[:-1]) / 8))``.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, shape, home or bit order; on NumPy also values of ``indptr``.

    Notes
    -----
    Current stream, no synchronisation. Source: kernels/segment_packbits.cu, kernels/byte_indptr.cu.

    Examples
    --------
    >>> import numpy as np
    >>> segment_packbits(np.array([True, False, True]), [0, 2, 3])
    (array([1, 1], dtype=uint8), array([0, 1, 2]))
    """
    op = "segment_packbits"
    x, big = as_array(op, "x", x), _is_big(op, bitorder)
    indptr = as_index(op, "indptr", indptr, x)
    xp = home(op, x=x, indptr=indptr)
    match(op, "x", x, ("n",), {})
    match_indptr(op, "indptr", indptr, "segments")
    truth_mask = _truth_mask(op, x.dtype)
    n, num_segments = x.shape[0], len(indptr) - 1
    size = (n + 7 * num_segments) // 8
    if xp is np:
        check_indptr(op, "indptr", values(indptr), n, "elements")
        out = np.zeros(size, _UINT8)
        with np.errstate(invalid="ignore"):
            packed, byte_indptr = reference.segment_packbits(x, indptr, bitorder)
        out[: len(packed)] = packed
        return out, byte_indptr
    match_aligned(op, "x", x)
    out, byte_indptr = empty(op, (size,), _UINT8, cp, like=x), offsets_in_bytes(op, indptr)
    if size == 0:
        return out, byte_indptr
    kernel("segment_packbits", x.data.device_id, BYTES=x.itemsize)(
        *one_per_warp(-(-size * 8 // _TILE_BITS)),
        out=out.data.ptr,
        size=size,
        x=_pack_elements(x.data.ptr, x.strides[0], n, truth_mask),
        indptr=pack_index(indptr),
        byte_indptr=pack_index(byte_indptr),
        big=big,
    )
    return out, byte_indptr


def offsets_in_bytes(op: str, indptr: Array) -> Array:
    """Give where segments start in bytes, from where they start in elements."""
    if isinstance(indptr, np.ndarray):
        return np.concatenate([[0], np.cumsum(-(-np.diff(indptr) // 8))]).astype(_INT64)
    out = empty(op, (len(indptr),), _INT64, cp, like=indptr)
    if len(out) == 1:
        set_to_zero(out)
        return out
    kernel("byte_indptr", out.data.device_id)(
        *ONE_SCAN, indptr=pack_index(indptr), byte_indptr=pack_index(out)
    )
    return out


def _is_big(op: str, bitorder: str) -> bool:
    if bitorder not in ("little", "big"):
        raise ValueError(f'{op}: bitorder must be "little" or "big", got {bitorder!r}')
    return bitorder == "big"


@functools.cache
def _truth_mask(op: str, dtype: np.dtype[Any]) -> int:
    """Bits of an element that make it true: all of them but a float's sign."""
    is_float = dtype.kind == "f" or dtype in DTYPES
    if dtype.itemsize > 8 or not (is_float or dtype.kind in "biu"):
        raise TypeError(f"{op}: x must be bool, integers or floats up to 64 bits, got {dtype.name}")
    return (1 << (8 * dtype.itemsize - is_float)) - 1


def _flattened_for_this_call(op: str, x: Array) -> Array:
    """Give the elements of a GPU array in C order, ``[n]``, for the launches of this call only."""
    with on_device_of(x):
        if not x.flags.c_contiguous:
            bits, strided = np.dtype(f"u{x.itemsize}"), x
            x = allocate_scratch(op, x.shape, x.dtype, x)
            x.view(bits)[...] = strided.view(bits)
        return x.reshape(-1)
