"""Captures of the tests: no garbage is collected in them, whatever fails."""

import gc

import pytest
from capturing import capturing


class Stream:
    """A stream that is not there, which fails in some calls."""

    def __init__(self, *failing):
        self._failing = failing

    def _call(self, name):
        if name in self._failing:
            raise RuntimeError(name)
        return name

    def begin_capture(self, mode):
        self._call("begin")

    def end_capture(self):
        return self._call("end")


def test_a_capture_gives_its_graph_and_collects_nothing():
    with capturing(Stream()) as graphs:
        assert not gc.isenabled()
    assert graphs == ["end"]
    assert gc.isenabled()


@pytest.mark.parametrize("failing", [("begin",), ("end",), ("body",), ("body", "end")])
def test_garbage_is_collected_again_after_a_capture_that_fails(failing):
    stream = Stream(*failing)
    with pytest.raises(RuntimeError, match=failing[-1]), capturing(stream):
        stream._call("body")
    assert gc.isenabled()
