"""The Pareto front under uncertainty: who is dominated, the knee, and the order of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from optkit.comparison.axes import Axis

MOST_NAMED = 3


@dataclass(frozen=True)
class Front:
    """Who stands where; all are indices of scorecards of one group."""

    members: tuple[int, ...]
    choices: tuple[int, ...]
    """The front of those that pass alone, of all if none does."""
    knee: int | None
    """The one of `choices` that is nearest to the best of all axes; None of two, which are both ends."""
    dominators: tuple[tuple[int, ...], ...]
    """For each scorecard, who dominates it, those of the front first, three at most; for the front
    none.
    """
    distances: tuple[float, ...]
    """From the best of all axes among `choices`, each axis scaled to their span."""


def front_of(axes: Sequence[Axis], passing: Sequence[bool]) -> Front:
    """Return the front of scorecards, and that of those that are `passing`.

    One dominates another if it is measurably worse in no axis and measurably better in one. That
    is not transitive, because small differences add up: of a ring none is dominated by the ring.
    """
    count = len(passing)
    dominated = numpy.zeros((count, count), dtype=bool)  # [who, by whom]
    for other in range(count):
        relations = numpy.stack([axis.relations(other) for axis in axes])
        dominated[other] = (relations >= 0).all(0) & (relations > 0).any(0)
    members = _members(dominated)
    able = numpy.flatnonzero(passing) if any(passing) else numpy.arange(count)
    choices = [int(able[each]) for each in sorted(_members(dominated[numpy.ix_(able, able)]))]
    distances = _distances(axes, choices)
    apart = numpy.lexsort((distances, [each not in members for each in range(count)]))
    dominators = [
        () if index in members else tuple(apart[dominated[index, apart]][:MOST_NAMED].tolist())
        for index in range(count)
    ]
    knee = None if len(choices) == 2 else min(choices, key=lambda each: float(distances[each]))
    return Front(tuple(sorted(members)), tuple(choices), knee, tuple(dominators), tuple(map(float, distances)))


def _members(dominated: Any) -> set[int]:
    """Return who is dominated by none, and the members of each ring that nobody outside dominates."""
    members = {int(each) for each in numpy.flatnonzero(~dominated.any(1))}
    reached = _reached(dominated.T, members)
    while not reached.all():
        outside = ~reached
        while outside.any():  # climb to a ring that has nobody above it
            start = {int(numpy.flatnonzero(outside)[0])}
            below, above = _reached(dominated.T, start), _reached(dominated, start)
            outside = above & ~below
        members |= {int(each) for each in numpy.flatnonzero(above)}
        reached |= below
    return members


def _reached(arrows: Any, start: set[int]) -> Any:
    """Return whom arrows lead to from those of the start, themselves too: bool [scorecards]."""
    found = numpy.zeros(len(arrows), dtype=bool)
    new = sorted(start)
    while new:
        found[new] = True
        new = numpy.flatnonzero(arrows[new].any(0) & ~found).tolist()
    return found


def _distances(axes: Sequence[Axis], choices: list[int]) -> Any:
    total: Any = 0.0
    for axis in axes:
        merits = axis.merits
        best, span = merits[choices].max(), numpy.ptp(merits[choices])
        total = total + (numpy.maximum(best - merits, 0.0) / (span or 1.0)) ** 2
    return numpy.sqrt(total)
