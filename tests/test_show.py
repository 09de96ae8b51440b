"""Pictures of layouts: what they draw and say, that they are small, and what they read."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import cupy as cp
import numpy as np
import pytest
from cases import NOUNS, fake_array, fake_cupy, host_array

import cukv
from cukv._picture import DARK, LIGHT, WIDTH, Box, Picture, Words

SVG = "{http://www.w3.org/2000/svg}"
LARGEST = 64 * 1024  # bytes of any picture

# Four requests of 45, 8, 25 and 22 tokens.
PAGES = [7, 2, 9, 4, 0, 5, 11, 3]
OWNED = {
    7: "request 0, tokens 0 to 15",
    2: "request 0, tokens 16 to 31",
    9: "request 0, tokens 32 to 44",
    4: "request 1, tokens 0 to 7",
    0: "request 2, tokens 0 to 15",
    5: "request 2, tokens 16 to 24",
    11: "request 3, tokens 0 to 15",
    3: "request 3, tokens 16 to 21",
}
EXAMPLE = (
    "Request 0 has 45 tokens on pages 7, 2, 9; the last holds 13 of 16. "
    "Request 1 has 8 tokens on page 4; the last holds 8 of 16. "
    "Request 2 has 25 tokens on pages 0, 5; the last holds 9 of 16. "
    "Request 3 has 22 tokens on pages 11, 3; the last holds 6 of 16."
)


@pytest.fixture
def xp():
    """Home of the arrays: pictures read GPU arrays by copying them to NumPy first."""
    return np


def example_table(xp=np):
    return cukv.PageTable.from_seq_lens([45, 8, 25, 22], 16, pages=PAGES, xp=xp)


def boxes(picture, about=None):
    """Give the boxes whose words for a resting pointer match a pattern; all of them without."""
    found = [shape for shape in picture.shapes if isinstance(shape, Box)]
    return found if about is None else [box for box in found if re.fullmatch(about, box.about)]


def words(picture):
    return [shape.text for shape in picture.shapes if isinstance(shape, Words)]


def fill_under(picture, box):
    """Give the filled part of a box that is not full."""
    parts = [b for b in boxes(picture) if not b.outline and (b.x, b.y) == (box.x, box.y)]
    assert len(parts) == 1
    return parts[0]


# Page tables and caches


def test_a_table_says_and_draws_who_owns_which_page(xp):
    shown = example_table(xp).show()
    assert shown.about == EXAMPLE
    assert repr(shown) == f"PageTable: 4 requests, pages of 16 tokens\n{EXAMPLE}"
    for page, owner in OWNED.items():
        assert len(boxes(shown, f"page {page}: {owner}")) == 2  # of its request, in the cache
    nobody = boxes(shown, "page .*: nobody's")
    assert [box.about for box in nobody] == [f"page {p}: nobody's" for p in (1, 6, 8, 10)]
    assert all(box.fill is None for box in nobody)
    for line in ("indptr, in pages: 0, 3, 4, 6, 8", "last_page_len, in tokens: 13, 8, 9, 6"):
        assert line in words(shown)


def test_a_requests_pages_stand_in_the_order_of_its_tokens():
    of_requests = [
        box for box in boxes(example_table().show(), "page .*: request .*") if box.height == 32
    ]
    assert [int(re.match(r"page (\d+)", box.about)[1]) for box in of_requests] == PAGES
    assert [box.y for box in of_requests] == sorted(box.y for box in of_requests)


def test_pages_stand_in_the_cache_in_the_order_of_their_ids():
    in_cache = [box for box in boxes(example_table().show(), "page .*") if box.height == 44]
    assert [int(re.match(r"page (\d+)", box.about)[1]) for box in in_cache] == list(range(12))
    assert [(box.y, box.x) for box in in_cache] == sorted((box.y, box.x) for box in in_cache)


def test_the_last_page_is_as_full_as_it_is():
    shown = example_table().show()
    for page, tokens in ((9, 13), (4, 8), (5, 9), (3, 6)):
        for box in boxes(shown, f"page {page}: .*"):
            assert box.fill is None
            part = fill_under(shown, box)
            assert part.width / box.width == tokens / 16
            assert part.fill == OWNED[page][len("request ")]
    assert all(box.fill == "0" for box in boxes(shown, "page [72]: .*"))


def test_a_page_of_several_requests_is_no_ones_own():
    table = cukv.PageTable([0, 3, 5, 8, 8], [7, 8, 0, 9, 1, 7, 8, 2], [4, 1, 2, 9], page_size=16)
    shown = table.show()
    shared = boxes(shown, "page .*: shared by r0 r2")
    assert [(box.about[:6], box.fill) for box in shared] == [
        ("page 7", "shared"),
        ("page 8", "shared"),
    ]
    assert shown.about.endswith("Request 3 has no tokens.")


def test_lengths_beyond_the_index_dtype_are_said():
    shown = cukv.PageTable([0, 3], [0, 1, 2], [5], page_size=2**30).show()
    assert shown.about.startswith("Request 0 has 2,147,483,653 tokens on pages 0, 1, 2")


def test_a_cache_is_drawn_with_the_owners_that_a_table_names(xp):
    table = example_table(xp)
    caches = [
        cukv.PagedKVCache.empty(14, 16, 2, 64, "float16", xp=xp),
        cukv.MLAPagedCache.empty(14, 16, "float16", xp=xp),
    ]
    for cache in caches:
        shown = cache.show(table)
        assert shown.about == EXAMPLE
        for page in range(14):
            assert len(boxes(shown, f"page {page}: {OWNED.get(page, 'nobody.s')}")) == 1
        alone = cache.show()
        assert [box.about for box in boxes(alone, "page .*")] == [f"page {p}" for p in range(14)]
        assert alone._repr_html_() == cache._repr_html_()


def test_a_table_that_does_not_fit_a_cache_is_refused_or_explained():
    cache = cukv.PagedKVCache.empty(8, 16, 2, 64, "float16", xp=np)
    with pytest.raises(ValueError, match=r"^PagedKVCache.show: .* 8, the cache's 16$"):
        cache.show(cukv.PageTable.from_seq_lens([3], 8, xp=np))
    with pytest.raises(TypeError, match=r"^PagedKVCache.show: table must be a PageTable"):
        cache.show([0, 1])
    assert "page 2 of request 0 must be 0 or more and below max_num_pages=8, got 9" in repr(
        cache.show(example_table())
    )


# One array and pairs, both layouts, slices of a fused projection, reversed pages.
STORED = {
    "NHD": lambda: cukv.PagedKVCache(np.zeros((3, 2, 5, 4, 8), np.float16)),
    "HND": lambda: cukv.PagedKVCache(np.zeros((3, 2, 4, 5, 8), np.float16), "HND"),
    "pair": lambda: cukv.PagedKVCache((np.zeros((3, 5, 4, 8)), np.zeros((3, 5, 4, 16)))),
    "fused": lambda: cukv.PagedKVCache(tuple(np.split(np.zeros((3, 5, 12, 8)), 3, axis=2)[1:])),
    "reversed": lambda: cukv.PagedKVCache(np.zeros((3, 2, 5, 4, 8), np.float16)[::-1, :, ::-1]),
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_offsets_are_where_tokens_and_heads_lie(name):
    cache = STORED[name]()
    found = boxes(cache.show(), r"entry .*")
    assert len(found) == 2 * 4 * 4  # k and v, entries, heads

    def address(array):
        return array.__array_interface__["data"][0]

    for n, array in enumerate((cache.k, cache.v)):
        nhd = array if cache.layout == "NHD" else array.swapaxes(1, 2)
        start = address(array[1] if isinstance(cache.data, tuple) else cache.k[1])
        for box in found[16 * n : 16 * (n + 1)]:
            entry, head, offset = map(int, re.findall(r"[+-]?\d+", box.about))
            assert address(nhd[1, entry, head]) - start == offset * array.itemsize


def test_latent_rows_are_drawn_with_both_parts():
    one = cukv.MLAPagedCache.empty(3, 16, "float16", xp=np).show()
    assert "entry 1, kpe (64): +1088" in [box.about for box in boxes(one)]
    pair = cukv.MLAPagedCache.empty(3, 16, "float8_e4m3fn", kpe_dtype="bfloat16", xp=np).show()
    abouts = [box.about for box in boxes(pair)]
    assert "entry 1, ckv (512): +512" in abouts
    assert "entry 1, kpe (64): +64" in abouts
    assert ", rows of 512 + 64, float8_e4m3fn + bfloat16, " in pair.title


# Ragged rows


def test_a_ragged_tensor_is_drawn_as_its_requests_side_by_side(xp):
    ragged = cukv.RaggedTensor(xp.zeros((100, 2, 64), xp.float16), [0, 45, 53, 78, 100])
    shown = ragged.show()
    assert shown.about == (
        "Request 0 is rows 0 to 44. Request 1 is rows 45 to 52. "
        "Request 2 is rows 53 to 77. Request 3 is rows 78 to 99."
    )
    strip = boxes(shown, "request .*")
    assert [box.fill for box in strip] == ["0", "1", "2", "3"]
    assert strip[0].x + strip[0].width == pytest.approx(strip[1].x)
    assert strip[-1].x + strip[-1].width == pytest.approx(WIDTH - 8)
    by_width = sorted(range(4), key=lambda b: strip[b].width)
    assert by_width == [1, 3, 2, 0]
    assert {"0", "45", "53", "78", "100"} <= set(words(shown))
    assert "row 1, head 1: +192" in [box.about for box in boxes(shown)]


def test_a_head_first_tensor_has_a_strip_for_each_head():
    shown = cukv.RaggedTensor(np.zeros((3, 12, 8)), [0, 4, 4, 10], "HND").show()
    assert len({box.y for box in boxes(shown, "request 0: rows 0 to 3")}) == 3
    empty = boxes(shown, "request 1: no rows")
    assert len(empty) == 3
    assert {box.fill for box in empty} == {None}
    assert len(boxes(shown, "2 padding not drawn")) == 3
    assert shown.about.endswith("2 rows of padding.")
    assert "row 1, head 1: +104" in [box.about for box in boxes(shown)]


# Masks


def cells(shown, left):
    """Give the cells of the masks, or of the flat elements on the right: [(y, x, fill)]."""
    half = WIDTH / 2 + 20
    return [(b.y, b.x, b.fill) for b in boxes(shown) if (b.x < half) == left and b.height == 12]


def test_masks_are_drawn_as_matrices_and_as_they_lie_in_data(xp, rng):
    masks = [rng.random(shape) < 0.5 for shape in ((3, 5), (2, 9), (1, 8))]
    ragged = cukv.RaggedMask.from_list([xp.asarray(mask) for mask in masks])
    flat = np.concatenate([mask.reshape(-1) for mask in masks])
    for noun in (ragged, ragged.pack()):
        shown = noun.show()
        for left in (True, False):
            drawn = cells(shown, left)
            assert drawn == sorted(drawn, key=lambda cell: cell[0])  # by lines, each from the left
            bits = [fill != "surface" for _, _, fill in drawn if fill is not None]
            assert bits == flat.tolist()
    assert shown.about == (
        "Request 0: a [3, 5] mask in bytes 0 to 1. Request 1: a [2, 9] mask in bytes 2 to 4. "
        "Request 2: a [1, 8] mask in byte 5."
    )
    unused = [fill for _, _, fill in cells(shown, left=False) if fill is None]
    assert len(unused) == 1 + 6
    packed = np.concatenate([np.packbits(m.reshape(-1), bitorder="little") for m in masks])
    said = [text for text in words(shown) if text.startswith("0x")]
    assert said == [f"0x{byte:02x} = {byte}" for byte in packed]
    assert "indptr, in bytes: 0, 2, 5, 6" in words(shown)
    assert "indptr, in elements: 0, 15, 33, 41" in words(ragged.show())


def test_the_corner_of_a_large_mask_is_drawn_from_its_own_elements():
    mask = np.zeros((40, 100), bool)
    mask[3, 5] = mask[0, 63] = True
    for noun in (cukv.RaggedMask.from_list([mask]), cukv.RaggedMask.from_list([mask]).pack()):
        shown = noun.show()
        grid = [fill != "surface" for _, _, fill in cells(shown, left=True)]
        assert np.flatnonzero(grid).tolist() == [3 * 24 + 5]
        flat = [fill != "surface" for _, _, fill in cells(shown, left=False)]
        assert np.flatnonzero(flat).tolist() == [63]
        assert "and 28 more rows, 76 more keys" in words(shown)


def test_bytes_are_shown_as_they_are_even_where_bits_are_unused():
    shown = cukv.PackedMask(np.array([0b11100101], np.uint8), [0, 1], [0, 4]).show()
    assert "0xe5 = 229" in words(shown)
    assert [fill for _, _, fill in cells(shown, left=False)][:4] == ["0", "surface", "0", "surface"]


def test_a_request_without_mask_elements_is_named():
    shown = cukv.RaggedMask(np.zeros(4, bool), [0, 0, 2], [0, 3, 5]).show()
    assert shown.about.startswith("Request 0: a [0, 3] mask in no elements. Request 1: a [2, 2]")


# Cascades

# Eight requests below three prefixes below one.
THREE_LEVELS = (
    ((0, 8), [0, 1], [16]),
    ((0, 3, 6, 8), [2, 3, 4, 5, 6], [16, 16, 16]),
    (tuple(range(9)), [*range(7, 16)], [3, 5, 16, 1, 9, 2, 7, 8]),
)


def three_levels(row_order=None):
    pages = ([0, 2], [0, 2, 3, 5], [0, 1, 2, 3, 4, 6, 7, 8, 9])
    return cukv.CascadeLevels(
        tuple(np.array(rows, np.int32) for rows, _, _ in THREE_LEVELS),
        tuple(
            cukv.PageTable(np.array(indptr), np.array(indices), np.array(last), 16)
            for indptr, (_, indices, last) in zip(pages, THREE_LEVELS, strict=True)
        ),
        row_order,
    )


def test_levels_of_a_cascade_are_nested_ranges(xp):
    levels = three_levels() if xp is np else three_levels().to_device()
    shown = levels.show()
    drawn = [boxes(shown, f"level {level}, request .*") for level in range(3)]
    assert [len(level) for level in drawn] == [1, 3, 8]
    leaves = drawn[2]
    for level, (rows, _, _) in zip(drawn, THREE_LEVELS, strict=True):
        for box, start, stop in zip(level, rows[:-1], rows[1:], strict=True):
            below = leaves[start:stop]
            assert box.x == pytest.approx(below[0].x)
            assert box.x + box.width == pytest.approx(below[-1].x + below[-1].width)
    assert drawn[1][0].about == "level 1, request 0: pages 2, 3, 32 tokens, rows 0 to 2"
    assert drawn[2][4].about == "level 2, request 4: pages 11, 12, 25 tokens, row 4"
    assert {box.fill for level in drawn[:2] for box in level} == {"shared"}
    assert [box.fill for box in leaves] == [str(b) for b in range(8)]
    assert shown.about.startswith("Level 0 has 1 request with 32 tokens; their rows start at 0.")


def test_rows_of_a_cascade_in_another_order_are_said():
    shown = three_levels(np.array([0, 2, 4, 6, 1, 3, 5, 7])).show()
    assert shown.about.endswith("In q these are rows 0, 2, 4, 6, 1, 3, 5, 7.")


def test_of_many_levels_the_first_and_the_leaves_are_drawn():
    def table(b):
        return cukv.PageTable(np.arange(b + 1), np.arange(b), np.full(b, 1), 16)

    rows = [np.array([0, 2])] * 19 + [np.array([0, 1, 2])]
    shown = cukv.CascadeLevels(tuple(rows), (*[table(1)] * 19, table(2))).show()
    assert boxes(shown, "level 6, .*")
    assert not boxes(shown, "level 7, .*")
    assert len(boxes(shown, "level 19, .*")) == 2
    assert "and 12 more levels" in words(shown)


def test_leaves_without_pages_are_empty():
    tables = (
        cukv.PageTable([0, 1], [7], [16], 16),
        cukv.PageTable([0, 0, 1], [8], [9, 2], 16),
    )
    shown = cukv.CascadeLevels((np.array([0, 5]), np.array([0, 1, 5])), tables).show()
    (leaf,) = boxes(shown, "level 1, request 0: pages none, 0 tokens, row 0")
    assert leaf.fill is None
    assert "pages none" in words(shown)


def test_requests_without_rows_take_no_place():
    table = cukv.PageTable(np.arange(5), np.arange(4), np.full(4, 2), 16)
    shown = cukv.CascadeLevels((np.array([0, 0, 3, 3, 4]),), (table,)).show()
    assert [box.about[:18] for box in boxes(shown, "level .*")] == [
        "level 0, request 1", "level 0, request 3"]  # fmt: skip


# Every noun

NOTHING = {
    "RaggedTensor": lambda: cukv.RaggedTensor(np.zeros((0, 2, 8)), [0]),
    "RaggedMask": lambda: cukv.RaggedMask(np.zeros(0, bool), [0], [0]),
    "PackedMask": lambda: cukv.PackedMask(np.zeros(0, np.uint8), [0], [0]),
    "PageTable": lambda: cukv.PageTable.from_seq_lens([], 16, xp=np),
    "PagedKVCache": lambda: cukv.PagedKVCache.empty(0, 16, 2, 64, "float16", xp=np),
    "no heads": lambda: cukv.PagedKVCache.empty(3, 16, 0, 64, "float16", xp=np),
    "MLAPagedCache": lambda: cukv.MLAPagedCache.empty(0, 16, "float16", xp=np),
    "CascadeLevels": lambda: cukv.CascadeLevels(
        (np.array([0]),), (cukv.PageTable.from_seq_lens([], 16, xp=np),)
    ),
    "no rows": lambda: cukv.CascadeLevels(
        (np.array([0, 0]),), (cukv.PageTable.from_seq_lens([3], 16, xp=np),)
    ),
}
DRAWN = {
    **{f"zeros, {name}": (lambda make=make: make(host_array)) for name, make in NOUNS.items()},
    **{f"empty, {name}": make for name, make in NOTHING.items()},
    "table": example_table,
    "levels": three_levels,
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_one_valid_svg_with_a_name_and_a_description(name):
    noun = DRAWN[name]()
    for html in (noun._repr_html_(), noun.show()._repr_html_()):
        root = ElementTree.fromstring(html)
        assert root.tag == SVG + "svg"
        assert root.get("role") == "img"
        named = [root.find(f"*[@id='{i}']") for i in root.get("aria-labelledby").split()]
        assert [element.tag for element in named] == [SVG + "title", SVG + "desc"]
        assert named[0].text.startswith(type(noun).__name__)
        width, height = (float(root.get(side)) for side in ("width", "height"))
        assert root.get("viewBox") == f"0 0 {width:.0f} {height:.0f}"
        for element in root.iter(SVG + "rect"):
            assert float(element.get("x", 0)) + float(element.get("width")) <= width
            assert float(element.get("y", 0)) + float(element.get("height")) <= height


@pytest.mark.parametrize("name", DRAWN)
def test_words_stay_inside_the_picture(name):
    shown = DRAWN[name]().show()
    for shape in shown.shapes:
        if isinstance(shape, Words):
            length = len(shape.text) * 0.602 * shape.size  # of the monospaced fonts in use
            left = shape.x - {"start": 0, "middle": length / 2, "end": length}[shape.anchor]
            assert left >= 0, shape.text
            assert left + length <= WIDTH, shape.text
            assert shape.size / 2 <= shape.y <= shown.height - shape.size / 4, shape.text


def test_a_picture_needs_nothing_from_outside():
    html = example_table()._repr_html_().replace('xmlns="http://www.w3.org/2000/svg"', "")
    for way_out in ("http", "url(", "href", "@import", "<script", "<image", "src="):
        assert way_out not in html


def test_words_are_escaped():
    shown = Picture('<b onload="x">&')
    shown.say("1 < 2 & 3")
    shown.box(0, 0, 200, 40, "0", ("<i>",), "</title><script>")
    root = ElementTree.fromstring(shown._repr_html_())
    texts = [element.text for element in root.iter() if element.text]
    assert {'<b onload="x">&', "1 < 2 & 3", "<i>", "</title><script>"} <= set(texts)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        "svg", "title", "desc", "style", "rect", "text"}  # fmt: skip


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return np.dot(linear, [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_words_can_be_read_on_every_colour(palette):
    def contrast(a, b):
        dark, light = sorted((luminance(palette[a]), luminance(palette[b])))
        return (light + 0.05) / (dark + 0.05)

    fills = [name for name in palette if name not in ("ink", "muted", "line")]
    assert all(contrast("ink", fill) >= 4.5 for fill in fills)  # WCAG 2.2, level AA
    assert contrast("muted", "surface") >= 4.5
    assert contrast("line", "surface") >= 3


def test_both_sets_of_colours_are_there_and_the_system_chooses():
    assert LIGHT.keys() == DARK.keys()
    html = example_table()._repr_html_()
    light, dark = html.split("@media (prefers-color-scheme:dark){", 1)
    assert f"--cukv-surface:{LIGHT['surface']}" in light
    assert f"--cukv-surface:{DARK['surface']}" in dark.split("}}")[0]


# Contents that are not valid, by what is said of them.
INVALID = {
    "indptr falls at request 1": lambda: cukv.PageTable([0, 3, 2], [1, 2, 3], [4, 4], 16),
    "last_page_len of request 0 must be 1 to": lambda: cukv.PageTable([0, 1], [1], [17], 16),
    "indptr ends at 9": lambda: cukv.RaggedTensor(np.zeros((5, 2, 8)), [0, 9]),
    "data must be [sum(qo_len * kv_len) = 12]": lambda: cukv.RaggedMask(
        np.zeros(5, bool), [0, 3], [0, 4]
    ),
    "bytes of data": lambda: cukv.PackedMask(np.zeros(1, np.uint8), [0, 3], [0, 4]),
    "all levels must have the same rows": lambda: cukv.CascadeLevels(
        (np.array([0, 2]), np.array([0, 3])),
        (cukv.PageTable([0, 1], [0], [1], 16), cukv.PageTable([0, 1], [1], [1], 16)),
    ),
}


@pytest.mark.parametrize("said", INVALID)
def test_contents_that_are_not_valid_are_explained_and_not_drawn(said):
    noun = INVALID[said]()
    for shown in (noun.show(), noun):
        html = shown._repr_html_()
        assert said in ElementTree.fromstring(html).find(SVG + "desc").text
    assert not boxes(noun.show())


# Size and cost


def huge(name):
    """Make a noun that is far larger than a picture; its data is not there."""
    n = 300_000
    many = np.arange(n + 1)
    if name == "short rows":
        return cukv.RaggedTensor(np.broadcast_to(np.float16(0), (n, 128, 128)), many)
    if name == "head first":
        return cukv.RaggedTensor(np.broadcast_to(np.float16(0), (128, n, 128)), [0, n], "HND")
    if name == "mask":
        return cukv.RaggedMask(np.broadcast_to(np.True_, 2**32), [0, 2**15], [0, 2**17])
    if name == "masks":
        return cukv.RaggedMask(np.broadcast_to(np.True_, n), many, many)
    if name == "bits":
        return cukv.PackedMask(np.broadcast_to(np.uint8(255), 2**29), [0, 2**15], [0, 2**17])
    if name == "table":
        return cukv.PageTable(many, many[::-1], np.full(n, 16), 16)
    if name == "one request":
        return cukv.PageTable([0, 10**6], np.arange(10**6), [7], 16)
    if name == "one page of all":
        return cukv.PageTable(many, np.zeros(n, np.int32), np.full(n, 3), 16)
    if name == "levels":
        tables = cukv.PageTable([0, 1000], np.arange(1000), [9], 16), huge("table")
        return cukv.CascadeLevels((np.array([0, n]), many), tables, many[:-1])
    levels = 1000
    tables = (cukv.PageTable([0, 9], np.arange(9), [9], 16),) * levels
    return cukv.CascadeLevels((np.array([0, n]),) * levels, tables)


HUGE = ["short rows", "head first", "mask", "masks", "bits", "table", "one request",
        "one page of all", "levels", "many levels"]  # fmt: skip


def test_all_owners_of_a_page_are_counted():
    shared = boxes(huge("one page of all").show(), "page 0: shared by .*")
    assert [box.about for box in shared] == ["page 0: shared by r0 r1 r2 and 299,997 more"]


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_noun_is_summarised(name):
    html = huge(name)._repr_html_()
    ElementTree.fromstring(html)
    assert "more" in html
    assert len(html.encode()) < LARGEST


def test_the_structure_of_many_levels_on_a_gpu_is_summarised():
    levels = (fake_array(3, "int32"),) * 1000
    tables = (cukv.PageTable(*(fake_array(n, "int32") for n in (3, 5, 2)), 4),) * 1000
    assert len(cukv.CascadeLevels(levels, tables)._repr_html_().encode()) < LARGEST


def test_a_huge_cache_is_summarised():
    cache = cukv.PagedKVCache(fake_cupy((700_000, 2, 16, 128, 128), "bfloat16"))
    shown = cache._repr_html_()
    assert len(shown.encode()) < LARGEST
    assert "and 699,960 more pages" in shown
    assert "734 GB" in shown
    table = cukv.PageTable.from_seq_lens(np.full(1000, 11_000), 16)
    assert len(cache.show(table)._repr_html_().encode()) < LARGEST


class Unreadable(cp.ndarray):
    """A GPU array that refuses to be copied to the host."""

    def get(self, *args, **kwargs):
        raise AssertionError("the device was read")


def unreadable(shape, dtype="float16"):
    return fake_array(shape, dtype).view(Unreadable)


@pytest.mark.parametrize("name", NOUNS)
def test_jupyter_reads_nothing_from_the_device(name):
    noun = NOUNS[name](unreadable)
    html = noun._repr_html_()
    desc = ElementTree.fromstring(html).find(SVG + "desc").text
    if isinstance(noun, (cukv.PagedKVCache, cukv.MLAPagedCache)):
        assert ".show(table) draws which request owns which page" in desc
    else:
        assert desc.endswith("The contents are on the GPU; .show() reads and draws them.")
        assert re.search(r"int(32|64)\[3\]", desc)


@pytest.mark.parametrize("name", ["RaggedTensor", "RaggedMask", "PageTable", "CascadeLevels"])
def test_only_show_reads_the_device(name):
    with pytest.raises(AssertionError, match="the device was read"):
        NOUNS[name](unreadable).show()


def test_a_cache_itself_is_never_read():
    for cache in (NOUNS["PagedKVCache"](unreadable), NOUNS["MLAPagedCache pair"](unreadable)):
        shown = cache.show(cukv.PageTable.from_seq_lens([7], 4, xp=np))
        assert boxes(shown, "page 1: request 0, tokens 4 to 6")


# matplotlib

WITHOUT_MATPLOTLIB = """
import sys
import numpy as np
import cukv
table = cukv.PageTable.from_seq_lens([45, 8], 16, xp=np)
table._repr_html_(), table.show()
print("matplotlib" in sys.modules)
sys.modules["matplotlib"] = None
try:
    table.plot()
