"""Samples of scorecards that lie on the same windows, items or turns, and what their differences say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from optkit.common.paired_items import is_binary, share_ratio_interval
from optkit.common.statistics import PAIRED_NEIGHBOURS, half_widths, mean
from optkit.measure import Metric
from optkit.scorecard.ratios import is_mean
from optkit.scorecard.scorecard import Measured


class PairedSamples:
    """The samples of one column, those of equal index beside each other.

    `paired_log` subtracts losses of windows, of which neighbours correlate; `exact` does so with
    what else was measured on windows. `paired_mean` and `paired_turns` have independent samples,
    whose relative deviations are subtracted; items that are right or wrong are counted.
    """

    def __init__(self, rows: Sequence[Measured], *, linear: bool) -> None:
        """Take the samples; `linear`: differences are wanted, not logarithms of ratios."""
        metrics = [row.metric for row in rows]
        self._pairing = metrics[0].pairing
        counts = [len(metric.samples) for metric in metrics]
        self._count = max(set(counts), key=counts.count)
        self._turns: dict[tuple[float, ...], int] = {}
        self.sets = numpy.array([self._set(row) for row in rows])
        """Those of one number can be paired; -1 with none."""
        some = [metric for metric, which in zip(metrics, self.sets, strict=True) if which >= 0]
        self._binary = self._pairing == "paired_mean" and all(is_binary(metric.samples) for metric in some)
        whole = linear or self._binary or self._pairing == "paired_log"
        nothing = (0.0,) * self._count
        self._samples = numpy.array(
            [
                nothing if which < 0 else metric.samples if whole else _deviations(metric)
                for metric, which in zip(metrics, self.sets, strict=True)
            ]
        )

    def _set(self, row: Measured) -> int:
        """Timings belong together if they were taken in turns beside the same baseline.
        Its samples show that: no two measurements have equal ones.
        """
        metric, baseline = row.metric, row.baseline
        if self._count < 2 or len(metric.samples) != self._count or metric.interval is None:
            return -1
        if self._pairing == "paired_turns":
            turns = baseline.samples if baseline else ()
            return self._turns.setdefault(turns, len(self._turns)) if len(turns) == self._count else -1
        usable = self._pairing in ("paired_log", "paired_mean", "exact")
        return 0 if usable and (self._pairing == "paired_log" or is_mean(metric)) else -1

    def ends(self, other: int, differences: Any) -> tuple[Any, Any, Any]:
        """Return who can be paired with another, and how far the interval of each of these reaches
        below its difference and above it.
        """
        paired = (self.sets == self.sets[other]) & (self.sets >= 0)
        ours, theirs = self._samples[paired], self._samples[other]
        if not self._binary:
            correlation = PAIRED_NEIGHBOURS if self._pairing in ("paired_log", "exact") else None
            half = half_widths(ours - theirs, correlation)
            return paired, half, half
        both = ours @ theirs
        low, high = share_ratio_interval(both, theirs.sum() - both, ours.sum(1) - both)
        with numpy.errstate(divide="ignore"):
            return paired, differences[paired] - numpy.log(low), numpy.log(high) - differences[paired]


def _deviations(metric: Metric) -> list[float]:
    centre = mean(metric.samples)
    return [each / centre for each in metric.samples]
