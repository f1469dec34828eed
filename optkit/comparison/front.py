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
    knee: int | None
    dominators: tuple[tuple[int, ...], ...]
    """For each scorecard, who dominates it, those of the front first, three at most; for the front
    none.
    """
    distances: tuple[float, ...]
    """From the best of all axes, each scaled to the span of the front."""


def front_of(axes: Sequence[Axis], count: int) -> Front:
    """Return the front of `count` scorecards.

    One dominates another if it is measurably worse in no axis and measurably better in one. That
    is not transitive, because small differences add up: of a ring none is dominated by the ring.
    """
    dominated = numpy.zeros((count, count), dtype=bool)  # [who, by whom]
    for other in range(count):
        relations = numpy.stack([axis.relations(other) for axis in axes])
        dominated[other] = (relations >= 0).all(0) & (relations > 0).any(0)
    members = _members(dominated)
    distances = _distances(axes, members)
    apart = numpy.lexsort((distances, [each not in members for each in range(count)]))
    dominators = [
        () if index in members else tuple(apart[dominated[index, apart]][:MOST_NAMED].tolist())
        for index in range(count)
    ]
    nearest = sorted(members, key=lambda each: distances[each])
    knee = nearest[0] if len(nearest) == 1 or len(nearest) > 2 else None
    return Front(tuple(sorted(members)), knee, tuple(dominators), tuple(map(float, distances)))


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


def _distances(axes: Sequence[Axis], members: set[int]) -> Any:
    front = sorted(members)
    total: Any = 0.0
    for axis in axes:
        merits = axis.merits
        best, span = merits[front].max(), numpy.ptp(merits[front])
        total = total + ((best - merits) / (span or 1.0)) ** 2
    return numpy.sqrt(total)
