"""Captures that nothing but what is launched in them can end."""

import contextlib
import gc

import cupy as cp


@contextlib.contextmanager
def capturing(stream):
    """Capture a stream in the block, in global mode: the list that it gives holds the graph then.

    No garbage is collected meanwhile: a graph that is destroyed then, of an earlier test, ends the
    capture.
    """
    graphs, collects = [], gc.isenabled()
    gc.disable()
    stream.begin_capture(cp.cuda.runtime.streamCaptureModeGlobal)
    try:
        yield graphs
    finally:  # a capture left open would fail every test that follows
        try:
            graphs.append(stream.end_capture())
        finally:
            if collects:
                gc.enable()
