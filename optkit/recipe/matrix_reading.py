"""From the text of a recipe, and several values of `--set`, to its matrix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from optkit.common.frozen import canonical_json
from optkit.errors import Problem, RecipeError, did_you_mean
from optkit.recipe.combination_names import axis_labels
from optkit.recipe.field_faults import shown
from optkit.recipe.matrix import Axis, Chosen, Matrix, Value
from optkit.recipe.overrides import assignment, override, read_value
from optkit.recipe.recipe import MATRIX, read_recipe
from optkit.recipe.yaml_places import Place, PlacedData, Steps

INCLUDE, EXCLUDE = "include", "exclude"
NO_AXES = ("name", "description", MATRIX)
EXAMPLE = "`stages.0.gptq.bits: [3, 4]`"
_SINGLE = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^,\[\]{}]|\[[^\]]*\]|\{[^}]*\}|[\[\]{}])*""")


def load_matrix(source: Path | str, overrides: Sequence[str] = (), model: str | None = None) -> Matrix:
    """Return the matrix of a recipe file, of a shipped recipe's name or of standard input (`-`).

    An override with several values, as in `stages.0.gptq.bits=3,4`, is an axis; it takes the place
    of the recipe's axis of the same path. `model` replaces the recipe's. Raises RecipeError.
    """
    placed, name = read_recipe(source)
    data = placed.data if isinstance(placed.data, dict) else {}
    rest = {key: value for key, value in data.items() if key != MATRIX}
    base = PlacedData(rest if data else placed.data, placed.keys, placed.values, placed.problems)
    matrix = data.get(MATRIX)
    problems: list[Problem] = []
    given, plain = _of_command_line(overrides, matrix if isinstance(matrix, dict) else {}, problems)
    place = placed.key_place((MATRIX,)) if MATRIX in data else next((axis.place for axis in given), Place())
    if MATRIX not in data and not given and not problems:
        return Matrix(base, placed, place, name, model, tuple(plain))
    problems += override(base, plain, model=None) if data else []
    read = _axes(placed, matrix, {axis.path for axis in given}, problems) if MATRIX in data else []
    axes = _labelled([*read, *given])
    include = _told_apart(_listed(placed, matrix, INCLUDE, problems), axes)
    exclude = tuple(_listed(placed, matrix, EXCLUDE, problems))
    problems += _of_no_axis(exclude, axes)
    if problems:
        raise RecipeError(sorted(problems, key=lambda each: (each.line, each.column)))
    return Matrix(base, placed, place, name, model, (), tuple(axes), include, exclude)


def _of_command_line(
    overrides: Sequence[str], matrix: Mapping[str, Any], problems: list[Problem]
) -> tuple[list[Axis], list[str]]:
    """Return the axes among overrides, and the others. Of one path the last counts.
    One value is an axis too if it takes the place of one of the recipe's.
    """
    found: dict[str, Axis | str] = {}
    for text in overrides:
        try:
            path, written = assignment(text)
            place = Place(f"--set {path}")
            parts = _parts(written)
            found.pop(path, None)
            if len(parts) == 1 and path not in matrix:
                found[path] = text
                continue
            if not all(parts):
                raise RecipeError([place.problem(f"an empty value in '{written}'. Write PATH=VALUE,VALUE.")])
            values = tuple(Value(path, read_value(part, place), place) for part in parts)
            problems += _twice(values)
            found[path] = Axis(path, place, values)
        except RecipeError as error:
            problems += error.problems
    axes = [each for each in found.values() if isinstance(each, Axis)]
    return axes, [each for each in found.values() if isinstance(each, str)]


def _parts(written: str) -> list[str]:
    """Return what stands between commas, those within quotes, lists and mappings left alone."""
    parts, at = [], 0
    while at <= len(written):
        found = _SINGLE.match(written, at)
        assert found
        parts.append(found[0].strip())
        at = found.end() + 1
    return parts


