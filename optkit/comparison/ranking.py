"""Rank what may be ranked together: the front, the knee, the pick and the order of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optkit.common.grouping import by_key
from optkit.comparison.axes import Axis, widen
from optkit.comparison.choice import named_columns, reason
from optkit.comparison.columns import PREFERRED, AxisName, Table
from optkit.comparison.front import Front, front_of
from optkit.comparison.result import Column, Entry, Floor, Group
from optkit.recipe.gates import Verdict, metric_key

FEW = 3


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
    found = by_key((keys, index) for index, keys in enumerate(table.along(axes)) if any(keys))
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


def picked(axes: Sequence[Axis], front: Front, entries: Sequence[Entry], best: Axis | None) -> tuple[int | None, str]:
    """Return the index of the one to take, None if there is none, and the reason.

    Without a metric that is to be `best`, it is the one nearest to the best of all axes. With one,
    those that are not measurably worse in it than the first count as its equals. What fails a gate
    of its recipe is not picked.
    """
    able = [index for index, entry in enumerate(entries) if entry.passes is Verdict.PASS]
    if not able:
        return None, _why_none(entries)
    near = sorted(able, key=lambda each: (each not in front.choices, front.distances[each]))
    if best is None and front.knee is None:
        one, other = near[:2]
        apart = [axis.column.title for axis in axes if axis.differences(other)[one].relation != "none"]
        both = f"neither {entries[one].label} nor {entries[other].label} is better in all axes"
        return None, f"{both}: say what counts, as in --best {(apart or [axes[-1].column.title])[-1]}"
    if best is None:
        pick, others, beside = near[0], near[1:], list(axes)
    else:
        merits, equals = best.merits, best_of(best, able)
        pick = next(each for each in near if each in equals)
        others = sorted((each for each in able if each != pick), key=lambda each: -merits[each])
        beside = [best, *(axis for axis in axes if axis.column.key != best.column.key)]
    label = entries[pick].label
    if not others:
        return pick, f"{label} is the only one" + (" that passes" if len(entries) > 1 else "")
    differences = [(axis.column, axis.differences(others[0])[pick]) for axis in beside]
    return pick, reason(label, entries[others[0]].label, differences)


def best_of(axis: Axis, able: Sequence[int]) -> list[int]:
    """Return the first by one axis and those that are not measurably worse in it, by their estimates."""
    merits = axis.merits
    order = sorted(able, key=lambda each: -merits[each])
    relations = axis.relations(order[0])
    return [each for each in order if relations[each] == 0]


def _why_none(entries: Sequence[Entry]) -> str:
    what = "its gates and what is required" if any(entry.requirements for entry in entries) else "its gates"
    unclear = [entry.label for entry in entries if entry.passes is Verdict.INCONCLUSIVE]
    if unclear:
        more = f" and {len(unclear) - FEW} more" if len(unclear) > FEW else ""
        return f"none surely passes {what}; {', '.join(unclear[:FEW])}{more} may"
    return f"none passes {what}"
