"""What is written under the fields of a class, read when somebody asks.
Reading it as classes are made took a fifth of the time in which a command starts.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema


def described(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of a class, with the text under each as its description."""
    for base in reversed(model.__mro__):
        for name, text in _texts(base.__module__).get(base.__qualname__, {}).items():
            if (field := model.model_fields.get(name)) and issubclass(base, BaseModel):
                field.description = text
    return model.model_fields


class DescribedSchema(GenerateJsonSchema):
    """JSON Schema with these descriptions."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        found = super().model_schema(schema)
        for name, field in described(schema["cls"]).items():
            for key in {name, field.alias} & found.get("properties", {}).keys() if field.description else ():
                found["properties"][key]["description"] = field.description
        return found


@cache
def _texts(module: str) -> Mapping[str, Mapping[str, str | None]]:
    """Return the texts under the fields of each class of a module, by the class's qualified name."""
    try:
        return dict(_classes(ast.parse(inspect.getsource(sys.modules[module])), ""))
    except (OSError, TypeError, KeyError):  # a class that was made without a file
        return {}


def _classes(node: ast.AST, prefix: str) -> Iterator[tuple[str, Mapping[str, str | None]]]:
    for child in ast.iter_child_nodes(node):
        inside = prefix
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name, dict(_fields(child))
            inside = f"{prefix}{child.name}."
        elif isinstance(child, ast.FunctionDef):
            inside = f"{prefix}{child.name}.<locals>."
        if isinstance(child, ast.stmt):
            yield from _classes(child, inside)


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str | None]]:
    for field, text in pairwise([*node.body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match text:
                case ast.Expr(value=ast.Constant(value=str(said))):
                    yield field.target.id, inspect.cleandoc(said)
                case _:
                    yield field.target.id, None
