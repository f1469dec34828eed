"""What each stage added to the damage, or to the speed (a waterfall).
It shows the numbers after each stage, and the change to those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optkit.common.markdown import markdown_table
from optkit.measure import Metric
from optkit.scorecard.numbers import format_ratio, significant
from optkit.scorecard.ratios import metric_identity, ratio_to_baseline
from optkit.scorecard.scorecard import Rung
from optkit.scorecard.table import NOTHING, metric_label, value_text


@dataclass(frozen=True)
class Waterfall:
    """The table has a line after each stage.
    For each metric it has the value, and the change that the stage made.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """Return the table in Markdown."""
        return markdown_table(self.columns, self.rows)


def waterfall(rungs: Sequence[Rung]) -> Waterfall | None:
    """Return what each stage added, None if nothing was attributed.

    The change is the ratio to the number before if the two can be paired, token by token or turn
    by turn, else the difference.
    """
    if not rungs:
        return None
    wanted = [*{metric_identity(metric): metric for metric in rungs[-1].metrics}.values()]
    known = [{metric_identity(metric): metric for metric in reversed(rung.metrics)} for rung in rungs]
    ladders = [[each.get(metric_identity(metric)) for each in known] for metric in wanted]
    columns = ("after", *(text for metric in wanted for text in (metric_label(metric), "change [95%]")))
    rows = [
        (rung.stage, *(text for ladder in ladders for text in _cells(ladder, index)))
        for index, rung in enumerate(rungs)
    ]
    return Waterfall(columns, tuple(rows))


def _cells(ladder: Sequence[Metric | None], index: int) -> tuple[str, str]:
    metric = ladder[index]
    if metric is None:
        return NOTHING, NOTHING
    value = value_text(metric)
    before = ladder[index - 1] if index else None
    if before is not None and _is_ratio(metric) and not (metric.failure or before.failure) and before.value:
        ratio = ratio_to_baseline(metric, before)
        return value, format_ratio(ratio.value, ratio.interval)
    if not index or _is_ratio(metric):
        return value, NOTHING
    of_unmodified = 1.0 if metric.higher_is_better else 0.0  # an agreement with itself, a distance from itself
    difference = metric.value - (before.value if before else of_unmodified)
    return value, f"{'+' if difference >= 0 else '-'}{significant(abs(difference), 3)}"


def _is_ratio(metric: Metric) -> bool:
    return metric.pairing in ("paired_log", "paired_turns")
