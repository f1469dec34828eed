"""Turn plain data into a frozen class.
What pydantic objects to becomes plain sentences that show the value and what is allowed.

Data is checked as JSON in strict mode: `"4"` and `true` are no numbers. A list may fill a tuple, a
text may fill a path or an enum.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from optkit.common.meanings import described
from optkit.errors import did_you_mean

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a value.
    It has the way to it from the data's root, whether its key is meant, and a sentence.
    """

    steps: tuple[str | int, ...]
    message: str
    of_key: bool = False


def validate(model: type[Model], data: Mapping[str, Any]) -> Model | list[Fault]:
    """Return the data as an instance of `model`, else everything that is wrong with it."""
    try:
        return model.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        grouped: dict[tuple[tuple[str | int, ...], bool], list[ErrorDetails]] = {}
        details = error.errors(include_url=False)
        places = [_steps(detail, data) for detail in details]
        for detail, steps in zip(details, places, strict=True):
            around = any(len(other) > len(steps) and other[: len(steps)] == steps for other in places)
            if around and (detail["type"] == "too_short" or isinstance(detail["input"], Mapping | list)):
                continue  # only because what is wrong in it is left out, or it was read as the other one of two types
            grouped.setdefault((steps, detail["type"] in _ABOUT_KEYS), []).append(detail)
        faults = [
            Fault(steps, _sentence(model, steps, details), of_key) for (steps, of_key), details in grouped.items()
        ]
        return [replace(fault, steps=(*fault.steps, *_named(fault, data))) for fault in faults]


def _named(fault: Fault, data: Any) -> tuple[str, ...]:
    """Return the field that a check across fields names first.
    Its name or else its value is what is written.
    """
    for step in fault.steps:
        data = data[step] if _has(data, step) else None
    if fault.of_key or not isinstance(data, Mapping):
        return ()
    names = {name: rf"\b{re.escape(name)}\b" for name in data}
    values = {name: f"'{re.escape(value)}'" for name, value in data.items() if isinstance(value, str)}
    for patterns in (names, values):
        found = {
            name: match.start() for name, pattern in patterns.items() if (match := re.search(pattern, fault.message))
        }
        if found:
            return (min(found, key=found.__getitem__),)
    return ()


def _has(data: Any, step: str | int) -> bool:
    """Say whether a step leads into plain data."""
    if isinstance(data, Mapping):
        return step in data
    return isinstance(data, list) and isinstance(step, int) and step < len(data)


def shown(value: Any) -> str:
    """Return a value as its YAML says it, short: 'text', 4, true, a list, a mapping, nothing."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else f"'{value}'"
    return text if len(text) <= 60 else f"{text[:57]}..."


def fields_model(model: type[BaseModel], steps: tuple[str | int, ...]) -> type[BaseModel] | None:
    """Return the class whose fields are the keys below `steps`, None if they are no class's fields."""
    annotations: list[Any] = [model]
    for step in steps:
        annotations = [below for annotation in annotations for below in _below(annotation, step)]
    return next((found for annotation in annotations for found in _parts(annotation) if _is_model(found)), None)


def _below(annotation: Any, step: str | int) -> Iterator[Any]:
    """Yield what a step into a value of a type can lead to."""
    for part in _parts(annotation):
        origin = get_origin(part)
        if _is_model(part) and step in part.model_fields:
            yield part.model_fields[step].annotation
        elif origin in (dict, Mapping):
            yield get_args(part)[1]
        elif origin in (tuple, list) and isinstance(step, int):
            yield get_args(part)[0]


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, or the one type that it is."""
    if get_origin(annotation) is Annotated:
        yield from _parts(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _parts(part)
    else:
        yield annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _steps(detail: ErrorDetails, root: Any) -> tuple[str | int, ...]:
    """Return the location without the union tags that pydantic puts into it."""
    steps: list[str | int] = []
    data = root
    for part in detail["loc"]:
        if _has(data, part):
            steps.append(part)
            data = data[part]
        elif detail["type"] == "missing" and part == detail["loc"][-1]:
            steps.append(part)
    return tuple(steps)


def _sentence(model: type[BaseModel], steps: tuple[str | int, ...], details: list[ErrorDetails]) -> str:
    name = ".".join(str(step) for step in steps)
    first = details[0]
    if first["type"] == "extra_forbidden":
        owner = fields_model(model, steps[:-1])
        known = list(owner.model_fields) if owner else []
        none = f" {owner.__name__.lower() if owner else 'It'} has no fields."
        hint = did_you_mean(str(steps[-1]), known) if known else none
        return f"unknown field '{name}'.{hint}"
    if first["type"] == "missing":
        owner = fields_model(model, steps[:-1])
        about = described(owner)[str(steps[-1])].description if owner else None
        return f"the field '{name}' is missing." + (f" It is: {' '.join(about.split())}" if about else "")
    for detail in details:
        if detail["type"] in ("value_error", "assertion_error"):
            text = str(detail["ctx"]["error"]).strip()
            return f"{name}: {text}" if name else text
    allowed = list(dict.fromkeys(_allowed(detail) for detail in details))
    value = first["input"]
    sentence = f"{name}: {shown(value)} is not {' or '.join(allowed)}."
    choices = [choice for detail in details for choice in _choices(detail)]
    if isinstance(value, str) and value in choices:
        sentence += " Remove the quotes."
    elif isinstance(value, str) and choices:
        near = did_you_mean(value, choices)
        sentence += near if near.startswith(" Did") else ""
    return sentence


def _choices(detail: ErrorDetails) -> list[str]:
    if detail["type"] not in ("literal_error", "enum"):
        return []
    return [choice.strip("'") for choice in str(detail["ctx"]["expected"]).replace(" or ", ", ").split(", ")]


def _allowed(detail: ErrorDetails) -> str:
    limits = detail.get("ctx", {}).items()
    context = {name: int(limit) if isinstance(limit, float) and limit.is_integer() else limit for name, limit in limits}
    if detail["type"] in ("literal_error", "enum"):
        choices = str(context["expected"]).replace(" or ", ", ")
        return f"one of {choices}" if ", " in choices else choices
    if detail["type"] in ("too_short", "too_long"):
        bound = (
            f"at least {context['min_length']}" if detail["type"] == "too_short" else f"at most {context['max_length']}"
        )
        return f"{bound} long (it has {context['actual_length']})"
    if phrase := _PHRASES.get(detail["type"]):
        return phrase.format(**context)
    return f"valid ({detail['msg']})"


_ABOUT_KEYS = ("extra_forbidden", "missing")

_PHRASES = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "form": "{words}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "model_type": "a mapping of fields",
    "multiple_of": "a multiple of {multiple_of}",
    "none_required": "left empty",
    "string_too_long": "at most {max_length} characters long",
    "string_too_short": "at least {min_length} characters long",
    "string_type": "text",
    "tuple_type": "a list",
}
