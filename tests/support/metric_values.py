"""Values of metrics by name."""

from __future__ import annotations


def values(metrics):
    return {metric.name: metric.value for metric in metrics}
