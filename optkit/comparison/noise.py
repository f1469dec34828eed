"""The noise floor: what the unmodified model differs from itself, as scorecards tell it.

The eval `noise_floor` measures accuracy in another batch size, attention kernel and dtype. Of a
timing it is what two measurements of the unmodified model differ in, by the spread of its turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from optkit.common.grouping import grouped
from optkit.common.statistics import mean, t_quantile
from optkit.comparison.columns import NOISE, Table, is_timed
from optkit.comparison.result import Column, Floor
from optkit.scorecard.scorecard import Measured, Scorecard

SOURCE = "against"
"""Label of a row of noise: what was varied."""


def floors_of(cards: Sequence[Scorecard], table: Table) -> tuple[Floor, ...]:
    """Return the floor of each column that has one."""
    metrics = (row.metric for card in cards for row in card.rows)
    measured = (metric for metric in metrics if metric.name.startswith(NOISE) and not metric.failure)
    noise = grouped(measured, lambda metric: metric.name.removeprefix(NOISE))
    found = list[Floor]()
    for column in table.columns:
        rows = [row[column.key] for row in table.rows if column.key in row]
        if is_timed(rows[0].metric):
            found += _of_turns(column, rows)
        elif varied := noise.get(column.name):
            worst = max(metric.value for metric in varied)
            kinds = dict.fromkeys(str(metric.labels.get(SOURCE, "")) for metric in varied)
            relative = varied[0].unit == "fraction" and column.unit == "perplexity"
            found.append(
                Floor(column=column.key, value=worst, relative=relative, source=", ".join(filter(None, kinds)))
            )
    return tuple(found)


def _of_turns(column: Column, rows: Sequence[Measured]) -> Iterator[Floor]:
    """Yield what 95 of 100 pairs of measurements of the unmodified model differ in at most.
    It is by the variance of their turns, of all measurements together.
    """
    if rows[0].metric.pairing != "paired_turns":
        return
    baselines = {row.baseline.samples for row in rows if row.baseline and len(row.baseline.samples) >= 2}
    baselines = {samples for samples in baselines if mean(samples) > 0}
    if not baselines:
        return
    squares = math.fsum(math.fsum((each / mean(turns) - 1) ** 2 for each in turns) for turns in baselines)
    degrees = sum(len(turns) - 1 for turns in baselines)
    each = mean([len(turns) for turns in baselines])
    value = t_quantile(degrees) * math.sqrt(2 * squares / degrees / each)
    yield Floor(
        column=column.key,
        value=value,
        relative=True,
        source=f"two measurements of the unmodified model, by the spread of {degrees + len(baselines)} turns",
    )
