"""Which recipe comes next, and which ones may be made at the same time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from optkit.plan import Plan


def nearest(waiting: Mapping[str, Plan], finished: Iterable[str]) -> str:
    """Return the name of the next plan: the one with the longest beginning among finished steps.
    Of several the first. A beginning is then made when it is needed, and used while it is fresh.
    """
    there = set(finished)
    return max(waiting, key=lambda name: shared(waiting[name], there))


def shared(plan: Plan, finished: set[str]) -> int:
    """Return how many steps of a plan are finished, counted from its model on."""
    return next((index for index, step in enumerate(plan.steps) if step.key not in finished), len(plan.steps))


def ready(waiting: Mapping[str, Plan], at_work: Collection[str], is_there: Callable[[str], bool]) -> list[str]:
    """Return the names of the plans that can begin, of all that wait for their outcome.
    No two of them, and none of those at work, have a step to make that is not there yet: the
    first makes it, and the others begin when it is there.
    """
    steps = {name: {step.key for step in plan.pending} for name, plan in waiting.items()}
    being_made = {key for name in at_work for key in steps[name] if not is_there(key)}
    found = []
    for name in waiting:
        if name not in at_work and not steps[name] & being_made:
            found.append(name)
            being_made |= {key for key in steps[name] if not is_there(key)}
    return found
