"""Measure an artifact and its baseline: only what the store lacks, timings of both in turns."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optkit.environment import describe_environment
from optkit.errors import EvalError
from optkit.measure import Attachment, Eval, EvalContext, Found, Metric, Opened, Turn
from optkit.measuring.fresh_process import Answer, measure_apart
from optkit.plan import Plan, PlannedEval
from optkit.processes import signals
from optkit.progress import Progress
from optkit.recipe.gates import parse_gate
from optkit.stage import Setting
from optkit.store.durations import Durations
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


@dataclass(frozen=True)
class Subject:
    """A model to be measured: how to find its weights (made only when needed) and how to open them."""

    weights: Callable[[], Path]
    settings: Sequence[Setting]
    trust_remote_code: bool = False


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
) -> Measurement:
    """Return all metrics. Timings are measured first, while the memory is clean, then everything
    else. Each is kept in the store.

    `retime` measures the timed evals again, of both models, whatever the store holds. `baseline` is
    None if the artifact is the unmodified model. Raises EvalError and ResourceError from the
    evals.
    """
    began, environment = datetime.now(UTC).isoformat(timespec="seconds"), describe_environment(plan.device)
    if baseline is None:
        refuse_comparisons(plan)
    compared = plan.evals if baseline else ()
    alone = [each for each in plan.evals if not (each.eval.timed or each.eval.compares) and not known(store, each.key)]
    of_baseline = [each for each in compared if not each.eval.timed and not known(store, each.baseline_key)]
    pairs = [each for each in plan.evals if each.eval.compares and not known(store, each.key)]
    both_known = {each.key for each in plan.evals if known(store, each.key) and known(store, each.baseline_key)}
    timed = [each for each in plan.evals if each.eval.timed and (retime or each.key not in both_known)]
    for each in (*alone, *of_baseline, *pairs, *timed):
        if any(key and store.is_damaged_json(key) for key in (each.key, each.baseline_key)):
            progress.warn(f"{each.kind}: its numbers in the store were changed or cut off; they are measured again")
    if alone or of_baseline or pairs or timed:
        store.check_writable()
    context = EvalContext(seed=plan.recipe.seed, progress=progress, data=data, calibrated_on=calibrated_on)
    bench = Bench(store, plan.device, context, plan.steps[0].size_bytes)
    if timed:
        bench.time_in_turns(timed, artifact, baseline)
    if baseline and (of_baseline or pairs):
        with bench.opened(baseline) as unmodified:
            bench.measure(unmodified, [(each.baseline_key or each.key, each) for each in of_baseline])
            if pairs:
                with bench.opened(artifact) as changed:
                    bench.measure(changed, [(each.key, each) for each in alone + pairs], beside=unmodified)
    if alone and not pairs:
        with bench.opened(artifact) as changed:
            bench.measure(changed, [(each.key, each) for each in alone])
    ours = [store.take_json(each.key) for each in plan.evals]
    theirs = [store.take_json(each.baseline_key) for each in compared if each.baseline_key]
    folders = _folders([each.kind for each in plan.evals])
    beside = [f"{folder}-unmodified" for folder, each in zip(folders, compared, strict=False) if each.baseline_key]
    return Measurement(
        metrics=tuple(metric for entry in ours for metric in Found.from_json(entry).metrics),
        baseline=tuple(metric for entry in theirs for metric in Found.from_json(entry).metrics),
        attachments=_attachments([*folders, *beside], [*ours, *theirs]),
        notes=_notes([each.kind for each in plan.evals], ours, environment, began),
        baseline_notes=_notes([each.kind for each in compared if each.baseline_key], theirs, environment, began),
        environment=environment,
    )


def _folders(kinds: Sequence[str]) -> list[str]:
    """Return a folder's name for each eval: its kind, with a number if there were several."""
    names = [re.sub(r"\W", "_", kind, flags=re.ASCII) for kind in kinds]
    counts = [names[:index].count(name) for index, name in enumerate(names)]
    return [f"{name}-{count + 1}" if count else name for name, count in zip(names, counts, strict=True)]


def _attachments(folders: Sequence[str], entries: Sequence[Mapping[str, Any]]) -> dict[str, Attachment]:
    """Return the files that evals left, those of each eval in its folder."""
    found = zip(folders, map(Found.from_json, entries), strict=True)
    return {f"{folder}/{file.name}": file for folder, each in found for file in each.attachments}


def _notes(
    kinds: Sequence[str], entries: Sequence[Mapping[str, Any]], environment: Mapping[str, Any], began: str
) -> tuple[str, ...]:
    """Return what was said while evals measured, and which of them did so before this run.
    What was different there is told too.
    """
    found = [note for entry in entries for note in entry["notes"]]
    for kind, entry in zip(kinds, entries, strict=True):
        if entry["created"] < began:
            there = {
                name: value for name, value in entry["environment"].items() if environment.get(name, value) != value
            }
            different = ", ".join(f"{name} {value}" for name, value in there.items())
            found.append(f"{kind}: measured earlier, {entry['created']}{f', with {different}' if different else ''}")
    return tuple(dict.fromkeys(found))


def refuse_comparisons(plan: Plan) -> None:
    """Raise EvalError if an eval or a gate compares the unmodified model with itself."""
    why = f"Nothing was done to {plan.recipe.model.name}, so it is its own baseline"
    comparing = [each.kind for each in plan.evals if each.eval.compares]
    if comparing:
        remedy = "Take this eval out, or give the recipe a stage"
        raise EvalError("there is nothing to compare with", where=comparing[0], why=why, remedy=remedy)
    relative = [gate.key for key, text in plan.recipe.gates.items() if (gate := parse_gate(key, text)).relative]
    if relative:
        remedy = "Set an absolute limit, without x"
        raise EvalError("the limit is relative to the baseline", where=f"gate {relative[0]}", why=why, remedy=remedy)


