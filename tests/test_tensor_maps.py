"""Tensor maps name the elements that an array's strides name, and are refused where they cannot.

The copies are done by hand here, from what the driver would be told; no GPU is needed.
"""

import numpy as np
import pytest
from cases import fake_cupy

from cukv import _latent_maps
from cukv._pages import PagePair
from cukv._ragged_pages import _RaggedPair
from cukv._rows import Pages
from cukv._specialisations import latent_tiles, stream_tiles
from cukv._tensor_maps import Copies, box_of, copies_of, piece_tokens

# Tokens that heads of so many elements of a dtype take at a time.
STEPS = {
    (64, "float16"): 128,
    (128, "float16"): 128,
    (256, "float16"): 64,
    (128, "float8_e4m3fn"): 128,
}


def pair(k, v=None, kind=PagePair):
    """See arrays [num_pages, page_size, num_heads, head_dim] as a cache, or as ragged rows."""
    arrays = (k, k if v is None else v)
    return kind(*(Pages("test", n, a, None) for n, a in zip("kv", arrays, strict=True)))


def copies(*arrays, kind=PagePair, aligned=True):
    """Tell how such keys and values are copied."""
    return copies_of(pair(*arrays, kind=kind), aligned)


def copied(array, box, start):
    """Copy a box by hand: bytes from the array's first element, -1 outside, innermost last."""
    steps = [array.itemsize, *box.strides]
    grids = np.meshgrid(*[np.arange(n) for n in box.box], indexing="ij")
    at = [grid + first for grid, first in zip(grids, start, strict=True)]
    inside = np.all([x < size for x, size in zip(at, box.sizes, strict=True)], axis=0)
    offsets = sum(x * step for x, step in zip(at, steps, strict=True))
    return np.where(inside, offsets, -1).T


def layouts(page_size, num_heads, dim, dtype):
    """Give arrays [num_pages, page_size, num_heads, dim] of each layout and form, by name."""
    pages = 5

    def make(*shape):
        return fake_cupy((pages, *shape), dtype)

    yield "NHD, one array", make(2, page_size, num_heads, dim)[:, 1]
    yield "HND, one array", make(2, num_heads, page_size, dim)[:, 0].swapaxes(1, 2)
    yield "HND pair", make(num_heads, page_size, dim).swapaxes(1, 2)
    padded = make(page_size + 3, num_heads + 1, dim + 128)
    yield "padded", padded[:, :page_size, :num_heads, :dim]
    yield "every other head", make(page_size, 2 * num_heads, dim)[:, :, ::2]


