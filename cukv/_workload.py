"""Models, requests and their schedule: what of ``cukv replay`` needs no array library.

A workload is a list of :class:`Request`, read from a trace or made up from a seed. A
:class:`Scheduler` hands out pages and says, step by step, which request gets how many rows.
"""

from __future__ import annotations

import csv
import json
import math
import random
import reprlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

SEGMENT = 512  # tokens under one hash id in a Mooncake trace
MOST_TOKENS = 2**31 - 1  # of a prompt or an answer
AZURE_COLUMNS = ("ContextTokens", "GeneratedTokens")


class ReplayError(ValueError):
    """What was asked for cannot be replayed; the message is one line for the user."""


@dataclass(frozen=True)
class Request:
    """One request: a prompt of ``input_length`` tokens, then ``output_length`` generated ones.

    ``hash_ids[i]`` names the contents of prompt tokens ``[512 * i, 512 * (i + 1))``; only whole
    segments are kept, so equal ids mean equal tokens, in whatever request they stand.
    """

    where: str  # "file:line", for messages
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()

    @property
    def total_length(self) -> int:
        """Tokens in the cache when the request ends."""
        return self.input_length + self.output_length


# What is replayed


@dataclass(frozen=True)
class Model:
    """Shapes of one attention layer. With ``head_dim_kpe`` it is MLA: one latent row per token."""

    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int  # of ckv in MLA
    head_dim_kpe: int = 0
    dtype: str = "bfloat16"

    @property
    def is_mla(self) -> bool:
        """Whether the cache holds latent rows."""
        return self.head_dim_kpe > 0

    @property
    def sm_scale(self) -> float:
        """Multiplies q.k before the softmax; in MLA by the head dimension before absorption."""
        return 1 / math.sqrt(128 + 64 if self.is_mla else self.head_dim)

    @property
    def row_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of a token's two rows: k and v, or ckv and kpe."""
        if self.is_mla:
            return [(self.head_dim,), (self.head_dim_kpe,)]
        return [(self.num_kv_heads, self.head_dim)] * 2

    @property
    def query_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of a token's query: q, or q_nope and q_pe."""
        dims = [self.head_dim, self.head_dim_kpe] if self.is_mla else [self.head_dim]
        return [(self.num_qo_heads, dim) for dim in dims]

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in one layer's cache."""
        return 2 * sum(math.prod(shape) for shape in self.row_shapes)

    @property
    def query_bytes(self) -> int:
        """Bytes of one row of q and one of o."""
        return self.num_qo_heads * (2 * self.head_dim + self.head_dim_kpe) * 2

    @property
    def pair_flops(self) -> int:
        """Floating-point operations that one query token spends on one key token."""
        return 2 * self.num_qo_heads * (2 * self.head_dim + self.head_dim_kpe)

    def __str__(self) -> str:
        kind = f"{self.num_kv_heads} key-value of {self.head_dim}"
        if self.is_mla:
            kind = f"latent of {self.head_dim} + {self.head_dim_kpe}"
        return f"{self.num_qo_heads} query heads, {kind}, {self.dtype}"


MODELS = {
    "llama8b": Model(32, 32, 8, 128),
    "llama70b": Model(80, 64, 8, 128),
    "qwen3-4b": Model(36, 32, 8, 128),
    "deepseek": Model(61, 16, 1, 512, head_dim_kpe=64),  # 128 heads over 8 GPUs
    "tiny": Model(2, 4, 2, 32, dtype="float16"),
}


@dataclass(frozen=True)
class Limits:
    """What one step may hold."""

    batch_size: int  # requests live at once
    chunk_tokens: int  # prompt rows of one request
    step_tokens: int  # rows of all requests


# Reading


