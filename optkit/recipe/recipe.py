"""A recipe: the model, the stages that change it, and the evals that measure it.
Its gates judge the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SerializeAsAny

from optkit.common.field_types import Form
from optkit.common.frozen import Frozen, replaced
from optkit.errors import RecipeError
from optkit.measure import Eval
from optkit.model.packed_names import METHODS_WITH_CODES
from optkit.progress import Progress
from optkit.recipe import checks
from optkit.recipe.files import find_recipe, is_stream, read_text
from optkit.recipe.gates import parse_gate
from optkit.recipe.overrides import override
from optkit.recipe.registry import class_of
from optkit.recipe.yaml_places import PlacedData, read_yaml_leniently
from optkit.source.models import ModelSource, quant_method
from optkit.source.places import pin_and_remember, remember_text
from optkit.source.texts import TextSource
from optkit.stage import Format, Setting, Stage, Transform

MATRIX = "matrix"
"""The key whose values make many recipes of one, see `optkit.recipe.matrix`."""
UNPACKING = "dequantize"
"""The stage that makes float weights of packed ones."""
OWN = "optkit"
"""The `backend` of a stage that no other library does."""
LONGEST_NAME = 100
"""Letters of a recipe's name: file systems take 255 bytes, with what stores and drafts put before
and behind it.
"""


class Entry(Frozen):
    """A stage or eval with its name in the recipe."""

    kind: str
    value: SerializeAsAny[Stage | Eval]


class TransformEntry(Entry):
    """A stage that changes weights."""

    value: SerializeAsAny[Transform]


class SettingEntry(Entry):
    """A stage that is applied when the artifact is opened."""

    value: SerializeAsAny[Setting]


class EvalEntry(Entry):
    """An eval."""

    value: SerializeAsAny[Eval]


DirectoryName = Annotated[
    str,
    Field(max_length=LONGEST_NAME),
    Form(
        r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        "the name of a directory: a letter or a digit first, then letters, digits, dots, dashes and underscores",
    ),
]


class Heading(Frozen):
    """The part of a recipe that is no list."""

    name: DirectoryName
    """The name of the artifact's directory: a letter or a digit first, then letters, digits, dots,
    dashes and underscores, 100 in all at most. The file's own name if it is left out."""
    description: str = Field(default="", max_length=10_000)
    """What the recipe is for, in a sentence."""
    model: ModelSource
    """The model to start from: its name, or a mapping of its fields. Required."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """The seed of everything random, so that a run can be repeated; 0 if left out."""
    attribution: bool = True
    """If several stages change the weights: measure perplexity and divergence after each of
    them, so that the scorecard says what each added. false saves those measurements."""


class Recipe(Heading):
    """What a recipe file says, checked, with every default filled in."""

    stages: tuple[TransformEntry | SettingEntry, ...] = ()
    """What is done to the model, in order: `kind: {field: value}`, or the kind alone if every
    field keeps its default.
    """
    evals: tuple[EvalEntry, ...] = ()
    """What is measured, of the artifact and of the unmodified model: written like the stages."""
    gates: dict[str, str] = {}
    """Limits to metrics, e.g. `perplexity: "<= 1.10x"`; a run that breaks one ends with status 3."""

    @property
    def transforms(self) -> tuple[TransformEntry, ...]:
        """The stages that change weights, in order."""
        return tuple(entry for entry in self.stages if isinstance(entry, TransformEntry))

    @property
    def settings(self) -> tuple[SettingEntry, ...]:
        """The stages that are applied when the artifact is opened, in order."""
        return tuple(entry for entry in self.stages if isinstance(entry, SettingEntry))

    def untimed(self) -> Recipe:
        """Return the recipe without its timed evals, and without the gates that they alone meet."""
        left = tuple(entry for entry in self.evals if not entry.value.timed)
        measured = {name for entry in left for name in entry.value.metrics}
        lost = {name for entry in self.evals for name in entry.value.metrics} - measured
        gates = {key: text for key, text in self.gates.items() if parse_gate(key, text).name not in lost}
        return self.model_copy(update={"evals": left, "gates": gates})

    def trusting(self, trusted: bool) -> Recipe:
        """Return the recipe with the code of its model trusted, if the command line says so."""
        model = self.model.model_copy(update={"trust_remote_code": True})
        return self.model_copy(update={"model": model}) if trusted else self

    def pinned(self, data: Path | None, cache: Path | None = None, progress: Progress | None = None) -> Recipe:
        """Return the recipe with every revision filled in; raises SourceError.
        If the model is packed and its first transform needs a float checkpoint, `dequantize` is put
        before that.

        `data` holds local copies of data sets; in `cache` the digests of large files are
        remembered, and `progress` shows how they are read.
        """
        model = pin_and_remember(self.model, cache, progress)
        return self.model_copy(
            update={
                "model": model,
                "stages": tuple(_pinned(entry, data) for entry in _from_floats(self.stages, model)),
                "evals": tuple(_pinned(entry, data) for entry in self.evals),
            }
        )

    def resolved(self) -> dict[str, Any]:
        """Return the recipe as plain data with every default filled in, as its YAML would say it.
        `load_recipe` takes it again.
        """
        return {
            "name": self.name,
            "description": self.description,
            "model": self.model.model_dump(mode="json"),
            "stages": [{entry.kind: entry.value.model_dump(mode="json")} for entry in self.stages],
            "evals": [{entry.kind: entry.value.model_dump(mode="json")} for entry in self.evals],
            "gates": dict(self.gates),
            "seed": self.seed,
            "attribution": self.attribution,
        }


def load_recipe(
    source: Path | str | Mapping[str, Any], overrides: Sequence[str] = (), model: str | None = None
) -> Recipe:
    """Return the recipe of a file, of a shipped recipe's name or of standard input (`-`).
    YAML text (more than one line) and plain data are taken too.

    `overrides` are changes like `stages.0.gptq.group_size=32`; `model` replaces the recipe's.
    Raises RecipeError with every problem.
    """
    if isinstance(source, Mapping):  # e.g. of an artifact, whose texts may be long gone
        return checked(PlacedData(dict(source)), "recipe", overrides, model, files=False)
    placed, name = read_recipe(source)
    return checked(placed, name, overrides, model)


def read_recipe(source: Path | str) -> tuple[PlacedData, str]:
    """Return the data of a recipe and the name that it has if it gives itself none.
    Raises RecipeError if there is no such recipe or it cannot be read.
    """
    if isinstance(source, str) and "\n" in source:
        return read_yaml_leniently(source, "recipe"), "recipe"
    path = find_recipe(source)
    placed = read_yaml_leniently(read_text(path), str(path))
    return placed, "recipe" if is_stream(path) else path.stem


def checked(
    placed: PlacedData, name: str, overrides: Sequence[str] = (), model: str | None = None, files: bool = True
) -> Recipe:
    """Return the recipe that data states; raises RecipeError with every problem.
    `files`: the texts that it names have to be there.
    """
    known = Recipe.model_fields
    if not isinstance(placed.data, dict):
        raise RecipeError(placed.problems or checks.check_root(placed, known))
    if MATRIX in placed.data:
        message = "a recipe with a matrix is many recipes. Run it with `optkit sweep`."
        raise RecipeError([*placed.problems, placed.key_place((MATRIX,)).problem(message)])
    problems = override(placed, overrides, model)
    problems += checks.check_root(placed, (*known, MATRIX))
    heading = checks.check_fields(placed, (), Heading, _heading(placed.data, name))
    if isinstance(heading, list):
        problems += heading
    stages, stage_problems = checks.read_items(placed, "stage")
    evals, eval_problems = checks.read_items(placed, "eval")
    gates, gate_problems = checks.check_gates(placed, evals)
    if not placed.data.get("stages") and not placed.data.get("evals"):
        idle = "the recipe has no stages and no evals: there is nothing to do. List some."
        problems.append(placed.value_place(()).problem(idle))
    problems += [*stage_problems, *eval_problems, *gate_problems]
    problems += [*checks.check_rules(placed, stages, evals), *checks.check_texts(placed, stages, evals)]
    problems += checks.check_files(placed, [*stages, *evals]) if files else ()
    said = {(problem.line, problem.column) for problem in placed.problems}
    problems = [*placed.problems, *(problem for problem in problems if (problem.line, problem.column) not in said)]
    if problems or isinstance(heading, list):
        raise RecipeError(sorted(problems, key=lambda problem: (problem.line, problem.column)))
    return Recipe(
        **{key: getattr(heading, key) for key in Heading.model_fields},
        stages=tuple(
            TransformEntry(kind=item.kind, value=item.value)
            if isinstance(item.value, Transform)
            else SettingEntry(kind=item.kind, value=item.value)
            for item in stages
        ),
        evals=tuple(EvalEntry(kind=item.kind, value=item.value) for item in evals),
        gates=gates,
    )


def _heading(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the keys of a `Heading`, the model spelled out and the name filled in."""
    given = {key: value for key, value in data.items() if key in Heading.model_fields}
    if isinstance(given.get("model"), str):
        given["model"] = {"name": given["model"]}
    return {"name": re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:LONGEST_NAME] or "recipe", **given}