# Pages shorter than a step, as long, longer; that do not divide it; one head and several.
@pytest.mark.parametrize("page_size", [8, 16, 24, 48, 128, 256])
@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize(("heads", "step"), STEPS.items())
def test_a_copy_brings_a_piece_of_a_page_and_of_one_head(page_size, num_heads, heads, step):
    dim, dtype = heads
    piece = piece_tokens(page_size, step)
    assert page_size % piece == step % piece == piece % 8 == 0
    for name, array in layouts(page_size, num_heads, dim, dtype):
        assert copies(array) == Copies(paged=True, mapped=True), name
        page, token, head, _ = array.strides
        box = box_of(array, step, dim)
        head_spans = head // 128 if num_heads > 1 else 0
        for h, first in ((0, 0), (num_heads - 1, page_size - piece)):
            got = copied(array, box, (0, 0, h * head_spans, first // 8, 3))
            tokens, spans = np.arange(piece) + first, np.arange(dim)
            want = 3 * page + tokens[:, None] * token + h * head + spans * array.itemsize
            # a copy has 8 rows of each span together
            want = want.reshape(piece // 8, 8, -1, 128 // array.itemsize).swapaxes(1, 2)
            np.testing.assert_array_equal(got[0], want, err_msg=name)
        assert (copied(array, box, (0, 0, 0, 0, array.shape[0])) == -1).all(), "a page past the end"


@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize(("heads", "step"), STEPS.items())
def test_a_copy_of_ragged_rows_stops_at_their_end(heads, step, hnd):
    dim, dtype = heads
    array = fake_cupy((3, 300, dim) if hnd else (300, 3, dim), dtype)
    rows = (array.swapaxes(0, 1) if hnd else array)[:, None]
    assert copies(rows, kind=_RaggedPair) == Copies(paged=False, mapped=True)
    box = box_of(rows, step, dim)
    row, _, head, _ = rows.strides
    got = copied(rows, box, (0, 250, 2 * head // 128))
    want = (250 + np.arange(step))[:, None] * row + 2 * head + np.arange(dim) * array.itemsize
    want[50:] = -1
    want = want.reshape(step, -1, 128 // array.itemsize).swapaxes(0, 1)
    np.testing.assert_array_equal(got, want)


def test_values_of_fewer_elements_are_copied_within_their_array():
    array = fake_cupy((40, 16, 2, 64))
    box = box_of(array, 128, 128)  # for a tile of 128
    got = copied(array, box, (0, 0, 1, 0, 39))
    assert got.max() < array.size * array.itemsize
    assert (got[:, :, 1] == -1).all(), "what follows the last head"


def test_what_a_map_cannot_read_is_copied_token_by_token_if_it_is_aligned():
    good = fake_cupy((5, 16, 3, 128))
    assert copies(good) == Copies(paged=True, mapped=True)
    shifted = fake_cupy((5 * 16 * 3 * 128 + 4,))[4:].reshape(good.shape)
    for bad in (
        fake_cupy((5, 12, 3, 128)),  # a page that ends within a swizzle pattern
        fake_cupy((5, 1, 3, 128)),
        fake_cupy((5, 16, 3, 96)),
        fake_cupy((5, 16, 3, 136))[..., :128],  # heads that begin within a span
        fake_cupy((5, 16, 3, 128), "float8_e5m2"),
        fake_cupy((5, 16, 3, 64), "float8_e4m3fn"),  # half a span
        fake_cupy((0, 16, 3, 128)),
        shifted,
        good[::-1],
        good[:, :, ::-1],
    ):
        pairs = [(bad,), (good, bad)] if bad.shape[1] == good.shape[1] else [(bad,)]
        for arrays in pairs:
            assert copies(*arrays) == Copies(paged=True, mapped=False)
            assert copies(*arrays, aligned=False) is None


# From one token to another a kernel counts units of 16 bytes in 31 bits.
@pytest.mark.parametrize(("num_pages", "reached"), [(1 << 22, True), ((1 << 22) + 1, False)])
def test_tokens_may_lie_as_far_apart_as_the_kernel_counts(num_pages, reached):
    pages = fake_cupy((num_pages, 1, 32, 128))  # of 8 KB
    for array in (pages, pages[::-1]):
        assert copies(array) == (Copies(paged=True, mapped=False) if reached else None)


# Latent rows


def latent_parts(page_size, dtypes):
    """Give arrays [num_pages, page_size, 1, dim] of ckv and kpe, apart and, of one dtype, beside.

    The number of pages is 5.
    """
    pairs = [[fake_cupy((5, page_size, n), d) for n, d in zip((512, 64), dtypes, strict=True)]]
    if len(set(dtypes)) == 1:
        rows = fake_cupy((5, page_size + 3, 576), dtypes[0])[:, :page_size]
        pairs.append([rows[..., :512], rows[..., 512:]])
    return [[part[:, :, None] for part in pair] for pair in pairs]


LATENT_DTYPES = [
    ("bfloat16", "bfloat16"),
    ("float8_e4m3fn", "float16"),
    ("float8_e4m3fn", "float8_e4m3fn"),
]


# Pages shorter than a step, as long, longer; that do not divide it; kpe of half a span.
@pytest.mark.parametrize("page_size", [8, 24, 64, 80, 256])
@pytest.mark.parametrize("dtypes", LATENT_DTYPES, ids=str)
def test_a_copy_of_latent_rows_brings_a_piece_of_a_page_and_of_one_span(
    page_size, dtypes, monkeypatch
):
    made = []
    monkeypatch.setattr(
        _latent_maps, "encode", lambda pointer, dtype, *box: made.append((pointer, *box))
    )
    for parts in latent_parts(page_size, dtypes):
        assert _latent_maps.can_be_mapped(pair(*parts))
        made.clear()
        piece = 1 << _latent_maps.latent_maps(pair(*parts)).piece_bits
        assert page_size % piece == 64 % piece == piece % 8 == 0
        for array, (pointer, box, _) in zip(parts, made, strict=True):
            assert pointer == array.data.ptr
            page, token, _, _ = array.strides
            for span in range(array.shape[3] * array.itemsize // 128):
                got = copied(array, box, (0, page_size - piece, span, 3))
                tokens, columns = np.arange(piece) + page_size - piece, np.arange(box.box[0])
                want = tokens[:, None] * token + 128 * span + columns * array.itemsize
                np.testing.assert_array_equal(got[0, 0], 3 * page + want)
            assert (copied(array, box, (0, 0, 0, 5)) == -1).all(), "a page past the end"
    assert len(made) == 2


def test_what_a_rotary_part_lacks_of_a_span_is_nothing():
    (_, kpe), (_, beside) = latent_parts(16, ("float8_e4m3fn",) * 2)
    for array in (kpe, beside):
        got = copied(array, _latent_maps.box_of(array, 16), (0, 0, 0, 1))[0, 0]
        assert got.shape == (16, 128)
        assert (got[:, :64] >= 0).all() and (got[:, 64:] == -1).all()


@pytest.mark.parametrize("dtypes", LATENT_DTYPES, ids=str)
def test_the_l2_brings_no_more_of_rows_of_e4m3_than_a_copy_reads(dtypes, monkeypatch):
    promotions = []
    monkeypatch.setattr(_latent_maps, "encode", lambda *args: promotions.append(args[3]))
    _latent_maps.latent_maps(pair(*latent_parts(16, dtypes)[0]))
    assert promotions == [2 if dtypes[0] == "float8_e4m3fn" else 3] * 2  # of 128 or 256 bytes


@pytest.mark.parametrize(
    "change",
    [
        lambda x: fake_cupy((5, 20, *x.shape[2:]), x.dtype),  # pages of 20 tokens
        lambda x: x[::-1],
        lambda x: x[:, ::-1],
        lambda x: fake_cupy((5, 16, 1, x.shape[3] + 1), x.dtype)[..., 1:],
        lambda x: fake_cupy((0, *x.shape[1:]), x.dtype),
    ],
)
def test_latent_rows_that_no_map_can_read_are_known(change):
    for parts in latent_parts(16, ("bfloat16",) * 2):
        assert _latent_maps.can_be_mapped(pair(*parts))
        assert not _latent_maps.can_be_mapped(pair(*map(change, parts)))


def test_kernels_over_latent_rows_take_steps_of_as_many_keys_as_maps_are_made_for():
    tiles = [*stream_tiles(), *(t for t in latent_tiles() if t.kernel == "mla_decode_sm90")]
    assert {tile.tokens for tile in tiles} == {_latent_maps._STEP_TOKENS}
