"""What turned between two models on the same items: how many, which, and what is left of the scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optkit.common.frozen import digest
from optkit.common.grouping import grouped
from optkit.common.paired_items import flips, mcnemar, mean_of_ratios
from optkit.measure import Attachment, Found, Metric

ITEMS, FLIPS = "items.jsonl", "flips.jsonl"
COMPARED = {"right_to_wrong": "items", "wrong_to_right": "items", "mcnemar_p": "probability", "recovery": "percent"}
"""Metric -> unit of what two models say together."""
MAIN = ("acc_norm", "acc", "exact_match", "f1")
"""Which metric of a task says what it is about, the first that there is."""


def contrasts(found: Found, baseline: Found) -> Iterator[Metric | Attachment]:
    """Yield the flips of each task's main metric, what is left of all of them, and the list of
    flips. A group with a number of its own counts as one task.
    """
    listed = [pair for pair in _pairs(found.metrics, baseline.metrics) if _is_main(pair[0], found.metrics)]
    pairs = [pair for pair in listed if "group" not in pair[0].labels]
    for ours, theirs in pairs:
        # right or wrong alone can turn; right ones of a group may have a weight
        if all(one == other or not (one and other) for one, other in zip(ours.samples, theirs.samples, strict=True)):
            yield from _counted(ours, theirs)
    if pairs and all(theirs.value > 0 for _, theirs in pairs):
        yield _recovery(pairs)
    turned = list(_listed(listed, _items(found), _items(baseline)))
    yield Attachment.of_records(FLIPS, turned)


def _pairs(ours: Sequence[Metric], theirs: Sequence[Metric]) -> list[tuple[Metric, Metric]]:
    known = {(each.name, str(each.labels), each.protocol): each for each in theirs}
    found = ((each, known.get((each.name, str(each.labels), each.protocol))) for each in ours)
    return [(each, other) for each, other in found if other and each.pairing == "paired_mean"]


def _is_main(metric: Metric, metrics: Sequence[Metric]) -> bool:
    """Say whether a metric is the one that its task is about, under the task's first filter."""
    same = [each for each in metrics if each.labels.get("task") == metric.labels.get("task")]
    first = [each.name for each in same if each.labels == same[0].labels]
    main = next((name for name in MAIN if name in first), first[0])
    return metric.labels == same[0].labels and metric.name == main


def _counted(ours: Metric, theirs: Metric) -> Iterator[Metric]:
    lost, won = flips(ours.samples, theirs.samples)
    counted = {"right_to_wrong": (lost, False), "wrong_to_right": (won, True), "mcnemar_p": (mcnemar(lost, won), True)}
    for name, (value, higher_is_better) in counted.items():
        yield Metric(
            name=name,
            labels=ours.labels,
            value=value,
            unit=COMPARED[name],
            higher_is_better=higher_is_better,
            protocol=f"{ours.protocol}; {ours.name} of artifact and unmodified model",
        )


def _recovery(pairs: Sequence[tuple[Metric, Metric]]) -> Metric:
    """Return what is left of the mean of the tasks' main metrics, in percent."""
    ratio = mean_of_ratios([(ours.samples, theirs.samples) for ours, theirs in pairs])
    low, high = ratio.interval or (ratio.value, ratio.value)
    named = ", ".join(f"{ours.name} of {ours.labels['task']}" for ours, _ in pairs)
    items = digest(sorted({ours.protocol for ours, _ in pairs}))[:12]
    return Metric(
        name="recovery",
        labels={name: value for name, value in pairs[0][0].labels.items() if name == "engine"},
        value=100 * ratio.value,
        unit="percent",
        higher_is_better=True,
        interval=(100 * low, 100 * high),
        protocol=f"mean of {named}, as a share of the unmodified model's; items {items}",
    )


def _items(found: Found) -> dict[str, list[dict[str, Any]]]:
    """Return the items of each task, in their order."""
    file = next((each for each in found.attachments if each.name == ITEMS), None)
    return grouped(file.records() if file else (), lambda said: str(said["task"]))


def _listed(
    pairs: Sequence[tuple[Metric, Metric]],
    ours: Mapping[str, Sequence[Mapping[str, Any]]],
    theirs: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Iterator[dict[str, Any]]:
    for metric, other in pairs:
        task = str(metric.labels["task"])
        normed = metric.name == "acc_norm"
        filtered = metric.labels.get("filter")
        key = f"{metric.name},{filtered}" if filtered else metric.name
        scored = ([item for item in items.get(task, ()) if key in item["scores"]] for items in (ours, theirs))
        places = zip(metric.samples, other.samples, *scored, strict=False)
        for score, before, item, unmodified in places:
            if math.isclose(score, before):
                continue
            yield {
                "task": task,
                "item": item["item"],
                "turned": "right to wrong" if score < before else "wrong to right",
                "metric": metric.name,
                "question": item["question"],
                **({"choices": item["choices"]} if "choices" in item else {}),
                "gold": item["gold"],
                "unmodified": _answer(unmodified, normed),
                "artifact": _answer(item, normed),
            }


def _answer(item: Mapping[str, Any], normed: bool) -> Any:
    return item["answer_normed"] if normed and "answer_normed" in item else item["answer"]
