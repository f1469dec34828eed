"""What a sweep would do: steps that its recipes share, and what the rest will need; pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optkit.common.frozen import Frozen
from optkit.environment import planned_device
from optkit.errors import OptkitError, StageError
from optkit.measuring.evaluation import metric_keys
from optkit.measuring.further import with_further
from optkit.pipeline import plan as plan_recipe
from optkit.plan import Plan, PlannedEval
from optkit.progress import Progress
from optkit.recipe.matrix import Combination
from optkit.store.durations import Durations
from optkit.store.shared import open_store
from optkit.store.store import Store
from optkit.sweep.executors.base import reason_of
from optkit.sweep.timing import timed_groups


class Planned(Frozen):
    """One combination."""

    name: str
    plan: Plan | None
    """None if it would fail."""
    reason: str = ""
    """Why it would."""


class SweepPlan(Frozen):
    """All that a sweep would do on a device, each step and measurement once."""

    name: str
    device: str
    combinations: tuple[Planned, ...]
    steps: int
    """Different steps of all recipes."""
    shared: int
    """How often a recipe finds a step that another one made."""
    pending: int
    """Steps to do."""
    disk_bytes: int
    """What they will leave in the store."""
    ram_bytes: int
    """Most main memory that one of them or an eval needs."""
    gpu_bytes: int
    seconds: float
    """How long what is known will take."""
    unknown: int
    """How many steps and measurements take a time that is not known here."""


def plan_sweep(
    name: str,
    combinations: Sequence[Combination],
    *,
    device: str | None = None,
    store: Path | None = None,
    data: Path | None = None,
    progress: Progress | None = None,
) -> SweepPlan:
    """Return what a sweep would do. Raises the error of the first combination if all would fail."""
    shelf, device = open_store(store, progress), planned_device(device)
    planned = [_planned(each, shelf, device, data, progress) for each in combinations]
    plans = {each.name: each.plan for each in planned if each.plan}
    if not plans:
        raise StageError(planned[0].reason, where=f"all {len(planned)} combinations")
    timed = {name: plan for group in timed_groups(plans, shelf) for name, plan in group.plans.items()}
    plans |= {name: with_further(plan, shelf) for name, plan in timed.items()}
    steps = {step.key: step for plan in plans.values() for step in plan.steps}
    pending = {step.key: step for plan in plans.values() for step in plan.pending}
    fetched = {step.key: step for plan in plans.values() for step in plan.fetched}
    times = [step.seconds for step in pending.values()]
    times += _eval_seconds([*plans.values()], shelf, device)
    return SweepPlan(
        name=name,
        device=device,
        combinations=tuple(planned),
        steps=len(steps),
        shared=sum(len(plan.steps) for plan in plans.values()) - len(steps),
        pending=len(pending),
        disk_bytes=sum(step.cost.disk_bytes for step in pending.values())
        + sum(step.size_bytes for step in fetched.values()),
        ram_bytes=max(plan.ram_bytes for plan in plans.values()),
        gpu_bytes=max(plan.gpu_bytes for plan in plans.values()),
        seconds=sum(filter(None, times)),
        unknown=times.count(None),
    )


def _planned(
    combination: Combination, store: Store, device: str, data: Path | None, progress: Progress | None
) -> Planned:
    try:
        return Planned(
            name=combination.name,
            plan=plan_recipe(combination.recipe, device=device, store=store, data=data, progress=progress),
        )
    except OptkitError as error:
        return Planned(name=combination.name, plan=None, reason=reason_of(error))


def _eval_seconds(plans: Sequence[Plan], store: Store, device: str) -> list[float | None]:
    """Return how long each measurement will take that the store does not hold, each once."""
    wanted: dict[str, tuple[PlannedEval, int]] = {}
    for plan in plans:
        for each in plan.evals:
            for key in metric_keys(each):
                if store.get_json(key) is None:
                    wanted.setdefault(key, (each, plan.steps[0].size_bytes))
    durations = Durations(store.root, device)
    further = {each.key: each.seconds for plan in plans for each in plan.further if each.pending}
    known = [durations.of_metric(each, key, size) for key, (each, size) in wanted.items()]
    return [*known, *further.values()]
