"""Attention over latent rows: 1152 bytes each in bfloat16, 640 with ckv in fp8."""

import pytest
from inputs import Shape, growth, shapes
from works import mla

pytestmark = pytest.mark.gpu

E4M3 = "float8_e4m3fn"


def latent(batch_size, kv_len, heads, qo_len=1, dtype="bfloat16"):
    """Shape of requests of DeepSeek's latent rows on pages of 64."""
    return Shape(batch_size, kv_len, qo_len, heads, 1, 576, 64, dtype)


def sizes(shape):
    """Name a shape by what matters of it."""
    rows = f"_q{shape.qo_len}" if shape.qo_len > 1 else ""
    return f"b{shape.batch_size}{rows}_kv{shape.kv_len}_h{shape.num_qo_heads}"


SIZES = ((128, 4096, 128), (128, 4096, 16), (16, 4096, 16), (1, 65536, 128), (1, 4096, 128))


# Batches beside the round ones, and rows of multi-token prediction.
@shapes(
    *(latent(*size) for size in SIZES),
    *(latent(batch_size, 4096, 128) for batch_size in (66, 100, 127, 130)),
    latent(64, 4096, 16, qo_len=2),
    latent(64, 4096, 128, qo_len=2),
    name=sizes,
)
def test_mla_decode(measure, shape):
    measure(mla(shape), shape)


@growth(
    latent(64, 4096, 64),
    batch_size=(1, 4, 16, 64, 256),
    kv_len=(256, 1024, 4096, 16384),
    num_qo_heads=(1, 8, 16, 32, 64, 128),
)
def test_mla_decode_grows(measure, shape):
    measure(mla(shape), shape)


@shapes(*(latent(*size, dtype=E4M3) for size in SIZES), name=sizes)
def test_mla_decode_of_fp8(measure, shape):
    measure(mla(shape, kpe_dtype="bfloat16"), shape)


@shapes(latent(128, 4096, 16, dtype=E4M3), name=sizes)
def test_mla_decode_of_fp8_beside_bfloat16(measure, shape):
    bfloat16 = latent(shape.batch_size, shape.kv_len, shape.num_qo_heads)
    took = measure(mla(shape, kpe_dtype="bfloat16"), shape, bfloat16=mla(bfloat16))
    measure.at_most(took["this"] / took["bfloat16"], 0.65)
