"""A recipe with a `matrix:`: each combination of the values of its axes is a recipe of its own.

    matrix:
      stages.0: [rtn, {gptq: {calibration: {samples: 16}}}]    # whole stages
      stages.0.*.bits: [3, 4]                                  # a field of whichever stands there
      exclude: [{stages.0: rtn, stages.0.*.bits: 3}]
      include: [{stages.0: {nf4: {}}}]

The paths are those of `--set`. A combination has the name of the recipe and of its values, e.g.
`NAME-gptq-bits4`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optkit.common.frozen import canonical_json
from optkit.errors import Problem, RecipeError, UsageError
from optkit.recipe.combination_names import combination_name, shortened
from optkit.recipe.field_faults import shown
from optkit.recipe.overrides import assign
from optkit.recipe.recipe import LONGEST_NAME, Recipe, checked
from optkit.recipe.yaml_places import Place, PlacedData, Steps

MOST = 500
"""Combinations that are all made; of more, `--trials` takes some."""


@dataclass(frozen=True)
class Value:
    """One value of one field or stage."""

    path: str
    value: Any
    place: Place
    steps: Steps = ()
    """The way to it in the recipe's data; empty if `--set` gave it."""
    label: str = ""
    """A word for it in names."""


@dataclass(frozen=True)
class Axis:
    """What differs between the combinations: the values of one path."""

    path: str
    place: Place
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Combination:
    """One recipe of a matrix."""

    name: str
    """What tells it from the others, e.g. `gptq-bits4`; empty if there are no others."""
    assignment: Mapping[str, Any]
    """Path -> value."""
    recipe: Recipe

    @property
    def content(self) -> str:
        """What its recipe does, without the name."""
        return _content(self.recipe)

    def trusting(self, trusted: bool) -> Combination:
        """Return it with the code of its model trusted, if the command line says so."""
        return replace(self, recipe=self.recipe.trusting(trusted))


Chosen = tuple[Value, ...]


