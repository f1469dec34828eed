"""What differs: the fields of recipes, and the parts of protocols that keep numbers apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optkit.comparison.columns import Table
from optkit.scorecard.ratios import protocol_difference

STAGES_OWN = ".*."
"""Stands for the stage, whichever it is, in the name of its field."""


def differing_fields(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each recipe what differs among them, e.g. `stages.0: rtn` and `stages.0.rtn.bits: 4`.
    What is compared are the model, the stages and the seed.

    Fields of different stages at one place are compared by their names. A field that some of the
    stages do not have is left out unless the others differ in it: the stage's name says enough.
    """
    said = [dict(_said(recipe)) for recipe in recipes]
    values: dict[str, set[str]] = {}
    for each in said:
        for name, (_, value) in each.items():
            values.setdefault(name, set()).add(repr(value))
    missing = {name for name in values if STAGES_OWN not in name and not all(name in each for each in said)}
    apart = [name for name in values if len(values[name]) > 1 or name in missing]
    return [dict(each[name] for name in apart if name in each) for each in said]


def _said(recipe: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield what a recipe says as (name to compare by, (path, value))."""
    for path, value in _leaves({key: recipe[key] for key in ("model", "seed") if key in recipe}, ()):
        yield path, (path, value)
    for index, stage in enumerate(recipe.get("stages") or ()):
        for kind, fields in stage.items():
            place = f"stages.{index}"
            yield place, (place, kind)
            for path, value in _leaves(fields, ()) if fields else ():
                yield f"{place}{STAGES_OWN}{path}", (f"{place}.{kind}.{path}", value)


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
