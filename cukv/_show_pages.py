"""Pictures of page tables and caches: who owns which page, and where a page's tokens lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukv._arrays import Array
from cukv._check import values
from cukv._phrases import Span, count, lengths, numbers
from cukv._picture import OWNERS, WIDTH, Picture, text_width
from cukv.mla import MLAPagedCache
from cukv.page_table import PageTable
from cukv.paged import PagedKVCache

# How much of a large noun is drawn.
REQUESTS = 12
PAGES_OF_A_REQUEST = 8
PAGES, OWNERS_OF_A_PAGE = 40, 3
ENTRIES, HEADS = 4, 5
SENTENCES = 8

LEFT, RIGHT = 8, WIDTH - 8
PAGE_WIDTH, PAGE_GAP = 66, 4


def draw_table(drawn: Picture, table: PageTable) -> None:
    """Draw the pages of each request, then the same pages where they lie in the cache."""
    table = table.to_host()
    _say_owners(drawn, table)
    drawn.heading("Pages of each request, in order of its tokens")
    indptr, lens = values(table.indptr), kv_lens(table)
    for b in range(min(table.batch_size, REQUESTS)):
        pages = values(table.indices[indptr[b] : indptr[b + 1]])
        _request_pages(drawn, b, pages, int(lens[b]), table.page_size)
    if table.batch_size > REQUESTS:
        drawn.note(
            f"and {count(table.batch_size - REQUESTS, 'more request')}; "
            f"all requests: {lengths(lens, 'token')}"
        )
    drawn.note(f"indptr, in pages: {numbers(indptr)}")
    drawn.note(f"indices, page ids: {numbers(table.indices[: indptr[-1]])}")
    drawn.note(f"last_page_len, in tokens: {numbers(table.last_page_len)}")
    if len(table.indices) > indptr[-1]:
        drawn.note(f"{count(len(table.indices) - int(indptr[-1]), 'entry')} of padding in indices")
    drawn.heading("The same pages where they lie in the cache")
    _storage(drawn, table, int(values(table.indices[: indptr[-1]]).max(initial=-1)) + 1)


def _say_owners(drawn: Picture, table: PageTable) -> None:
    indptr, lens = values(table.indptr), kv_lens(table)
    for b in range(min(table.batch_size, SENTENCES)):
        pages = values(table.indices[indptr[b] : indptr[b + 1]])
        if len(pages) == 0:
            drawn.say(f"Request {b} has no tokens.")
            continue
        last = int(lens[b]) - (len(pages) - 1) * table.page_size
        drawn.say(
            f"Request {b} has {count(int(lens[b]), 'token')} on "
            f"{'page' if len(pages) == 1 else 'pages'} {numbers(pages)}; "
            f"the last holds {last} of {table.page_size}."
        )
    if table.batch_size > SENTENCES:
        drawn.say(f"{count(table.batch_size - SENTENCES, 'more request')}.")


def _request_pages(
    drawn: Picture, b: int, pages: np.ndarray[Any, Any], kv_len: int, page_size: int
) -> None:
    """Draw a line of pages: the first ones, how many are left out, and the last one."""
    y = drawn.height
    drawn.words(LEFT, y + 9, f"request {b}", bold=True)
    drawn.words(LEFT, y + 22, count(kv_len, "token"), role="muted")
    places = list(range(len(pages)))
    if len(pages) > PAGES_OF_A_REQUEST:
        places = [*places[: PAGES_OF_A_REQUEST - 2], -1, places[-1]]
    for column, i in enumerate(places):
        x = LEFT + 92 + column * (PAGE_WIDTH + PAGE_GAP)
        if i < 0:
            left_out = len(pages) - PAGES_OF_A_REQUEST + 1
            drawn.words(x + PAGE_WIDTH / 2, y + 16, f"... {left_out} ...", anchor="middle")
            continue
        tokens = Span(b, i * page_size, min((i + 1) * page_size, kv_len))
        drawn.box(
            x,
            y,
            PAGE_WIDTH,
            32,
            str(b % OWNERS),
            (f"page {pages[i]}", tokens.ends),
            f"page {pages[i]}: request {b}, {tokens.range_of('token')}",
            tokens.size / page_size,
        )
    drawn.height += 38


def _storage(drawn: Picture, table: PageTable | None, num_pages: int) -> None:
    """Draw the first pages of a cache and who owns each."""
    owners = _owners(table) if table is not None else {}
    columns, height = (RIGHT - LEFT + PAGE_GAP) // (PAGE_WIDTH + PAGE_GAP), 44
    top, shown = drawn.height, min(num_pages, PAGES)
    for page in range(shown):
        x = LEFT + (page % columns) * (PAGE_WIDTH + PAGE_GAP)
        y = top + (page // columns) * (height + PAGE_GAP)
        name, (number, found) = f"page {page}", owners.get(page, (0, []))
        if table is None:
            drawn.box(x, y, PAGE_WIDTH, height, "plain", (name,), name)
        elif not number:
            drawn.box(x, y, PAGE_WIDTH, height, None, (name, "", ""), f"{name}: nobody's")
        elif number == 1:
            span = found[0]
            lines = (name, f"r{span.owner}", span.ends)
            about = f"{name}: request {span.owner}, {span.range_of('token')}"
            full = span.size / table.page_size
            drawn.box(x, y, PAGE_WIDTH, height, str(span.owner % OWNERS), lines, about, full)
        else:
            names, more = " ".join(f"r{span.owner}" for span in found), number - len(found)
            lines = (name, f"{number} owners" if more else names, "shared")
            about = f"{name}: shared by {names}" + (f" and {more:,} more" if more else "")
            drawn.box(x, y, PAGE_WIDTH, height, "shared", lines, about)
    drawn.height += -(-shown // columns) * (height + PAGE_GAP) + 4
    if shown < num_pages:
        drawn.note(f"and {count(num_pages - shown, 'more page')}")
    elif not num_pages:
        drawn.note("no pages")


def _owners(table: PageTable) -> dict[int, tuple[int, list[Span]]]:
    """Find how many own each of the first pages, and which tokens of the first owners lie there."""
    indptr, lens = values(table.indptr), kv_lens(table)
    indices = values(table.indices[: indptr[-1]])
    places = np.flatnonzero(indices < PAGES)
    owners = {}
    for page in np.unique(indices[places]).tolist():
        own = places[indices[places] == page]
        found = []
        for i in own[:OWNERS_OF_A_PAGE].tolist():
            b = int(np.searchsorted(indptr, i, side="right")) - 1
            start = (i - int(indptr[b])) * table.page_size
            found.append(Span(b, start, min(start + table.page_size, int(lens[b]))))
        owners[page] = len(own), found
    return owners


def draw_cache(
    drawn: Picture, cache: PagedKVCache | MLAPagedCache, table: PageTable | None
) -> None:
    """Draw the pages, their owners if a table names them, and the inside of a page."""
    if table is not None:
        table = table.to_host()
        try:
            table.validate(cache.max_num_pages)
            _say_owners(drawn, table)
        except ValueError as error:
            say_invalid(drawn, error)
            table = None
    drawn.heading("Pages" if table is None else "Pages and who owns them")
    _storage(drawn, table, cache.max_num_pages)
    if table is None:
        drawn.note(".show(table) draws who owns them; .append and .gather take the same table.")
        drawn.say(".show(table) draws which request owns which page.")
    drawn.heading("Where a page's tokens lie: elements from the start of the page")
    parts, pair = _parts(cache), isinstance(cache.data, tuple)
    room, top, bottom = (RIGHT - LEFT) / len(parts), drawn.height, drawn.height
    hidden = max(cache.num_kv_heads - HEADS, 0) if isinstance(cache, PagedKVCache) else 0
    for index, (name, array, columns) in enumerate(parts):
        x = LEFT + index * room
        drawn.height = top
        drawn.words(x, top + 6, name, bold=True)
        drawn.height += 16
        item = array.dtype.itemsize
        entry = int(array.strides[1]) // item
        offsets(drawn, x, room - 8, "entry", cache.page_size, entry, columns, hidden)
        bottom = max(bottom, drawn.height)
    drawn.height = bottom
    strides = {name: int(a.strides[0]) // a.dtype.itemsize for name, a, _ in parts}
    if pair:
        steps = " and of ".join(f"{name} {stride}" for name, stride in strides.items())
        drawn.note(f"{len(parts)} arrays: pages of {steps} elements apart.")
    else:
        drawn.note(f"One array: pages are {next(iter(strides.values()))} elements apart.")


def _parts(cache: PagedKVCache | MLAPagedCache) -> list[tuple[str, Array, list[tuple[str, int]]]]:
    """Give (name, [pages, page_size, ...] view, [(column, its offset in a page)]) of each part."""
    if isinstance(cache, MLAPagedCache):
        ckv, kpe = (f"ckv ({cache.head_dim_ckv})", f"kpe ({cache.head_dim_kpe})")
        if isinstance(cache.data, tuple):
            return [("ckv", cache.ckv, [(ckv, 0)]), ("kpe", cache.kpe, [(kpe, 0)])]
        return [("ckv | kpe", cache.ckv, [(ckv, 0), (kpe, cache.head_dim_ckv)])]
    parts = []
    for index, (name, pages) in enumerate(zip(("k", "v"), cache._pages, strict=True)):
        array = pages.array
        item = array.dtype.itemsize
        first = 0 if isinstance(cache.data, tuple) else index * int(cache.data.strides[1]) // item
        stride = int(array.strides[2]) // item
        heads = [(f"head {h}", first + h * stride) for h in range(min(cache.num_kv_heads, HEADS))]
        parts.append((name, array, heads))
    return parts


def offsets(
    drawn: Picture,
    x: float,
    room: float,
    row: str,
    rows: int,
    stride: int,
    columns: list[tuple[str, int]],
    hidden: int = 0,
) -> None:
    """Draw where rows, ``stride`` elements apart, and the columns of each start in memory.

    Columns are those of ``columns``, named with where they start in the first row, that fit into
    ``room`` pixels from x; ``hidden`` counts those that are not given.
    """
    shown = range(min(rows, ENTRIES))
    texts = [f"{first + r * stride:+d}" for r in shown for _, first in columns]
    widths = [text_width(text) + 8 for text in (*texts, *(name for name, _ in columns))]
    width, label = max([58.0, *widths]), text_width(f"{row} 0") + 8
    fitting = columns[: max(1, int((room - label) // width))]
    hidden += len(columns) - len(fitting)
    for column, (name, _) in enumerate(fitting):
        middle = x + label + (column + 0.5) * width
        drawn.words(middle, drawn.height + 6, name, anchor="middle", role="muted")
    drawn.height += 14
    for r in shown:
        drawn.words(x, drawn.height + 9, f"{row} {r}", role="muted")
        for column, (name, first) in enumerate(fitting):
            offset = f"{first + r * stride:+d}"
            left, about = x + label + column * width, f"{row} {r}, {name}: {offset}"
            drawn.box(left, drawn.height, width, 18, "plain", (offset,), about)
        drawn.height += 18
    more = [(rows - len(shown), f"more {row}"), (hidden, "more head")]
    left_out = [count(n, what) for n, what in more if n]
    if left_out:
        drawn.words(x, drawn.height + 8, f"and {' and '.join(left_out)}", role="muted")
        drawn.height += 16
    drawn.height += 6


def kv_lens(table: PageTable) -> np.ndarray[Any, Any]:
    """Give the tokens of each request as int64, whatever the table's index dtype can hold."""
    return np.diff(values(table.token_indptr))


def say_invalid(drawn: Picture, error: ValueError) -> None:
    """Say why contents are not drawn."""
    drawn.note(f"Not drawn, as the contents are not valid: {error}")
    drawn.say(f"The contents are not valid: {error}.")
