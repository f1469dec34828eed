"""One axis of a comparison: the differences between scorecards, and which of them are measurable.

Numbers of the same windows, items or turns are subtracted sample by sample, others by their
intervals. Ratios are formed as differences of logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy

from optkit.common.statistics import PAIRED_NEIGHBOURS, half_widths, mean
from optkit.comparison.result import Column, Difference, Floor, Relation
from optkit.measure import Metric
from optkit.scorecard.scorecard import Measured

NEGLIGIBLE = 0.001
"""Differences below this fraction are none, however certain: nobody chooses by them."""
LINEAR_UNITS = ("nats/token", "fraction", "cosine", "correlation")
"""Units of numbers that can be 0, of which differences are formed and no ratios."""
RELATIONS: dict[int, Relation] = {1: "better", 0: "none", -1: "worse"}


class Axis:
    """One column of the scorecards that are ranked together."""

    def __init__(self, column: Column, rows: Sequence[Measured], floor: Floor | None, beside_baseline: bool) -> None:
        """Take the numbers of each scorecard.
        `beside_baseline`: all have one unmodified model, so that a timing can be told by its ratio.
        """
        self.column, self.linear = column, column.unit in LINEAR_UNITS
        metrics = [row.metric for row in rows]
        self.values = numpy.array([metric.value for metric in metrics])
        self._sign = 1.0 if column.higher_is_better else -1.0
        self._floor = floor
        by_ratio = beside_baseline and all(row.ratio and row.ratio_interval for row in rows)
        timed = bool(column.environment) and metrics[0].pairing == "paired_turns"
        points = [
            (row.ratio, row.ratio_interval) if by_ratio and timed else (row.metric.value, row.metric.interval)
            for row in rows
        ]
        self.places = numpy.array([self._place(value) for value, _ in points])
        """Where each lies: its value, or the logarithm of that."""
        ends = [interval or (value, value) for value, interval in points]
        self._below = self.places - [self._place(low) for low, _ in ends]
        self._above = [self._place(high) for _, high in ends] - self.places
        self._sets = _sets(rows, timed)
        self._correlation = None if timed else PAIRED_NEIGHBOURS
        self._samples = numpy.array([])
        if any(each >= 0 for each in self._sets):
            self._samples = numpy.array([self._paired(metric, len(_samples_of(rows))) for metric in metrics])
        self.noisy = bool(any(interval for _, interval in points))
        self.widening = 1.0
        """Set by `widen`."""

    def _place(self, value: float | None) -> float:
        value = value or 0.0
        return value if self.linear else math.log(max(value, 1e-300))

    def _paired(self, metric: Metric, count: int) -> list[float]:
        """Return samples of which the mean difference to another's is the difference of places."""
        if len(metric.samples) != count:
            return [0.0] * count
        if metric.pairing == "paired_log" or self.linear:
            return list(metric.samples)
        centre = mean(metric.samples)
        return [each / centre for each in metric.samples]

    def against(self, other: int) -> tuple[Any, Any, Any]:
        """Return place less that of another, and its 95% interval, float64 [scorecards] each."""
        differences = self.places - self.places[other]
        down = numpy.hypot(self._below, self._above[other])
        up = numpy.hypot(self._above, self._below[other])
        pairs = (self._sets == self._sets[other]) & (self._sets >= 0)
        if pairs.any():
            half = half_widths(self._samples[pairs] - self._samples[other], self._correlation)
            down[pairs] = up[pairs] = half
        return differences, differences - down * self.widening, differences + up * self.widening

    def relations(self, other: int) -> Any:
        """Return what each is to another: int8 [scorecards], 1 better, -1 worse, 0 no difference."""
        differences, low, high = self.against(other)
        certain = ((low > 0) | (high < 0)) & (numpy.abs(differences) > self._least(other))
        return (numpy.sign(differences) * self._sign * certain).astype(numpy.int8)

    def _least(self, other: int) -> Any:
        """Return below what a difference is none."""
        if not self.linear:
            return math.log1p(max(NEGLIGIBLE, self._floor.value if self._floor else 0.0))
        least = NEGLIGIBLE * numpy.maximum(numpy.abs(self.values), abs(self.values[other]))
        return numpy.maximum(least, self._floor.value) if self._floor else least

    def difference(self, this: int, other: int) -> Difference:
        """Return what one is to another, as people read it."""
        differences, low, high = (float(each[this]) for each in self.against(other))
        shown = (differences, low, high) if self.linear else tuple(map(math.exp, (differences, low, high)))
        return Difference(
            axis=self.column.key,
            relative=not self.linear,
            value=shown[0],
            interval=None if low == high else (shown[1], shown[2]),
            relation=RELATIONS[int(self.relations(other)[this])],
        )


def widen(axes: Sequence[Axis]) -> None:
    """Let the intervals of all axes hold together in 95 of 100 cases (Bonferroni).
    Else the same model beside itself would look better in one of them too often.
    """
    noisy = [axis for axis in axes if axis.noisy]
    for axis in noisy:
        normal = NormalDist()
        axis.widening = normal.inv_cdf(1 - 0.025 / len(noisy)) / normal.inv_cdf(0.975)


def _samples_of(rows: Sequence[Measured]) -> tuple[float, ...]:
    """Return the samples whose number the most scorecards have."""
    counts = [len(row.metric.samples) for row in rows]
    most = max(set(counts), key=counts.count)
    return rows[counts.index(most)].metric.samples


def _sets(rows: Sequence[Measured], timed: bool) -> Any:
    """Return for each scorecard the set in which samples of one index belong together; -1 for none.

    Of a text all do. Timings do if they were taken in turns beside the same baseline, which its
    samples show: no two measurements have equal ones.
    """
    count = len(_samples_of(rows))
    groups: dict[tuple[float, ...], int] = {}
    found = []
    for row in rows:
        metric = row.metric
        usable = count >= 2 and len(metric.samples) == count and metric.interval is not None
        if usable and timed:
            turns = row.baseline.samples if row.baseline else ()
            found.append(groups.setdefault(turns, len(groups)) if len(turns) == count else -1)
        else:
            found.append(0 if usable and not timed and _is_mean(metric) else -1)
    return numpy.array(found)


def _is_mean(metric: Metric) -> bool:
    """Say whether the value is the mean of the samples, as it must be to be paired by them."""
    if metric.pairing == "paired_log":
        return True
    return math.isclose(mean(metric.samples), metric.value, rel_tol=1e-6, abs_tol=1e-12)
