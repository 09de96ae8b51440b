"""Plans, made anew on the device in every step: ``plan.update()``, one launch or two."""

import pytest
from inputs import Shape, growth, shapes
from timing import Work
from works import common_prompt, mla, paged, ragged, shared, tree

pytestmark = pytest.mark.gpu

# What a step of 64 and of 4096 requests may take on an H200, in microseconds.
LIMITS = {Shape(64): 4.0, Shape(4096, 16): 12.0}


def updating(work):
    """Update the plan of a work, whose calls must then give right answers."""
    return Work([work.plan.update] * 2, check=lambda _: work.check(work.calls[-1]()))


@pytest.mark.parametrize(
    ("shape", "limit"),
    [pytest.param(shape, us, id=str(shape)) for shape, us in LIMITS.items()],
    indirect=["shape"],
)
def test_plan_update_of_decode(measure, shape, limit):
    took = measure(updating(paged(shape)), shape)
    measure.at_most(1e6 * took["this"] / limit, 1.0)


@growth(Shape(64, 1024), batch_size=(1, 16, 256, 1024), kv_len=(16, 8192, 16384))
def test_plan_update_of_decode_grows(measure, shape):
    measure(updating(paged(shape)), shape)


@shapes(Shape(4, 4096, qo_len=4096), Shape(64, 1024, qo_len=16))
def test_plan_update_of_prefill(measure, shape):
    measure(updating(paged(shape)), shape)


@shapes(Shape(128, 4096, num_qo_heads=16, page_size=64), Shape(1, 65536, num_qo_heads=128))
def test_plan_update_of_mla(measure, shape):
    measure(updating(mla(shape)), shape)


@shapes(Shape(4, 4096, qo_len=4096))
def test_plan_update_of_a_mask(measure, shape):
    mask = tree(shape)
    measure(updating(ragged(shape, mask)), shape)


@shapes(Shape(64, 8448))
def test_plan_update_of_a_cascade(measure, shape):
    cascade, _ = shared(*common_prompt(shape, shape.kv_len - 256), shape)
    measure(updating(cascade), shape)
