"""Put the artifact's metrics beside the baseline's, form the ratios and judge the gates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from optkit.common.statistics import Estimate
from optkit.devices.memory_watch import MemoryTrace, thinned
from optkit.measure import Metric
from optkit.recipe.gates import Gate, Of, Other, Verdict, metric_key, parse_gate
from optkit.scorecard.ratios import metric_identity, protocol_difference, ratio_to_baseline, ratio_to_earlier
from optkit.scorecard.scorecard import Beside, GateResult, Measured, Release, Rung, Scorecard, StepLine

MOST_READINGS = 300


@dataclass(frozen=True)
class Reference:
    """A model that numbers are put beside, and that limits can be relative to."""

    of: Of
    name: str
    """As sentences call it."""
    metrics: Sequence[Metric]
    remedy: str
    """What to do if a limit has no ratio to it."""
    earlier: bool = False
    """It was measured in another run."""
    unlike: Mapping[str, str] = field(default_factory=dict)
    """Names of metrics that cannot be compared, and why."""

    def beside(self, metric: Metric) -> tuple[Metric | None, Estimate | None]:
        """Return its own number of the same protocol, and the ratio to it.
        A ratio to 0, or of what could not be measured, has no value.
        """
        same = [each for each in self.metrics if metric_identity(each) == metric_identity(metric)]
        if not same or metric.name in self.unlike:
            return None, None
        if metric.failure or same[0].failure or (metric.pairing != "paired_log" and same[0].value == 0):
            return same[0], None
        return same[0], (ratio_to_earlier if self.earlier else ratio_to_baseline)(metric, same[0])

    def why_none(self, metric: Metric, same: Metric | None) -> str:
        """Return why a metric has no ratio to its own `same` number."""
        if same is None:
            return f"it was not measured on {self.name}"
        if metric.name in self.unlike:
            return self.unlike[metric.name]
        if metric.protocol == same.protocol:
            return f"{self.name}'s value is 0"
        ours, theirs = protocol_difference(metric.protocol, same.protocol)
        return f"the protocols differ: '{ours}' and, on {self.name}, '{theirs}'"


def build_scorecard(
    *,
    name: str,
    artifact_key: str,
    recipe: Mapping[str, Any],
    metrics: Sequence[Metric],
    baseline: Sequence[Metric] = (),
    gates: Mapping[str, str] | None = None,
    steps: Iterable[Any] = (),
    memory: Sequence[MemoryTrace] = (),
    attribution: Sequence[Rung] = (),
    settings: Sequence[str] = (),
    notes: Sequence[str] = (),
    baseline_notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
    environment: Mapping[str, Any] | None = None,
    previous: Scorecard | None = None,
    same_engine: Sequence[Metric] | None = None,
    speed: Sequence[Rung] = (),
    comparing: Collection[str] = (),
) -> Scorecard:
    """Return the scorecard. `steps` have the attributes of `StepLine`; `gates` are the recipe's;
    `warnings` are those of the notes that ask someone to act, as do all notes of stages.
    `previous` is that of an earlier release; `same_engine` are numbers of the unmodified model in
    the artifact's engine, None if the baseline is in it; the metrics in `comparing` compare with the unmodified
    model, which must be the same then.

    A gate that nothing was measured for fails, on a row that says why.
    """
    limits = [parse_gate(key, text) for key, text in (gates or {}).items()]
    device = (environment or {}).get("device")
    missing = [
        _unmeasured(gate, metrics, device) for gate in limits if not any(gate.matches(metric) for metric in metrics)
    ]
    references = [Reference("baseline", "the baseline", baseline, "set a limit without x")]
    if same_engine is not None or any(gate.of == "same engine" for gate in limits):
        references.append(_in_same_engine(baseline if same_engine is None else same_engine))
    references += [_earlier(previous, recipe, comparing)] if previous else []
    lines, traces = _thinned([StepLine.model_validate(step, from_attributes=True) for step in steps], memory)
    of_stages = [f"{line.kind}: {note}" for line in lines for note in line.report.get("notes", ())]
    return Scorecard(
        name=name,
        artifact_key=artifact_key,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        recipe=dict(recipe),
        steps=lines,
        memory=traces,
        attribution=tuple(attribution),
        speed=tuple(speed),
        settings=tuple(settings),
        notes=(*of_stages, *notes),
        baseline_notes=tuple(baseline_notes),
        warnings=(*of_stages, *warnings),
        environment=dict(environment or {}),
        previous=_release(previous) if previous else None,
        rows=tuple(_row(metric, references, limits) for metric in (*metrics, *missing)),
    )


def _thinned(
    steps: Sequence[StepLine], memory: Sequence[MemoryTrace]
) -> tuple[tuple[StepLine, ...], tuple[MemoryTrace, ...]]:
    """Return steps and traces with at most `MOST_READINGS` of memory together."""
    made = [step.memory for step in steps if step.memory]
    found = iter(thinned([*made, *memory], MOST_READINGS))
    lines = [step.model_copy(update={"memory": next(found)}) if step.memory else step for step in steps]
    return tuple(lines), tuple(found)


def _release(scorecard: Scorecard) -> Release:
    return Release(name=scorecard.name, artifact_key=scorecard.artifact_key, created=scorecard.created)


def _in_same_engine(metrics: Sequence[Metric]) -> Reference:
    remedy = "set a limit relative to the baseline, without `same engine`"
    return Reference("same engine", "the unmodified model in the artifact's engine", metrics, remedy)


def _earlier(previous: Scorecard, recipe: Mapping[str, Any], comparing: Collection[str]) -> Reference:
    """Return an earlier release as what numbers are put beside."""
    (ours, revision), (theirs, earlier) = (_model(said.get("model")) for said in (recipe, previous.recipe))
    unlike = f"it compares with another model: {ours} and, then, {theirs}"
    return Reference(
        of="previous",
        name=f"the earlier release {previous.name}",
        metrics=[row.metric for row in previous.rows],
        remedy="measure that release by these evals (optkit eval ARTIFACT --evals RECIPE --json), or take the gate out",
        earlier=True,
        unlike={} if revision == earlier else dict.fromkeys(comparing, unlike),
    )


def _model(said: Any) -> tuple[Any, Any]:
    """Return name and revision of a recipe's model."""
    return (said.get("name"), said.get("revision")) if isinstance(said, Mapping) else (said, None)


