"""Attention over latent rows: 1152 bytes each in bfloat16, 640 with ckv in fp8."""

import numpy as np
import pytest
from inputs import HOME, Shape, growth, shapes
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


def mixed_lens():
    """Give lengths of 128 requests whose mean is near 4096."""
    return [int(n) for n in np.random.default_rng(0).integers(400, 7792, 128)]


SIZES = ((128, 4096, 128), (128, 4096, 16), (16, 4096, 16), (1, 65536, 128), (1, 4096, 128))


# Also rows of multi-token prediction.
@shapes(
    *(latent(*size) for size in SIZES),
    latent(64, 4096, 16, qo_len=2),
    latent(64, 4096, 128, qo_len=2),
    name=sizes,
)
def test_mla_decode(measure, shape):
    measure(mla(shape), shape)


# Batches beside 128, whose requests are whole parts of an H200, and lengths of all kinds.
@pytest.mark.parametrize("heads", [128, 16])
@pytest.mark.parametrize("batch", [66, 100, 127, 130, "mixed"])
def test_mla_decode_keeps_its_rate_beside_whole_parts(measure, batch, heads):
    uniform = latent(128, 4096, heads)
    lens = mixed_lens() if batch == "mixed" else [4096] * batch
    if HOME.xp is np:  # a rehearsal
        uniform, lens = uniform.small(), [min(n, 90) for n in lens[:4]]
    took = measure(mla(uniform, kv_lens=lens), uniform=mla(uniform))
    share = sum(lens) / (uniform.batch_size * uniform.kv_len)
    measure.ask(1.17, "of the time of a key of 128 x 4096", took["this"] / took["uniform"] / share)


@growth(
    latent(64, 4096, 64),
    batch_size=(1, 4, 16, 64, 256),
    kv_len=(256, 1024, 16384),
    num_qo_heads=(1, 16, 32, 128),
)
def test_mla_decode_grows(measure, shape):
    measure(mla(shape), shape)


@shapes(*(latent(*size, dtype=E4M3) for size in SIZES), name=sizes)
def test_mla_decode_of_fp8(measure, shape):
    measure(mla(shape, kpe_dtype="bfloat16"), shape)


def beside_bfloat16(measure, shape):
    """Time fp8 latents beside those of bfloat16: the ratio."""
    bfloat16 = latent(shape.batch_size, shape.kv_len, shape.num_qo_heads)
    took = measure(mla(shape, kpe_dtype="bfloat16"), shape, bfloat16=mla(bfloat16))
    return took["this"] / took["bfloat16"]


@shapes(latent(128, 4096, 16, dtype=E4M3), name=sizes)
def test_mla_decode_of_fp8_beside_bfloat16(measure, shape):
    measure.ask(0.65, "of bfloat16", beside_bfloat16(measure, shape))


# Bound by products, which are those of 16 bits.
@shapes(latent(128, 4096, 128, dtype=E4M3), name=sizes)
def test_mla_decode_of_fp8_and_many_heads_beside_bfloat16(measure, shape):
    measure.ask(1.35, "of bfloat16", beside_bfloat16(measure, shape))
