"""Change a recipe before it is checked: `--set PATH=VALUE`, `--model NAME`, the values of a matrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from optkit.errors import OptkitError, Problem, RecipeError
from optkit.recipe.field_faults import shown
from optkit.recipe.registry import spell_out
from optkit.recipe.yaml_places import Place, PlacedData, Steps, read_yaml

ROLES = {"stages": "stage", "evals": "eval"}

ANY = "*"
"""In a path, the stage or eval that stands there, whichever it is."""

_OVERRIDE = re.compile(r"(?P<path>(?:[^\[\]=]|\[[^\]]*\])+)=(?P<value>.*)", re.DOTALL)
_DOT = re.compile(r"\.(?![^\[]*\])")


def override(recipe: PlacedData, overrides: Sequence[str], model: str | None) -> list[Problem]:
    """Change the data in place and note the origin of each new value.
    Returns what could not be followed.
    """
    problems: list[Problem] = []
    for text in overrides:
        try:
            path, written = assignment(text)
            place = Place(f"--set {path}")
            assign(recipe, path, read_value(written, place), place)
        except RecipeError as error:
            problems += error.problems
    if model is not None:
        recipe.data["model"] = model
        _note(recipe, ("model",), Place("--model"))
    return problems


def assignment(text: str) -> tuple[str, str]:
    """Return the path and the value that `--set` gives as one text; raises RecipeError."""
    found = _OVERRIDE.fullmatch(text)
    if not found:
        raise RecipeError([Problem("write PATH=VALUE, for example stages.0.gptq.group_size=32.", f"--set {text}")])
    return found["path"].strip(), found["value"].strip()


def read_value(written: str, place: Place) -> Any:
    """Return the YAML value of a text that was written at a place; raises RecipeError."""
    try:
        return written if written.startswith(">") else read_yaml(written, "").data
    except RecipeError as error:
        raise RecipeError(
            place.problem(f"the value '{written}' is not YAML: {problem.message}") for problem in error.problems
        ) from error


def assign(recipe: PlacedData, path: str, value: Any, place: Place) -> Steps:
    """Put a value at a path like `stages.0.gptq.bits`, and return its steps.
    What the data shares with others is not changed but for its root.

    `*` below a stage or eval is whichever stands there. Raises RecipeError with `place`.
    """
    names = _DOT.split(path)
    container: Any = recipe.data
    steps: Steps = ()
    for index, name in enumerate(names):
        step = _step(container, steps, name, names[index + 1 :], place)
        steps = (*steps, step)
        if index == len(names) - 1:
            container[step] = value
        else:
            container[step] = container = _opened(container, step, steps, place)
    _note(recipe, steps, place)
    return steps


def _step(container: Any, steps: Steps, name: str, rest: list[str], place: Place) -> str | int:
    """Return the key or number that a part of the path means.
    Raises RecipeError if the container has no such part.
    """
    inside = ".".join(str(step) for step in steps)
    if isinstance(container, list):
        count = len(container)
        numbers = f"{inside} has {count} items, numbered from 0 to {count - 1}" if count > 1 else f"{inside} has one, 0"
        numbers = numbers if count else f"{inside} has no items"
        if not name.isdecimal():
            kinds = [next(iter(item), "") if isinstance(item, dict) else item for item in container]
            hint = f" Write {inside}.{kinds.index(name)}.{'.'.join([name, *rest])}." if name in kinds else ""
            raise RecipeError([place.problem(f"{numbers}, and '{name}' is no number.{hint}")])
        if int(name) >= len(container):
            raise RecipeError([place.problem(f"{numbers}; there is no {name}.")])
        return int(name)
    if len(steps) == 2 and steps[0] in ROLES and name == ANY and len(container) == 1:
        return str(next(iter(container)))
    if len(steps) == 2 and steps[0] in ROLES and name not in container:
        there = next(iter(container), "empty")
        raise RecipeError(
            [place.problem(f"{inside} is {there}, not {name}. Write {'.'.join([inside, there, *rest])}.")]
        )
    return name


def _opened(container: Any, step: Any, steps: Steps, place: Place) -> Any:
    """Return the list or mapping that `step` leads to, ready to be changed.
    Short forms are spelled out, missing mappings made.
    """
    value: Any = container[step] if isinstance(container, list) or step in container else None
    if steps[0] in ROLES and len(steps) == 1:
        value = [] if value is None else value
    elif steps[0] in ROLES and len(steps) == 2:
        value = _spelled(str(steps[0]), value, place)
    elif steps[0] in ROLES and len(steps) == 3:
        value = next(iter(_spelled(str(steps[0]), {step: value}, place).values()))
    elif steps == ("model",) and isinstance(value, str):
        value = {"name": value}
    elif value is None:
        value = {}
    if not isinstance(value, dict | list):
        inside = ".".join(str(part) for part in steps)
        raise RecipeError(
            [place.problem(f"{inside} is {shown(value)}, and nothing can be set below it. Set it as a whole.")]
        )
    return value.copy()


def _spelled(group: str, item: Any, place: Place) -> Any:
    try:
        return spell_out(ROLES[group], item)
    except OptkitError as error:
        raise RecipeError([place.problem(str(error))]) from error


def _note(recipe: PlacedData, steps: Steps, place: Place) -> None:
    for places in (recipe.keys, recipe.values):
        for known in [known for known in places if known[: len(steps)] == steps]:
            del places[known]
    recipe.keys[steps] = recipe.values[steps] = place
