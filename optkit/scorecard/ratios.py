"""The ratio of one number of two models, and why there is none."""

from __future__ import annotations

import re

from optkit.common.paired_items import paired_mean_ratio
from optkit.common.statistics import Estimate, exact_ratio, independent_ratio, mean, paired_log_ratio, paired_ratio
from optkit.measure import Metric

_PARTS = re.compile(r"[;,] ")


def ratio_to_baseline(metric: Metric, baseline: Metric) -> Estimate:
    """Return the ratio of a metric to that of a model measured beside it, as its `pairing` says.
    Raises ValueError if there is none.
    """
    if metric.pairing == "paired_log":
        return paired_log_ratio(metric.samples, baseline.samples)
    if metric.pairing == "paired_mean":
        return paired_mean_ratio(metric.samples, baseline.samples)
    if metric.pairing == "paired_turns" and len(metric.samples) == len(baseline.samples):
        return paired_ratio(metric.samples, baseline.samples)
    if metric.pairing == "exact":
        return _ratio_of_windows(metric, baseline)
    return independent_ratio(Estimate(metric.value, metric.interval), Estimate(baseline.value, baseline.interval))


def ratio_to_earlier(metric: Metric, earlier: Metric) -> Estimate:
    """Return the ratio of a metric to one of another run, formed as `ratio_to_baseline` does.
    Turns of two runs were not neighbours, so that timings have the errors of both; so have numbers
    whose samples were lost.

    Raises ValueError if there is none.
    """
    apart = metric.pairing == "paired_turns" or len(metric.samples) != len(earlier.samples)
    counted = metric.pairing == "exact" and not metric.interval
    alone = metric.model_copy(update={"pairing": "independent"}) if apart and not counted else metric
    return ratio_to_baseline(alone, earlier)


def _ratio_of_windows(metric: Metric, other: Metric) -> Estimate:
    """Return the ratio of two counts, or of two means over the same windows of a text.
    A quantile of all tokens is no mean of its windows: its ratio is that of the intervals.
    """
    if not (metric.interval and other.interval):
        return exact_ratio(metric.value, other.value)
    if len(metric.samples) == len(other.samples) > 1 and is_mean(metric) and is_mean(other):
        return paired_ratio(metric.samples, other.samples, neighbours=True)
    return independent_ratio(Estimate(metric.value, metric.interval), Estimate(other.value, other.interval))


def is_mean(metric: Metric) -> bool:
    """Say whether the value is the mean of the samples, so that it can be paired by them."""
    return abs(mean(metric.samples) - metric.value) <= 1e-9 * abs(metric.value)


def metric_identity(metric: Metric) -> tuple[str, tuple[tuple[str, int | str], ...], str]:
    """Return what must be equal for two metrics to be the same number of two models."""
    return metric.name, tuple(sorted(metric.labels.items())), metric.protocol


def protocol_difference(ours: str, theirs: str) -> tuple[str, str]:
    """Return the parts of two protocols that the other does not have, as text."""
    parts = [[part.strip() for part in _PARTS.split(protocol)] for protocol in (ours, theirs)]
    only = [", ".join(part for part in some if part not in other) for some, other in (parts, parts[::-1])]
    return only[0] or ours, only[1] or theirs
