"""What a run measures beside its evals, to tell where damage and speed come from, counted in its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optkit.measuring.attribution import between
from optkit.measuring.bench import known
from optkit.measuring.speed import speed_rungs
from optkit.model.cost import Cost
from optkit.plan import Plan, PlannedEval, Step, session_memory
from optkit.recipe.recipe import SettingEntry
from optkit.store.durations import Durations
from optkit.store.store import Store


def with_further(plan: Plan, store: Store) -> Plan:
    """Return a plan that counts the further models too, and what has to be timed again in turns with
    them.
    """
    durations, size = Durations(store.root, plan.device), plan.steps[0].size_bytes
    further, again = list[PlannedEval](), set[str]()
    for name, step, settings, key, each in _measured(plan):
        there = known(store, key)
        told = {"kind": f"{each.kind}, {name}", "key": key, "baseline_key": None, "hit": there, "baseline_hit": True}
        needs: dict[str, Any] = {"cost": Cost(), "seconds": None}
        if not there:
            seconds = durations.of_metric(each, key, size)
            needs = {"cost": _cost(plan, each, step, settings), "seconds": seconds}
            again |= {each.key} if each.eval.timed else set()
        further.append(each.model_copy(update=told | needs))
    evals = []
    for each in plan.evals:
        if each.key in again and not each.pending:
            each = each.model_copy(update={"hit": False, "baseline_hit": False})
            cost = _cost(plan, each, plan.steps[-1], plan.recipe.settings)
            each = each.model_copy(update={"cost": cost, "seconds": durations.of_eval(each, size)})
        evals.append(each)
    return plan.model_copy(update={"evals": tuple(evals), "further": tuple(further)})


def _measured(plan: Plan) -> Iterator[tuple[str, Step, tuple[SettingEntry, ...], str, PlannedEval]]:
    """Yield each further measurement: a name, the weights, how they are opened, the key and the eval."""
    for rung in speed_rungs(plan, stages=True).rungs:
        for key, each in rung.wanted:
            yield rung.name, plan.steps[rung.index], rung.settings, key, each
    for found in between(plan):
        for each in found.evals:
            yield f"after {found.kind}", plan.steps[found.index], (), each.key, each


def _cost(plan: Plan, each: PlannedEval, step: Step, settings: tuple[SettingEntry, ...]) -> Cost:
    memory = session_memory(step, settings, plan.device)
    beside = session_memory(plan.steps[0], plan.baseline_settings, plan.device) if each.eval.compares else None
    return each.eval.predict(memory, beside) if memory else Cost()
