"""Things with those that are alike, and the first of many."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
SHOWN = 3


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items of each key, keys and items in the order in which they come."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def some(words: Iterable[str]) -> str:
    """Return the first of the words, and how many more there are."""
    every = list(words)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return "; ".join(every[:SHOWN]) + more
