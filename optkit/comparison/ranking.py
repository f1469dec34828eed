"""Rank what may be ranked together: the front, the knee, the pick and the order of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optkit.comparison.axes import Axis, widen
from optkit.comparison.choice import named_columns
from optkit.comparison.columns import PREFERRED, AxisName, Table
from optkit.comparison.front import front_of
from optkit.comparison.picking import best_of, picked
from optkit.comparison.result import Column, Entry, Floor, Group
from optkit.recipe.gates import Verdict, metric_key


def axis_of(table: Table, text: str, option: str) -> AxisName:
    """Return the axis that `decode_tokens_per_s[batch=8]` names, of several the first one.
    Raises UsageError if no scorecard has it.
    """
    return _name(named_columns(table, text, option)[0])


def usual_axes(table: Table) -> list[AxisName]:
    """Return a quality, a size and a speed, of each the one that the most scorecards have."""
    found = []
    for role, preferred in PREFERRED.items():
        names = list(dict.fromkeys(_name(column) for column in table.columns if column.role == role))
        counts = {name: sum(1 for row in table.along([name]) if row[0]) for name in names}

        def place(
            name: AxisName, counts: Mapping[AxisName, int] = counts, known: Sequence[str] = preferred
        ) -> tuple[int, int]:
            return -counts[name], known.index(name[0]) if name[0] in known else len(known)

        found += sorted(names, key=place)[:1]
    return found


def groups_of(table: Table, axes: Sequence[AxisName]) -> dict[tuple[str | None, ...], list[int]]:
    """Return who can be ranked together, by the columns of their axes; the largest group first."""
    found: dict[tuple[str | None, ...], list[int]] = {}
    for index, keys in enumerate(table.along(axes)):
        if any(keys):
            found.setdefault(keys, []).append(index)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _name(column: Column) -> AxisName:
    return column.name, tuple(sorted(column.labels.items()))


@dataclass(frozen=True)
class Ranking:
    """What scorecards are ranked by."""

    table: Table
    floors: Mapping[str, Floor]
    entries: Sequence[Entry]
    best: AxisName | None
    """The metric by which one is picked."""

    def rank(self, keys: Sequence[str], members: Sequence[int]) -> tuple[Group, list[Entry]]:
        """Return a group and its entries, ranked. `keys` are the columns of its axes."""
        entries = [self.entries[index] for index in members]
        able = [index for index, entry in enumerate(entries) if entry.passes is Verdict.PASS]
        axes = [self._axis(key, members) for key in keys]
        widen(axes)
        front = front_of(axes, [entry.passes is Verdict.PASS for entry in entries])
        best = self._best(members)
        if isinstance(best, str):
            pick, why = None, best
        else:
            pick, why = picked(axes, front, entries, best)
        order = sorted(
            range(len(members)),
            key=lambda at: (at != pick, at not in front.choices, at not in front.members, front.distances[at]),
        )
        first = pick if pick is not None else front.knee if front.knee is not None else order[0]
        beside = list(zip(*(axis.differences(first) for axis in axes), strict=True))
        ranked = [
            entries[each].model_copy(
                update={
                    "rank": rank,
                    "front": each in front.members,
                    "knee": each == front.knee,
                    "pick": each == pick,
                    "dominated_by": tuple(entries[other].label for other in front.dominators[each]),
                    "differences": beside[each] if each != first else (),
                }
            )
            for rank, each in enumerate(order, start=1)
        ]
        group = Group(
            axes=tuple(keys),
            entries=tuple(each.label for each in ranked),
            front=tuple(each.label for each in ranked if each.front),
            knee=None if front.knee is None else entries[front.knee].label,
            pick=None if pick is None else entries[pick].label,
            bests={
                axis.column.key: tuple(entries[each].label for each in best_of(axis, able)) for axis in axes if able
            },
            why=why,
        )
        return group, ranked

    def _best(self, members: Sequence[int]) -> Axis | str | None:
        """Return the axis by which one is picked, or why there is none."""
        if self.best is None:
            return None
        keys = {row[0] for row in self.table.along([self.best], members)}
        name = metric_key(self.best[0], dict(self.best[1]))
        if None in keys:
            return f"{name} was not measured of all that are ranked here"
        if len(keys) > 1:
            return f"{name} was measured here by {len(keys)} protocols"
        return self._axis(str(keys.pop()), members)

    def _axis(self, key: str, members: Sequence[int]) -> Axis:
        column = next(column for column in self.table.columns if column.key == key)
        rows = [self.table.rows[index][key] for index in members]
        one_model = len({self.entries[index].model for index in members}) == 1
        return Axis(column, rows, self.floors.get(key), one_model)
