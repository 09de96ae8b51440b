"""What pictures of layouts say: counts, ranges and lists of numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cukv._arrays import Array

MOST_NUMBERS = 12  # of a list


class Span(NamedTuple):
    """Rows, tokens or elements ``start`` to ``stop - 1`` of an owner."""

    owner: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.stop - self.start

    def range_of(self, what: str) -> str:
        """Say ``rows 3 to 7``."""
        if self.size <= 0:
            return f"no {what}s"
        last = self.stop - 1
        return f"{what} {last}" if self.size == 1 else f"{what}s {self.start} to {last}"

    @property
    def ends(self) -> str:
        """Say ``3-7``."""
        return f"{self.start}-{self.stop - 1}" if self.size > 1 else str(self.start)


def spans(indptr: np.ndarray[Any, Any]) -> list[Span]:
    """Give what each request owns."""
    return [Span(b, start, stop) for b, (start, stop) in enumerate(pairwise(indptr.tolist()))]


def numbers(array: Array) -> str:
    """List the first numbers of an array on the host, and the last."""
    shown = ", ".join(str(n) for n in array[:MOST_NUMBERS].tolist())
    return f"{shown}, ... {array[-1]}" if len(array) > MOST_NUMBERS else shown or "none"


def count(n: int, what: str) -> str:
    """Say ``1 page`` or ``1,024 pages``."""
    plural = f"{what[:-1]}ies" if what.endswith("ry") else f"{what}s"
    return f"{n:,} {what if n == 1 else plural}"


def lengths(lens: np.ndarray[Any, Any], what: str) -> str:
    """Say ``1 to 3 rows each, 20 in all`` of one length or more."""
    low, high, total = int(lens.min()), int(lens.max()), int(lens.sum())
    each = count(high, what) if low == high else f"{low:,} to {count(high, what)}"
    return f"{each} each, {total:,} in all"


def size_of(num_bytes: int) -> str:
    """Say ``640 bytes`` or ``12.3 MB``."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    size, unit = num_bytes / 1000, "kB"
    for larger in ("MB", "GB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:,.0f} {unit}"
