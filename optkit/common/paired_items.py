"""Two models on the same items: the ratio of their means, and which items turned.
An item is one question of a task; items are independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optkit.common.statistics import LARGEST, Z_975, Estimate, binomial_at_most, exact_ratio, mean, paired_ratio

LARGEST_LOG = math.log(LARGEST)


def paired_mean_ratio(samples: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the ratio of two means over the same items, not negative, with its interval.
    Right or wrong (1 or 0) is counted; of other scores it is `paired_ratio`.

    Raises ValueError for other numbers of items, for none, and for a baseline of 0.
    """
    if len(samples) != len(baseline) or not samples:
        raise ValueError(f"{len(samples)} items cannot be paired with {len(baseline)}")
    if not (is_binary(samples) and is_binary(baseline)):
        return paired_ratio(samples, baseline)
    lost, won = flips(samples, baseline)
    return paired_share_ratio(round(sum(samples)) - won, lost, won)


def paired_share_ratio(both: int, lost: int, won: int) -> Estimate:
    """Return the ratio of how many items two models have right, with its interval.
    `both` have so many, the baseline alone `lost`, the other alone `won`.

    It is that of Bonett and Price (https://doi.org/10.1002/sim.2440): two Wilson intervals,
    narrowed by what the items have in common. It has a width even if no item turned, unlike those
    of the normal approximation. Raises ValueError if the baseline has none right.
    """
    ratio = exact_ratio(both + won, both + lost).value
    low, high = share_ratio_interval(both, lost, won)
    return Estimate(ratio, (float(low), float(high)))


def share_ratio_interval(both: Any, lost: Any, won: Any) -> tuple[Any, Any]:
    """Return the interval of `paired_share_ratio`, of numbers or of arrays of them.
    The baseline has some items right.
    """
    import numpy

    ours, theirs, items = both + won, both + lost, both + lost + won
    spread = sum(numpy.sqrt((1 - (right + 1) / (items + 2)) / (right + 1)) for right in (ours, theirs))
    narrowed = Z_975 * numpy.sqrt((lost + won + 2) / ((ours + 1) * (theirs + 1))) / spread
    (low, high), (their_low, their_high) = (_wilson(right, items, narrowed) for right in (ours, theirs))
    return low / their_high, high / their_low


def mean_of_ratios(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Estimate:
    """Return the ratio of the means of several tasks' means, each over its own items, with its
    interval. Each pair has the scores of both models on a task, not negative.

    It is symmetric in the logarithm (delta method). Of right and wrong, half an item more is counted
    in each of the four ways that two answers can go, so that it has a width if no item turned.
    Raises ValueError for a baseline of 0.
    """
    if len(pairs) == 1:
        return paired_mean_ratio(*pairs[0])
    ours, theirs = (math.fsum(mean(each[side]) for each in pairs) for side in (0, 1))
    ratio = exact_ratio(ours, theirs).value
    if ratio == 0:
        return Estimate(ratio)
    squares = math.fsum(_deviation(*pair, ours, theirs) for pair in pairs)
    half = Z_975 * math.sqrt(squares)
    return Estimate(ratio, (ratio * math.exp(-half), ratio * math.exp(min(half, LARGEST_LOG))))


def _deviation(samples: Sequence[float], baseline: Sequence[float], ours: float, theirs: float) -> float:
    """Return the square of the standard error that a task adds to the logarithm of the ratio."""
    added = [(1, 1), (1, 0), (0, 1), (0, 0)] if is_binary(samples) and is_binary(baseline) else []
    pairs = [*zip(samples, baseline, strict=True)]
    weighted = [*((one / ours - other / theirs, 1.0) for one, other in pairs)]
    weighted += [(one / ours - other / theirs, 0.5) for one, other in added]
    count = math.fsum(weight for _, weight in weighted)
    centre = math.fsum(value * weight for value, weight in weighted) / count
    return math.fsum(weight * (value - centre) ** 2 for value, weight in weighted) / (count - 1) / count


def flips(samples: Sequence[float], baseline: Sequence[float]) -> tuple[int, int]:
    """Return how many items turned from right to wrong, and from wrong to right."""
    pairs = list(zip(samples, baseline, strict=True))
    return sum(ours < theirs for ours, theirs in pairs), sum(ours > theirs for ours, theirs in pairs)


def mcnemar(lost: int, won: int) -> float:
    """Return how probable it is that so many more items turn one way, if both ways are as likely.
    It is McNemar's exact test (https://doi.org/10.1007/BF02295996), two-sided.
    """
    turned = lost + won
    return min(1.0, 2 * binomial_at_most(min(lost, won), turned, 0.5)) if turned else 1.0


def is_binary(samples: Sequence[float]) -> bool:
    """Say whether each item is right or wrong."""
    return all(sample in (0.0, 1.0) for sample in samples)


def _wilson(hits: Any, trials: Any, z: Any) -> tuple[Any, Any]:
    """Return Wilson's score interval of a share, for a quantile `z` of the normal distribution."""
    import numpy

    share = hits / trials
    centre, half = share + z * z / (2 * trials), z * numpy.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    return numpy.maximum(0.0, centre - half) / (1 + z * z / trials), (centre + half) / (1 + z * z / trials)
