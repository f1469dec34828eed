"""Uncertainty of measured numbers: means with t intervals, ratios with intervals, a seeded bootstrap. All intervals are 95%."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""The 97.5% quantile of Student's t for 1 to 10 degrees of freedom."""
_Z_975 = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval; no interval where the number has no error."""

    value: float
    interval: tuple[float, float] | None = None


def mean(samples: Sequence[float]) -> float:
    """Return the arithmetic mean; raises ValueError for no samples."""
    if not samples:
        raise ValueError("no samples")
    return math.fsum(samples) / len(samples)


def standard_error(samples: Sequence[float]) -> float:
    """Return the standard error of the mean of independent samples; raises ValueError for fewer than two."""
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} sample(s) have no standard error: at least 2 are needed")
    centre = mean(samples)
    variance = math.fsum((sample - centre) ** 2 for sample in samples) / (len(samples) - 1)
    return math.sqrt(variance / len(samples))


def t_quantile(degrees: float) -> float:
    """Return the 97.5% quantile of Student's t.

    Up to 10 degrees from a table (linear in 1/degrees in between); above, four terms of the Cornish-Fisher expansion (Abramowitz and
    Stegun 26.7.5), which is within 1e-4 there.
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom: at least 1 is needed")
    if degrees <= 10:
        below = math.floor(degrees)
        if below == degrees:
            return _T_975[below - 1]
        weight = (1 / below - 1 / degrees) / (1 / below - 1 / (below + 1))
        return _T_975[below - 1] * (1 - weight) + _T_975[below] * weight
    z = _Z_975
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees ** (power + 1) for power, term in enumerate(terms))


def mean_estimate(samples: Sequence[float], least: float = -math.inf, most: float = math.inf) -> Estimate:
    """Return the mean of independent samples with its t interval; raises ValueError for fewer than two.

    The interval is cut off at `least` and `most`, the limits of what is possible: the mean cannot lie beyond them, so no coverage is lost.
    """
    error = standard_error(samples)
    centre, half = mean(samples), error * t_quantile(len(samples) - 1)
    return Estimate(centre, (max(least, centre - half), min(most, centre + half)))


def pooled_quantile(groups: Sequence[Sequence[float]], fraction: float, seed: int, resamples: int = 1000) -> Estimate:
    """Return a quantile of all values; its interval is the percentile bootstrap's, which resamples whole groups (Efron 1979).

    Values within a group may depend on each other (tokens of a window). Raises ValueError for fewer than two groups.
    """
    import numpy

    if len(groups) < 2:
        raise ValueError(f"{len(groups)} group(s) cannot be resampled: at least 2 are needed")
    arrays = [numpy.asarray(group, dtype=numpy.float64) for group in groups]
    generator = numpy.random.default_rng(seed)
    draws = [
        numpy.quantile(numpy.concatenate([arrays[index] for index in generator.integers(len(arrays), size=len(arrays))]), fraction)
        for _ in range(resamples)
    ]
    low, high = numpy.quantile(draws, [0.025, 0.975])
    return Estimate(float(numpy.quantile(numpy.concatenate(arrays), fraction)), (float(low), float(high)))


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Return a quantile of the samples, linear between neighbours (numpy's default)."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def exact_ratio(value: float, baseline: float) -> Estimate:
    """Return the ratio of two numbers that have no error; raises ValueError where the baseline is 0."""
    if baseline == 0:
        raise ValueError("a ratio to 0 has no value")
    return Estimate(value / baseline)


def paired_log_ratio(samples: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return exp of the mean difference of paired log samples, e.g. window losses on the same tokens -> ratio of perplexities.

    Raises ValueError for fewer than two pairs. Beyond e^700, the range of a float, ratios and bounds are e^700.
    """
    if len(samples) != len(baseline):
        raise ValueError(f"{len(samples)} samples cannot be paired with {len(baseline)}")
    difference = mean_estimate([ours - theirs for ours, theirs in zip(samples, baseline, strict=True)])
    low, high = difference.interval or (difference.value, difference.value)
    value, low, high = (math.exp(min(each, 700.0)) for each in (difference.value, low, high))
    return Estimate(value, (low, high))


def independent_ratio(samples: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the ratio of the means of two unrelated sets of positive samples.

    The interval is symmetric in the logarithm: relative standard errors added in quadrature (delta method), degrees of freedom by Welch and
    Satterthwaite. Raises ValueError for fewer than two samples or a mean that is not positive.
    """
    means = mean(samples), mean(baseline)
    if min(means) <= 0:
        raise ValueError(f"means {means[0]:g} and {means[1]:g}: a ratio of timings needs positive ones")
    relative = [(standard_error(each) / centre) ** 2 for each, centre in zip((samples, baseline), means, strict=True)]
    variance = sum(relative)
    ratio = means[0] / means[1]
    if variance == 0:
        return Estimate(ratio, (ratio, ratio))
    spread = sum(part**2 / (len(each) - 1) for part, each in zip(relative, (samples, baseline), strict=True))
    half = t_quantile(variance**2 / spread) * math.sqrt(variance)
    return Estimate(ratio, (ratio * math.exp(-half), ratio * math.exp(half)))
