from typing import Any

import pytest
from jsonschema import Draft202012Validator

from optkit.recipe.recipe import MATRIX, Recipe
from optkit.recipe.registry import PRESETS, eval_class, names_of, stage_class
from optkit.recipe.schema import recipe_schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return recipe_schema()


def entries(schema: dict[str, Any], group: str) -> tuple[list[str], dict[str, Any]]:
    bare, mapping = schema["properties"][group]["items"]["anyOf"]
    return bare["enum"], mapping["properties"]


def test_it_is_a_schema(schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_it_has_every_key_kind_and_preset_with_a_description(schema: dict[str, Any]) -> None:
    assert list(schema["properties"]) == [*Recipe.model_fields, MATRIX]
    bare, stages = entries(schema, "stages")
    assert list(stages) == names_of("stage")
    assert set(PRESETS) <= set(bare) <= set(PRESETS) | set(names_of("stage"))
    assert list(entries(schema, "evals")[1]) == names_of("eval")
    assert all(each["description"] for group in ("stages", "evals") for each in entries(schema, group)[1].values())
    assert all(each["description"] for each in schema["properties"].values())


def test_every_field_has_a_description(schema: dict[str, Any]) -> None:
    classes = [*map(stage_class, names_of("stage")), *map(eval_class, names_of("eval"))]
    for model in classes:
        described = schema["$defs"][model.__name__]["properties"] if model.model_fields else {}
        assert set(described) == set(model.model_fields)
        assert [name for name, field in described.items() if not field.get("description")] == [], model.__name__


@pytest.mark.parametrize(
    "recipe",
    [
        {"model": "smollm2-135m"},
        {"model": {"name": "a/b", "revision": "main"}, "stages": ["sdpa", {"gptq": {"bits": 4}}], "seed": 1},
        {
            "model": "a/b",
            "stages": [{"attention": "sdpa"}, {"attention": {"implementation": "eager"}}],
            "evals": ["footprint"],
        },
        {
            "model": "a/b",
            "evals": [{"footprint": None}, {"throughput": {"batch_sizes": [1, 8]}}],
            "gates": {"size_bytes": "<= 0.5x"},
        },
    ],
)
def test_it_accepts_recipes(schema: dict[str, Any], recipe: dict[str, Any]) -> None:
    assert [error.message for error in Draft202012Validator(schema).iter_errors(recipe)] == []


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"model": 4},
        {"model": "a/b", "stage": []},
        {"model": "a/b", "stages": ["gtpq"]},
        {"model": "a/b", "stages": [{"gptq": {"bits": 7}}]},
        {"model": "a/b", "stages": [{"gptq": {"bit": 4}}]},
        {"model": "a/b", "stages": [{"gptq": {}, "rtn": {}}]},
        {"model": "a/b", "stages": [{}]},
        {"model": "a/b", "stages": [{"attention": "spda"}]},
        {"model": "a/b", "stages": ["attention"]},
        {"model": "a/b", "gates": {"perplexity": 4}},
        {"model": "a/b", "seed": -1},
    ],
)
def test_it_refuses_mistakes(schema: dict[str, Any], recipe: dict[str, Any]) -> None:
    assert list(Draft202012Validator(schema).iter_errors(recipe))
