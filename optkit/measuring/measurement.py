"""Measure an artifact and its baseline: only what the store lacks, timings of both in turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optkit.common.frozen import digest
from optkit.common.spans import mark
from optkit.devices.memory_watch import MemoryTrace
from optkit.environment import describe_environment
from optkit.errors import EvalError, OptkitError, ResourceError
from optkit.measure import Attachment, EvalContext, Found, Metric
from optkit.measuring.bench import Bench, Subject, known
from optkit.measuring.turns import TimedModel, time_in_turns
from optkit.plan import Plan, PlannedEval
from optkit.progress import Progress
from optkit.recipe.gates import parse_gate
from optkit.store.store import Store


@dataclass(frozen=True)
class Measurement:
    """Every metric of a plan's evals, with what the sessions said while they were measured."""

    metrics: tuple[Metric, ...]
    baseline: tuple[Metric, ...]
    attachments: Mapping[str, Attachment]
    """The files that evals left, each with its place below the scorecard's folder."""
    notes: tuple[str, ...]
    baseline_notes: tuple[str, ...]
    environment: dict[str, Any]
    warnings: tuple[str, ...] = ()
    """Those of the notes that ask someone to act; `baseline: ` stands before those about it."""
    memory: tuple[MemoryTrace, ...] = ()
    """What opening and measuring them needed; of numbers of an earlier optkit there is none."""
    further: tuple[tuple[str, tuple[Metric, ...]], ...] = ()
    """Name and numbers of each further model; no numbers if it could not be timed."""


def measure(
    plan: Plan,
    artifact: Subject,
    baseline: Subject | None,
    store: Store,
    *,
    data: Path | None,
    progress: Progress,
    calibrated_on: tuple[dict[str, str], ...] = (),
    retime: bool = False,
    further: Sequence[TimedModel] = (),
    since: str | None = None,
) -> Measurement:
    """Return all metrics. Timings are measured first, while the memory is clean, then everything
    else. Each is kept in the store.

    `retime` measures the timed evals again, of both models, whatever the store holds. `baseline` is
    None if the artifact is the unmodified model. `further` models take turns with the two; one
    that fails is left out. What was measured before `since` is noted. Raises EvalError and
    ResourceError from the evals.
    """
    environment = describe_environment(plan.device)
    began = since or datetime.now(UTC).isoformat(timespec="seconds")
    if baseline is None:
        refuse_comparisons(plan)
    compared = plan.evals if baseline else ()
    missing = _Missing.of(plan, compared, store, further, retime)
    todo = [*missing.alone, *missing.of_baseline, *missing.pairs, *missing.timed]
    for each in todo:
        if any(key and store.is_damaged_json(key) for key in (each.key, each.baseline_key)):
            progress.warn(f"{each.kind}: its numbers in the store were changed or cut off; they are measured again")
    if todo:
        store.check_writable()
    for each in plan.evals:
        if each not in todo:
            mark(f"eval {each.kind}", kind=each.kind, key=each.key, status="stored")
    context = EvalContext(seed=plan.recipe.seed, progress=progress, data=data, calibrated_on=calibrated_on)
    bench = Bench(store, plan.device, context, plan.steps[0].size_bytes)
    if missing.timed:
        _time(bench, missing.timed, artifact, baseline, further, retime)
    missing.run(bench, artifact, baseline)
    return _gathered(plan, compared, store, environment, began, further)


