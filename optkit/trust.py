"""Whose code may run.
It says what an artifact has of it, and who allows it (the command line or a recipe alone).

What an artifact's own optkit.json says of trust is never an answer; it is a reason to ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from optkit.artifact import Artifact
from optkit.errors import SourceError
from optkit.progress import Progress
from optkit.recipe.recipe import Recipe
from optkit.source.foreign_code import classes_of, loaded_unasked
from optkit.source.lineage import models_in
from optkit.stage import Setting

FLAG = "--trust-remote-code"
WHY = "Code of others runs only if whoever opens it says so, and never because its own files do"


def allow_code(artifact: Artifact, settings: Sequence[Setting], trusted: bool, progress: Progress) -> bool:
    """Return whether the code that came with an artifact's model is to be run, which is then said.

    `settings` are those that it is opened with. Raises SourceError if there is code that is not
    `trusted`.
    """
    model = artifact.record.recipe.get("model")
    own = isinstance(model, Mapping) and bool(model.get("trust_remote_code"))
    code = [_model_code(artifact.directory)] if own else []
    code += [setting.foreign_code() for setting in settings if setting.foreign_code()] + loaded_unasked(
        artifact.directory
    )
    _ask(artifact.directory, code, trusted, progress)
    return own and trusted


def allow_remaking(artifact: Artifact, recipe: Recipe, trusted: bool, progress: Progress) -> None:
    """Say whose code making an artifact again by its own recipe runs.
    Raises SourceError if there is code that is not `trusted`.
    """
    models = [recipe.model, *(model for entry in recipe.stages for model in models_in(entry.value))]
    code = [f"that of {model.name}" for model in models if model.trust_remote_code]
    code += [found for entry in recipe.settings if (found := entry.value.foreign_code())]
    _ask(artifact.directory, code, trusted, progress, "making it again runs code of others")


def allow_directory(directory: Path, trusted: bool, progress: Progress) -> bool:
    """Return `trusted` for a plain model directory, and say what code it allows.
    Raises SourceError if there is more than that.
    """
    own = [_model_code(directory)] if trusted and classes_of(directory) else []
    _ask(directory, own + loaded_unasked(directory), trusted, progress)
    return trusted


def say_code(recipe: Recipe, progress: Progress) -> None:
    """Say what code of others a recipe runs.
    It is that of its model if it trusts it, and what its settings load.
    """
    if recipe.model.trust_remote_code:
        progress.say(f"{recipe.model.name}: the code that comes with the model is run, as you said (trust_remote_code)")
    for entry in recipe.settings:
        if code := entry.value.foreign_code():
            progress.say(f"{entry.kind}: runs code of others, as the recipe says: {code}")


def _ask(
    directory: Path,
    code: Sequence[str],
    trusted: bool,
    progress: Progress,
    what: str = "opening it runs code of others",
) -> None:
    if code and not trusted:
        raise SourceError(
            f"{what}: {'; '.join(code)}",
            where=str(directory),
            why=WHY,
            remedy=f"Read that code, then give {FLAG} (in Python: trust_remote_code=True)",
        )
    for each in code:
        progress.say(f"{directory}: runs code of others, as you said: {each}")


def _model_code(directory: Path) -> str:
    files = sorted(path.name for path in directory.glob("*.py"))
    return f"that of its model ({', '.join(classes_of(directory) or files) or 'none of it lies in the directory'})"
