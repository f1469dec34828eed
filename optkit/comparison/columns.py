"""The numbers of all scorecards as columns: a metric, its labels, and the protocol that it was measured by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optkit.comparison.result import Column, Role
from optkit.measure import Metric
from optkit.recipe.gates import metric_key
from optkit.scorecard.scorecard import Measured, Scorecard

AxisName = tuple[str, tuple[tuple[str, int | str], ...]]
"""A metric's name and labels, whatever its protocol."""
NOISE = "noise_"
"""How names of metrics begin that say what the unmodified model differs from itself."""
MACHINE = ("device", "device_name", "driver", "torch", "transformers")
CORES = ("cpu_cores", "cpu_threads", "cpu_kernels")
"""What decides a timing, in the words of a scorecard's environment; on a CPU also `CORES`."""
SIZES = ("size_bytes", "weights_bytes", "bits_per_weight", "bits_per_quantized_weight")
SPEEDS = ("decode_tokens_per_s", "sequences_per_s", "prefill_tokens_per_s", "time_to_first_token_s")
QUALITIES = ("perplexity", "kl_divergence", "cosine_similarity")
PREFERRED: Mapping[Role, tuple[str, ...]] = {"quality": QUALITIES, "size": SIZES, "speed": SPEEDS}
"""The axes of a comparison, and which metric is taken for each if several were measured."""
OF_BASELINE = ("kl_divergence", "kl_divergence_p99", "top1_agreement")
"""Metrics that say nothing without the model that was the baseline; so do cosines."""
QUALITY_UNITS = ("perplexity", "cosine", "correlation", "fraction", "nats/token", "score")
SPEED_UNITS = ("tokens/s", "sequences/s", "requests/s", "s")
NO_QUALITY = ("zeros", "predicted_kl_divergence", "layer_kl_divergence")


@dataclass(frozen=True)
class Table:
    """Every number of every scorecard."""

    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Measured], ...]
    """For each scorecard, what a column's key leads to."""

    def along(self, axes: Sequence[AxisName], members: Sequence[int] | None = None) -> list[tuple[str | None, ...]]:
        """Return for each scorecard the column that each axis has there; None if it has no number."""
        keys = [
            [each.key for each in self.columns if (each.name, tuple(sorted(each.labels.items()))) == axis]
            for axis in axes
        ]
        rows = self.rows if members is None else [self.rows[index] for index in members]

        def first(its: Sequence[str], row: Mapping[str, Measured]) -> str | None:
            return next((key for key in its if key in row and not row[key].metric.failure), None)

        return [tuple([first(its, row) for its in keys]) for row in rows]


def table_of(cards: Sequence[Scorecard]) -> Table:
    """Return the columns of all scorecards, and what each scorecard has in them."""
    found: dict[str, Column] = {}
    keys: dict[tuple[Any, ...], str] = {}
    counts: dict[str, int] = {}
    rows = []
    for card in cards:
        machine = machine_of(card)
        model = {"unmodified model": model_of(card)}
        here: dict[str, Measured] = {}
        for row in card.rows:
            metric = row.metric
            if metric.name.startswith(NOISE) or (metric.failure and not metric.unit):
                continue
            plain = metric_key(metric.name, metric.labels)
            of_baseline = metric.name in OF_BASELINE or metric.unit == "cosine"
            around = machine if is_timed(metric) else model if of_baseline else {}
            identity = (plain, metric.protocol, *around.items())
            if identity not in keys:
                counts[plain] = counts.get(plain, 0) + 1
                keys[identity] = plain if counts[plain] == 1 else f"{plain} #{counts[plain]}"
                found[keys[identity]] = _column(keys[identity], metric, around)
            here.setdefault(keys[identity], row)
        rows.append(here)
    return Table(_titled([*found.values()]), tuple(rows))


def is_timed(metric: Metric) -> bool:
    """Say whether a number depends on the machine that it was measured on.
    A score of a task does not, however its interval was formed.
    """
    return metric.pairing in ("paired_turns", "independent") and "task" not in metric.labels


def machine_of(card: Scorecard) -> dict[str, str]:
    """Return what decides the timings of a scorecard; cores count on a CPU alone."""
    said = card.environment
    names = MACHINE + CORES if said.get("device", "cpu") == "cpu" else MACHINE
    return {name: str(said[name]) for name in names if said.get(name) is not None}


def model_of(card: Scorecard) -> str:
    """Return the name and revision of the unmodified model."""
    model: Any = card.recipe.get("model")
    if not isinstance(model, Mapping):
        return str(model or "")
    return "@".join(str(model[part]) for part in ("name", "revision") if model.get(part))


def _column(key: str, metric: Metric, around: Mapping[str, str]) -> Column:
    return Column(
        key=key,
        title=key,
        name=metric.name,
        labels=metric.labels,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        role=_role(metric),
        protocol=metric.protocol,
        environment=dict(around),
    )


def _titled(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Return columns without those labels in their titles that all columns of one name share."""
    shared: dict[str, set[tuple[str, int | str]]] = {}
    for column in columns:
        shared[column.name] = shared.get(column.name, {*column.labels.items()}) & {*column.labels.items()}
    found = []
    for column in columns:
        labels = {label: value for label, value in column.labels.items() if (label, value) not in shared[column.name]}
        title = column.key.replace(metric_key(column.name, column.labels), metric_key(column.name, labels))
        found.append(column.model_copy(update={"title": title}))
    return tuple(found)


def _role(metric: Metric) -> Role:
    if metric.name in SIZES:
        return "size"
    if metric.name.startswith("peak_") and metric.unit == "bytes":
        return "memory"
    if is_timed(metric):
        return "speed" if metric.unit in SPEED_UNITS else "other"
    return "quality" if metric.unit in QUALITY_UNITS and metric.name not in NO_QUALITY else "other"
