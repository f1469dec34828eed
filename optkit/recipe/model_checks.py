"""What the model, and what the stages leave of it, refuse of a recipe before anything runs."""

from __future__ import annotations

from optkit.errors import EvalError, StageError
from optkit.model.shape import ModelShape
from optkit.model.task import PHRASES, Task, phrase_of
from optkit.recipe.problems import FORMATS
from optkit.recipe.recipe import EvalEntry, Recipe, SettingEntry, TransformEntry
from optkit.recipe.registry import EVALS, STAGES, eval_class, stage_class
from optkit.stage import Format, Transform


def check_tasks(recipe: Recipe, shape: ModelShape) -> None:
    """Refuse stages and evals for another kind of model; an ONNX model without config.json may be
    anything.
    """
    if shape.task is None:
        return
    why = f"{recipe.model.name} is {PHRASES[shape.task]} ({', '.join(shape.config['architectures'])})"
    entries: tuple[TransformEntry | SettingEntry | EvalEntry, ...] = (
        *recipe.transforms,
        *recipe.settings,
        *recipe.evals,
    )
    for entry in entries:
        if shape.task in entry.value.tasks:
            continue
        raise (EvalError if isinstance(entry, EvalEntry) else StageError)(
            f"is for {phrase_of(entry.value.tasks)}", where=entry.kind, why=why, remedy=_other_kinds(entry, shape.task)
        )


def _other_kinds(entry: TransformEntry | SettingEntry | EvalEntry, task: Task) -> str:
    """Return what to take instead, of the built-in stages and evals."""
    if isinstance(entry, EvalEntry):
        kinds = [kind for kind in EVALS if task in eval_class(kind).tasks]
    elif isinstance(entry, SettingEntry):
        return "Take it out of the recipe"
    else:
        kinds = [
            kind for kind in STAGES if task in stage_class(kind).tasks and issubclass(stage_class(kind), Transform)
        ]
    return f"Take it out; there {'are' if len(kinds) > 1 else 'is'} {', '.join(sorted(kinds))}"


def check_lengths(recipe: Recipe, shape: ModelShape) -> None:
    """Refuse sequences that are longer than the model was built for."""
    for entry in recipe.evals:
        longest = entry.value.longest_sequence()
        if shape.positions and longest > shape.positions:
            raise EvalError(
                f"its sequences have {longest:,} tokens, and {recipe.model.name} was built for {shape.positions:,}",
                where=entry.kind,
                why="Beyond its positions a model's numbers mean nothing",
                remedy=f"Set its fields so that they have at most {shape.positions:,}",
            )


def check_onnx(recipe: Recipe, left: Format) -> None:
    """Refuse what has no place in the format that the stages leave; `validate` knows it only where
    one of them leaves ONNX.
    """
    for setting in recipe.settings:
        if left not in setting.value.accepts:
            remedy = "Take it out of the recipe"
            if left is Format.ADAPTED and Format.QUANTIZED in setting.value.accepts:
                raise StageError(
                    "knows no adapter beside packed weights, and this model has one", where=setting.kind, remedy=remedy
                )
            wanted = "an ONNX model" if setting.value.accepts == {Format.ONNX} else "a torch model"
            raise StageError(f"is applied to {wanted}, and this is {FORMATS[left]}", where=setting.kind, remedy=remedy)
    for entry in recipe.evals:
        if left is Format.ONNX and entry.value.reads_weights:
            why = "Its weights lie in a graph"
            raise EvalError(
                "reads the weights of a checkpoint, and this model is ONNX",
                where=entry.kind,
                why=why,
                remedy="Take it out",
            )
