"""The site's pages about recipes, and what `optkit explain` shows: written from the classes."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from optkit.common.meanings import described
from optkit.measure import Eval
from optkit.recipe.files import shipped_recipes
from optkit.recipe.recipe import Recipe
from optkit.recipe.registry import EVALS, PRESETS, STAGES, class_of
from optkit.recipe.yaml_places import read_yaml
from optkit.source.models import known_models
from optkit.source.texts import known_texts
from optkit.stage import Transform


class Family(NamedTuple):
    """Entries of recipes that share a page."""

    title: str
    about: str
    kinds: tuple[str, ...]


FAMILIES = {
    "quantize": Family(
        "Quantize",
        "Weights in fewer bits; some stages round the activations too.",
        ("gptq", "rtn", "awq", "auto_bits", "qat", "smoothquant", "fp8", "int8", "nf4", "mx"),
    ),
    "prepare": Family(
        "Prepare",
        "What makes a model easier to quantize, and what goes beside its weights.",
        ("cast", "dequantize", "rotate", "awq_scale", "kv_scales"),
    ),
    "prune": Family("Prune", "Weights that become 0, and parts that go.", ("prune", "prune_structured")),
    "train": Family("Recover by training", "Training with a teacher.", ("distill", "lora_recover")),
    "export": Family("Export", "For ONNX Runtime and llama.cpp.", ("onnx", "onnx_quantize", "onnx_optimize", "gguf")),
    "settings": Family(
        "Settings",
        "A setting changes no weights. It is recorded in the artifact and applied each time that it is opened.",
        (
            *("attention", "compile", "cpu_decoder", "cuda_graphs", "kv_cache"),
            *("offload", "onnx_provider", "precision", "speculative", "tensor_parallel"),
        ),
    ),
}
"""Name of the page -> what is on it; evals have a page of their own."""


def recipe_pages() -> dict[str, str]:
    """Return name -> Markdown of each page about recipes."""
    evals = Family("Evals", "What is measured of the artifact and of the unmodified model.", tuple(EVALS))
    return {
        **{name: _family("stage", family) for name, family in FAMILIES.items()},
        "evals": _family("eval", evals),
        "fields": _fields_page(),
    }


def entry(role: str, kind: str) -> str:
    """Return what is said of a `stage` or an `eval`: what it does, an example, its fields."""
    model = class_of(role, kind)
    notes = [_prose(model)]
    if model.example:
        notes.append(f"```yaml\n{role}s:\n{textwrap.indent(model.example, '  ')}\n```")
    if issubclass(model, Eval):
        notes.append("\n".join(["Metrics:\n", *(f"- `{name}`: {unit}" for name, unit in model.metrics.items())]))
        notes += ["Compares the artifact with the unmodified model."] if model.compares else []
        notes += ["Measures the unmodified model alone."] if model.of_unmodified else []
        notes += ["Timed for both models in the same run."] if model.timed else []
    elif issubclass(model, Transform):
        notes.append(_formats(model))
    if shorthand := getattr(model, "shorthand", None):
        notes.append(f"`- {kind}: VALUE` is short for `- {kind}: {{{shorthand}: VALUE}}`.")
    if model.requires:
        notes.append(f"Needs: {', '.join(f'`{need}`' for need in model.requires)}.")
    return "\n\n".join([*notes, fields_of(model)])


def fields_of(model: type[BaseModel], home: str = "fields.md") -> str:
    """Return the fields of a class as a list: type, default and meaning; `home` is where others are."""
    return definitions(
        (
            f"`{field.alias or name}`: {_type(field.annotation, field.metadata, home)}{_default(field)}",
            field.description or "",
        )
        for name, field in described(model).items()
    )


def fields_called(path: str) -> dict[str, list[str]]:
    """Return what is said of the fields at the end of a path, e.g. `bits` or `stages.0.gptq.bits`, and where each
    such field is, as `stages.gptq.bits`.
    """
    wanted = tuple(part for part in path.split(".") if part and not part.isdecimal())
    said: dict[str, list[str]] = {}
    for way, field in _every_field():
        if wanted and way[-len(wanted) :] == wanted:
            text = f"`{way[-1]}`: {_type(field.annotation, field.metadata)}{_default(field)}"
            said.setdefault(definitions([(text, field.description or "")]), []).append(".".join(way))
    return said


def field_names() -> set[str]:
    """Return the names of all fields of recipes."""
    return {way[-1] for way, _ in _every_field()}


def _every_field() -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield each field of a recipe with the way to it."""
    yield from (((name,), field) for name, field in described(Recipe).items())
    for role, kinds in (("stage", STAGES), ("eval", EVALS)):
        for kind in kinds:
            yield from _fields_below(class_of(role, kind), (f"{role}s", kind))


