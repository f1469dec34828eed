"""Values of two kinds together, of which a few pairs stand for all."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def crossed(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Return all pairs, for `parametrize`; of a mapping the keys are the names.
    Each value is in one that always runs. The others run with --slow.
    """
    first, second = (
        [*each.items()] if isinstance(each, Mapping) else [(str(value), value) for value in each]
        for each in (rows, columns)
    )
    few = min(len(first), len(second))
    return [
        pytest.param(row, column, id=f"{left}-{right}", marks=() if i % few == j % few else pytest.mark.slow)
        for i, (left, row) in enumerate(first)
        for j, (right, column) in enumerate(second)
    ]


def few(*always: Any, slow: Iterable[Any]) -> list[Any]:
    """Return values for `parametrize`, some of which run with --slow."""
    return [*always, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]