@dataclass(frozen=True)
class _Missing:
    """The evals of which the store does not hold all numbers, by what has to be open for them."""

    timed: Sequence[PlannedEval]
    alone: Sequence[PlannedEval]
    """The artifact."""
    of_baseline: Sequence[PlannedEval]
    pairs: Sequence[PlannedEval]
    """The artifact, and the baseline beside it."""

    @classmethod
    def of(
        cls, plan: Plan, compared: Sequence[PlannedEval], store: Store, further: Sequence[TimedModel], retime: bool
    ) -> _Missing:
        lacking = {each.key for model in further for key, each in model.wanted if not known(store, key)}
        timed, alone, of_baseline, pairs = (list[PlannedEval]() for _ in range(4))
        for each in plan.evals:
            here, there = known(store, each.key), known(store, each.baseline_key)
            if each.eval.timed:
                timed += [each] * (retime or not (here and there) or each.key in lacking)
            elif each.eval.compares:
                pairs += [each] * (not here)
            elif each in compared and each.eval.of_unmodified:
                of_baseline += [each] * (not here)
            else:
                alone += [each] * (not here)
                of_baseline += [each] * (each in compared and not there)
        return cls(timed, alone, of_baseline, pairs)

    def run(self, bench: Bench, artifact: Subject, baseline: Subject | None) -> None:
        """Measure what is not timed; both models are open together for pairs alone."""
        alone = [(each.key, each) for each in self.alone]
        if baseline and (self.of_baseline or self.pairs):
            with bench.opened(baseline) as unmodified:
                its = [(each.baseline_key or each.key, each) for each in self.of_baseline]
                bench.measure(unmodified, its, of="the baseline")
                if self.pairs:
                    with bench.opened(artifact) as changed:
                        bench.measure(changed, [*alone, *((each.key, each) for each in self.pairs)], beside=unmodified)
        if alone and not self.pairs:
            with bench.opened(artifact) as changed:
                bench.measure(changed, alone)


def _time(
    bench: Bench,
    timed: Sequence[PlannedEval],
    artifact: Subject,
    baseline: Subject | None,
    further: Sequence[TimedModel],
    retime: bool,
) -> None:
    """Time both models, and the further ones between them, in turns."""
    models = [TimedModel(artifact, [(each.key, each) for each in timed], "the artifact" if baseline else "")]
    if baseline:
        wanted = [(each.baseline_key, each) for each in timed if each.baseline_key]
        models.insert(0, TimedModel(baseline, wanted, "the baseline"))
    keys = {each.key for each in timed}
    others = [replace(each, wanted=[pair for pair in each.wanted if pair[1].key in keys]) for each in further]
    models[-1:-1] = [model for model in others if model.wanted]
    name = digest(sorted({key for model in models for key, _ in model.wanted}))
    kept = bench.store.workspace(name) / "turns.json"
    if retime:
        kept.unlink(missing_ok=True)
    time_in_turns(bench, models, kept=kept, failed=_leaving_out(bench, models[-1]) if further else None)


def _gathered(
    plan: Plan,
    compared: Sequence[PlannedEval],
    store: Store,
    environment: dict[str, Any],
    began: str,
    further: Sequence[TimedModel],
) -> Measurement:
    """Return the numbers of all evals, which the store holds now."""
    ours = [(each, store.take_json(each.key)) for each in plan.evals]
    theirs = [(each, store.take_json(each.baseline_key)) for each in compared if each.baseline_key]
    once = [pair for pair in ours if pair[0] in compared and pair[0].eval.of_unmodified]
    own, of_unmodified = [pair for pair in ours if pair not in once], [*once, *theirs]
    there = [Found.from_json(entry) for _, entry in theirs]
    baselines = dict(zip((each.key for each, _ in theirs), there, strict=True))
    found = [_contrasted(each, Found.from_json(entry), baselines.get(each.key)) for each, entry in ours]
    folders = _folders([each.kind for each in plan.evals])
    beside = [f"{folder}-unmodified" for folder, each in zip(folders, compared, strict=False) if each.baseline_key]
    left = zip([*folders, *beside], [*found, *there], strict=True)
    return Measurement(
        metrics=tuple(metric for each in found for metric in each.metrics),
        baseline=tuple(metric for each in there for metric in each.metrics),
        attachments={f"{folder}/{file.name}": file for folder, each in left for file in each.attachments},
        notes=_notes(own, environment, began),
        baseline_notes=_notes(of_unmodified, environment, began),
        environment=environment,
        warnings=_warnings(ours, theirs),
        memory=(*_memory(of_unmodified, "unmodified"), *_memory(own, "artifact")),
        further=tuple((each.name, _numbers(each, store)) for each in further),
    )


