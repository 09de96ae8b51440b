"""Pictures of layouts: which request owns which rows and pages, and where its memory lies.

A picture shows the first requests and pages of a noun and counts the rest, so that it stays small
whatever the noun holds. Only ``picture(..., read=True)`` copies from a GPU, and only index arrays
and the mask elements that it draws.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from cukv._check import read, values
from cukv._phrases import Span, count, lengths, numbers, size_of, spans
from cukv._picture import OWNERS, Picture, text_width
from cukv._show_pages import (
    HEADS,
    LEFT,
    REQUESTS,
    RIGHT,
    SENTENCES,
    draw_cache,
    draw_table,
    kv_lens,
    offsets,
    say_invalid,
)
from cukv.cascade import CascadeLevels
from cukv.masks import PackedMask, RaggedMask
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache
from cukv.ragged import RaggedTensor

Host = np.ndarray[Any, Any]

# How much of a large noun is drawn.
STRIPS = 4
MASKS, MASK_ROWS, MASK_KEYS, MASK_BYTES = 6, 12, 24, 8
LEVELS, PIECES = 8, 24
MOST_CHARACTERS = 400  # of a field

CELL = 12  # of a mask, pixels


def picture(noun: Any, table: PageTable | None = None, *, read: bool) -> Picture:
    """Draw a noun; ``table`` says who owns the pages of a cache.

    Parameters
    ----------
    noun : RaggedTensor, RaggedMask, PackedMask, PageTable, PagedKVCache, MLAPagedCache or \
