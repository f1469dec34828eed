"""Values of metrics by name."""

from optkit.measure import Metric


def values(metrics: list[Metric]) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics}
