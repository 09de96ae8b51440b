"""Prefill of prompts, ragged and over pages, which the tensor cores bound; masks; mixed batches."""

import pytest
from inputs import Shape, growth, shapes
from works import causal_plus, paged, ragged, tree

pytestmark = pytest.mark.gpu


def prompts(batch_size, tokens, **options):
    """Shape of prompts that attend to themselves."""
    return Shape(batch_size, tokens, tokens, **options)


@shapes(
    *(prompts(*size) for size in ((1, 16384), (4, 4096), (16, 1024))),
    *(prompts(*size, causal=False) for size in ((1, 16384), (4, 4096), (16, 1024))),
    prompts(4, 4096, head_dim=64),
    prompts(4, 4096, head_dim=256),
    prompts(4, 4096, dtype="float16"),
)
def test_ragged_prefill(measure, shape):
    measure(ragged(shape), shape)


# Half the bytes, and products that take the tensor cores half the time; exponentials take as long.
@shapes(prompts(4, 4096, dtype="float8_e4m3fn"))
def test_ragged_prefill_of_fp8_beside_bfloat16(measure, shape):
    took = measure(ragged(shape), shape, bfloat16=ragged(prompts(shape.batch_size, shape.kv_len)))
    measure.ask(1.0, "of bfloat16", took["this"] / took["bfloat16"])


@growth(
    prompts(4, 2048),
    batch_size=(1, 4, 16, 64),
    tokens=(128, 512, 8192),
    heads=(1, 4, 16),
)
def test_ragged_prefill_grows(measure, shape):
    measure(ragged(shape), shape)


@shapes(
    Shape(16, 8192, qo_len=512),
    Shape(4, 4096, qo_len=4096),
    Shape(16, 8192, qo_len=512, page_size=64),
    Shape(16, 8192, qo_len=512, page_size=1),
    Shape(16, 8192, qo_len=512, dtype="float8_e4m3fn"),
)
def test_paged_prefill(measure, shape):
    measure(paged(shape), shape)


@growth(
    Shape(16, 4096, qo_len=512),
    batch_size=(1, 4, 16, 64),
    kv_len=(512, 2048, 8192, 32768),
    qo_len=(8, 64, 2048),
    heads=(1, 4, 16),
)
def test_paged_prefill_grows(measure, shape):
    measure(paged(shape), shape)


# FLOPs are those of the pairs that attend.
@shapes(prompts(4, 4096))
def test_a_random_mask(measure, shape):
    measure(ragged(shape, causal_plus(shape, 0.5, shape.kv_len)), shape)


@shapes(prompts(4, 4096))
def test_a_tree_mask_costs_little_more_than_causal(measure, shape):
    took = measure(ragged(shape, tree(shape)), shape, causal=ragged(shape))
    measure.ask(1.15, "of causal", took["this"] / took["causal"])


@shapes(Shape(64, 8192))
def test_a_mixed_batch_costs_no_more_than_its_parts(measure, shape):
    rows, chunk = [1] * (shape.batch_size - 1), [min(2048, shape.kv_len)]
    took = measure(
        *(paged(shape, rows + chunk), shape),
        rows=paged(shape, rows, [shape.kv_len] * len(rows)),
        chunk=paged(shape, chunk, [shape.kv_len]),
    )
    measure.ask(1.10, "of both alone", took["this"] / (took["rows"] + took["chunk"]))