except ModuleNotFoundError as error:
    print(error)
"""


def test_matplotlib_is_imported_by_plot_only_and_named_where_it_is_missing():
    code = [sys.executable, "-W", "error", "-c", WITHOUT_MATPLOTLIB]
    run = subprocess.run(
        code, capture_output=True, text=True, check=False, cwd=Path(cukv.__file__).parent.parent
    )
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first == "False"
    assert second == "plot: needs matplotlib, which pip install 'cukv[notebooks]' brings"


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


@pytest.mark.parametrize("name", DRAWN)
def test_plot_draws_what_the_picture_shows(name, pyplot):
    noun = DRAWN[name]()
    shown, ax = noun.show(), noun.plot()
    assert len(ax.patches) == len(boxes(shown))
    assert [text.get_text() for text in ax.texts] == words(shown)
    for patch, box in zip(ax.patches, boxes(shown), strict=True):
        assert (patch.get_x(), patch.get_y(), patch.get_width()) == (box.x, box.y, box.width)
    ax.figure.canvas.draw()


def test_plot_draws_on_given_axes(pyplot):
    _, (left, right) = pyplot.subplots(1, 2)
    cache = cukv.PagedKVCache.empty(14, 16, 2, 64, "float16", xp=np)
    assert cache.plot(right, example_table()) is right
    assert not left.patches
    assert len(right.patches) == len(boxes(cache.show(example_table())))
    assert len(pyplot.get_fignums()) == 1
