"""Plan: what a call needs besides its arrays, made once and used by every layer of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Prepared attention work; made by a noun's ``plan`` and passed to its calls as ``plan=``.

    A plan belongs to shapes, dtypes and options, and raises when a call's differ. It follows the
    contents of its index arrays when ``update`` is called. On NumPy arrays there is nothing to
    prepare: a plan only checks that its calls are the ones it was made for.
    """

    op: str
    key: tuple[tuple[str, Any], ...]

    def update(self) -> None:
        """Follow the present contents of the index arrays that the plan was made from."""

    def _require(self, op: str, key: tuple[tuple[str, Any], ...]) -> None:
        """Raise unless a call is the one that this plan serves."""
        for (name, wanted), (_, got) in zip(self.key, key, strict=True):
            if wanted != got:
                raise ValueError(f"{op}: the plan was made for {name}={wanted}, got {got}")

    def __repr__(self) -> str:
        return f"Plan({self.op}, {', '.join(f'{n}={v}' for n, v in self.key)})"