@dataclass(frozen=True)
class Matrix:
    """A recipe and the axes along which it is varied; without any it is that recipe alone."""

    base: PlacedData
    """The recipe without its matrix."""
    written: PlacedData
    """The recipe with it, for the places of its values."""
    place: Place
    """Of the matrix."""
    file_name: str
    model: str | None = None
    overrides: tuple[str, ...] = ()
    """What `--set` changes in a recipe that is not varied; in one that is, it is done already."""
    axes: tuple[Axis, ...] = ()
    include: tuple[Chosen, ...] = ()
    exclude: tuple[Chosen, ...] = ()

    @property
    def name(self) -> str:
        """The name of the recipe."""
        given = self.base.data.get("name") if isinstance(self.base.data, dict) else None
        return given if isinstance(given, str) else self.file_name

    @property
    def varied(self) -> bool:
        """Whether there are axes or further combinations."""
        return bool(self.axes or self.include)

    def require_varied(self, source: Path | str, remedy: str) -> None:
        """Raise UsageError with the remedy if the recipe from `source` has one combination alone."""
        if not self.varied:
            why = "A sweep has a `matrix:`, or a field with several values: --set stages.0.gptq.bits=3,4"
            raise UsageError("this is one recipe", where=str(source), why=why, remedy=remedy)

    @property
    def size(self) -> int:
        """How many combinations the axes have, those that are excluded among them."""
        return math.prod(len(axis.values) for axis in self.axes) if self.axes else 0

    def has_more_than(self, count: int) -> bool:
        """Say whether the axes and what is added to them have more combinations."""
        return self.size + len(self.include) > count

    def combinations(self, most: int = MOST) -> tuple[Combination, ...]:
        """Return all combinations; raises RecipeError with every problem of any of them, or for more than `most`."""
        if not self.varied:
            recipe = checked(self.base, self.file_name, self.overrides, self.model)
            return (Combination("", {}, recipe),)
        if self.size > most:
            many = f"the matrix has {self.size:,} combinations, and no more than {most} are all made."
            raise RecipeError([self.place.problem(f"{many} Let some of them be chosen: --trials N.")])
        product = list(itertools.product(*(axis.values for axis in self.axes))) if self.axes else []
        left = [each for each in product if not self.is_excluded(each)]
        problems = list(self._idle_excludes(product))
        found = self._all_checked([*left, *self.include], problems)
        if problems := [*self._idle_axes(found[: len(left)])] or [*self._twice(found)]:
            raise RecipeError(problems)
        return found

    def _different(self, chosen: Sequence[Chosen]) -> tuple[Combination, ...]:
        """Return the combinations; raises RecipeError with what is wrong in any, and if two are the same."""
        found = self._all_checked(chosen, [])
        if problems := [*self._twice(found)]:
            raise RecipeError(problems)
        return found

    def some(self, count: int, seed: int) -> tuple[Combination, ...]:
        """Return so many combinations, drawn with a seed; a larger count has those of a smaller one.
        Those of `include` are among them. Raises RecipeError as `combinations` does.
        """
        if not self.has_more_than(count):
            return self.combinations(count)
        draw, seen, found = random.Random(seed), set[int](), list[Chosen](self.include[:count])
        while len(found) < count and len(seen) < self.size:
            number = draw.randrange(self.size)
            if number not in seen:
                seen.add(number)
                each = self._numbered(number)
                found += [] if self.is_excluded(each) else [each]
        return self._different(found)

    def first(self, count: int) -> tuple[Combination, ...]:
        """Return so many combinations in their order, those of `include` first.
        Raises RecipeError as `combinations` does.
        """
        if not self.has_more_than(count):
            return self.combinations(count)
        return self._different([*itertools.islice(itertools.chain(self.include, self._left()), count)])

    def included(self, count: int) -> tuple[Combination, ...]:
        """Return the combinations of `include`, no more than so many; raises RecipeError."""
        return self._all_checked(self.include[:count], []) if self.include else ()

    def covering(self) -> tuple[Combination, ...]:
        """Return all combinations; of too many the first, and so few that each value is in one.
        Raises RecipeError as `combinations` does.
        """
        if self.size <= MOST:
            return self.combinations()
        most = max(len(axis.values) for axis in self.axes)
        found = (self.placed([index % len(axis.values) for axis in self.axes]) for index in range(most))
        some = [*itertools.islice(self._left(), 1), *(each for each in found if not self.is_excluded(each))]
        return self._all_checked(some, [])

    def _left(self) -> Iterator[Chosen]:
        """Yield the values of each combination of the axes that is not excluded."""
        product = itertools.product(*(axis.values for axis in self.axes))
        return (each for each in product if not self.is_excluded(each))

    def combination(self, chosen: Chosen) -> Combination:
        """Return the recipe of values, one of each axis; raises RecipeError."""
        return self._all_checked([chosen], [])[0]

    def placed(self, places: Sequence[int]) -> Chosen:
        """Return the value of each axis at its place."""
        return tuple(axis.values[place] for axis, place in zip(self.axes, places, strict=True))

    def _numbered(self, number: int) -> Chosen:
        places = []
        for axis in self.axes:
            number, place = divmod(number, len(axis.values))
            places.append(place)
        return self.placed(places)

    def is_excluded(self, chosen: Chosen) -> bool:
        """Say whether values, one of each axis, have the values of one that is excluded."""
        return any(_has(chosen, partial) for partial in self.exclude)

    def _all_checked(self, chosen: Sequence[Chosen], problems: list[Problem]) -> tuple[Combination, ...]:
        """Return the combinations; raises RecipeError with what is wrong in any, and in which."""
        found: list[Combination] = []
        wrong: dict[Problem, list[str]] = {}
        if not chosen:
            problems.append(self.place.problem(f"all {self.size:,} combinations are excluded: nothing is left."))
        for values in chosen:
            meant = {each.path: each.value for each in values}
            name = combination_name([each.label for each in values], meant)
            try:
                found.append(Combination(name, meant, self._recipe_of(values, name)))
            except RecipeError as error:
                for problem in error.problems:
                    wrong.setdefault(problem, []).append(name)
        for problem, names in wrong.items():
            some = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            said = problem.message if len(names) == len(chosen) else f"{problem.message} Combinations: {some}."
            problems.append(Problem(said, problem.file, problem.line, problem.column))
        if problems:
            raise RecipeError(sorted(problems, key=lambda problem: (problem.line, problem.column)))
        return tuple(found)

    def _recipe_of(self, values: Chosen, name: str) -> Recipe:
        """Return the recipe with these values; raises RecipeError, with places in the matrix."""
        data = PlacedData(dict(self.base.data), dict(self.base.keys), dict(self.base.values), [*self.base.problems])
        # Whole stages before their fields, whatever the order in which they are written.
        for each in sorted(values, key=lambda each: each.path.count(".")):
            steps = assign(data, each.path, each.value, each.place)
            for places, there in ((self.written.keys, data.keys), (self.written.values, data.values)):
                length = len(each.steps) or math.inf
                inside = {
                    way: at for way, at in places.items() if len(way) > length and way[: int(length)] == each.steps
                }
                there.update({(*steps, *way[int(length) :]): at for way, at in inside.items()})
        meant = {each.path: each.value for each in values}
        data.data["name"] = shortened(f"{self.name}-{name}", meant, max(LONGEST_NAME, len(self.name)))
        return checked(data, self.file_name, (), self.model)

    def _idle_excludes(self, product: Sequence[Chosen]) -> Iterator[Problem]:
        for partial in self.exclude:
            if not any(_has(each, partial) for each in product):
                message = "no combination has these values, so that nothing is excluded. Write values of the axes."
                yield partial[0].place.problem(message)

    def _idle_axes(self, found: Sequence[Combination]) -> Iterator[Problem]:
        """Yield the axes along which all recipes are the same."""
        for axis in self.axes:
            alike: dict[str, list[str]] = {}
            for each in found:
                others = {path: value for path, value in each.assignment.items() if path != axis.path}
                alike.setdefault(canonical_json(others), []).append(each.content)
            if len(axis.values) > 1 and all(len(set(recipes)) == 1 for recipes in alike.values()):
                if len(found) > len(alike):
                    message = (
                        f"the axis {axis.path} changes nothing: all its {len(axis.values)} values give one recipe."
                    )
                    yield axis.place.problem(f"{message} Take it out, or vary a field that is used.")
            elif axis.values[0].steps and len(axis.values) == 1 and self._is_as_without(axis, found):
                message = (
                    f"the axis {axis.path} changes nothing: {shown(axis.values[0].value)} is what the recipe says."
                )
                yield axis.place.problem(f"{message} Give it other values, or take it out.")

    def _is_as_without(self, axis: Axis, found: Sequence[Combination]) -> bool:
        rest = tuple(other.values[0] for other in self.axes if other is not axis)
        try:
            without = _content(self._recipe_of(rest, "without"))
        except RecipeError:
            return False
        return any(without == each.content for each in found)

    def _twice(self, found: Sequence[Combination]) -> Iterator[Problem]:
        """Yield the combinations whose recipe another one has already."""
        first: dict[str, Combination] = {}
        for each in found:
            earlier = first.setdefault(each.content, each)
            if earlier is not each:
                message = f"the combinations {earlier.name} and {each.name} are the same recipe. Exclude one of them."
                yield self.place.problem(message)


def _has(chosen: Chosen, partial: Chosen) -> bool:
    """Say whether a combination has the values of a part of one; a label stands for its value too."""
    there = {each.path: each for each in chosen}
    return all(each.value in (there[each.path].value, there[each.path].label) for each in partial)


def _content(recipe: Recipe) -> str:
    """Return what a recipe does, without its name."""
    return canonical_json(recipe.resolved() | {"name": "", "description": ""})
