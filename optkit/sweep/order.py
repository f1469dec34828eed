"""Which recipe comes next: the one whose steps are most shared with what is finished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
