"""The figures of docs/understand/algorithms show what their pages say; their numbers are those of the benchmarks."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from docs.understand.algorithms.draw import (
    Lines,
    by_alpha,
    by_bits,
    by_block,
    by_code,
    by_power,
    by_scale,
    by_size,
    by_zeros,
    layer,
)

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


def test_nf4_beats_fp4_and_unsearched_integers_and_large_blocks_cost_it_little() -> None:
    largest, searched, fp4, nf4 = (dict(line) for line in by_code().values())
    assert all(nf4[size] < largest[size] < fp4[size] for size in nf4)
    assert searched[64] < nf4[64]
    assert all(nf4[size] < searched[size] for size in nf4 if size > 64)


def test_an_outlier_costs_the_other_inputs_in_integers_alone() -> None:
    integers, floats = (dict(line) for line in by_size().values())
    assert max(floats.values()) < 1.05 * min(floats.values())
    assert integers[3] < floats[3]
    assert integers[30] > floats[30]
    assert integers[300] > 50 * integers[3]


def test_too_large_a_scale_of_float8_costs_nothing_and_too_small_a_one_much() -> None:
    (line,) = by_scale().values()
    errors = dict(line)
    assert all(errors[2.0**power] < 1.01 * errors[1.0] for power in range(11))
    assert errors[0.5] > 2 * errors[1.0]


def test_zero_points_and_searched_scales_both_help_onnx_quantize(error: Callable[..., float]) -> None:
    nearest, nearest_zeros, searched, searched_zeros = (dict(line) for line in by_block(WEIGHT, error).values())
    for size in (16, 32, 64, 128, 256):
        assert searched[size] < nearest[size]
        assert searched_zeros[size] < min(nearest_zeros[size], searched[size])


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
