"""Pick one of those that meet the requirements, and say why in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from optkit.comparison.axes import Axis
from optkit.comparison.choice import reason
from optkit.comparison.front import Front
from optkit.comparison.result import Entry
from optkit.recipe.gates import Verdict

FEW = 3


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