def _fields_below(model: type[BaseModel], way: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in described(model).items():
        here = (*way, field.alias or name)
        yield here, field
        for inner in _models_in(field.annotation):
            yield from _fields_below(inner, here)


def sections(models: Iterable[type[BaseModel]], home: str = "fields.md") -> str:
    """Return a section for each class."""
    return "\n".join(f"## `{model.__name__}`\n\n{_prose(model)}\n\n{fields_of(model, home)}" for model in models)


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    """Return terms and what they mean."""
    return "\n".join(
        f"{term}\n:   {text}\n" if (text := " ".join(meaning.split())) else f"{term}\n" for term, meaning in rows
    )


def inner_models(*roots: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the classes that fields of others hold, each once, by name."""
    found: dict[str, type[BaseModel]] = {}
    waiting = list(roots)
    while waiting:
        for field in waiting.pop().model_fields.values():
            for inner in _models_in(field.annotation):
                if inner.__name__ not in found:
                    found[inner.__name__] = inner
                    waiting.append(inner)
    return [found[name] for name in sorted(found)]


def _family(role: str, family: Family) -> str:
    kinds = "\n".join(f"## `{kind}`\n\n{entry(role, kind)}" for kind in family.kinds)
    return f"# {family.title}\n\n{family.about}\n\n{kinds}"


def _fields_page() -> str:
    recipes = {name: path.read_text(encoding="utf-8") for name, path in shipped_recipes().items()}
    entries = [class_of(role, kind) for role, kinds in (("stage", STAGES), ("eval", EVALS)) for kind in kinds]
    parts = {
        "Keys of a recipe": ((f"`{name}`", field.description or "") for name, field in described(Recipe).items()),
        "Built-in models": ((f"`{name}`", line) for name, line in known_models().items()),
        "Built-in texts": ((f"`{name}`", line) for name, line in known_texts().items()),
        "Presets": ((f"`- {name}`", f"Short for `- {one_line(each)}`.") for name, each in sorted(PRESETS.items())),
        "Shipped recipes": (
            (f"`{name}`", str(read_yaml(text, "").data["description"])) for name, text in recipes.items()
        ),
    }
    lists = "\n".join(f"## {title}\n\n{definitions(rows)}" for title, rows in parts.items())
    return f"# Keys, names and shared fields\n\n{lists}\n{sections(inner_models(*entries))}"


def _formats(model: type[Transform]) -> str:
    others = {given: left for given in sorted(model.accepts) if (left := model.leaves(given)) is not model.produces}
    said = "".join(f"; of `{given}` `{left}`" for given, left in others.items())
    return f"Takes the formats {', '.join(f'`{each}`' for each in sorted(model.accepts))}; leaves `{model.produces}`{said}."


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _type(annotation: Any, metadata: Iterable[Any] = (), home: str = "") -> str:
    """Return a type as the reader of a YAML file would say it."""
    bounds = [bound for part in metadata for bound in (part.metadata if isinstance(part, FieldInfo) else (part,))]
    said = ((sign, getattr(bound, name)) for bound in bounds for name, sign in _LIMITS.items() if hasattr(bound, name))
    limits = "".join(f" {sign} {_number(value)}" for sign, value in said)
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *limiting = get_args(annotation)
        inner = next((part.json_schema_input_type for part in limiting if isinstance(part, BeforeValidator)), inner)
        return _type(inner, [*limiting, *metadata], home)
    if origin is Literal:
        return _choices(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _choices([choice.value for choice in annotation])
    if origin in (Union, types.UnionType):
        return " or ".join(_type(part, metadata if part in (int, float) else (), home) for part in get_args(annotation))
    if origin in (tuple, list, frozenset):
        return f"list of {_type(get_args(annotation)[0], home=home)}"
    if origin in (dict, Mapping):
        key, value = get_args(annotation)
        return f"mapping of {_type(key)} to {_type(value, home=home)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"mapping, see [`{annotation.__name__}`]({home}#{annotation.__name__.lower()})"
    return _NAMES.get(annotation, str(getattr(annotation, "__name__", annotation))) + limits


def _choices(values: Sequence[Any]) -> str:
    *first, last = (f"`{one_line(value)}`" for value in values)
    return f"{', '.join(first)} or {last}" if first else last


def _number(bound: float) -> str:
    return f"{bound:,.0f}" if bound == round(bound) else f"{bound:g}"


_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_NAMES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Any: "any value",
}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ", required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is PydanticUndefined else f", default `{one_line(value)}`"


def one_line(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, BaseModel):
        return one_line(value.model_dump(mode="json", exclude_unset=True))
    if isinstance(value, Mapping):
        text = ", ".join(f"{key}: {one_line(part)}" for key, part in value.items())
        return f"{{{text}}}" if len(value) != 1 or not isinstance(next(iter(value.values())), Mapping) else text
    if isinstance(value, list | tuple | frozenset):
        return f"[{', '.join(one_line(part) for part in value)}]"
    plain = (
        isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w ./-]*", value) and value not in ("true", "false", "null")
    )
    return str(value) if plain else json.dumps(value)


def _prose(model: type[BaseModel]) -> str:
    return inspect.cleandoc(model.__doc__ or "")
