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
from optkit_cli.sources import Call, Scope, Sources, has_words, name_of

RECIPES = {"common", "optkit_evals", "recipe", "settings", "source", "stages", "training"}
"""Folders whose classes have the fields of recipes."""
PLACED = {"Problem": 0, "problem": 0, "Fault": 1}
"""What makes one problem of a recipe -> which argument is its text."""


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

    @property
    def text(self) -> str:
        """By what it is known: the cure, if only values stand before it."""
        return self.what if has_words(self.what) else self.cure


@cache
def messages() -> tuple[Message, ...]:
    """Return the messages, each once, by class and text."""
    sources = read_sources()
    found = {message for call in sources.calls for message in messages_of(call, sources)}
    refused = (text for scope in sources.functions() if _validates(scope, sources) for text in sources.raised(scope))
    found |= {Message("RecipeError", text, "", "") for text in refused if has_words(text)}
    once = {(message.error, message.what): message for message in sorted(found)}
    return tuple(once.values())


def error_classes(base: type[OptkitError] = OptkitError) -> Iterator[type[OptkitError]]:
    """Return the classes of optkit.errors, a class before those derived from it."""
    yield base
    for derived in base.__subclasses__():
        if derived.__module__ == OptkitError.__module__:
            yield from error_classes(derived)


def read_sources() -> Sources:
    """Return what optkit is made of: a million objects, for which a process that keeps them collects garbage slowly."""
    roots = [Path(str(package.__file__)).parent for package in (optkit, optkit_cli, optkit_evals)]
    return Sources(
        {str(path): path.read_text(encoding="utf-8") for root in roots for path in sorted(root.rglob("*.py"))}
    )


def messages_of(call: Call, sources: Sources) -> Iterator[Message]:
    """Return what a call says to the user: nothing unless it makes an error."""
    errors = errors_of(call, sources)
    place = PLACED.get(name_of(call.node.func), 0)
    if not errors or len(call.node.args) <= place:
        return
    said = {word.arg: word.value for word in call.node.keywords}
    found = [*sources.texts(call, (call.node.args[place], said.get("why"), said.get("remedy")))]
    clear = any(has_words(what) for what, *_ in found)
    for parts in found:
        what, why, remedy = (text if has_words(text) else "" for text in parts)
        if what or (not clear and (why or remedy)):
            yield from (Message(error, what or parts[0], why, remedy) for error in errors)


def errors_of(call: Call, sources: Sources) -> list[str]:
    """Return the classes of the error that a call makes, by name: two if a condition decides."""
    function = call.node.func
    either = [function.body, function.orelse] if isinstance(function, ast.IfExp) else [function]
    return [error for each in either if (error := _error(name_of(each), call.scope, sources.bases))]


def _error(name: str, scope: Scope, bases: Mapping[str, str]) -> str:
    known = _classes()
    name = name if name in known else bases.get(name, name)
    if name == "__init__" and OptkitError in known.get(scope.owner, object).__bases__:
        return scope.owner
    if name in known:
        return name if name == OptkitError.__name__ or "__init__" not in vars(known[name]) else ""
    parameters = [each for outer in scope.functions for each in outer.args.args if each.arg == name and each.annotation]
    if any("type[OptkitError]" in ast.unparse(each.annotation) for each in parameters if each.annotation):
        return OptkitError.__name__
    return "RecipeError" if name in PLACED else ""


@cache
def _classes() -> dict[str, type[OptkitError]]:
    return {each.__name__: each for each in error_classes()}


def _validates(scope: Scope, sources: Sources) -> bool:
    """Say whether pydantic calls a function, whose ValueErrors the recipe's reader then gives a place."""
    owner = scope.functions[0]
    decorated = any("validator" in ast.unparse(each) for each in owner.decorator_list)
    return bool(RECIPES & {*Path(scope.module).parts}) and (decorated or owner.name in sources.validators)
