"""What transformers' own class of a config says, read from its files without importing it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

TIED = "tie_word_embeddings"


@cache
def model_folder(model_type: str) -> Path | None:
    """Return the folder of transformers with the code of a model type; None if there is none."""
    found = find_spec("transformers")
    if found is None or found.origin is None or not re.fullmatch(r"[\w-]+", model_type):
        return None
    models = Path(found.origin).parent / "models"
    near = models / model_type.replace("-", "_")
    for folder in (near, *sorted(models.iterdir())):
        for file in sorted(folder.glob("configuration_*.py")):
            if f'model_type = "{model_type}"' in file.read_text(encoding="utf-8"):
                return folder
    return None


def code_files(model_type: str, part: str) -> list[Path]:
    """Return the files of a model type's code whose names begin so, e.g. `modeling`."""
    folder = model_folder(model_type)
    return sorted(folder.glob(f"{part}_*.py")) if folder else []


def statements_of(file: str) -> list[ast.stmt]:
    """Return the code of a file of transformers; nothing if it is not there."""
    found = find_spec("transformers")
    place = Path(found.origin).parent / file if found and found.origin else None
    return ast.parse(place.read_text(encoding="utf-8")).body if place and place.is_file() else []


@cache
def keys_of(table: str, file: str) -> frozenset[str]:
    """Return the keys of a dict that a file of transformers assigns; nothing if it is not there."""
    for statement in statements_of(file):
        for name, value in _assigned(statement):
            if name == table and isinstance(value, ast.Dict):
                constants = (key.value for key in value.keys if isinstance(key, ast.Constant))
                return frozenset(key for key in constants if isinstance(key, str))
    return frozenset()


@cache
def config_class(model_type: str) -> ast.ClassDef | None:
    """Return the class of a model type's config; None if nobody can tell."""
    classes = (
        each
        for file in code_files(model_type, "configuration")
        for each in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(each, ast.ClassDef)
    )
    return next((each for each in classes if _is_of(each, model_type)), None)


def assigned(found: ast.ClassDef) -> dict[str, ast.expr]:
    """Return what a class assigns, by names."""
    return {name: value for statement in found.body for name, value in _assigned(statement)}


@cache
def defaults_of(model_type: str) -> Mapping[str, int]:
    """Return the sizes and switches that a config has if its file is silent.
    Tied embeddings are none of them: a nested config's are decided outside of it.
    """
    found = config_class(model_type)
    values = assigned(found) if found else {}
    numbers = {name: value.value for name, value in values.items() if isinstance(value, ast.Constant)}
    return MappingProxyType(
        {
            name: number
            for name, number in numbers.items()
            if isinstance(number, int) and not name.endswith(("_token_id", TIED))
        }
    )


def tied_by_default(model_type: str) -> bool:
    """Say whether the output layer is the embedding if a config is silent."""
    found = config_class(model_type)
    value = assigned(found).get(TIED) if found else None
    return isinstance(value, ast.Constant) and bool(value.value)


def _is_of(found: ast.ClassDef, model_type: str) -> bool:
    named = assigned(found).get("model_type")
    return isinstance(named, ast.Constant) and named.value == model_type


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        yield statement.targets[0].id, statement.value
    elif (
        isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None
    ):
        yield statement.target.id, statement.value
