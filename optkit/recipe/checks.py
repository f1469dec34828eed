"""Everything that can be wrong in a recipe before it runs, found at once and each at its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from optkit.common.frozen import Frozen
from optkit.errors import OptkitError, Problem, did_you_mean
from optkit.measure import Eval
from optkit.model.task import PHRASES
from optkit.recipe.field_faults import shown, validate
from optkit.recipe.gates import check_gate, parse_gate
from optkit.recipe.registry import EVALS, PRESETS, class_of, eval_class, names_of, spell_out
from optkit.recipe.rules import Start, broken_rules
from optkit.recipe.yaml_places import PlacedData, Steps
from optkit.source.models import BUILT_IN
from optkit.source.texts import is_file_name


@dataclass(frozen=True)
class Item:
    """One stage or eval of a recipe."""

    steps: Steps
    kind: str
    value: Any
    """The stage or eval; its class if its fields are wrong."""


def check_root(recipe: PlacedData, known: Iterable[str]) -> list[Problem]:
    """Return what is wrong with the recipe as a whole: no mapping, or keys that no recipe has."""
    if not isinstance(recipe.data, dict):
        empty = "the recipe is empty. Begin with `model: smollm2-135m` and a list of `stages:`."
        other = f"a recipe is a mapping of {', '.join(known)}, not {shown(recipe.data)}."
        return [recipe.value_place(()).problem(empty if recipe.data is None else other)]
    problems = []
    for key in recipe.data:
        if key not in known:
            role = next((role for role in ("stage", "eval") if key in names_of(role)), None)
            moved = f" '{key}' is one of the {role}s: write it below `{role}s:`, as `- {key}`."
            hint = moved if role else did_you_mean(key, known)
            problems.append(recipe.key_place((key,)).problem(f"unknown key '{key}'.{hint}"))
    return problems


def check_fields(
    recipe: PlacedData, steps: Steps, model: type[BaseModel], data: Mapping[str, Any]
) -> Any | list[Problem]:
    """Return the data as an instance of `model`, else its problems."""
    try:
        checked = validate(model, data)
    except OptkitError as error:
        return [recipe.value_place(steps).problem(str(error))]
    if not isinstance(checked, list):
        return checked
    places = [recipe.key_place if fault.of_key else recipe.value_place for fault in checked]
    return [place((*steps, *fault.steps)).problem(fault.message) for place, fault in zip(places, checked, strict=True)]


def read_items(recipe: PlacedData, role: str) -> tuple[list[Item], list[Problem]]:
    """Return the stages or evals whose kind is known, and the problems of all."""
    group = f"{role}s"
    listed = recipe.data.get(group)
    if listed is None:
        return [], []
    if not isinstance(listed, list):
        message = f"{group} are a list: begin each with `- `. This is {shown(listed)}."
        return [], [recipe.value_place((group,)).problem(message)]
    read = [_read_item(recipe, role, (group, index), written) for index, written in enumerate(listed)]
    return [item for item, _ in read if item], [problem for _, problems in read for problem in problems]


def _read_item(recipe: PlacedData, role: str, steps: Steps, written: Any) -> tuple[Item | None, list[Problem]]:
    place = recipe.value_place(steps)
    try:
        spelled = spell_out(role, written)
        if not isinstance(spelled, dict):
            message = f"this is {shown(written)}. Write the name of a {role}, or `name: {{field: value}}`."
            return None, [place.problem(message)]
        if len(spelled) != 1:
            several = f"{len(spelled)} keys stand side by side: {', '.join(spelled)}."
            message = several if spelled else "this mapping is empty."
            written_so = "Write `- name: {field: value}`, with the fields indented below the name"
            return None, [place.problem(f"{message} {written_so} and each {role} after its own `- `.")]
        ((kind, fields),) = spelled.items()
        if kind not in names_of(role):
            return None, [recipe.key_place((*steps, kind)).problem(_unknown(role, kind))]
        model = class_of(role, kind)
    except OptkitError as error:
        return None, [place.problem(str(error))]
    steps = (*steps, kind)
    if not isinstance(fields, dict):
        names = ", ".join(model.model_fields)
        taken = (
            f"takes a mapping of its fields ({names}), not {shown(fields)}." if names else f"has no fields: `- {kind}`."
        )
        message = f"{kind} {taken}"
        return Item(steps, kind, model), [recipe.value_place(steps).problem(message)]
    checked = check_fields(recipe, steps, model, fields)
    return (Item(steps, kind, model), checked) if isinstance(checked, list) else (Item(steps, kind, checked), [])


def _unknown(role: str, kind: str) -> str:
    other = "eval" if role == "stage" else "stage"
    if kind in names_of(other):
        return f"'{kind}' is one of the {other}s. Move it below `{other}s:`."
    if role == "stage" and kind in PRESETS:
        return f"'{kind}' is a preset and takes no fields. Write `- {kind}`."
    return f"unknown {role} '{kind}'.{did_you_mean(kind, [*names_of(role), *(PRESETS if role == 'stage' else ())])}"


def check_rules(recipe: PlacedData, stages: list[Item], evals: list[Item]) -> Iterator[Problem]:
    """Yield the stages and evals that cannot stand beside the others or in this order.
    Nothing but the model's name has to be known.
    """
    written = recipe.data.get("model")
    known = BUILT_IN.get(str(written.get("name") if isinstance(written, Mapping) else written))
    start = Start(tasks=frozenset({known.task}), phrase=PHRASES[known.task]) if known else Start()

    def place(item: Item) -> str:
        return recipe.key_place(item.steps).short

    for item, message in broken_rules(stages, evals, start, ("cpu", "cuda"), place):
        yield recipe.key_place(item.steps).problem(message)


def check_texts(recipe: PlacedData, stages: list[Item], evals: list[Item]) -> Iterator[Problem]:
    """Yield the evals that measure on a text which the weights are calibrated on."""
    calibrated = {text: stage for stage in stages for _, text in texts_in(stage.value)}
    for item in evals:
        for way, text in texts_in(item.value):
            if stage := calibrated.get(text):
                whose = f"{stage.kind} ({recipe.key_place(stage.steps).short})"
                message = f"{item.kind} would measure on {' '.join(text)}, which {whose} is calibrated on."
                remedy = "The result would look better than it is. Name another split or data set for one of them."
                steps = (*item.steps, *way)
                place = recipe.values.get((*steps, "split")) or recipe.value_place((*steps, "dataset"))
                yield place.problem(f"{message} {remedy}")


def check_files(recipe: PlacedData, items: Iterable[Item]) -> Iterator[Problem]:
    """Yield the local texts that are not there, and what evals find wrong on this machine."""
    for item in items:
        for way, message in item.value.faults() if isinstance(item.value, Eval) else ():
            yield recipe.value_place((*item.steps, *way)).problem(message)
        for way, (dataset, _) in texts_in(item.value):
            path = Path(dataset).expanduser()
            if is_file_name(dataset) and not path.is_file():
                message = f"there is no file {path}. A path counts from the directory in which optkit runs"
                yield recipe.value_place((*item.steps, *way, "dataset")).problem(f"{message}, {Path.cwd()}.")


def check_gates(recipe: PlacedData, evals: list[Item]) -> tuple[dict[str, str], list[Problem]]:
    """Return the gates and their problems.
    A gate that is no limit, or that no eval of the recipe measures, is a problem.

    If the recipe lists an eval of a kind that nobody knows, a gate may be about any built-in
    one.
    """
    written = recipe.data.get("gates")
    if written is None:
        return {}, []
    if not isinstance(written, dict):
        message = f'gates are a mapping like `perplexity: "<= 1.10x"`, not {shown(written)}.'
        return {}, [recipe.value_place(("gates",)).problem(message)]
    problems = []
    measuring: list[Eval | type[Eval]] = [item.value for item in evals]
    others = {kind: eval_class(kind) for kind in EVALS if kind not in {item.kind for item in evals}}
    listed = recipe.data.get("evals")
    if isinstance(listed, list) and len(listed) > len(evals):
        measuring += others.values()
        others = {}
    for key, limit in written.items():
        place = recipe.value_place(("gates", key))
        if not isinstance(limit, str):
            problems.append(
                place.problem(f'{key}: {shown(limit)} is not a limit in quotes, such as "<= 25" or "<= 1.10x".')
            )
            continue
        try:
            gate = parse_gate(key, limit)
        except ValueError as error:
            problems.append(place.problem(f"{key}: {error}"))
            continue
        would = " or ".join(f"`- {kind}`" for kind, each in others.items() if gate.name in each.metrics)
        if would and not any(gate.name in each.metrics for each in measuring):
            message = f"no eval of the recipe measures '{gate.name}'. Write {would} below `evals:`."
            problems.append(recipe.key_place(("gates", key)).problem(message))
            continue
        try:
            check_gate(gate, measuring)
        except ValueError as error:
            problems.append(recipe.key_place(("gates", key)).problem(str(error)))
    return written, problems


def texts_in(value: Any) -> Iterator[tuple[Steps, tuple[str, str]]]:
    """Yield (data set, split) of every text that a stage or eval names, with the way to it."""
    for steps, found in nested(value):
        if {"dataset", "split"} <= set(type(found).model_fields):
            text = found.model_dump(include={"dataset", "split"})
            yield steps, (text["dataset"], text["split"])


def nested(value: Any) -> Iterator[tuple[Steps, Frozen]]:
    """Yield every frozen value in a value, itself included, with the way to it."""
    parts: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Frozen):
        yield (), value
        parts = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif isinstance(value, Mapping):
        parts = value.items()
    for step, part in parts:
        for steps, found in nested(part):
            yield (step, *steps), found
