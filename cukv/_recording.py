"""Recording: device work of this thread noted down instead of done, to be done any time later."""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import cupy as cp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Work = Callable[[int], None]  # a launch, ready but for its stream


class _Recorder(threading.local):
    """What this thread notes; None: it works."""

    work: list[Work] | None = None


recorder = _Recorder()


@contextmanager
def recording() -> Iterator[list[Work]]:
    """Note launches of this thread: each entry, called with a stream's pointer, makes one there.

    Arguments of a launch are addresses and numbers, so that no memory need exist until then.
    """
    outer, recorder.work = recorder.work, []
    try:
        yield recorder.work
    finally:
        recorder.work = outer


def set_bytes_to_zero(pointer: int, num_bytes: int) -> None:
    """Set memory of the current device to zero, without a kernel, on the current stream."""
    work = functools.partial(_memset, pointer, num_bytes)
    if recorder.work is None:
        work(cp.cuda.get_current_stream().ptr)
    else:
        recorder.work.append(work)


def _memset(pointer: int, num_bytes: int, stream: int) -> None:
    cp.cuda.runtime.memsetAsync(pointer, 0, num_bytes, stream)
