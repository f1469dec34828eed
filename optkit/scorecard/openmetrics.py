"""Numbers in the text format of OpenMetrics (https://prometheus.io/docs/specs/om/open_metrics_spec/),
which GitLab's metrics report reads.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from optkit.common.statistics import Estimate
from optkit.measure import Metric
from optkit.recipe.gates import RELATIVE_TO, Verdict
from optkit.scorecard.gate_lines import gate_lines
from optkit.scorecard.scorecard import EXIT_STATUS, Measured, Scorecard

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

Line = tuple[str, dict[str, str], float]
"""Name, labels, value."""


def to_openmetrics(scorecard: Scorecard) -> str:
    """Return a gauge for each number and ratio, with the ends of its 95% interval, and for each
    gate the exit status that it alone would give.

    The label `protocol` is a digest, so that numbers of different protocols are never compared.
    Numbers that were not measured are left out.
    """
    from prometheus_client.openmetrics.exposition import generate_latest

    lines = number_lines(scorecard)
    lines += [
        ("gate_exit_status", {"gate": f"{line.row} {line.limit}"}, EXIT_STATUS[line.verdict])
        for line in gate_lines(scorecard)
        if line.verdict is not Verdict.SKIPPED
    ]
    written: bytes = generate_latest(_Families(scorecard.name, lines))
    return written.decode("utf-8")


def number_lines(scorecard: Scorecard) -> list[Line]:
    """Return every number and ratio that was measured, with the ends of its interval."""
    return [line for row in scorecard.rows for line in _of_row(row)]


class _Families:
    """A registry as prometheus_client asks it."""

    def __init__(self, recipe: str, lines: list[Line]) -> None:
        self.recipe, self.lines = recipe, lines

    def collect(self) -> Iterator[Family]:
        """Yield each name once, with all of its numbers."""
        from prometheus_client.core import Metric as Family

        for name in dict.fromkeys(name for name, _, _ in self.lines):
            family = Family(f"optkit_{name}", f"{name} as optkit measured it", "gauge")
            for its_name, labels, value in self.lines:
                if its_name == name:
                    family.add_sample(family.name, {"recipe": self.recipe, **labels}, value)
            yield family


def _of_row(row: Measured) -> Iterator[Line]:
    name, labels = _name(row.metric.name), _labels(row.metric)
    models = [("artifact", row.metric), ("baseline", row.baseline), *((each.of, each.metric) for each in row.beside)]
    for model, metric in models:
        if metric and not metric.failure:
            yield from _of_number(name, {**labels, "model": model}, Estimate(metric.value, metric.interval))
    for of in RELATIVE_TO:
        if ratio := row.number(of):
            yield from _of_number(f"{name}_ratio", {**labels, "of": of}, ratio)


def _of_number(name: str, labels: dict[str, str], number: Estimate) -> Iterator[Line]:
    yield name, labels, number.value
    for end, value in zip(("low", "high"), number.interval or (), strict=False):
        yield f"{name}_{end}", labels, value


def _labels(metric: Metric) -> dict[str, str]:
    protocol = hashlib.sha256(metric.protocol.encode()).hexdigest()[:8]
    return {**{_name(name): str(value) for name, value in metric.labels.items()}, "protocol": protocol}


def _name(text: str) -> str:
    """Return a name that OpenMetrics takes."""
    return re.sub(r"^(?=\d)|\W", "_", text, flags=re.ASCII)
