"""What each stage added to the damage.
The recipe's evals of accuracy run on every directory between the model and the artifact.

Their numbers have the keys that they would have in a recipe that ends there, so that the two share
them in the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from optkit.errors import ResourceError
from optkit.execute import materialize
from optkit.keys import make_metric_key
from optkit.measure import EvalContext, Metric
from optkit.measuring.bench import Bench, Subject, known
from optkit.measuring.measurement import Measurement
from optkit.plan import Plan, PlannedEval
from optkit.scorecard import Rung
from optkit.stage import Context
from optkit.store.store import Store

UNMODIFIED, SETTINGS = "unmodified", "settings"


@dataclass(frozen=True)
class Between:
    """A directory between the model and the artifact, and what is measured of it."""

    index: int
    """Of the step that leaves it."""
    kind: str
    evals: tuple[PlannedEval, ...]


def between(plan: Plan) -> tuple[Between, ...]:
    """Return what has to be measured to attribute the damage.
    It is nothing if one stage alone makes it.

    Without settings, so the last stage's directory is among them if a setting changes the
    numbers too.
    """
    last = len(plan.steps) - 1
    entries = [entry for entry in plan.recipe.evals if entry.value.attributed and plan.recipe.attribution]
    also_last = last > 0 and any(not entry.value.exact for entry in plan.recipe.settings)
    found = []
    for index in (*range(1, last), *((last,) if also_last else ())) if entries else ():
        step = plan.steps[index]
        evals = []
        for entry in entries:
            beside = {"baseline": plan.steps[0].key} if entry.value.compares else {}
            key = make_metric_key(entry, plan.recipe.seed, step.key, [], beside)
            evals.append(
                PlannedEval(kind=entry.kind, eval=entry.value, key=key, baseline_key=None, hit=False, baseline_hit=True)
            )
        found.append(Between(index, step.kind, tuple(evals)))
    return tuple(found)


def attribute(
    plan: Plan, measured: Measurement, store: Store, context: Context, calibrated_on: tuple[dict[str, str], ...]
) -> tuple[Rung, ...]:
    """Return the accuracy of the model, after each stage and of the artifact.
    What the store does not hold is measured.

    Without the memory for it, it is left out with a warning: everything that the recipe asked for
    is measured already. Raises what else evals and stages raise.
    """
    rungs = between(plan)
    if not rungs:
        return ()
    try:
        _measure(plan, rungs, store, context, calibrated_on)
    except ResourceError as error:
        context.progress.warn(f"what each stage added is left out: {error}")
        return ()
    first = {next(iter(each.eval.metrics)) for rung in rungs for each in rung.evals}
    last = SETTINGS if rungs[-1].index == len(plan.steps) - 1 else plan.steps[-1].kind
    return (
        Rung(stage=UNMODIFIED, metrics=_named(first, measured.baseline)),
        *(Rung(stage=rung.kind, metrics=_named(first, _stored(store, rung))) for rung in rungs),
        Rung(stage=last, metrics=_named(first, measured.metrics)),
    )


def _measure(
    plan: Plan, rungs: Sequence[Between], store: Store, context: Context, calibrated_on: tuple[dict[str, str], ...]
) -> None:
    """Measure what the store does not hold.
    The unmodified model is open beside the others if an eval compares with it.
    """
    missing = {rung.index: [each for each in rung.evals if not known(store, each.key)] for rung in rungs}
    measuring = EvalContext(
        seed=plan.recipe.seed, progress=context.progress, data=context.data, calibrated_on=calibrated_on
    )
    bench = Bench(store, plan.device, measuring, plan.steps[0].size_bytes)

    def subject(index: int) -> Subject:
        def weights() -> Path:
            return materialize(plan, index, store, context, set())

        return Subject(weights, (), context.trust_remote_code)

    with ExitStack() as held:
        comparing = any(each.eval.compares for evals in missing.values() for each in evals)
        unmodified = held.enter_context(bench.opened(subject(0))) if comparing else None
        for rung in rungs:
            if missing[rung.index]:
                context.progress.say(f"what {rung.kind} added")
                with bench.opened(subject(rung.index)) as session:
                    bench.measure(session, [(each.key, each) for each in missing[rung.index]], beside=unmodified)


def _stored(store: Store, rung: Between) -> list[Metric]:
    return [Metric.model_validate(metric) for each in rung.evals for metric in store.take_json(each.key)["metrics"]]


def _named(names: set[str], metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    return tuple(metric for metric in metrics if metric.name in names)
