"""Named-dimension matcher: the checks of a call read as a table of array, shape and dtype."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from cukv._arrays import INDEX_DTYPES, Array, require_on_host

_LARGEST = np.iinfo(np.int64).max
_VIEWS = {
    np.dtype(np.uint16): "ml_dtypes.bfloat16",
    np.dtype(np.uint8): "ml_dtypes.float8_e4m3fn (or _e5m2)",
}


def match(
    op: str, name: str, array: Array, pattern: tuple[str, ...], dims: dict[str, int | None]
) -> None:
    """Bind each dimension name of ``pattern`` to the array's size, or raise.

    A name bound before must have the same size again; digits are a size by themselves.
    """
    shape = array.shape
    if len(shape) == len(pattern):
        for dim, size in zip(pattern, shape, strict=True):
            bound = dims.get(dim)
            if bound is not None and bound != size:
                break
        else:
            dims.update(zip(pattern, shape, strict=True))
            return
    want = ", ".join(
        dim if dim.isdigit() or (size := dims.get(dim)) is None else f"{dim}={size}"
        for dim in pattern
    )
    raise ValueError(f"{op}: {name} must be [{want}], got {list(shape)}")


def match_dtype(op: str, name: str, array: Array, *allowed: np.dtype[Any]) -> None:
    """Raise unless the array has one of the allowed dtypes."""
    if array.dtype not in allowed:
        names = " or ".join(d.name for d in allowed)
        hint = bits_hint(array.dtype)
        raise TypeError(f"{op}: {name} must be {names}, got {named(array.dtype)}{hint}")


def named(dtype: np.dtype[Any]) -> str:
    """Name a dtype, and its byte order where that is not this machine's."""
    return dtype.name if dtype.isnative else f"{dtype.name} of the other byte order"


def bits_hint(dtype: np.dtype[Any]) -> str:
    """Say how bits held in unsigned integers become a float dtype."""
    view = _VIEWS.get(dtype)
    if view is None:
        return ""
    return f"; if these are the bits of another dtype, pass a view: .view({view})"


def match_index(op: str, name: str, array: Array, size: int | None = None) -> None:
    """Raise unless the array is a 1-D int32 or int64 array, of ``size`` entries if given."""
    if array.dtype not in INDEX_DTYPES:
        raise TypeError(f"{op}: {name} must be int32 or int64, got {named(array.dtype)}")
    if array.ndim != 1 or (size is not None and array.shape[0] != size):
        want = "n" if size is None else f"n={size}"
        raise ValueError(f"{op}: {name} must be [{want}], got {list(array.shape)}")
    match_aligned(op, name, array)


def match_indptr(op: str, name: str, array: Array, count: str = "batch_size") -> None:
    """Raise unless the array holds the offsets of 0 or more, ``[count + 1]``."""
    match_index(op, name, array)
    if not len(array):
        raise ValueError(f"{op}: {name} must be [{count} + 1], got [0]")


def match_aligned(op: str, name: str, array: Array) -> None:
    """Raise unless elements lie at multiples of their size."""
    size, pointer = array.dtype.itemsize, 0 if isinstance(array, np.ndarray) else array.data.ptr
    if math.gcd(pointer, *array.strides) % size and array.size:
        raise ValueError(f"{op}: {name} must be aligned to its {size}-byte elements")


def whole_number(op: str, name: str, x: Any, low: int) -> int:
    """Give an integer of ``low`` or more, as Python or NumPy have them; booleans are none."""
    require_on_host(op, name, x)
    try:
        number = operator.index(x)
    except TypeError:
        raise TypeError(f"{op}: {name} must be an integer, got {x!r}") from None
    if is_boolean(x):
        raise TypeError(f"{op}: {name} must be an integer, got {x!r}")
    if not low <= number <= _LARGEST:
        most = ", below 2**63" if number > _LARGEST else ""
        raise ValueError(f"{op}: {name} must be {low} or more{most}, got {x}")
    return number


def as_whole(op: str, name: str, x: Any) -> int | None:
    """Give a number as an int if it is whole, however it is written; booleans are no numbers."""
    require_on_host(op, name, x)
    try:
        number = int(x)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if number != x or is_boolean(x) else number


