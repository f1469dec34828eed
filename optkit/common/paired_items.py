"""Two models on the same items: the ratio of their means, and which items turned.
An item is one question of a task; items are independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optkit.common.statistics import Z_975, Estimate, binomial_at_most, exact_ratio, paired_ratio


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
