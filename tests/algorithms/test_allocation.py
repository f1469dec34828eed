"""The knapsack against every combination, on small cases; and a case of real size."""

import itertools
import random
from typing import Any

import pytest

from optkit.algorithms import allocation
from optkit.algorithms.allocation import choose


def brute_force(costs: list[list[float]], sizes: list[list[int]], budget: int) -> float:
    best = float("inf")
    for options in itertools.product(*(range(len(row)) for row in costs)):
        if sum(row[index] for row, index in zip(sizes, options, strict=True)) <= budget:
            best = min(best, sum(row[index] for row, index in zip(costs, options, strict=True)))
    return best


def random_case(seed: int) -> tuple[list[list[float]], list[list[int]]]:
    draw = random.Random(seed)
    widths = [draw.randint(1, 4) for _ in range(draw.randint(1, 6))]
    sizes = [[draw.randint(1, 30) for _ in range(width)] for width in widths]
    ties = draw.random() < 0.3
    costs = [
        [float(draw.randint(0, 3)) if ties else draw.lognormvariate(0, 2) for _ in range(width)] for width in widths
    ]
    return costs, sizes


@pytest.mark.parametrize("seed", range(150))
def test_nothing_is_better(seed: int) -> None:
    costs, sizes = random_case(seed)
    low, high = sum(map(min, sizes)), sum(map(max, sizes))
    for budget in {low, high, (low + high) // 2, low + (high - low) // 4}:
        options = choose(costs, sizes, budget)
        assert sum(row[index] for row, index in zip(sizes, options, strict=True)) <= budget
        chosen = sum(row[index] for row, index in zip(costs, options, strict=True))
        assert chosen == pytest.approx(brute_force(costs, sizes, budget), rel=1e-9, abs=1e-12)


def test_a_budget_that_nothing_fits_names_the_least() -> None:
    with pytest.raises(ValueError, match="the smallest options take 12 and the budget is 11"):
        choose([[1.0, 2.0], [3.0]], [[9, 5], [7]], 11)


def test_a_large_model_needs_few_partial_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 11^320 that there are; without bounds or dominance they grow with each layer."""
    held = []

    def counted(sizes: Any, *parts: Any) -> Any:
        held.append(len(sizes))
        return partial(sizes, *parts)

    partial = allocation._Partial
    monkeypatch.setattr(allocation, "_Partial", counted)
    draw = random.Random(1)
    layers = [draw.choice([4096 * 6144, 4096 * 4096, 4096 * 28672, 14336 * 4096]) for _ in range(320)]
    bits = [2.25, 2.5, 3.25, 3.5, 3.57, 4.25, 4.3125, 4.5, 4.625, 8.25, 8.5]
    sizes = [[int(layer * each / 8) for each in bits] for layer in layers]
    costs = [[draw.lognormvariate(0, 1) * 4.0**-each for each in bits] for _ in layers]
    options = choose(costs, sizes, int(sum(layers) * 4.4 / 8))
    assert len(held) == len(layers) + 1
    assert max(held) < 5000
    used = sum(row[index] for row, index in zip(sizes, options, strict=True))
    assert used <= sum(layers) * 4.4 / 8
    assert used > sum(layers) * 4.39 / 8
