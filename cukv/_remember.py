"""Keep what was worked out for calls that are alike, so many of them at most."""

from __future__ import annotations

from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_MOST = 256


def remember(found: dict[_Key, _Value], key: _Key, value: _Value, most: int = _MOST) -> None:
    """Keep a value under its key; what was found before goes where there are too many."""
    if len(found) >= most:
        found.clear()
    found[key] = value
