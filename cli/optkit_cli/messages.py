"""Every message that an error class is raised with, read from the sources: what, why and what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import optkit_evals

import optkit
import optkit_cli
from optkit.errors import OptkitError

RECIPES = {"optkit_evals", "recipe", "settings", "source", "stages", "training"}
"""Folders whose classes have the fields of recipes."""


class Message(NamedTuple):
    """What one place in the sources says; `‹name›` stands for a value."""

    error: str
    what: str
    why: str
    remedy: str

    @property
    def cure(self) -> str:
        """Why it is so and what to do, as sentences."""
        return " ".join(f"{part.rstrip('.')}." for part in (self.why, self.remedy) if part)


@cache
def messages() -> tuple[Message, ...]:
    """Return the messages, each once, by class and text.
    Left out are those that are put together elsewhere than at the `raise`.
    """
    errors = {each.__name__ for each in error_classes()}
    roots = [Path(str(package.__file__)).parent for package in (optkit, optkit_cli, optkit_evals)]
    found = {
        message
        for root in roots
        for path in root.rglob("*.py")
        for of_recipes in (bool(RECIPES & {root.name, *path.relative_to(root).parts}),)
        for message in _of_module(ast.parse(path.read_text(encoding="utf-8")), errors, of_recipes)
    }
    once = {(message.error, message.what): message for message in sorted(found)}
    return tuple(once.values())


def error_classes(base: type[OptkitError] = OptkitError) -> Iterator[type[OptkitError]]:
    """Return the classes of optkit.errors, a class before those derived from it."""
    yield base
    for derived in base.__subclasses__():
        if derived.__module__ == OptkitError.__module__:
            yield from error_classes(derived)


def _of_module(module: ast.Module, errors: set[str], of_recipes: bool) -> Iterator[Message]:
    constants = _assigned(module.body)
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef):
            continue
        names = {**constants, **_assigned(ast.walk(function))}
        said_as = {name: name for name in errors} | {"Problem": "RecipeError"}
        if of_recipes and any("validator" in ast.unparse(each) for each in function.decorator_list):
            said_as["ValueError"] = "RecipeError"  # pydantic catches it, and the recipe's reader gives it a place
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in said_as and call.args:
                said = {word.arg: _text(word.value, names) for word in call.keywords if word.arg}
                what, why, remedy = (
                    text if any(letter.isalpha() for letter in _without_values(text)) else ""
                    for text in (_text(call.args[0], names), said.get("why", ""), said.get("remedy", ""))
                )
                if what:
                    yield Message(said_as[call.func.id], what, why, remedy)


def _assigned(nodes: Iterator[ast.AST] | list[ast.stmt]) -> dict[str, ast.expr]:
    """Return name -> value of plain assignments, also of several at once."""
    found: dict[str, ast.expr] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            found |= {name.id: value for name, value in pairs if isinstance(name, ast.Name)}
    return found


def _text(node: ast.expr, names: Mapping[str, ast.expr]) -> str:
    """Return what an expression reads like, values as `‹name›`."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, names) for part in parts)
        case ast.FormattedValue(value=value):
            return _text(value, {})
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, names) + _text(right, names)
        case ast.Name(id=name) if name in names:
            return _text(names[name], {each: value for each, value in names.items() if each != name})
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"‹{name}›"
        case ast.Subscript(value=value) | ast.Call(func=value):
            return _text(value, {})
        case _:
            return "…"


def _without_values(text: str) -> str:
    """Return a text without its values."""
    return "".join(part.rpartition("›")[2] for part in text.split("‹"))
