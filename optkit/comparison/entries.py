"""Each scorecard as an entry: its name among the others, its cells, and whether it meets what is required."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from optkit.common.grouping import by_key
from optkit.comparison.axes import NEGLIGIBLE
from optkit.comparison.choice import judged
from optkit.comparison.columns import Table, model_of
from optkit.comparison.differing import differing_fields
from optkit.comparison.result import Cell, Entry, Floor, Relation, Warned
from optkit.recipe.gates import Gate, overall
from optkit.scorecard.scorecard import Measured, Scorecard
from optkit.scorecard.summary import to_act_on

BETWEEN_WORDS = "-"
"""Of a name of a recipe, and of a sweep's combination."""


def entries_of(
    cards: Sequence[tuple[Path, Scorecard]], table: Table, floors: Mapping[str, Floor], gates: Sequence[Gate]
) -> list[Entry]:
    """Return an entry for each scorecard, not ranked yet."""
    fields = differing_fields([card.recipe for _, card in cards])
    units = {column.key: column.unit for column in table.columns}
    found = []
    for (place, card), label, rows, its in zip(cards, _labels(cards), table.rows, fields, strict=True):
        results = tuple(judged(gate, rows.values()) for gate in gates)
        found.append(
            Entry(
                label=label,
                place=str(place),
                artifact_key=card.artifact_key,
                created=card.created,
                model=model_of(card),
                device=card.device,
                fields=its,
                verdict=card.verdict,
                gates=tuple(gate for row in card.rows for gate in row.gates),
                requirements=results,
                meets=overall([each.verdict for each in results]),
                passes=overall([card.verdict, *(each.verdict for each in results)]),
                cells=tuple(_cell(key, row, floors.get(key), units[key]) for key, row in rows.items()),
            )
        )
    return found


def warned(cards: Sequence[Scorecard], entries: Sequence[Entry]) -> list[Warned]:
    """Return what scorecards ask to act on, each text once; what most say comes first."""
    beside = zip(cards, entries, strict=True)
    found = by_key((text, entry.label) for card, entry in beside for text in dict.fromkeys(to_act_on(card)))
    alike = [Warned(text=text, entries=tuple(labels)) for text, labels in found.items()]
    return sorted(alike, key=lambda each: -len(each.entries))


def _labels(cards: Sequence[tuple[Path, Scorecard]]) -> list[str]:
    """Return a name for each: the recipe's, and behind it the place if several have it.
    What all begin with is left out: of names the words, e.g. a sweep's name, of places the directories.
    """
    names, places = _without_shared([card.name for _, card in cards]), [str(place.absolute()) for place, _ in cards]
    alike = by_key(zip(names, places, strict=True))
    return [
        name if len(alike[name]) == 1 else f"{name} {os.path.relpath(place, os.path.commonpath(alike[name]))}"
        for name, place in zip(names, places, strict=True)
    ]


def _without_shared(names: Sequence[str]) -> list[str]:
    words = [name.split(BETWEEN_WORDS)[:-1] for name in set(names)]
    alike = takewhile(lambda column: len(words) > 1 and len(set(column)) == 1, zip(*words, strict=False))
    shared = sum(1 for _ in alike)
    return [BETWEEN_WORDS.join(name.split(BETWEEN_WORDS)[shared:]) for name in names]


def _cell(column: str, row: Measured, floor: Floor | None, unit: str) -> Cell:
    metric = row.metric
    baseline = row.baseline if row.baseline and not row.baseline.failure else None
    if metric.failure:
        return Cell(column=column, value=None, failure=metric.failure)
    return Cell(
        column=column,
        value=metric.value,
        interval=metric.interval,
        baseline=baseline.value if baseline else None,
        baseline_interval=baseline.interval if baseline else None,
        ratio=row.ratio,
        ratio_interval=row.ratio_interval,
        change=_change(row, floor, unit),
    )


def _change(row: Measured, floor: Floor | None, unit: str) -> Relation | None:
    """Return what a number is to the unmodified model's; a divergence is one from it already."""
    if row.ratio is None:
        if floor is None or unit != "nats/token":
            return None
        return "worse" if row.metric.value > floor.value else "none"
    low, high = row.ratio_interval or (row.ratio, row.ratio)
    least = max(NEGLIGIBLE, floor.value if floor and floor.relative else 0.0)
    if low <= 1 <= high or 1 / (1 + least) <= row.ratio <= 1 + least:
        return "none"
    return "better" if (low > 1) == row.metric.higher_is_better else "worse"