CascadeLevels
        What to draw. Contents that are not valid are not drawn; the picture says what is wrong.
    table : PageTable
        For caches only.
    read : bool
        Copy from a GPU what the drawing needs, which synchronises. Otherwise only the structure of
        a noun on a GPU is drawn.

    Returns
    -------
    Picture

    Raises
    ------
    TypeError, ValueError
        ``table`` is no PageTable, or has another page size than the cache.
    """
    drawn = Picture(_title(noun))
    if isinstance(noun, (PagedKVCache, MLAPagedCache)):
        if table is not None:
            noun._pages.check_table(f"{type(noun).__name__}.show", table)
        draw_cache(drawn, noun, table)
        return drawn
    if not read and noun._home() is not np:
        _fields(drawn, noun)
        drawn.say("The contents are on the GPU; .show() reads and draws them.")
        drawn.note("The contents are on the GPU: .show() reads and draws them.")
        return drawn
    try:
        noun.validate()
    except ValueError as error:
        _fields(drawn, noun)
        say_invalid(drawn, error)
        return drawn
    _DRAW[type(noun)](drawn, noun)
    return drawn


def _title(noun: Any) -> str:
    if isinstance(noun, RaggedTensor):
        return (
            f"RaggedTensor: {count(noun.batch_size, 'request')}, "
            f"{noun.dtype.name} {list(noun.data.shape)}, {noun.layout}"
        )
    if isinstance(noun, (RaggedMask, PackedMask)):
        unit = "element" if isinstance(noun, RaggedMask) else "byte"
        size = count(len(noun.data), unit)
        return f"{type(noun).__name__}: {count(noun.batch_size, 'request')}, {size}"
    if isinstance(noun, PageTable):
        return f"PageTable: {count(noun.batch_size, 'request')}, pages of {noun.page_size} tokens"
    if isinstance(noun, CascadeLevels):
        return (
            f"CascadeLevels: {count(noun.num_levels, 'level')}, "
            f"{count(noun.batch_size, 'request')} in the last, pages of {noun.page_size} tokens"
        )
    arrays = noun.data if isinstance(noun.data, tuple) else (noun.data,)
    size = size_of(sum(array.nbytes for array in arrays))
    pages = f"{count(noun.max_num_pages, 'page')} of {noun.page_size} tokens"
    if isinstance(noun, MLAPagedCache):
        row = f"rows of {noun.head_dim_ckv} + {noun.head_dim_kpe}"
        kinds = " + ".join(dict.fromkeys((noun.dtype.name, noun.kpe_dtype.name)))
        return f"MLAPagedCache: {pages}, {row}, {kinds}, {size}"
    heads = f"{count(noun.num_kv_heads, 'head')} of {noun.head_dim}"
    if noun.head_dim_vo != noun.head_dim:
        heads += f"/{noun.head_dim_vo}"
    return f"PagedKVCache: {pages}, {heads}, {noun.dtype.name}, {noun.layout}, {size}"


def _fields(drawn: Picture, noun: Any) -> None:
    """Write the structure: names, dtypes and shapes."""
    for part in (line[:MOST_CHARACTERS] for line in noun._structure()):
        drawn.note(part)
        drawn.say(f"{part}.")


# ------------------------------------------------------------------------------------ ragged rows


def _ragged_tensor(drawn: Picture, ragged: RaggedTensor) -> None:
    indptr = values(ragged.indptr)
    shown = spans(indptr[: REQUESTS + 1])
    more, padding = ragged.batch_size - len(shown), ragged.nnz - int(indptr[-1])
    for span in shown[:SENTENCES]:
        drawn.say(f"Request {span.owner} is {span.range_of('row')}.")
    if ragged.batch_size > SENTENCES:
        drawn.say(f"{count(ragged.batch_size - SENTENCES, 'more request')}.")
    if padding:
        drawn.say(f"{count(padding, 'row')} of padding.")
    cuts = indptr[: len(shown) + 1]
    places = _places(cuts, RIGHT - 96 * (more + padding > 0))
    drawn.heading("Rows of each request")
    hnd = ragged.layout == "HND"
    strips = min(ragged.num_heads, STRIPS) if hnd else 1
    for head in range(strips):
        if hnd:
            drawn.words(LEFT, drawn.height + 6, f"head {head}: data[{head}]", role="muted")
            drawn.height += 16
        if more or padding:
            rest = f"{more} more" if more else f"{padding} padding"
            left = places[-1]
            drawn.box(left, drawn.height, RIGHT - left, 22, None, (rest,), f"{rest} not drawn")
        _strip(drawn, shown, places)
        drawn.height += 4
    _ticks(drawn, cuts, places)
    if hnd and strips < ragged.num_heads:
        drawn.note(f"and {count(ragged.num_heads - strips, 'more head')}")
    drawn.note(f"indptr, in rows: {numbers(indptr)}")
    if more:
        drawn.note(
            f"and {count(more, 'more request')}; all requests: {lengths(np.diff(indptr), 'row')}"
        )
    item = ragged.dtype.itemsize
    row, head_stride = (int(stride) // item for stride in ragged.rows.strides[:2])
    drawn.heading("Where a row's heads lie: elements from the start of data")
    heads = [(f"head {h}", h * head_stride) for h in range(min(ragged.num_heads, HEADS))]
    hidden = ragged.num_heads - len(heads)
    offsets(drawn, LEFT, RIGHT - LEFT, "row", ragged.nnz, row, heads, hidden)


# ------------------------------------------------------------------------------------------ masks


def _mask(drawn: Picture, mask: RaggedMask | PackedMask) -> None:
    qo_lens, key_lens = (np.diff(values(a)) for a in (mask.qo_indptr, mask.kv_indptr))
    indptr, unit = values(mask.indptr), "byte" if isinstance(mask, PackedMask) else "element"
    shown = min(mask.batch_size, MASKS)
    for b in range(shown):
        size, span = [int(qo_lens[b]), int(key_lens[b])], Span(b, *indptr[b : b + 2].tolist())
        text = f"request {b}: a {size} mask in {span.range_of(unit)}"
        drawn.heading(text)
        drawn.say(f"{text[0].upper()}{text[1:]}.")
        if size[0] * size[1]:
            heights = _matrix(drawn, mask, span, *size), _lying(drawn, mask, span, *size)
            drawn.height += max(heights) + 8
    if shown < mask.batch_size:
        drawn.note(f"and {count(mask.batch_size - shown, 'more request')}")
        drawn.say(f"{count(mask.batch_size - shown, 'more request')}.")
    drawn.note(
        "Filled cells are True: the query (a row of the mask) attends to the key (a column). "
        "On the right the elements as they lie in data, in C order, request after request."
    )
    if isinstance(mask, PackedMask):
        drawn.note(
            "Bits are little-endian: a byte's first element is its lowest bit. Each request starts "
            "on a byte of its own; dashed bits are unused."
        )
    drawn.note(f"indptr, in {unit}s: {numbers(indptr)}")


def _matrix(
    drawn: Picture, mask: RaggedMask | PackedMask, span: Span, qo_len: int, kv_len: int
) -> float:
    """Draw the corner of a request's mask, and give the height it takes."""
    rows, keys = min(qo_len, MASK_ROWS), min(kv_len, MASK_KEYS)
    for i in range(rows):
        for j, seen in enumerate(_elements(mask, span.start, i * kv_len, i * kv_len + keys)):
            _cell(drawn, LEFT + j * CELL, drawn.height + i * CELL, span, bool(seen))
    more = [(qo_len - rows, "more row"), (kv_len - keys, "more key")]
    left_out = ", ".join(count(n, what) for n, what in more if n)
    if left_out:
        drawn.words(LEFT, drawn.height + rows * CELL + 8, f"and {left_out}", role="muted")
    return rows * CELL + 16 * bool(left_out)


