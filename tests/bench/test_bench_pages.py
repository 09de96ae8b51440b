"""Copying out of pages and between them."""

import pytest
from inputs import Shape, growth, shapes
from works import copy_pages, gather

pytestmark = pytest.mark.gpu


@shapes(Shape(), Shape(layout="HND"), Shape(dtype="float8_e4m3fn"), Shape(page_size=1))
def test_gather(measure, shape):
    measure(gather(shape), shape)


@growth(
    Shape(),
    batch_size=(1, 4, 16, 64, 256),
    kv_len=(16, 256, 4096),
    heads=(1, 2, 4, 8, 16),
)
def test_gather_grows(measure, shape):
    measure(gather(shape), shape)


# Pages go through scratch, so that each byte is read and written twice; it counts once.
@shapes(Shape(1, kv_len=16), Shape(4), Shape())
def test_copy_pages(measure, shape):
    measure(copy_pages(shape), shape)
