"""The figures of docs/understand/algorithms show what their pages say; their numbers are those of the benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from docs.understand.algorithms.draw import Lines, by_alpha, by_bits, by_power, by_zeros, layer

PAGES = Path(__file__).parents[2] / "docs" / "understand" / "algorithms"
RESULTS = PAGES.parents[1] / "benchmarks" / "results"
WEIGHT, INPUTS = layer()
HESSIAN = INPUTS.T @ INPUTS


@pytest.fixture
def error() -> Callable[..., float]:
    outputs = INPUTS @ WEIGHT.T

    def of(changed: Tensor, seen: Tensor = INPUTS) -> float:
        return float((seen @ changed.T - outputs).norm() / outputs.norm())

    return of


def test_each_way_to_round_beats_the_one_before(error: Callable[..., float]) -> None:
    nearest, searched, paper, ours = by_bits(WEIGHT, HESSIAN, error).values()
    assert all(ours[each][1] < min(searched[each][1], paper[each][1]) for each in range(4))
    assert all(max(searched[each][1], paper[each][1]) < nearest[each][1] for each in range(4))


def test_each_way_to_prune_beats_the_one_before(error: Callable[..., float]) -> None:
    errors = [[error for _, error in line] for line in by_zeros(WEIGHT, HESSIAN, error).values()]
    assert all(list(at) == sorted(at, reverse=True) for at in zip(*errors, strict=True))


@pytest.mark.parametrize("curve", [by_power, by_alpha])
def test_the_best_scale_lies_between_none_and_all(curve: Callable[..., Lines], error: Callable[..., float]) -> None:
    (line,) = curve(WEIGHT, INPUTS, error).values()
    best = min(line, key=lambda point: point[1])
    assert 0.1 < best[0] < 0.9
    assert best[1] < 0.8 * min(line[0][1], line[-1][1])


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_numbers_of_tables_are_those_of_the_benchmarks(page: Path) -> None:
    known = {number for path in RESULTS.glob("*.json") for number in numbers(json.loads(path.read_text()))}
    cells = re.findall(r"(?<=\| )(\d+\.\d+)(?= \|)", page.read_text(encoding="utf-8"))
    rounded = {f"{number:.{digits}f}" for number in known for digits in (1, 2, 3, 4)}
    assert [cell for cell in cells if cell not in rounded] == []


def numbers(value: object) -> Iterator[float]:
    """Return the numbers in a JSON value, also those in its texts."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from map(float, re.findall(r"\d+\.\d+", value))