def _lying(
    drawn: Picture, mask: RaggedMask | PackedMask, span: Span, qo_len: int, kv_len: int
) -> float:
    """Draw a request's first elements as they lie in data, and give the height they take."""
    packed, elements = isinstance(mask, PackedMask), qo_len * kv_len
    left, pitch = LEFT + MASK_KEYS * CELL + 86, CELL + (18 if packed else 6)
    shown = min(elements, 8 * MASK_BYTES)
    bits = _elements(mask, span.start, 0, shown).tolist()
    for n in range(0, shown, 8):  # a byte
        column, line = n // 8 % 2, n // 16
        x, y = left + column * 9 * CELL, drawn.height + line * pitch
        if column == 0:
            at = f"[{span.start + (n // 8 if packed else n)}]"
            drawn.words(left - 8, y + CELL / 2, at, anchor="end")
        for i in range(8 if packed else min(8, shown - n)):
            used = n + i < shown
            _cell(drawn, x + i * CELL, y, span, bits[n + i] if used else None)
        if packed:
            byte = int(mask.data[span.start + n // 8])
            text = f"0x{byte:02x} = {byte}"
            drawn.words(x + 4 * CELL, y + CELL + 7, text, anchor="middle", role="muted")
    height = -(-shown // 16) * pitch
    if shown < elements:
        text = f"and {count(elements - shown, 'more element')}"
        drawn.words(left, drawn.height + height + 6, text, role="muted")
        height += 14
    return height


def _cell(drawn: Picture, x: float, y: float, span: Span, seen: bool | None) -> None:
    """Draw an element of a mask; None is a bit that is no element."""
    fill = None if seen is None else str(span.owner % OWNERS) if seen else "surface"
    drawn.box(x, y, CELL, CELL, fill)


def _elements(mask: RaggedMask | PackedMask, start: int, first: int, stop: int) -> Host:
    """Read elements ``first`` to ``stop`` of the request that starts at ``start`` of the data."""
    if isinstance(mask, RaggedMask):
        return read(mask.data[start + first : start + stop])
    data = read(mask.data[start + first // 8 : start + -(-stop // 8)])
    bits = np.unpackbits(data, bitorder="little").astype(np.bool_)
    return bits[first % 8 : first % 8 + stop - first]


# ---------------------------------------------------------------------------------------- cascade


def _cascade(drawn: Picture, levels: CascadeLevels) -> None:
    levels = levels.to_host()
    starts = [values(indptr) for indptr in levels.qo_indptr]
    rows, last = int(starts[0][-1]), levels.num_levels - 1
    cuts = np.unique(np.concatenate(starts))[: PIECES + 1]
    places = dict(zip(cuts.tolist(), _places(cuts, RIGHT), strict=True))
    drawn.heading("Who reads what: a row attends to all that stands above it")
    for level in range(last + 1):
        if LEVELS - 1 <= level < last:  # the leaves are always drawn
            if level == LEVELS - 1:
                drawn.note(f"and {count(last - level, 'more level')}")
            continue
        what = "leaves, a request each" if level == last else "shared"
        drawn.words(LEFT, drawn.height + 6, f"level {level}: {what}", role="muted")
        drawn.height += 14
        _level(drawn, level, starts[level], levels.tables[level], places, level == last)
        drawn.say(
            f"Level {level} has {count(levels.tables[level].batch_size, 'request')} with "
            f"{count(int(levels.tables[level].token_indptr[-1]), 'token')}; "
            f"their rows start at {numbers(starts[level][:-1])}."
        )
    _ticks(drawn, cuts, list(places.values()))
    if cuts[-1] < rows:
        drawn.note(f"and {count(rows - int(cuts[-1]), 'more row')}")
    for level, indptr in enumerate(starts[:LEVELS]):
        drawn.note(f"qo_indptr[{level}], in rows: {numbers(indptr)}")
    if levels.row_order is not None:
        order = numbers(levels.row_order[:rows])
        drawn.note(f"row_order, the row of q that each row here is: {order}")
        drawn.say(f"In q these are rows {order}.")


def _level(
    drawn: Picture,
    level: int,
    indptr: Host,
    table: PageTable,
    places: dict[int, float],
    leaves: bool,
) -> None:
    """Draw the requests of a level over the rows that they serve."""
    edge = max(places)
    pages, lens = values(table.indptr), kv_lens(table)
    for b in np.flatnonzero((indptr[:-1] < edge) & (np.diff(indptr) > 0)).tolist():
        start, stop = int(indptr[b]), min(int(indptr[b + 1]), edge)
        own = values(table.indices[pages[b] : pages[b + 1]])
        names = f"{'page' if len(own) == 1 else 'pages'} {numbers(own)}"
        left, right = places[start], places[stop]
        tokens = count(int(lens[b]), "token")
        lines = (
            _fitting(right - left, names, names.partition(" ")[2]),
            _fitting(right - left, tokens, tokens.partition(" ")[0]),
        )
        about = (
            f"level {level}, request {b}: {names}, {tokens}, "
            f"{Span(b, start, int(indptr[b + 1])).range_of('row')}"
        )
        fill = None if not len(own) else str(b % OWNERS) if leaves else "shared"
        drawn.box(left, drawn.height, right - left, 34, fill, lines, about)
    drawn.height += 38


# ------------------------------------------------------------------------------------------ parts


def _places(cuts: Host, right: float) -> list[float]:
    """Give the x of each cut: as far apart as what lies between, and wide enough for a name."""
    sizes = np.diff(cuts).astype(np.float64)
    width = right - LEFT
    least = min(26.0, width / max(len(sizes), 1))
    share = sizes / sizes.sum() if sizes.sum() else np.full(len(sizes), 1 / max(len(sizes), 1))
    widths = least + (width - least * len(sizes)) * share
    return [float(LEFT + x) for x in np.concatenate([[0.0], np.cumsum(widths)])]


def _strip(drawn: Picture, shown: list[Span], places: list[float]) -> None:
    """Draw what each request owns, side by side."""
    for span, (left, right) in zip(shown, pairwise(places), strict=True):
        name = f"r{span.owner}"
        line = _fitting(right - left, f"{name}: {span.size} rows", f"{name}: {span.size}", name)
        fill = str(span.owner % OWNERS) if span.size else None
        about = f"request {span.owner}: {span.range_of('row')}"
        drawn.box(left, drawn.height, right - left, 22, fill, (line,), about)
    drawn.height += 22


def _ticks(drawn: Picture, cuts: Host, places: list[float]) -> None:
    """Write the numbers at which pieces meet, as far as they fit."""
    free = LEFT - 10.0
    for cut, x in zip(cuts.tolist(), places, strict=True):
        half = text_width(str(cut)) / 2
        middle = min(max(x, LEFT + half), RIGHT - half)
        if middle - half > free:
            drawn.words(middle, drawn.height + 6, str(cut), anchor="middle", role="muted")
            free = middle + half + 4
    drawn.height += 16


def _fitting(width: float, *texts: str) -> str:
    """Give the first text that fits, or nothing."""
    return next((text for text in texts if text_width(text) <= width - 4), "")


_DRAW: dict[type, Callable[[Picture, Any], None]] = {
    RaggedTensor: _ragged_tensor,
    RaggedMask: _mask,
    PackedMask: _mask,
    PageTable: draw_table,
    CascadeLevels: _cascade,
}
