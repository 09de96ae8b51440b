"""Launches of a captured graph whose inputs are ready: the launch before them writes none.

A launch waits for the one before it, which may have written what it reads. Outside of a capture
nobody knows what that was. While a stream is captured, the graph says which node is last: if it is
a launch of this module, what it writes is known, and where the next reads none of it that one may
begin to read while the other ends (``inputs_ready`` in kernels/common/attention.cuh). Whatever
else was captured in between is the last node then, and is waited for.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING, Any

import cupy as cp
from cupy.cuda import get_current_stream
from cupy_backends.cuda.api.runtime import getDevice, streamIsCapturing

from cukv._recording import recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cukv._kernels import BoundLaunch

    Range = tuple[int, int]  # addresses
    Node = tuple[int, int]  # a capture's number, and the node's address

_NO_STREAM = -1
_NEVER_CAPTURED = (_NO_STREAM, 0, 1)  # the legacy stream must not even be asked during a capture
_ACTIVE = 1  # CUstreamCaptureStatus


class _LastReader(threading.local):
    """The last launch that this thread captured here: its node, and the memory that it writes."""

    node: Node | None = None
    writes: list[Range] = []  # noqa: RUF012


_last = _LastReader()


def launch_reader(
    launch: BoundLaunch,
    arguments: tuple[Any, ...],
    device: int,
    touched: Callable[[], tuple[Iterable[Any], Iterable[Any]]],
) -> None:
    """Launch a kernel that takes ``inputs_ready``, which becomes its last argument.

    ``touched`` gives the arrays that it reads, and those that it writes; entries may be no arrays.
    Memory of the library's own, which no other call reads, is left out.
    """
    stream = get_current_stream().ptr if recorder.work is None else _NO_STREAM
    if stream in _NEVER_CAPTURED or not streamIsCapturing(stream):
        launch(*arguments, 0)
        return
    here = getDevice() == device
    reads, writes = touched()
    node = _last_node(stream) if here else None
    follows = node is not None and node == _last.node
    launch(*arguments, int(follows and not _overlap(_last.writes, _ranges(reads))))
    _last.node, _last.writes = _last_node(stream) if here else None, _ranges(writes)


def _ranges(arrays: Iterable[Any]) -> list[Range]:
    """Give the addresses between which the elements of arrays lie."""
    return [cp.byte_bounds(x) for x in arrays if isinstance(x, cp.ndarray) and x.size]


def _overlap(some: Iterable[Range], others: Iterable[Range]) -> bool:
    """Tell whether ranges have an address in common."""
    return any(a < d and c < b for a, b in some for c, d in others)


@functools.cache
def _capture_info() -> Any:
    """Find the driver's call that knows edges of early launches; None: it is from before 12.3."""
    call = getattr(ctypes.CDLL("libcuda.so.1"), "cuStreamGetCaptureInfo_v3", None)
    if call is not None:
        call.argtypes = (ctypes.c_void_p,) * 7
    return call


def _last_node(stream: int) -> Node | None:
    """Give the node that what a stream captures next depends on; None: none, or several."""
    call = _capture_info()
    if call is None:
        return None
    status, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    graph, edges = ctypes.c_void_p(), ctypes.c_void_p()
    nodes = ctypes.POINTER(ctypes.c_void_p)()
    error = call(stream, *map(ctypes.byref, (status, number, graph, nodes, edges, count)))
    if error or status.value != _ACTIVE or count.value != 1:
        return None
    return number.value, nodes[0] or 0