def _row(metric: Metric, references: Sequence[Reference], gates: Sequence[Gate]) -> Measured:
    found = {each.of: each.beside(metric) for each in references}
    baseline, ratio = found.pop("baseline")
    return Measured(
        metric=metric,
        baseline=baseline,
        ratio=ratio.value if ratio else None,
        ratio_interval=ratio.interval if ratio else None,
        beside=tuple(_beside(cast(Other, of), other, its) for of, (other, its) in found.items() if other),
        gates=tuple(_judge(gate, metric, references) for gate in gates if gate.matches(metric)),
    )


def _beside(of: Other, metric: Metric, ratio: Estimate | None) -> Beside:
    if ratio is None:
        return Beside(of=of, metric=metric)
    return Beside(of=of, metric=metric, ratio=ratio.value, ratio_interval=ratio.interval)


def _judge(gate: Gate, metric: Metric, references: Sequence[Reference]) -> GateResult:
    verdict, why = _verdict(gate, metric, references)
    return GateResult(key=gate.key, limit=gate.text, of=gate.of, verdict=verdict, why=why)


def _verdict(gate: Gate, metric: Metric, references: Sequence[Reference]) -> tuple[Verdict, str]:
    if metric.failure:
        return Verdict.FAIL, metric.failure
    if not gate.of:
        return gate.judge(Estimate(metric.value, metric.interval)), ""
    reference = next((each for each in references if each.of == gate.of), None)
    if reference is None:
        return Verdict.SKIPPED, "there is no earlier release"
    _, ratio = reference.beside(metric)
    if ratio is not None:
        return gate.judge(ratio), ""
    alike = (each for each in reference.metrics if (each.name, each.labels) == (metric.name, metric.labels))
    same = next(alike, None)
    if same and same.failure:
        return Verdict.INCONCLUSIVE, f"of {reference.name}, {same.failure}"
    return Verdict.FAIL, f"no ratio: {reference.why_none(metric, same)}; {reference.remedy}"


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