def _axes(placed: PlacedData, matrix: Any, replaced: Iterable[str], problems: list[Problem]) -> list[Axis]:
    """Return the axes of a `matrix:`, without those that the command line replaces."""
    place = placed.value_place((MATRIX,))
    if not isinstance(matrix, dict):
        empty = "the matrix is empty: there is nothing to combine." if matrix is None else ""
        problems.append(place.problem(f"{empty or f'a matrix is a mapping, not {shown(matrix)}.'} Write {EXAMPLE}."))
        return []
    if not matrix.get(INCLUDE) and not {*matrix} - {INCLUDE, EXCLUDE}:
        problems.append(place.problem(f"the matrix is empty: there is nothing to combine. Write {EXAMPLE}."))
        return []
    axes = []
    for path, values in matrix.items():
        steps: Steps = (MATRIX, path)
        at = placed.key_place(steps)
        if path in (INCLUDE, EXCLUDE) or path in replaced:
            continue
        if path in NO_AXES:
            problems.append(at.problem(f"{path} is no axis: each combination is named after its values. Take it out."))
        elif not isinstance(values, list) or not values:
            message = f"the values of the axis {path} are a list like [3, 4], not {shown(values)}."
            problems.append(placed.value_place(steps).problem(message))
        else:
            ways: list[Steps] = [(*steps, index) for index in range(len(values))]
            found = tuple(
                Value(path, value, placed.value_place(way), way) for way, value in zip(ways, values, strict=True)
            )
            problems += _twice(found)
            axes.append(Axis(path, at, found))
    return axes


def _twice(values: Sequence[Value]) -> list[Problem]:
    """Return the values that an axis has already."""
    first: dict[str, Value] = {}
    again = [each for each in values if first.setdefault(canonical_json(each.value), each) is not each]
    return [
        each.place.problem(f"the axis {each.path} has the value {shown(each.value)} twice. Remove one.")
        for each in again
    ]


def _labelled(axes: Sequence[Axis]) -> list[Axis]:
    """Return the axes with a word for each value."""
    labels = [
        axis_labels(axis.path, [each.value for each in axis.values], [each.path for each in axes if each is not axis])
        for axis in axes
    ]
    return [
        replace(axis, values=tuple(replace(each, label=word) for each, word in zip(axis.values, words, strict=True)))
        for axis, words in zip(axes, labels, strict=True)
    ]


def _told_apart(listed: Sequence[Chosen], axes: Sequence[Axis]) -> tuple[Chosen, ...]:
    """Return combinations with a word for each value, by which it differs from others of its path."""
    known = {axis.path: {canonical_json(each.value): each.value for each in axis.values} for axis in axes}
    for each in chain.from_iterable(listed):
        known.setdefault(each.path, {})[canonical_json(each.value)] = each.value
    words = {
        path: dict(zip(values, axis_labels(path, [*values.values()], [*known.keys() - {path}]), strict=True))
        for path, values in known.items()
    }
    return tuple(
        tuple(replace(each, label=words[each.path][canonical_json(each.value)]) for each in chosen) for chosen in listed
    )


def _listed(placed: PlacedData, matrix: Any, key: str, problems: list[Problem]) -> list[Chosen]:
    """Return the combinations, or parts of them, that a matrix lists under a key."""
    listed = matrix.get(key) if isinstance(matrix, dict) else None
    if listed is None:
        return []
    found = []
    for index, item in enumerate(listed if isinstance(listed, list) else [listed]):
        steps: Steps = (MATRIX, key, index) if isinstance(listed, list) else (MATRIX, key)
        if not isinstance(item, dict) or not item or not isinstance(listed, list):
            message = f"{key} is a list of mappings like {{stages.0.gptq.bits: 3}}, not {shown(listed)}."
            problems.append(placed.value_place(steps).problem(message))
            continue
        found.append(
            tuple(Value(path, value, placed.key_place((*steps, path)), (*steps, path)) for path, value in item.items())
        )
    return found


def _of_no_axis(exclude: Sequence[Chosen], axes: Sequence[Axis]) -> list[Problem]:
    """Return what is excluded by paths that are no axes."""
    paths = [axis.path for axis in axes]
    return [
        each.place.problem(
            f"{each.path} is no axis of the matrix, so that nothing can be excluded by it."
            f"{did_you_mean(each.path, paths)}"
        )
        for partial in exclude
        for each in partial
        if each.path not in paths
    ]
