"""Put scorecards side by side: what may be ranked together, who is on the front, which to take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from optkit.common.garbage import uncollected
from optkit.common.grouping import grouped, some
from optkit.comparison.choice import check_names, parse_requirement
from optkit.comparison.columns import table_of
from optkit.comparison.differing import differing_parts
from optkit.comparison.entries import entries_of, warned
from optkit.comparison.noise import floors_of
from optkit.comparison.ranking import Ranking, axis_of, groups_of, usual_axes
from optkit.comparison.reading import read_scorecards
from optkit.comparison.result import Comparison, Entry, Group, LeftOut
from optkit.comparison.table import short_digests
from optkit.scorecard.scorecard import Scorecard


def compare(
    places: Sequence[Path | str], *, require: Sequence[str] = (), best: str | None = None, axes: Sequence[str] = ()
) -> Comparison:
    """Return the scorecards of artifacts, of files and of what lies below directories, side by side.

    `require` are limits as gates have them, `perplexity<=1.05x`; `best` is the metric by which one
    of those that meet them is picked; `axes` are what they are ranked by, by default a quality, a
    size and a speed. Raises ArtifactError for what cannot be read, UsageError for an unknown metric.
    """
    with uncollected():
        found = read_scorecards([Path(place) for place in places])
        return compare_scorecards(
            found.cards, require=require, best=best, axes=axes, left_out=found.left_out, notes=found.notes
        )


def compare_scorecards(
    cards: Sequence[tuple[Path, Scorecard]],
    *,
    require: Sequence[str] = (),
    best: str | None = None,
    axes: Sequence[str] = (),
    left_out: Sequence[LeftOut] = (),
    notes: Sequence[str] = (),
) -> Comparison:
    """Return scorecards that are read already, each with its place, side by side.
    Raises UsageError for a metric that none has.
    """
    table = table_of([card for _, card in cards])
    gates = [parse_requirement(text) for text in require]
    check_names(gates, table)
    chosen = [*dict.fromkeys(axis_of(table, text, "--axis") for text in axes)] or usual_axes(table)
    wanted = axis_of(table, best, "--best") if best else None
    floors = {floor.column: floor for floor in floors_of([card for _, card in cards], table)}
    entries = entries_of(cards, table, floors, gates)
    ranking = Ranking(table, floors, entries, wanted)
    groups, ranked = list[Group](), list[Entry]()
    unranked = [entries[index] for index, keys in enumerate(table.along(chosen)) if not any(keys)]
    found = groups_of(table, chosen)
    for keys, members in found.items():
        group, its = ranking.rank([key for key in keys if key], members)
        groups.append(group.model_copy(update={"differs": differing_parts(table, next(iter(found)), keys)}))
        ranked += [entry.model_copy(update={"group": len(groups) - 1}) for entry in its]
    return Comparison(
        entries=(*ranked, *unranked),
        columns=table.columns,
        groups=tuple(groups),
        floors=tuple(floors.values()),
        best=best,
        require=tuple(require),
        notes=(
            *notes,
            *several_models(entries, found.values()),
            *(f"{entry.label} is not ranked: it has none of the axes" for entry in unranked),
        ),
        left_out=tuple(left_out),
        warnings=tuple(warned([card for _, card in cards], entries)),
    )


def several_models(entries: Sequence[Entry], groups: Iterable[Sequence[int]]) -> Iterator[str]:
    """Yield for each group of several unmodified models whose ratios are to which."""
    for members in groups:
        models = grouped((entries[index] for index in members), lambda entry: entry.model)
        if len(models) > 1:
            said = some(
                f"{', '.join(entry.label for entry in its)} of {short_digests(model)}" for model, its in models.items()
            )
            yield f"ratios are to {len(models)} unmodified models: {said}"