def truth(op: str, name: str, x: Any) -> bool:
    """Give an option that is on or off as a bool. Arrays are none: a GPU's would be read."""
    if x is True or x is False:
        return x
    if not isinstance(x, (int, np.bool_)):
        raise TypeError(f"{op}: {name} must be True or False, got {type(x)}")
    return bool(x)


def is_boolean(x: Any) -> bool:
    """Tell a truth value, which is no number here though Python counts with it."""
    return isinstance(x, (bool, np.bool_))


def request_number(noun: str, i: Any, batch_size: int) -> int:
    """Give a request's number from 0, where negative ones count from the end; or raise."""
    if is_boolean(i) or not isinstance(i, (int, np.integer)):
        raise TypeError(f"{noun}: a request is named by an integer, got {i!r}")
    if not -batch_size <= i < batch_size:
        raise IndexError(f"{noun}: request {i} of {batch_size}")
    return int(i) % batch_size


def check_sizes(op: str, **sizes: Any) -> None:
    """Raise unless every size of a new cache is an integer of 0 or more; a page holds a token."""
    for name, size in sizes.items():
        whole_number(op, name, size, 1 if name == "page_size" else 0)


def match_rows(op: str, name: str, array: Array) -> None:
    """Raise unless the last axis is contiguous and elements are aligned, as kernels read them."""
    size = array.dtype.itemsize
    strides = array.strides
    if array.shape[-1] > 1 and strides[-1] != size and array.size:
        raise ValueError(
            f"{op}: {name} must have a contiguous last axis, got strides {strides} in bytes"
        )
    match_aligned(op, name, array)


def match_writable(op: str, name: str, array: Array) -> None:
    """Raise if two elements of an array to be written share memory through a stride of 0."""
    if 0 in array.strides:
        for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
            if stride == 0 and size > 1 and array.size:
                raise ValueError(
                    f"{op}: {name} is written and must not repeat memory, "
                    f"got stride 0 on axis {axis} of {list(array.shape)}"
                )


# ------------------------------------------------------- values of index arrays, on the host only


def read(array: Any) -> np.ndarray[Any, Any]:
    """Read an array on the host, whichever library's it is. Synchronises if it is on a GPU."""
    return np.asarray(array.get() if hasattr(array, "get") else array)  # CuPy's has get


def values(array: Array) -> np.ndarray[Any, Any]:
    """Read an index array on the host, as int64. Synchronises if it is on a GPU."""
    return read(array).astype(np.int64, copy=False)


def narrow(op: str, found: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Give int64 values in a narrower dtype, or raise if they do not fit."""
    limits = np.iinfo(dtype)
    beyond = np.flatnonzero((found > limits.max) | (found < limits.min))
    if len(beyond):
        i = int(beyond[0])
        raise ValueError(f"{op}: entry {i} is {found[i]}, which {dtype.name} does not hold")
    return found.astype(dtype)


def check_indptr(op: str, name: str, indptr: np.ndarray[Any, Any], total: int, what: str) -> None:
    """Raise unless ``indptr`` starts at 0, never falls and ends at or below ``total``."""
    if len(indptr) == 0 or indptr[0] != 0:
        got = indptr[0] if len(indptr) else "nothing"
        raise ValueError(f"{op}: {name}[0] must be 0, got {got}")
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])  # a difference could wrap
    if len(falls):
        i = int(falls[0])
        raise ValueError(
            f"{op}: {name} falls at request {i}: {name}[{i}] = {indptr[i]}, "
            f"{name}[{i + 1}] = {indptr[i + 1]}"
        )
    if indptr[-1] > total:
        raise ValueError(f"{op}: {name} ends at {indptr[-1]}, but there are {total} {what}")


def check_rows_fit(op: str, indptr: np.ndarray[Any, Any], seq_lens: np.ndarray[Any, Any]) -> None:
    """Raise unless every sequence is as long as the rows of ``indptr`` that it ends with."""
    short = np.flatnonzero(np.diff(indptr) > seq_lens)
    if len(short):
        b = int(short[0])
        raise ValueError(
            f"{op}: request {b} has {seq_lens[b]} tokens but {indptr[b + 1] - indptr[b]} "
            "rows to append"
        )
