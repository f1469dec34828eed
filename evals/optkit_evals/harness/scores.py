"""Scores of items as metrics: each with an interval, and with samples that pair it with another model's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optkit.common.paired_items import is_binary
from optkit.common.statistics import Z_975, Estimate, mean, mean_estimate, share_estimate
from optkit.measure import Metric
from optkit_evals.harness.asking import Score

RENAMED = {"perplexity": "task_perplexity"}
"""Names that another eval has: a gate on `perplexity` means that of a text."""
UNITS = {"task_perplexity": "perplexity", "word_perplexity": "perplexity", "byte_perplexity": "perplexity"}
FRACTIONS = frozenset({"acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match", "f1"})
DRAWS = 1000
"""Of the bootstrap, for what is no mean of items."""
LOSS_BOUND = 700.0


def metric_name(name: str) -> str:
    """Return what a metric of the harness is called in scorecards."""
    return RENAMED.get(name, name)


def unit_of(name: str) -> str:
    """Return the unit of a metric as a recipe's gates name it."""
    return UNITS.get(name, "fraction" if name in FRACTIONS else "score")


def labels_of(task: str, group: str, filtered: str) -> dict[str, int | str]:
    """Return the labels of a row."""
    return {"task": task, **({"group": group} if group else {}), **({"filter": filtered} if filtered else {})}


def as_metric(score: Score, task: str, group: str, protocol: str) -> Metric:
    """Return a score as a metric.
    Means and perplexities have a sample for each item, so that ratios are paired. Others have the
    interval of a bootstrap.
    """
    name = metric_name(score.metric)
    samples = _samples(score)
    fields: dict[str, Any] = {
        "name": name,
        "labels": labels_of(task, group, score.filter),
        "value": score.value,
        "unit": unit_of(name),
        "higher_is_better": score.higher_is_better,
        "protocol": protocol,
    }
    if samples is None:
        return Metric(**fields, interval=_bootstrapped(score), pairing="independent")
    if unit_of(name) == "perplexity":
        low, high = _t_interval(samples, -math.inf, LOSS_BOUND)
        return Metric(**fields, interval=(math.exp(low), math.exp(high)), samples=samples, pairing="paired_log")
    if is_binary(samples):
        interval = share_estimate(samples, (1,) * len(samples)).interval
    else:
        interval = _t_interval(samples, *((0.0, 1.0) if all(0 <= each <= 1 for each in samples) else ()))
    return Metric(**fields, interval=interval, samples=samples, pairing="paired_mean" if min(samples) >= 0 else "exact")


def _samples(score: Score) -> tuple[float, ...] | None:
    """Return what each item adds: the mean of it is the value, or its logarithm for a perplexity.
    None for a number that no items add up to.
    """
    kind, items = score.aggregation.__name__, score.items
    if kind == "mean" and all(isinstance(each, int | float) for each in items):
        return tuple(map(float, items))
    if kind == "perplexity":
        return tuple(-float(each) for each in items)
    if kind in ("weighted_perplexity", "bits_per_byte"):
        # The ratio of two sums, to first order: each item's part has the ratio as its mean.
        losses, weights = [-float(loss) for loss, _ in items], [float(weight) for _, weight in items]
        whole, width = math.fsum(losses) / math.fsum(weights), mean(weights)
        scale = math.log(2) if kind == "bits_per_byte" else 1.0
        parts = ((loss - whole * weight) / width for loss, weight in zip(losses, weights, strict=True))
        return tuple((whole + part) / scale for part in parts)
    return None


def _t_interval(samples: Sequence[float], least: float = -math.inf, most: float = math.inf) -> tuple[float, float]:
    if len(samples) < 2:
        return (least, most) if math.isfinite(least) else (samples[0], samples[0])
    estimate: Estimate = mean_estimate(samples, least, most)
    return estimate.interval or (estimate.value, estimate.value)


def _bootstrapped(score: Score) -> tuple[float, float]:
    """Return the interval of a number whose items are drawn again and again."""
    import numpy

    chance, count = numpy.random.default_rng(0), len(score.items)
    drawn = (chance.integers(count, size=count) for _ in range(DRAWS))
    values = [float(score.aggregation([score.items[place] for place in places])) for places in drawn]
    half = Z_975 * float(numpy.std(values, ddof=1))
    return score.value - half, score.value + half
