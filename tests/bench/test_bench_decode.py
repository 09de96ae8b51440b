"""Decoding over pages, which reads every key and value once: what counts is the memory's speed."""

import numpy as np
import pytest
from inputs import HOME, Shape, growth, shapes
from works import paged

pytestmark = pytest.mark.gpu

LONG = Shape(64, 8192)


@shapes(
    Shape(1, 1024),
    Shape(1, 8192),
    Shape(1, 131072),
    Shape(16, 1024),
    Shape(16, 8192),
    LONG,
    Shape(128, 2048),
    Shape(256, 1024),
    Shape(8, 1024, num_qo_heads=64),
    Shape(32, 4096, num_kv_heads=32),
    Shape(64, 2048, layout="HND"),
    Shape(64, 2048, page_size=1),
    Shape(64, 2048, page_size=64),
    Shape(64, 2048, head_dim=64),
    Shape(64, 2048, head_dim=256),
)
def test_decode(measure, shape):
    measure(paged(shape), shape)


@growth(
    Shape(16, 4096),
    batch_size=(1, 4, 16, 64, 256),
    kv_len=(256, 1024, 4096, 16384, 65536),
    heads=(1, 2, 4, 8, 16),
)
def test_decode_grows(measure, shape):
    measure(paged(shape), shape)


# Half the bytes, in at most 0.56 of the time.
@shapes(Shape(64, 8192, dtype="float8_e4m3fn"))
def test_decode_of_fp8_beside_bfloat16(measure, shape):
    took = measure(paged(shape), shape, bfloat16=paged(Shape(shape.batch_size, shape.kv_len)))
    measure.at_most(took["this"] / took["bfloat16"], 0.56)


# Speculative decoding: the keys are read once for four rows.
@shapes(Shape(64, 8192, qo_len=4))
def test_four_rows_beside_one(measure, shape):
    one = Shape(shape.batch_size, shape.kv_len)
    took = measure(paged(shape), shape, one_row=paged(one))
    measure.at_most(took["this"] / took["one_row"], 1.10)


def mixed_lens(kind):
    """Give lengths as traces have them, or one long request among short ones."""
    if kind == "one_long":
        return [131072] + [64] * 511
    lens = np.random.default_rng(0).lognormal(6.5, 1.1, 512)
    return [int(n) for n in lens.clip(1, 16384)]


@pytest.mark.parametrize("kind", ["lognormal", "one_long"])
def test_mixed_lengths_beside_even_ones(measure, kind):
    lens = mixed_lens(kind)
    if HOME.xp is np:  # a rehearsal
        lens = [min(n, 90) for n in lens[:4]]
    even = [sum(lens) // len(lens)] * len(lens)
    took = measure(paged(Shape(), kv_lens=lens), even=paged(Shape(), kv_lens=even))
    measure.at_most(took["this"] / took["even"], 1 / 0.90)