def known(store: Store, key: str | None) -> bool:
    """Say whether a metric needs no measuring: it is in the store, or there is none to measure."""
    return key is None or store.get_json(key) is not None


def in_turns(artifact: Subject, baseline: Subject | None, count: int) -> Iterator[tuple[Subject, int]]:
    """Yield each model `count` times, with the index of its turn.
    The order is baseline, artifact, artifact, baseline, and so on.
    """
    for index in range(count):
        pair = [subject for subject in (baseline, artifact) if subject]
        yield from ((subject, index) for subject in (pair if index % 2 == 0 else pair[::-1]))


@dataclass(frozen=True)
class TimedRun:
    """What the turns of one model said so far."""

    planned: PlannedEval
    answers: list[Answer] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def turns(self) -> list[Sequence[Metric]]:
        """The metrics of each turn."""
        return [answer.found.metrics for answer in self.answers]

    @property
    def notes(self) -> list[str]:
        """What all turns said beside the numbers."""
        return [note for answer in self.answers for note in answer.notes]

    @property
    def session_notes(self) -> list[str]:
        """What the sessions said, each thing once."""
        return list(dict.fromkeys(note for answer in self.answers for note in answer.session_notes))


@dataclass(frozen=True)
class Bench:
    """Where models are opened, measured and closed again; every number is kept in the store."""

    store: Store
    device: str
    context: EvalContext
    size_bytes: int
    """Bytes of the unmodified model's weights."""

    def measure(self, session: Opened, wanted: Sequence[tuple[str, PlannedEval]], beside: Opened | None = None) -> None:
        """Run evals on one opened model, and keep each under its key.
        Those that compare have the baseline `beside` it.
        """
        for key, each in wanted:
            signals.check()
            context = replace(self.context, baseline=beside if each.eval.compares else None, notes=[])
            start = time.perf_counter()
            found = Found.of(each.eval, session, context)
            self.keep(key, each, found, [*session.notes, *context.notes], time.perf_counter() - start)

    def time_in_turns(self, timed: Sequence[PlannedEval], artifact: Subject, baseline: Subject | None) -> None:
        """Run timed evals, and keep all numbers or none.
        Each model has its turns: baseline, artifact, artifact, baseline, and so on.

        A machine that slows down steadily then costs both the same, and one that changes at once
        costs neighbours the same. Each turn opens its model anew, so that the two are never in
        memory together: in a process of its own for evals that ask for it.
        """
        runs: dict[str, TimedRun] = {}
        for subject, index in in_turns(artifact, baseline, max(each.eval.turns() for each in timed)):
            signals.check()
            for measured in (self._apart, self._here):
                some = [
                    each
                    for each in timed
                    if each.eval.apart() == (measured == self._apart) and index < each.eval.turns()
                ]
                if not some:
                    continue
                start = time.perf_counter()
                answers = measured(subject, index, [each.eval for each in some])
                seconds = (time.perf_counter() - start) / len(some)
                for each, answer in zip(some, answers, strict=True):
                    key = each.key if subject is artifact else each.baseline_key or each.key
                    run = runs.setdefault(key, TimedRun(each))
                    run.answers.append(answer)
                    run.seconds.append(seconds)
        for key, run in runs.items():
            context = replace(self.context, notes=run.notes)
            pooled = Found(tuple(run.planned.eval.pool(run.turns, context)), run.answers[-1].found.attachments)
            notes = [*run.session_notes, *context.notes]
            self.keep(key, run.planned, pooled, notes, sum(run.seconds), run.answers[0].environment)

    def _apart(self, subject: Subject, index: int, evals: Sequence[Eval]) -> list[Answer]:
        """Run a turn of timed evals in a fresh process."""
        return measure_apart(
            subject.weights(), subject.settings, evals, self.device, subject.trust_remote_code, self.context, index
        )

    def _here(self, subject: Subject, index: int, evals: Sequence[Eval]) -> list[Answer]:
        """Run a turn of timed evals in this process."""
        answers = []
        with self.opened(subject) as session:
            for each in evals:
                context = replace(self.context, turn=Turn(index, each.turns()), notes=[])
                found = Found.of(each, session, context)
                answers.append(Answer(found, tuple(context.notes), session.notes, describe_environment(self.device)))
        return answers

    def keep(
        self,
        key: str,
        planned: PlannedEval,
        found: Found,
        notes: Sequence[str],
        seconds: float,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep what an eval measured, with what the scorecard must say beside it.
        `environment` is this process's if it is not given.
        """
        self.store.put_json(
            key,
            {
                **found.to_json(),
                "notes": list(notes),
                "environment": environment or describe_environment(self.device),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(seconds, 3),
            },
        )
        Durations(self.store.root, self.device).note(planned.duration_of(key), planned.eval, self.size_bytes, seconds)

    @contextmanager
    def opened(self, subject: Subject) -> Iterator[Opened]:
        """Open a session and give its memory back afterwards."""
        from optkit.session import open_session

        session = open_session(
            subject.weights(),
            subject.settings,
            device=self.device,
            progress=self.context.progress,
            trust_remote_code=subject.trust_remote_code,
        )
        try:
            yield session
        finally:
            session.close()
            gc.collect()
