"""Whatever is written in a field of a stage or an eval: it is refused at its place, or it is
something that can be meant.
"""

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from optkit.errors import RecipeError
from optkit.recipe.recipe import load_recipe
from optkit.recipe.registry import class_of, names_of

NEEDED: dict[str, dict[str, Any]] = {
    "attention": {"implementation": "sdpa"},
    "answers": {"dataset": "pairs.jsonl", "input": "input"},
    "auto_bits": {"average_bits": 4.5},
    "cast": {"dtype": "bfloat16"},
    "generation": {"prompts": "prompts.txt"},
    "kv_cache": {"dtype": "int8"},
    "lm_eval": {"tasks": ["piqa"]},
    "onnx_optimize": {"float16": True},
    "onnx_provider": {"threads": 2},
    "prune_structured": {"remove_layers": 2},
    "precision": {"mode": "fp32"},
    "speculative": {"prompt_lookup": 3},
    "tensor_parallel": {"devices": 2},
    **{
        kind: {"dataset": "python-reference"}
        for kind in ("divergence", "embedding", "noise_floor", "perplexity", "sensitivity", "speculation")
    },
}
"""Fields that a kind does not do without, or that others are only read beside."""
ABSURD: dict[type, tuple[Any, ...]] = {
    int: (-(10**25), -2, 10**16, 10**25),
    float: (-1e300, -0.5, 1e16, 1e300),
    str: ("x" * 10_000, "nul\0", "\x1b[31mred", "two\nlines"),
}
Way = tuple[str | int, ...]


def leaves(annotation: Any) -> Iterator[tuple[Way, type]]:
    """Yield the numbers and texts in a type with the way to each."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from leaves(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from leaves(part)
    elif origin in (tuple, list):
        yield from (((0, *way), kind) for way, kind in leaves(get_args(annotation)[0]))
    elif origin in (dict, Mapping):
        yield from ((("*", *way), kind) for way, kind in leaves(get_args(annotation)[1]))
        yield from ((("KEY",), kind) for _, kind in leaves(get_args(annotation)[0]))
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from (((name, *way), kind) for way, kind in leaves(field.annotation))
    elif annotation in ABSURD and origin is not Literal:
        yield (), annotation


def lists(annotation: Any) -> Iterator[Way]:
    """Yield the ways to the lists in a type."""
    origin = get_origin(annotation)
    if origin is Annotated or origin in (Union, types.UnionType):
        for part in get_args(annotation)[: 1 if origin is Annotated else None]:
            yield from lists(part)
    elif origin in (tuple, list):
        yield ()
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from ((name, *way) for way in lists(field.annotation))


def put(fields: dict[str, Any], way: Way, value: Any) -> dict[str, Any]:
    """Return the fields with the value at the end of the way, and what has to stand around it."""
    container: Any = value
    for step in reversed(way):
        container = [container] if step == 0 else {value: "cpu"} if step == "KEY" else {step: container}
    merged = {**fields, **container}
    for name, part in container.items():
        if isinstance(part, dict) and name in ("calibration", "teacher", "draft", "generated"):
            about = {"calibration": {"dataset": "c4"}, "generated": {"tokens": 1000}}.get(
                name, {"name": "smollm2-135m"}
            )
            merged[name] = {**about, **part}
    return merged


def entry(role: str, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    others = {"answers": "org/encoder-decoder", "embedding": "all-minilm-l6-v2", "encoding": "all-minilm-l6-v2"}
    return {"model": others.get(kind, "smollm2-135m"), f"{role}s": [{kind: fields}]}


def refused(role: str, kind: str, fields: dict[str, Any]) -> str:
    """Return what is said, nothing if the fields are accepted."""
    try:
        load_recipe(entry(role, kind, fields))
    except RecipeError as error:
        return str(error)
    return ""


EVERY = [(role, kind) for role in ("stage", "eval") for kind in names_of(role)]


@pytest.mark.parametrize(("role", "kind"), EVERY)
def test_absurd_numbers_and_texts_are_refused_and_their_field_is_named(role: str, kind: str) -> None:
    for way, leaf in leaves(class_of(role, kind)):
        for value in ABSURD[leaf]:
            said = refused(role, kind, put(NEEDED.get(kind, {}), way, value))
            name = next(str(step) for step in reversed(way) if isinstance(step, str) and step not in ("*", "KEY"))
            assert name in said or str(value)[:40] in said, (
                f"{kind}: {'.'.join(map(str, way))}: {str(value)[:40]!r} was said to be: {said!r}"
            )


@pytest.mark.parametrize(("role", "kind"), EVERY)
def test_nothing_stands_twice_in_a_list(role: str, kind: str) -> None:
    for way in lists(class_of(role, kind)):
        given: Any = class_of(role, kind).model_validate(NEEDED.get(kind, {})).model_dump(mode="json")
        for step in way:
            given = (given or {}).get(step)
        one = given[0] if isinstance(given, list) and given else 3
        for item in (one, "*", "MatMul", "cpu"):
            said = refused(role, kind, put(NEEDED.get(kind, {}), way, [item, item]))
            assert str(way[-1]) in said or "twice" in said, f"{kind}: {way}: [{item}, {item}] was said to be: {said!r}"


@pytest.mark.parametrize(("role", "kind"), EVERY)
def test_the_fields_that_the_others_are_tried_beside_are_right(role: str, kind: str) -> None:
    assert not refused(role, kind, NEEDED.get(kind, {}))