def _leaving_out(bench: Bench, artifact: TimedModel) -> Callable[[TimedModel, Exception], None]:
    """Return what hears of a model whose turn failed: a further one is left out for good if it
    cannot be opened so, and until the next run if memory ran out.
    """

    def failed(model: TimedModel, error: Exception) -> None:
        if model is artifact or not isinstance(error, OptkitError):
            raise error
        leave_out(bench, model, error)

    return failed


def leave_out(bench: Bench, model: TimedModel, error: Exception) -> None:
    """Note that a further model cannot be timed; if memory ran out, the next run tries it again."""
    bench.context.progress.warn(f"a further model is not timed: {error}")
    if not isinstance(error, ResourceError):
        for key, each in model.wanted:
            bench.keep(key, each, Found(()), [str(error)], 0.0)


def _numbers(model: TimedModel, store: Store) -> tuple[Metric, ...]:
    found = (store.get_json(key) for key, _ in model.wanted)
    return tuple(metric for entry in found if entry for metric in Found.from_json(entry).metrics)


def _folders(kinds: Sequence[str]) -> list[str]:
    """Return a folder's name for each eval: its kind, with a number if there were several."""
    names = [re.sub(r"\W", "_", kind, flags=re.ASCII) for kind in kinds]
    counts = [names[:index].count(name) for index, name in enumerate(names)]
    return [f"{name}-{count + 1}" if count else name for name, count in zip(names, counts, strict=True)]


def _contrasted(planned: PlannedEval, found: Found, baseline: Found | None) -> Found:
    """Return what an eval found of the artifact, with what only both models say together."""
    if baseline is None:
        return found
    both = Found.sorted(planned.eval.contrast(found, baseline), planned.kind)
    return Found((*found.metrics, *both.metrics), (*found.attachments, *both.attachments))


Entries = Sequence[tuple[PlannedEval, Mapping[str, Any]]]
"""Evals, each with what the store holds of it."""


def _memory(entries: Entries, of: str) -> tuple[MemoryTrace, ...]:
    """Return the traces that lie in entries of the store."""
    return tuple(
        MemoryTrace.model_validate({**each, "of": of}) for _, entry in entries for each in entry.get("memory", ())
    )


def _notes(said: Entries, environment: Mapping[str, Any], began: str) -> tuple[str, ...]:
    """Return what was said while evals measured, and which of them did so before this run.
    What was different there is told too.
    """
    found = [note for _, entry in said for note in entry.get("notes", ())]
    for each, entry in said:
        if entry.get("created", began) < began:
            earlier = entry.get("environment", {})
            there = {name: value for name, value in earlier.items() if environment.get(name, value) != value}
            different = ", ".join(f"{name} {value}" for name, value in there.items())
            found.append(
                f"{each.kind}: measured earlier, {entry['created']}{f', with {different}' if different else ''}"
            )
    return tuple(dict.fromkeys(found))


def _warnings(ours: Entries, theirs: Entries) -> tuple[str, ...]:
    """Return what evals warned of, each once."""
    said = [warning for _, entry in ours for warning in entry.get("warnings", ())]
    said += [f"baseline: {warning}" for _, entry in theirs for warning in entry.get("warnings", ())]
    return tuple(dict.fromkeys(said))


def refuse_comparisons(plan: Plan) -> None:
    """Raise EvalError if an eval or a gate compares the unmodified model with itself."""
    why = f"Nothing was done to {plan.recipe.model.name}, so it is its own baseline"
    comparing = [each.kind for each in plan.evals if each.eval.compares]
    if comparing:
        remedy = "Take this eval out, or give the recipe a stage"
        raise EvalError("there is nothing to compare with", where=comparing[0], why=why, remedy=remedy)
    gates = [parse_gate(key, text) for key, text in plan.recipe.gates.items()]
    relative = [gate.key for gate in gates if gate.of in ("baseline", "same engine")]
    if relative:
        remedy = "Set an absolute limit, without x"
        raise EvalError("the limit is relative to the baseline", where=f"gate {relative[0]}", why=why, remedy=remedy)