def read_trace(path: Path, limit: int) -> tuple[list[Request], int]:
    """Read the first ``limit`` requests of a Mooncake JSONL or an Azure CSV, told by content.

    The whole file is checked. Arrival order is kept, arrival times are not.

    Returns
    -------
    tuple
        The requests, and how many the file holds.
    """
    try:
        with path.open("rb") as file:
            requests = _requests(path, _lines(path, file))
            first = list(islice(requests, limit))
            return first, len(first) + sum(1 for _ in requests)
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror or error}") from None


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield (file:line, text) of every line that is not blank."""
    for number, line in enumerate(file, start=1):
        where = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            raise ReplayError(f"{where}: not UTF-8 text") from None
        if text:
            yield where, text


def _requests(path: Path, lines: Iterator[tuple[str, str]]) -> Iterator[Request]:
    """Parse lines in the format that the first one is written in."""
    where, first = next(lines, ("", ""))
    if not first:
        raise ReplayError(f"{path}:1: the file is empty")
    if first.startswith("{"):
        for here, text in chain([(where, first)], lines):
            yield _mooncake_request(here, text)
        return
    try:
        columns = _csv_fields(where, first)
    except ReplayError:  # a JSON array, say: no header at all
        columns = []
    if not set(AZURE_COLUMNS) <= set(columns):
        raise ReplayError(
            f"{where}: neither a Mooncake JSON object nor an Azure header with "
            f"{' and '.join(AZURE_COLUMNS)}, got {reprlib.repr(first)}"
        )
    last = where
    for last, text in lines:
        yield _azure_request(last, text, columns)
    if last == where:
        raise ReplayError(f"{where}: a header and no request after it")


def _mooncake_request(where: str, text: str) -> Request:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReplayError(f"{where}: not a JSON object ({error})") from None
    if not isinstance(entry, dict):
        raise ReplayError(f"{where}: must be a JSON object, got {reprlib.repr(entry)}")
    input_length = _length(where, "input_length", entry.get("input_length"), least=1)
    output_length = _length(where, "output_length", entry.get("output_length"), least=0)
    hash_ids = entry.get("hash_ids", [])
    if not isinstance(hash_ids, list) or any(type(i) is not int for i in hash_ids):
        raise ReplayError(
            f"{where}: hash_ids must be a list of integers, got {reprlib.repr(hash_ids)}"
        )
    segments = -(-input_length // SEGMENT)
    if len(hash_ids) > segments:
        raise ReplayError(
            f"{where}: hash_ids must name at most the {segments} that {input_length} tokens have, "
            f"one for each {SEGMENT} of them, got {len(hash_ids)}"
        )
    return Request(where, input_length, output_length, tuple(hash_ids[: input_length // SEGMENT]))


def _azure_request(where: str, text: str, columns: list[str]) -> Request:
    fields = _csv_fields(where, text)
    if len(fields) != len(columns):
        raise ReplayError(f"{where}: must have {len(columns)} fields, got {len(fields)}")
    row = dict(zip(columns, fields, strict=True))

    def length(column: str, least: int) -> int:
        number = whole_number(row[column])
        return _length(where, column, row[column] if number is None else number, least)

    return Request(where, length(AZURE_COLUMNS[0], 1), length(AZURE_COLUMNS[1], 0))


def whole_number(text: str) -> int | None:
    """Parse plain decimal digits, where ``int`` also takes ``1_0``, but limits their number."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 640 else None


def _csv_fields(where: str, text: str) -> list[str]:
    try:
        return [entry.strip() for entry in next(csv.reader([text], strict=True))]
    except csv.Error as error:
        raise ReplayError(f"{where}: not a CSV line ({error})") from None


def _length(where: str, name: str, value: object, least: int) -> int:
    """Take an integer only: bool, float (NaN too), text and nothing at all are refused."""
    if type(value) is not int or not least <= value <= MOST_TOKENS:
        got = "nothing" if value is None else reprlib.repr(value)
        raise ReplayError(
            f"{where}: {name} must be a whole number in [{least}, {MOST_TOKENS}], got {got}"
        )
    return value


def built_in(
    seed: int, count: int, prompt_tokens: int, output_tokens: int, common_tokens: int = 0
) -> list[Request]:
    """Make up ``count`` requests of around the given lengths; half start with a shared prompt.

    Before it, all start with ``common_tokens`` that are the same, whole segments of them.
    """
    common = common_tokens // SEGMENT
    rng = random.Random(seed)
    requests = []
    for number in range(1, count + 1):
        prompt = max(1, round(prompt_tokens * rng.lognormvariate(0, 0.8)))
        output = max(1, round(output_tokens * rng.lognormvariate(0, 0.6)))
        shared = rng.choice([0, 0, 1, 2])  # segments of a system prompt before its own tokens
        where = f"built-in request {number}"
        ids = tuple(range(common + shared))
        requests.append(Request(where, len(ids) * SEGMENT + prompt, output, ids))
    return requests


# Scheduling


