"""Measure an artifact and its baseline: only what the store does not hold, timings of both always in one run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optkit.environment import describe_environment
from optkit.errors import EvalError
from optkit.gates import parse_gate
from optkit.measure import EvalContext, Metric, Session
from optkit.plan import Plan, PlannedEval
from optkit.progress import Progress
from optkit.stage import Setting
from optkit.store import Store


@dataclass(frozen=True)
class Measurement:
    """Every metric of a plan's evals, with what the sessions said while they were measured."""

    metrics: tuple[Metric, ...]
    baseline: tuple[Metric, ...]
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
    """Return all metrics: the artifact's first, then the baseline's, then those that need both open. Each is kept in the store.

    `retime` measures the timed evals again, of both models, whatever the store holds.
    `baseline` is None where the artifact is the unmodified model. Raises EvalError and ResourceError from the evals.
    """
    comparing = [each.kind for each in plan.evals if each.eval.compares]
    if comparing and baseline is None:
        raise EvalError(
            "there is nothing to compare with",
            where=comparing[0],
            why=f"Nothing was done to {plan.recipe.model.name}, so it is its own baseline",
            remedy="Take this eval out, or give the recipe a stage",
        )
    relative = [gate.key for key, text in plan.recipe.gates.items() if (gate := parse_gate(key, text)).relative]
    if relative and baseline is None:
        raise EvalError(
            "the limit is relative to the baseline",
            where=f"gate {relative[0]}",
            why=f"Nothing was done to {plan.recipe.model.name}, so it is its own baseline",
            remedy="Set an absolute limit, without x",
        )
    context = EvalContext(seed=plan.recipe.seed, progress=progress, data=data, calibrated_on=calibrated_on)
    compared = plan.evals if baseline else ()
    timed = [each for each in plan.evals if each.eval.timed]
    stale = {each.key for each in timed if retime or not (known(store, each.key) and known(store, each.baseline_key))}

    def missing(planned: Iterable[PlannedEval], *, of_baseline: bool) -> list[tuple[str, PlannedEval]]:
        keys = [(each.baseline_key if of_baseline else each.key, each) for each in planned]
        return [(key, each) for key, each in keys if key and (each.key in stale or not known(store, key))]

    alone = missing((each for each in plan.evals if not each.eval.compares), of_baseline=False)
    of_baseline = missing((each for each in compared if not each.eval.compares), of_baseline=True)
    pairs = missing((each for each in compared if each.eval.compares), of_baseline=False)
    if alone or of_baseline or pairs:
        store.check_writable()
    if alone:
        with opened(artifact, plan.device, progress) as session:
            for key, each in alone:
                keep(store, key, each.eval.run(session, context), session, plan.device)
    if baseline and (of_baseline or pairs):
        with opened(baseline, plan.device, progress) as session:
            for key, each in of_baseline:
                keep(store, key, each.eval.run(session, context), session, plan.device)
            if pairs:
                beside = EvalContext(seed=context.seed, progress=progress, data=data, baseline=session, calibrated_on=calibrated_on)
                with opened(artifact, plan.device, progress) as changed:
                    for key, each in pairs:
                        keep(store, key, each.eval.run(changed, beside), changed, plan.device)
    ours = [store.take_json(each.key) for each in plan.evals]
    theirs = [store.take_json(each.baseline_key) for each in compared if each.baseline_key]
    return Measurement(
        metrics=tuple(Metric.model_validate(metric) for entry in ours for metric in entry["metrics"]),
        baseline=tuple(Metric.model_validate(metric) for entry in theirs for metric in entry["metrics"]),
        notes=tuple(dict.fromkeys(note for entry in ours for note in entry["notes"])),
        baseline_notes=tuple(dict.fromkeys(note for entry in theirs for note in entry["notes"])),
        environment=ours[0]["environment"] if ours else describe_environment(plan.device),
    )


def known(store: Store, key: str | None) -> bool:
    """Say whether a metric needs no measuring: it is in the store, or there is none to measure."""
    return key is None or store.get_json(key) is not None


def keep(store: Store, key: str, metrics: Sequence[Metric], session: Session, device: str) -> None:
    """Keep what an eval measured, with the notes of the session and what it was measured on."""
    store.put_json(
        key,
        {
            "metrics": [metric.model_dump(mode="json") for metric in metrics],
            "notes": list(session.notes),
            "environment": describe_environment(device),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


@contextmanager
def opened(subject: Subject, device: str, progress: Progress) -> Iterator[Session]:
    """Open a session and give its memory back afterwards."""
    from optkit.session import open_session

    session = open_session(
        subject.weights(), subject.settings, device=device, progress=progress, trust_remote_code=subject.trust_remote_code
    )
    try:
        yield session
    finally:
        session.close()
        gc.collect()
