"""Merging attention states: each is read once, the result is written."""

import pytest
from inputs import HOME, Shape, growth, normal, num_sets, shapes, take, to_host
from timing import Work
from tolerances import LSE, MERGE, assert_close, max_abs
from works import some

from cukv import merge_state, merge_states, reference

pytestmark = pytest.mark.gpu

# A shape's batch_size counts rows, its qo_len the states of each.
ROWS = Shape(16384, qo_len=4)


def sizes(shape):
    """Name a shape by rows, states, heads and dimension."""
    return f"{shape.batch_size}x{shape.qo_len}x{shape.num_qo_heads}x{shape.head_dim}"


def merging(shape, function=None):
    """Merge the states of every row and head."""
    rows, k, heads = shape.batch_size, shape.qo_len, shape.num_qo_heads
    nbytes = rows * heads * (k + 1) * (shape.head_dim * 2 + 4)
    sets = [
        (normal(rows, k, heads, shape.head_dim), normal(rows, k, heads, dtype="float32"))
        for _ in range(num_sets(nbytes))
    ]
    call = function or merge_states

    def check(result):
        chosen = HOME.xp.asarray(some(rows))
        o, lse = (to_host(take(x, chosen)) for x in sets[-1])
        want, want_lse = reference.merge_states(o, lse)
        assert_close(to_host(take(result[0], chosen)), want, MERGE["bfloat16"], scale=max_abs(o))
        assert_close(to_host(take(result[1], chosen)), want_lse, LSE)

    return Work([lambda s=s: call(*s) for s in sets], nbytes, check=check)


@shapes(ROWS, Shape(64, qo_len=8), name=sizes)
def test_merge_states(measure, shape):
    measure(merging(shape), shape)


@shapes(Shape(16384, qo_len=2), name=sizes)
def test_merge_state(measure, shape):
    def two(o, lse):
        return merge_state(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1])

    measure(merging(shape, two), shape)


@growth(
    Shape(1024, qo_len=4),
    batch_size=(1, 16, 256, 4096),
    qo_len=(1, 2, 8, 32),
    heads=(1, 4, 16),
)
def test_merge_states_grows(measure, shape):
    measure(merging(shape), shape)
