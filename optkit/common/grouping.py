"""Things with those that are alike, how far two rows of them are the same, and the first of many."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
SHOWN = 3


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items of each key, keys and items in the order in which they come."""
    return by_key((key(item), item) for item in items)


def by_key(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return the values of each key, keys and values in the order in which they come."""
    found: dict[K, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def common_prefix(left: Sequence[T], right: Sequence[T]) -> int:
    """Return how many elements are the same from the first on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def some(words: Iterable[str]) -> str:
    """Return the first of the words, and how many more there are."""
    every = list(words)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return "; ".join(every[:SHOWN]) + more
