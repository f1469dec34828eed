"""Numbers of groups: the harness' own aggregation, with intervals that are stratified as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optkit.measure import Metric
from optkit_evals.harness.asking import Loaded
from optkit_evals.harness.scores import Score, labels_of, unit_of


@dataclass(frozen=True)
class Scored:
    """A number of a task."""

    loaded: Loaded
    score: Score
    metric: Metric

    @property
    def key(self) -> str:
        """What the harness calls it."""
        return f"{self.score.metric},{self.score.filter or 'none'}"


@dataclass(frozen=True)
class Aggregated:
    """A number of a group, formed of those of its tasks."""

    group: Any
    """`lm_eval.api.group.Group`."""
    labels: Mapping[str, int | str]
    value: float
    sizes: tuple[int, ...]
    """The weight of each task: its items, or 1."""
    parts: tuple[Scored, ...]

    def metric(self, protocol: str) -> Metric:
        """Return it as a metric.
        Its interval adds the distances from the parts' values to the ends of theirs, weighted, in
        quadrature (the method of variance estimates recovery). If the parts are means of items, it
        has the items as samples, so weighted that its value is their mean.
        """
        first, total = self.parts[0].metric, sum(self.sizes)
        weighted = [(size / total, each.metric) for size, each in zip(self.sizes, self.parts, strict=True)]
        ends = [(weight, each.value, each.interval or (each.value, each.value)) for weight, each in weighted]
        below, above = (math.hypot(*(weight * (value - end[side]) for weight, value, end in ends)) for side in (0, 1))
        alike = {each.pairing for _, each in weighted} == {"paired_mean"}
        return Metric(
            name=first.name,
            labels=dict(self.labels),
            value=self.value,
            unit=unit_of(first.name),
            higher_is_better=first.higher_is_better,
            interval=(self.value - below, self.value + above),
            protocol=protocol,
            samples=self._samples() if alike else (),
            pairing="paired_mean" if alike else "independent",
        )

    def _samples(self) -> tuple[float, ...]:
        total, some = sum(self.sizes), [each.metric.samples for each in self.parts]
        count = sum(map(len, some))
        scales = [size * count / (total * len(items)) for size, items in zip(self.sizes, some, strict=True)]
        return tuple(scale * item for scale, items in zip(scales, some, strict=True) for item in items)


def aggregated(scored: Sequence[Scored]) -> Iterator[Aggregated]:
    """Yield the numbers of the groups that tasks were loaded as, the outer ones first."""
    wholes = {id(each.loaded.whole): each.loaded.whole for each in scored if each.loaded.whole is not each.loaded.task}
    for whole in wholes.values():
        yield from _numbers(whole, [each for each in scored if each.loaded.whole is whole], "")


def _numbers(group: Any, scored: Sequence[Scored], above: str) -> Iterator[Aggregated]:
    tasks: dict[str, dict[str, Any]] = {}
    for each in scored:
        said = tasks.setdefault(each.loaded.name, {"sample_len": 0})
        said[each.key] = each.score.value
        said["sample_len"] = max(said["sample_len"], len(each.score.items))
    names = [task.task_name for task in group.get_all_tasks()]
    for key, value in group.aggregate(tasks).items():
        name, comma, filtered = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        parts = [each for task in names for each in scored if (each.loaded.name, each.key) == (task, key)]
        by_size = _said(group, name, filtered).weight_by_size
        labels = labels_of(group.name, above, "" if filtered == "none" else filtered)
        sizes = tuple(tasks[each.loaded.name]["sample_len"] if by_size else 1 for each in parts)
        yield Aggregated(group, labels, float(value), sizes, tuple(parts))
    for each in group.get_all_groups(recursive=False):
        yield from _numbers(each, scored, group.name if group.has_aggregation else above)


def _said(group: Any, metric: str, filtered: str) -> Any:
    """Return what the group says of the aggregation of a metric; the last counts, as in the harness."""
    return next(
        each
        for each in reversed(group.aggregate_metric_list)
        if each.metric == metric and (each.filter_list is None or filtered in each.filter_list)
    )