class FreePages:
    """A free list with reference counts: every page is free, or has at least one holder.

    ``take`` gives pages their first holder, ``hold`` a further one, ``release`` removes one; the
    page is free again when the last is gone. Pages are handed out in a shuffled order, so that
    neighbours in a request are not neighbours in memory.
    """

    def __init__(self, max_num_pages: int, seed: int = 0) -> None:
        self._free = list(range(max_num_pages))
        random.Random(seed).shuffle(self._free)
        self._holders = [0] * max_num_pages

    def __len__(self) -> int:
        """Count the free pages."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` pages that nobody holds."""
        if count > len(self._free):
            raise RuntimeError(f"FreePages.take: {count} pages asked, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self.hold(pages)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add one holder to each page."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """Remove one holder from each page and return those that became free."""
        freed = []
        for page in pages:
            if self._holders[page] == 0:
                raise RuntimeError(f"FreePages.release: page {page} is free already")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                freed.append(page)
        self._free += freed
        return freed


@dataclass(eq=False)
class Live:
    """A request that has been admitted: its pages, and its length once this step's rows are in."""

    request: Request
    number: int  # place in the workload, from 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    kv_len: int = 0
    rows: int = 0  # of this step: the last ones of kv_len


class Scheduler:
    """First come, first served, over one pool of pages; prompts go in chunks beside decoding.

    A request is admitted when the free pages cover its whole length after all that was promised
    to the live ones, so nothing is ever preempted. A whole segment of a prompt that another live
    request has written already is taken by reference: its pages get one more holder.
    """

    def __init__(
        self, requests: list[Request], pages: FreePages, page_size: int, limits: Limits
    ) -> None:
        self.page_size, self.limits, self.free = page_size, limits, pages
        self.waiting = deque(Live(request, number) for number, request in enumerate(requests))
        self.live: list[Live] = []
        self.finished = self.tokens_by_reference = self.most_pages = 0
        self.capacity = len(pages)
        self._resident: dict[int, array[int]] = {}  # hash id -> pages of a segment that is written
        self._hash_of: dict[int, int] = {}  # first page of such a segment -> hash id
        for request in requests:
            self._must_fit(request)

    @property
    def shares(self) -> bool:
        """Whether segments are whole pages; otherwise nothing is taken by reference."""
        return SEGMENT % self.page_size == 0

    @property
    def done(self) -> bool:
        """Whether no request is left."""
        return not self.live and not self.waiting

    @property
    def pages_in_use(self) -> int:
        """Pages that somebody holds."""
        return self.capacity - len(self.free)

    def next_batch(self) -> list[Live]:
        """Admit, give rows and pages, and return who has rows: single rows first, then chunks."""
        self._admit()
        budget = self.limits.step_tokens
        for live in sorted(self.live, key=lambda live: live.kv_len < live.request.input_length):
            live.rows = min(self._wanted_rows(live), budget)
            live.kv_len += live.rows
            budget -= live.rows
            live.pages.extend(self.free.take(self._num_pages(live.kv_len) - len(live.pages)))
        self.most_pages = max(self.most_pages, self.pages_in_use)
        return sorted((live for live in self.live if live.rows), key=lambda live: live.rows > 1)

    def end_step(self) -> None:
        """Offer the segments that this step completed, and return the pages of who is finished."""
        for live in self.live:
            self._offer(live)
        for live in [live for live in self.live if live.kv_len == live.request.total_length]:
            self.retire(live)
            self.finished += 1

    def retire(self, live: Live) -> None:
        """Take a request out and give its pages back."""
        self.live.remove(live)
        for page in self.free.release(live.pages):
            if page in self._hash_of:
                del self._resident[self._hash_of.pop(page)]

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _must_fit(self, request: Request) -> None:
        needed = self._num_pages(request.total_length)
        if needed > self.capacity:
            raise ReplayError(
                f"{request.where}: does not fit: {request.total_length} tokens need {needed} pages "
                f"of {self.page_size} tokens, the cache has {self.capacity}"
            )

    def _admit(self) -> None:
        promised = sum(
            self._num_pages(live.request.total_length) - len(live.pages) for live in self.live
        )
        while self.waiting and len(self.live) < self.limits.batch_size:
            promised += self._num_pages(self.waiting[0].request.total_length)
            if promised > len(self.free):
                return
            self.live.append(self.waiting.popleft())

    def _wanted_rows(self, live: Live) -> int:
        """Rows that the request could use now: a chunk up to the segment's end, or one token."""
        request = live.request
        self._take_by_reference(live)
        if live.kv_len < request.input_length:
            to_segment_end = SEGMENT - live.kv_len % SEGMENT
            return min(self.limits.chunk_tokens, request.input_length - live.kv_len, to_segment_end)
        return min(1, request.total_length - live.kv_len)

    def _take_by_reference(self, live: Live) -> None:
        """Skip over the prompt's next segments as long as they are resident."""
        while (segment := self._segment_after(live.kv_len, live)) in self._resident:
            pages = self._resident[segment]
            self.free.hold(pages)
            live.pages += pages
            live.kv_len += SEGMENT
            self.tokens_by_reference += SEGMENT

    def _offer(self, live: Live) -> None:
        """Let others share the segment that ends at ``kv_len``, if one does and they have none."""
        begin = live.kv_len - SEGMENT
        segment = self._segment_after(begin, live) if live.rows else None
        if segment is not None and segment not in self._resident:
            pages = live.pages[begin // self.page_size : live.kv_len // self.page_size]
            self._resident[segment] = pages
            self._hash_of[pages[0]] = segment

    def _segment_after(self, position: int, live: Live) -> int | None:
        """Return the hash id of the whole segment that starts at a position, or None."""
        index, inside = divmod(position, SEGMENT)
        if not self.shares or inside or not 0 <= index < len(live.request.hash_ids):
            return None
        return live.request.hash_ids[index]
