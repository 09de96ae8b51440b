"""Appending rows to pages, which is a copy: what counts is the share of the card's copy speed."""

import pytest
from inputs import Shape, growth, shapes
from works import append, append_mla

pytestmark = pytest.mark.gpu

PROMPTS, STEP = Shape(qo_len=1024), Shape(256, kv_len=64)
LATENT_STEP = Shape(256, 64, num_kv_heads=1, head_dim=576, page_size=64)
LATENT = Shape(qo_len=1024, num_kv_heads=1, head_dim=576, page_size=64)


def rows(shape):
    """Name a shape by what is appended where."""
    dtype = "" if shape.dtype == "bfloat16" else f"_{shape.dtype}"
    return f"{shape.layout}_b{shape.batch_size}_n{shape.qo_len}{dtype}"


# Whole prompts and one token each, both layouts; values that are rounded to fp8 on their way.
@shapes(
    PROMPTS,
    Shape(qo_len=1024, layout="HND"),
    Shape(qo_len=1024, dtype="float8_e4m3fn"),
    STEP,
    Shape(256, kv_len=64, layout="HND"),
    name=rows,
)
def test_append(measure, shape):
    measure(append(shape), shape)


@shapes(LATENT, LATENT_STEP, name=rows)
def test_append_mla(measure, shape):
    measure(append_mla(shape), shape)


@growth(
    Shape(64, kv_len=1024, qo_len=64),
    batch_size=(1, 4, 16, 64, 256),
    qo_len=(1, 16, 256, 1024),
    heads=(1, 2, 4, 8, 16),
)
def test_append_grows(measure, shape):
    measure(append(shape), shape)
