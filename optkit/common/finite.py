"""Numbers of a report that are none: NaN and Inf, which JSON does not have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from optkit.errors import StageError


def refuse_not_finite(details: Any, where: str) -> None:
    """Raise StageError if a number somewhere in these values is NaN or Inf, with its place."""
    for place, number in _not_finite(details):
        raise StageError(
            f"{place} is {number}",
            where=where,
            why="Weights or activations are so large that their squares leave float32",
            remedy="Take the checkpoint from its source again, or exclude the layer",
        )


def _not_finite(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield place, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, part in parts:
        yield from _not_finite(part, f"{place}: {name}" if place else str(name))
