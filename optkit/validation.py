"""Turn plain data into a frozen class, and what pydantic objects to into plain sentences that show the value and what is allowed.

Data is checked as JSON in strict mode: `"4"` and `true` are no numbers, a list may fill a tuple, a text may fill a path or an enum.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from optkit.errors import did_you_mean

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a value: the way to it from the data's root, whether its key is meant, and a sentence."""

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
        for detail in details:
            if detail["type"] == "too_short" and any(_lies_in(other, detail) for other in details):
                continue  # only because what is wrong in it is left out
            steps = _steps(detail, data)
            grouped.setdefault((steps, detail["type"] in _ABOUT_KEYS), []).append(detail)
        return [Fault(steps, _sentence(model, steps, details), of_key) for (steps, of_key), details in grouped.items()]


def _lies_in(other: ErrorDetails, detail: ErrorDetails) -> bool:
    depth = len(detail["loc"])
    return len(other["loc"]) > depth and other["loc"][:depth] == detail["loc"]


def shown(value: Any) -> str:
    """Return a value as its YAML says it, short: 'text', 4, true, a list, a mapping, nothing."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else f"'{value}'"
    return text if len(text) <= 60 else f"{text[:57]}..."


def fields_model(model: type[BaseModel], steps: tuple[str | int, ...]) -> type[BaseModel] | None:
    """Return the class whose fields are the keys below `steps`, None where they are not fields of a class."""
    current: type[BaseModel] | None = model
    for step in steps:
        if isinstance(step, int):
            continue
        if current is None or step not in current.model_fields:
            return None
        current = _model_in(current.model_fields[step].annotation)
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated, tuple, list):
        return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
    return None


def _steps(detail: ErrorDetails, root: Any) -> tuple[str | int, ...]:
    """Return the location without the union tags that pydantic puts into it."""
    steps: list[str | int] = []
    data = root
    for part in detail["loc"]:
        within = part in data if isinstance(data, Mapping) else isinstance(data, list) and isinstance(part, int) and part < len(data)
        if within:
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
        hint = did_you_mean(str(steps[-1]), known) if known else f" {owner.__name__.lower() if owner else 'It'} has no fields."
        return f"unknown field '{name}'.{hint}"
    if first["type"] == "missing":
        owner = fields_model(model, steps[:-1])
        return f"the field '{name}' is missing.{_meaning(owner, steps)}"
    for detail in details:
        if detail["type"] in ("value_error", "assertion_error"):
            text = str(detail["ctx"]["error"]).strip()
            return f"{name}: {text}" if name else text
    if first["type"] == "string_pattern_mismatch":
        return f"{name}: {shown(first['input'])} is not allowed.{_meaning(fields_model(model, steps[:-1]), steps)}"
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


def _meaning(owner: type[BaseModel] | None, steps: tuple[str | int, ...]) -> str:
    about = owner.model_fields[str(steps[-1])].description if owner else None
    return f" It is: {' '.join(about.split())}" if about else ""


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
        bound = f"at least {context['min_length']}" if detail["type"] == "too_short" else f"at most {context['max_length']}"
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
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_long": "at most {max_length} characters long",
    "string_too_short": "at least {min_length} characters long",
    "string_type": "text",
    "tuple_type": "a list",
}
