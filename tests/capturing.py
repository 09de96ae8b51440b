"""Captures that nothing but what is launched in them can end."""

import contextlib
import gc

import cupy as cp


@contextlib.contextmanager
def nothing_collected():
    """Collect no garbage in the block: a graph of an earlier test that goes then ends a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def capturing(stream):
    """Capture a stream in the block, in global mode: the list that it gives then has the graph."""
    graphs = []
    with nothing_collected():
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeGlobal)
        try:
            yield graphs
        finally:  # a capture left open would fail every test that follows
            graphs.append(stream.end_capture())
