"""The JSON Schema of recipes, from the classes, so that an editor completes and checks YAML."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from optkit.common.meanings import DescribedSchema, described
from optkit.recipe.recipe import MATRIX, Heading, Recipe
from optkit.recipe.registry import PRESETS, class_of, names_of, summary


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of recipes, plug-ins included."""
    models = [Heading, *(class_of(role, kind) for role in ("stage", "eval") for kind in names_of(role))]
    references, schema = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/$defs/{model}", schema_generator=DescribedSchema
    )
    definitions = _without_titles(schema["$defs"])
    named = {model: reference["$ref"].rpartition("/")[2] for (model, _), reference in references.items()}
    properties = definitions.pop(named[Heading])["properties"] | {
        "stages": {"type": "array", "items": _entry_schema("stage", named, definitions)},
        "evals": {"type": "array", "items": _entry_schema("eval", named, definitions)},
        "gates": {"type": "object", "additionalProperties": {"type": "string", "examples": ["<= 1.10x"]}},
    }
    properties["model"] = {"anyOf": [{"type": "string", "minLength": 1}, {"$ref": properties["model"]["$ref"]}]}
    about = {name: " ".join((field.description or "").split()) for name, field in described(Recipe).items()}
    axes: dict[str, Any] = {"type": "array", "minItems": 1, "items": True}
    partial: dict[str, Any] = {"type": "array", "items": {"type": "object", "minProperties": 1}}
    matrix: dict[str, Any] = {
        "type": "object",
        "properties": {"include": partial, "exclude": partial},
        "additionalProperties": axes,
    }
    matrix |= {"minProperties": 1, "description": "Axes, a path and its values each: every combination is a recipe."}
    return {
        "$schema": DescribedSchema.schema_dialect,
        "title": "optkit recipe",
        "type": "object",
        "additionalProperties": False,
        "required": ["model"],
        "properties": {name: {**properties[name], "description": about[name]} for name in Recipe.model_fields}
        | {MATRIX: matrix},
        "$defs": definitions,
    }


def _entry_schema(role: str, named: dict[Any, str], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one item of a list: a bare name, or one name with its fields."""
    mappings: dict[str, Any] = {}
    bare: list[str] = []
    for kind in names_of(role):
        model = class_of(role, kind)
        fields = definitions[named[model]]
        forms: list[dict[str, Any]] = [{"$ref": f"#/$defs/{named[model]}"}]
        if shorthand := getattr(model, "shorthand", None):
            forms.append(fields["properties"][shorthand])
        if not fields.get("required"):
            bare.append(kind)
            forms.append({"type": "null"})
        mappings[kind] = {"anyOf": forms, "description": summary(model)}
    bare += sorted(PRESETS) if role == "stage" else []
    one = {"type": "object", "properties": mappings, "additionalProperties": False}
    return {"anyOf": [{"type": "string", "enum": bare}, one | {"minProperties": 1, "maxProperties": 1}]}


def _without_titles(value: Any) -> Any:
    """Return a schema without the titles, which only repeat the names."""
    if isinstance(value, dict):
        return {
            key: _without_titles(part) for key, part in value.items() if not (key == "title" and isinstance(part, str))
        }
    if isinstance(value, list):
        return [_without_titles(part) for part in value]
    return value
