"""Short names of metrics: with those labels alone that tell them from others of the page."""

from __future__ import annotations

from collections.abc import Iterable

from optkit.measure import Metric
from optkit.scorecard import metric_label


class Titles:
    """Names of the metrics of one page."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._values: dict[str, dict[str, set[str]]] = {}
        for metric in metrics:
            for label, value in metric.labels.items():
                self._values.setdefault(metric.name, {}).setdefault(label, set()).add(str(value))

    def __call__(self, metric: Metric) -> str:
        """Return e.g. `decode_tokens_per_s`, or `decode_tokens_per_s, batch 8` if there are several batches."""
        values = self._values.get(metric.name, {})
        telling = {label: value for label, value in metric.labels.items() if len(values[label]) > 1}
        return metric_label(metric.model_copy(update={"labels": telling}))
