"""Put the artifact's metrics beside the baseline's, form the ratios and judge the gates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from optkit.common.paired_items import paired_mean_ratio
from optkit.common.statistics import Estimate, exact_ratio, independent_ratio, paired_log_ratio, paired_ratio
from optkit.measure import Metric
from optkit.recipe.gates import Gate, Verdict, metric_key, parse_gate
from optkit.scorecard.scorecard import GateResult, Measured, Rung, Scorecard, StepLine


def build_scorecard(
    *,
    name: str,
    artifact_key: str,
    recipe: Mapping[str, Any],
    metrics: Sequence[Metric],
    baseline: Sequence[Metric] = (),
    gates: Mapping[str, str] | None = None,
    steps: Iterable[Any] = (),
    attribution: Sequence[Rung] = (),
    settings: Sequence[str] = (),
    notes: Sequence[str] = (),
    baseline_notes: Sequence[str] = (),
    environment: Mapping[str, Any] | None = None,
) -> Scorecard:
    """Return the scorecard. `steps` have the attributes of `StepLine`; `gates` are the recipe's.

    A gate that nothing was measured for fails, on a row that says why.
    """
    limits = [parse_gate(key, text) for key, text in (gates or {}).items()]
    device = (environment or {}).get("device")
    missing = [
        _unmeasured(gate, metrics, device) for gate in limits if not any(gate.matches(metric) for metric in metrics)
    ]
    lines = tuple(StepLine.model_validate(step, from_attributes=True) for step in steps)
    return Scorecard(
        name=name,
        artifact_key=artifact_key,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        recipe=dict(recipe),
        steps=lines,
        attribution=tuple(attribution),
        settings=tuple(settings),
        notes=(*(f"{line.kind}: {note}" for line in lines for note in line.report.get("notes", ())), *notes),
        baseline_notes=tuple(baseline_notes),
        environment=dict(environment or {}),
        rows=tuple(_row(metric, baseline, limits) for metric in (*metrics, *missing)),
    )


def ratio_to_baseline(metric: Metric, baseline: Metric) -> Estimate:
    """Return the ratio of a metric to the baseline's, formed as its `pairing` says.
    Raises ValueError if there is none.
    """
    if metric.pairing == "paired_log":
        return paired_log_ratio(metric.samples, baseline.samples)
    if metric.pairing == "paired_mean":
        return paired_mean_ratio(metric.samples, baseline.samples)
    if metric.pairing == "exact":
        return exact_ratio(metric.value, baseline.value)
    if metric.pairing == "paired_turns" and len(metric.samples) == len(baseline.samples):
        return paired_ratio(metric.samples, baseline.samples)
    return independent_ratio(Estimate(metric.value, metric.interval), Estimate(baseline.value, baseline.interval))


def metric_identity(metric: Metric) -> tuple[str, tuple[tuple[str, int | str], ...], str]:
    """Return what must be equal for two metrics to be the same number of two models."""
    return metric.name, tuple(sorted(metric.labels.items())), metric.protocol


def _row(metric: Metric, baseline: Sequence[Metric], gates: Sequence[Gate]) -> Measured:
    other = next((each for each in baseline if metric_identity(each) == metric_identity(metric)), None)
    ratio = _ratio(metric, other) if other else None
    return Measured(
        metric=metric,
        baseline=other,
        ratio=ratio.value if ratio else None,
        ratio_interval=ratio.interval if ratio else None,
        gates=tuple(_judge(gate, metric, ratio, baseline) for gate in gates if gate.matches(metric)),
    )


def _ratio(metric: Metric, baseline: Metric) -> Estimate | None:
    """A ratio to 0, or of what could not be measured, has no value.
    Every other failure to form one is a mistake of the eval.
    """
    if metric.failure or baseline.failure:
        return None
    if metric.pairing != "paired_log" and baseline.value == 0:
        return None
    return ratio_to_baseline(metric, baseline)


def _judge(gate: Gate, metric: Metric, ratio: Estimate | None, baseline: Sequence[Metric]) -> GateResult:
    if metric.failure:
        return GateResult(key=gate.key, limit=gate.text, verdict=Verdict.FAIL, why=metric.failure)
    if gate.relative and ratio is None:
        same = [each for each in baseline if (each.name, each.labels) == (metric.name, metric.labels)]
        if same and same[0].failure:
            why = f"of the baseline, {same[0].failure}"
            return GateResult(key=gate.key, limit=gate.text, verdict=Verdict.INCONCLUSIVE, why=why)
        why = (
            f"no ratio: {_why_no_ratio(metric, same[0]) if same else 'it was not measured on the baseline'}; "
            "set a limit without x"
        )
        return GateResult(key=gate.key, limit=gate.text, verdict=Verdict.FAIL, why=why)
    measured = ratio if gate.relative and ratio else Estimate(metric.value, metric.interval)
    return GateResult(key=gate.key, limit=gate.text, verdict=gate.judge(measured))


def _why_no_ratio(metric: Metric, baseline: Metric) -> str:
    if metric.protocol == baseline.protocol:
        return "the baseline's value is 0"
    return f"the protocols differ: '{metric.protocol}' and, on the baseline, '{baseline.protocol}'"


def _unmeasured(gate: Gate, metrics: Sequence[Metric], device: str | None) -> Metric:
    """Return the row of a gate whose metric appears only under conditions that were not met."""
    same_name = [metric_key(metric.name, metric.labels) for metric in metrics if metric.name == gate.name]
    others = f"; measured: {', '.join(same_name)}" if same_name else ""
    return Metric(
        name=gate.name,
        labels=gate.labels,
        value=0.0,
        unit="",
        higher_is_better=gate.operator.startswith(">"),
        protocol="not measured",
        failure=f"no number: {gate.key} was not measured{f' on {device}' if device else ''}{others}",
    )
