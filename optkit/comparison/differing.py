"""What differs: the fields of recipes, and the parts of protocols that keep numbers apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optkit.comparison.columns import Table
from optkit.scorecard.ratios import protocol_difference

OUTSIDE = ("name", "description")
"""Fields of a recipe that change nothing."""
ABSENT = None


def differing_fields(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each recipe those of its fields that differ among them, e.g. `stages.0.rtn.bits: 4`.
    What is compared are the model, the stages and the seed.
    """
    leaves = [
        dict(_leaves({key: value for key, value in recipe.items() if key in ("model", "stages", "seed")}, ()))
        for recipe in recipes
    ]
    seen: dict[str, set[str]] = {}
    for each in leaves:
        for path, value in each.items():
            seen.setdefault(path, set()).add(repr(value))
    counts = {path: sum(path in each for each in leaves) for path in seen}
    apart = [path for path in seen if len(seen[path]) > 1 or counts[path] < len(leaves)]
    return [{path: each[path] for path in apart if path in each} for each in leaves]


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(each, (*path, str(key)))
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        for index, each in enumerate(value):
            yield from _leaves(each, (*path, str(index)))
    else:
        yield ".".join(path), value


def differing_parts(table: Table, first: Sequence[str | None], other: Sequence[str | None]) -> tuple[str, ...]:
    """Return a line for each axis by which another group differs from the first, with the parts of
    the protocols that are not the same.
    """
    columns = {column.key: column for column in table.columns}
    lines = []
    for key, its in zip(first, other, strict=True):
        if key == its:
            continue
        axis = columns[its or key or ""].title.partition(" #")[0]
        if key is None or its is None:
            lines.append(f"{axis}: measured {'here' if its else 'in the first group'} alone")
            continue
        ours, theirs = columns[its], columns[key]
        same = theirs.protocol == ours.protocol
        parts = [] if same else [protocol_difference(theirs.protocol, ours.protocol)]
        parts += [
            (f"{name} {theirs.environment.get(name, '-')}", f"{name} {ours.environment.get(name, '-')}")
            for name in dict.fromkeys((*theirs.environment, *ours.environment))
            if theirs.environment.get(name) != ours.environment.get(name)
        ]
        lines += [f"{axis}: {mine}, not {before}" for before, mine in parts]
    return tuple(lines)
