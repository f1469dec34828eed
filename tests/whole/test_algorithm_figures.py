"""The figures of docs/understand/algorithms show what their pages say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from docs.understand.algorithms.draw import Lines, by_alpha, by_bits, by_power, by_zeros, layer

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
