"""Choose one option for each item so that costs are least and sizes fit a budget.
This is the multiple-choice knapsack, solved exactly.

The Lagrangian relaxation gives a lower bound (Sinha and Zoltners 1979); a dynamic program over
partial choices gives the optimum. It leaves out those that are dominated or cannot beat the best
known answer (Dyer, Riha and Walker 1995). No unit of size is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Sizes = NDArray[np.int64]
HALVINGS = 200
"""Steps of the search for the price of a byte: more than a float64 has bits."""
TOLERANCE = 1e-12
"""Of the best known cost: rounding of sums must not lose the optimum."""


@dataclass(frozen=True)
class _Partial:
    """Choices of the first items that may still lead to the optimum, by size."""

    sizes: Sizes
    costs: Costs
    parents: NDArray[np.int64]
    options: NDArray[np.int64]


def choose(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> list[int]:
    """Return each item's option: the least sum of costs whose sum of sizes is at most `budget`.

    costs, sizes: one row per item, one entry per option. Raises ValueError if even the smallest
    options do not fit.
    """
    all_costs: list[Costs] = [np.asarray(row, dtype=np.float64) for row in costs]
    all_sizes: list[Sizes] = [np.asarray(row, dtype=np.int64) for row in sizes]
    smallest = sum(int(row.min()) for row in all_sizes)
    if smallest > budget:
        raise ValueError(f"the smallest options take {smallest} and the budget is {budget}")
    price, best = _priced(all_costs, all_sizes, budget)
    known = sum(float(row[index]) for row, index in zip(all_costs, best, strict=True))
    return _search(all_costs, all_sizes, budget, price, known) or best


def _cheapest(costs: Sequence[Costs], sizes: Sequence[Sizes], price: float) -> list[int]:
    """Return the options with the least cost + price * size; of equal ones the smallest."""
    return [int(np.lexsort((size, cost + price * size))[0]) for cost, size in zip(costs, sizes, strict=True)]


def _total(sizes: Sequence[Sizes], options: Sequence[int]) -> int:
    return sum(int(row[index]) for row, index in zip(sizes, options, strict=True))


def _priced(costs: Sequence[Costs], sizes: Sequence[Sizes], budget: int) -> tuple[float, list[int]]:
    """Return the price of a unit of size at which the cheapest options just fit, and these options."""
    options = _cheapest(costs, sizes, 0.0)
    if _total(sizes, options) <= budget:
        return 0.0, options
    low, high = 0.0, 1.0
    while _total(sizes, options := _cheapest(costs, sizes, high)) > budget:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        tried = _cheapest(costs, sizes, middle)
        if _total(sizes, tried) > budget:
            low = middle
        else:
            high, options = middle, tried
    return high, options


def _search(
    costs: Sequence[Costs], sizes: Sequence[Sizes], budget: int, price: float, known: float
) -> list[int] | None:
    """Return the optimal options, None if nothing beats the cost that is `known`."""
    priced = [cost + price * size for cost, size in zip(costs, sizes, strict=True)]
    rest_bound = _sums_from_the_end([float(row.min()) for row in priced])
    rest_size = _sums_from_the_end([int(row.min()) for row in sizes])
    zero = np.zeros(1, dtype=np.int64)
    stages = [_Partial(zero, np.zeros(1), zero, zero)]
    for index, (cost, size) in enumerate(zip(costs, sizes, strict=True)):
        before = stages[-1]
        made_sizes = (before.sizes[:, None] + size).ravel()
        made_costs = (before.costs[:, None] + cost).ravel()
        least = made_costs + price * (made_sizes - budget) + rest_bound[index + 1]
        hopeful = np.flatnonzero(
            (made_sizes + rest_size[index + 1] <= budget) & (least <= known + TOLERANCE * abs(known))
        )
        order = hopeful[np.lexsort((made_costs[hopeful], made_sizes[hopeful]))]
        ahead = np.minimum.accumulate(np.concatenate(([np.inf], made_costs[order])))[:-1]
        kept = order[made_costs[order] < ahead]
        stages.append(_Partial(made_sizes[kept], made_costs[kept], kept // len(cost), kept % len(cost)))
    if not len(stages[-1].costs):
        return None
    place, chosen = int(stages[-1].costs.argmin()), []
    for stage in reversed(stages[1:]):
        chosen.append(int(stage.options[place]))
        place = int(stage.parents[place])
    return chosen[::-1]


def _sums_from_the_end(values: Sequence[float]) -> list[float]:
    return [*accumulate(reversed(values), initial=0.0)][::-1]