def _from_floats(
    stages: tuple[TransformEntry | SettingEntry, ...], model: ModelSource
) -> tuple[TransformEntry | SettingEntry, ...]:
    """Return the stages with `dequantize` in front of the first transform, if that neither reads the
    codes of a pinned model nor makes floats of them itself.
    """
    first = next((index for index, entry in enumerate(stages) if isinstance(entry, TransformEntry)), None)
    method = quant_method(model) if first is not None else ""
    if first is None or not _needs_floats(stages[first].value, method) or reads_floats(stages, method):
        return stages
    return (*stages[:first], unpacking_entry(), *stages[first:])


def reads_floats(stages: Sequence[Entry], method: str) -> bool:
    """Say whether the first transform makes floats of a model packed by `method` as it reads them.
    Stages that open the unmodified model too find its float checkpoint.
    """
    found = [entry.value for entry in stages if isinstance(entry.value, Transform)]
    own = bool(found) and found[0].unpacks and getattr(found[0], "backend", OWN) == OWN
    return own and _needs_floats(found[0], method) and not any(each.reads_origin for each in found)


def unpacking_entry() -> TransformEntry:
    """Return the stage that makes floats, as it is put in front of others."""
    return TransformEntry(kind=UNPACKING, value=class_of("stage", UNPACKING)())


def _needs_floats(stage: Any, method: str) -> bool:
    """Say whether a stage cannot read the codes of a model packed by `method`; empty for one of floats."""
    keeps = Format.QUANTIZED in stage.accepts and method in METHODS_WITH_CODES
    return bool(method) and Format.CHECKPOINT in stage.accepts and not keeps


def _pinned(value: Any, data: Path | None) -> Any:
    """Return the value with each frozen value in it replaced by what its `pinned` returns."""

    def pin(part: Frozen) -> Any:
        pin = getattr(part, "pinned", None)
        pinned = pin(data) if pin else part
        if isinstance(pinned, TextSource):
            remember_text(pinned)
        return pinned

    return replaced(value, pin)
