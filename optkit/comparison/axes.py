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

from optkit.comparison.paired import PairedSamples
from optkit.comparison.result import Column, Difference, Floor, Relation
from optkit.scorecard.scorecard import Measured

NEGLIGIBLE = 0.001
"""Differences below this fraction are none, however certain: nobody chooses by them."""
LINEAR_UNITS = ("nats/token", "fraction", "cosine", "correlation")
"""Units of numbers that can be 0: of these, and of what is not above it, differences are formed and no
ratios.
"""
RELATIONS: dict[int, Relation] = {1: "better", 0: "none", -1: "worse"}
SMALLEST, LARGEST = 1e-300, 700.0
"""Numbers and logarithms of ratios beyond these are not told apart."""


class Axis:
    """One column of the scorecards that are ranked together."""

    def __init__(self, column: Column, rows: Sequence[Measured], floor: Floor | None, one_model: bool) -> None:
        """Take the numbers of each scorecard.

        If all have `one_model` unmodified, a timing is told by its ratio to that: each was timed in
        turns with its baseline, so that what was slow on one day cancels.
        """
        pairing = rows[0].metric.pairing
        self.column = column
        least = min(row.metric.value for row in rows)
        self.linear = least <= 0 or (column.unit in LINEAR_UNITS and pairing != "paired_mean")
        by_ratio = one_model and pairing == "paired_turns" and all(row.ratio and row.ratio_interval for row in rows)
        points = [
            (row.ratio, row.ratio_interval) if by_ratio else (row.metric.value, row.metric.interval) for row in rows
        ]
        ends = [interval or (value, value) for value, interval in points]
        self.places = self._placed([value for value, _ in points])
        """Where each lies: its value, or the logarithm of that."""
        self._below = self.places - self._placed([low for low, _ in ends])
        self._above = self._placed([high for _, high in ends]) - self.places
        self._paired = PairedSamples(rows, linear=self.linear)
        self._floor = floor.value if floor else 0.0
        self._sign = 1.0 if column.higher_is_better else -1.0
        self.noisy = any(interval for _, interval in points)
        self.widening = 1.0
        """By which intervals are wider than those of 95% for this axis alone."""

    @property
    def merits(self) -> Any:
        """Where each lies, more being better: float64 [scorecards]."""
        return self.places * self._sign

    def _placed(self, values: Sequence[float | None]) -> Any:
        numbers = numpy.array(values, dtype=numpy.float64)
        return numbers if self.linear else numpy.log(numpy.maximum(numbers, SMALLEST))

    def against(self, other: int) -> tuple[Any, Any, Any]:
        """Return place less that of another, and its 95% interval, float64 [scorecards] each."""
        differences = self.places - self.places[other]
        paired: Any = numpy.zeros(len(differences), dtype=bool)
        down: Any = 0.0
        up: Any = 0.0
        if self._paired.sets[other] >= 0:
            paired, down, up = self._paired.ends(other, differences)
        if not paired.all():
            below, above = down, up
            down = numpy.hypot(self._below, self._above[other])
            up = numpy.hypot(self._above, self._below[other])
            down[paired], up[paired] = below, above
        return differences, differences - down * self.widening, differences + up * self.widening

    def relations(self, other: int) -> Any:
        """Return what each is to another: int8 [scorecards], 1 better, -1 worse, 0 no difference."""
        differences, low, high = self.against(other)
        certain = ((low > 0) | (high < 0)) & (numpy.abs(differences) > self._least(other))
        certain[other] = False
        return (numpy.sign(differences) * self._sign * certain).astype(numpy.int8)

    def _least(self, other: int) -> Any:
        """Return below what a difference is none."""
        if not self.linear:
            return math.log1p(max(NEGLIGIBLE, self._floor))
        return numpy.maximum(self._floor, NEGLIGIBLE * numpy.maximum(abs(self.places), abs(self.places[other])))

    def differences(self, other: int) -> list[Difference]:
        """Return what each is to another, as people read it."""
        ends = numpy.stack(self.against(other), axis=1)
        shown = ends if self.linear else numpy.exp(numpy.minimum(ends, LARGEST))
        return [
            Difference(
                axis=self.column.key,
                relative=not self.linear,
                value=value,
                interval=None if low == high else (low, high),
                relation=RELATIONS[relation],
            )
            for (value, low, high), relation in zip(shown.tolist(), self.relations(other).tolist(), strict=True)
        ]


def widen(axes: Sequence[Axis]) -> None:
    """Let the intervals of all axes hold together in 95 of 100 cases (Bonferroni).
    Else the same model beside itself would look better in one of them too often.
    """
    noisy, normal = [axis for axis in axes if axis.noisy], NormalDist()
    for axis in noisy:
        axis.widening = normal.inv_cdf(1 - 0.025 / len(noisy)) / normal.inv_cdf(0.975)
