"""Captures: what comes before a launch in a graph, and launches that overlap with it.

A launch waits for the one before it, which may have written what it reads. Outside of a capture
nobody knows what that one was. While a stream is captured, the graph says which node is last. If
that is a launch of this module, what it writes is known; a launch that reads none of that begins to
read while the other ends (programmatic dependent launch; ``inputs_ready`` in
kernels/common/attention.cuh). Anything else that was captured in between is the last node, and is
waited for.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np
from cupy.cuda import get_current_stream
from cupy_backends.cuda.api.runtime import getDevice, streamIsCapturing

from cukv._recording import recorder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cukv._kernels import BoundLaunch

    Range = tuple[int, int]  # addresses
    Node = tuple[int, int]  # a capture's number, and the node's address

_LEGACY_STREAMS = (0, 1)  # which must not even be asked during a capture
_ANYWHERE = (0, 1 << 64)  # of an array of another library, whose address is not known here
_ACTIVE = 1  # CUstreamCaptureStatus


class _LastLaunch(threading.local):
    """The last launch that this thread captured here: its node, and the memory that it writes."""

    node: Node | None = None
    writes: tuple[Range, ...] = ()


_last = _LastLaunch()


def launch_overlapping(
    launch: BoundLaunch,
    arguments: tuple[Any, ...],
    device: int,
    reads: Iterable[Any],
    writes: Iterable[Any],
) -> None:
    """Launch a kernel that takes ``inputs_ready``, which becomes its last argument.

    ``reads`` and ``writes`` are its arrays; entries may be numbers or None. A plan's slots and
    tickets, which its calls share, are left out: the kernel waits before it touches them. Two
    threads must not launch on one captured stream at a time.
    """
    stream = get_current_stream().ptr if recorder.work is None else 0
    if stream in _LEGACY_STREAMS or getDevice() != device or not streamIsCapturing(stream):
        launch(*arguments, 0)
        return
    node = _last_node(stream)
    follows = node is not None and node == _last.node
    launch(*arguments, int(follows and not _overlap(_last.writes, _ranges(reads))))
    _last.node, _last.writes = _last_node(stream), _ranges(writes)


def _ranges(arrays: Iterable[Any]) -> tuple[Range, ...]:
    """Give the addresses between which the elements of arrays on a GPU lie."""
    return tuple(
        cp.byte_bounds(x) if isinstance(x, cp.ndarray) else _ANYWHERE
        for x in arrays
        if hasattr(x, "__dlpack__") and not isinstance(x, (np.ndarray, np.generic))
    )


def _overlap(some: Iterable[Range], others: Iterable[Range]) -> bool:
    """Tell whether ranges have an address in common."""
    return any(max(a, c) < min(b, d) for a, b in some for c, d in others)


def _last_node(stream: int) -> Node | None:
    """Give the node that what a stream captures next depends on; None: none, several or not known.

    Drivers from before CUDA 12.3 have no such call.
    """
    status, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    graph, edges = ctypes.c_void_p(), ctypes.c_void_p()
    nodes = ctypes.POINTER(ctypes.c_void_p)()
    try:
        ask = driver("cuStreamGetCaptureInfo_v3", *(ctypes.c_void_p,) * 7)
        ask(stream, *map(ctypes.byref, (status, number, graph, nodes, edges, count)))
    except (AttributeError, RuntimeError):
        return None
    if status.value != _ACTIVE or count.value != 1:
        return None
    return number.value, nodes[0] or 0


def capture_id(stream: int) -> int:
    """Number that the driver gives to a capture, and to no other of this process."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = driver("cuStreamGetCaptureInfo_v2", *(ctypes.c_void_p,) * 6)
    ask(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value


@functools.cache
def driver(name: str, *arguments: Any) -> Any:
    """Find a function of the driver that CuPy does not call; one that fails raises."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = arguments
    function.errcheck = functools.partial(_raise, name)
    return function


def _raise(name: str, error: int, function: Any, arguments: Any) -> None:
    if error:
        raise RuntimeError(f"cukv: {name} gave CUDA error {error}")
