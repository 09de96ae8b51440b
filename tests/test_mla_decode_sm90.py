"""Hopper's attention of many rows over fp8 latents gives what the definition gives by few keys too.

Calls of few keys are for kernels of few rows, which are faster by them; here that of many is chosen
for all that it has tiles for. That of 16 bits serves the calls of test_mla_decode.py.
"""

import cupy as cp
import pytest
from cases import MLACase
from test_mla_decode import (
    E4M3,
    LENS,
    attend_beyond_pages,
    attend_to_nan,
    attend_with_queries_of,
    attend_with_scales,
    check,
    fp8_latents,
)

from cukv import _latent_attention
from cukv._geometry import MlaDecodeSm90Tile
from cukv._kernels import arch_of
from cukv._latent_attention import LatentAttention
from cukv._specialisations import runs_on

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    """Have mla_decode_sm90 serve every call of fp8 that it can: some of each test."""
    if not runs_on("mla_decode_sm90", arch_of(0)):
        pytest.skip("needs sm_90")
    chosen = []
    choose = LatentAttention._choose_tile

    def keep(self, call):
        chosen.append(choose(self, call))
        return chosen[-1]

    monkeypatch.setattr(LatentAttention, "_choose_tile", keep)
    monkeypatch.setitem(_latent_attention._FP8_STEPS, "mla_decode_sm90", (0.0, 0))
    _latent_attention._kinds_of.cache_clear()
    yield
    _latent_attention._kinds_of.cache_clear()
    assert any(isinstance(tile, MlaDecodeSm90Tile) for tile in chosen)


# Tiles of 64 rows that are full and not, pages that tensor maps take and others, and scales that
# are no powers of two.
@pytest.mark.parametrize("page_size", [1, 8, 17, 48, 256])
@pytest.mark.parametrize(
    ("heads", "kpe_dtype"), [(17, "float16"), (64, E4M3), (96, "bfloat16"), (128, E4M3)]
)
def test_latents_lie_in_pages_of_any_size(heads, kpe_dtype, page_size, rng):
    case = MLACase(LENS, page_size, dtype=E4M3, form="pair")
    arrays = fp8_latents(case, kpe_dtype, rng)
    q_dtype = "bfloat16" if kpe_dtype == E4M3 else kpe_dtype
    scales = {"ckv_scale": 0.37, "kpe_scale": 1.7 if kpe_dtype == E4M3 else 1.0}
    check(cp, case, rng, heads=heads, arrays=arrays, q_dtype=q_dtype, **scales)


# One to 17 rows, none, more rows than keys; tiles that end inside a row of heads.
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "page_size"), [(16, 64), (40, 17), (128, 16)])
def test_rows_of_a_request_see_up_to_their_own_position(heads, page_size, causal, rng):
    case = MLACase((65, 5, 33, 97, 0, 514, 3, 130), page_size, dtype=E4M3)
    qo_lens = (1, 9, 3, 17, 2, 4, 0, 2)
    check(cp, case, rng, heads=heads, qo_lens=qo_lens, q_dtype="bfloat16", causal=causal)


# Two requests in parts of one another, one of a step for each part, and as many as parts and more.
@pytest.mark.parametrize("lens", [(20000, 3), (4096,), (130,) * 66, (130,) * 67], ids=len)
def test_requests_are_dealt_to_parts(lens, rng):
    check(cp, MLACase(lens, 64, dtype=E4M3), rng, heads=128, q_dtype="bfloat16")


@pytest.mark.parametrize(
    ("kpe_dtype", "q_dtype"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), (E4M3, "bfloat16"), (E4M3, E4M3)],
)
def test_latents_are_read_as_their_scales_say(kpe_dtype, q_dtype, rng):
    attend_with_scales(cp, kpe_dtype, q_dtype, 128, rng)


@pytest.mark.parametrize("size", [1e-30, 1e6])
def test_queries_may_be_of_any_size(size, rng):
    attend_with_queries_of(cp, size, 128, rng)


@pytest.mark.parametrize("kpe_dtype", ["bfloat16", E4M3])
def test_nan_is_seen_where_it_is_a_key(kpe_dtype, rng):
    attend_to_nan(cp, kpe_dtype, 128, rng)


def test_pages_that_are_not_there_have_no_keys(rng):
    attend_beyond_pages(E4M3, rng)
