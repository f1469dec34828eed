"""Every error that optkit raises on purpose.

    OptkitError                 exit status 1
    ├── UsageError              exit status 2: a command line that cannot be followed
    ├── RecipeError             exit status 2: one or more problems in a recipe, each with its place
    ├── SourceError             a model or text that cannot be found, read or trusted
    ├── StageError              a stage that cannot do what it was asked to
    ├── MissingPackageError     a stage, eval or source whose package is not installed
    ├── ResourceError           memory or disk ran out
    ├── StoreError              the store or an output directory is in use, damaged or not ours
    ├── ArtifactError           a directory that is not an artifact, or one that was damaged
    │   └── UnsoundError        exit status 3: an artifact that was made and does not pass its checks or gates
    ├── PushError               a place that does not take an artifact, or cannot be reached
    └── EvalError               a measurement that cannot be made, or would not be honest

A message reads `<where>: <what, with the values>. <Why.> <What to do.>`
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar


def _sentence(text: str) -> str:
    text = text.strip()
    return text if not text or text[-1] in ".?!:" or "\n" in text else text + "."


BARE = LookupError, TypeError, AttributeError
"""Exceptions of code that met a value that it does not expect; what they say is little more than the value."""


def opening_of(error: BaseException) -> str:
    """Return the first line of what an exception says, and the next if the first ends in a colon; maybe nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 1 + (lines[0].endswith(":"))]) if lines else ""


def first_line(error: BaseException) -> str:
    """Return how an exception begins, by `opening_of`. What `BARE` ones say stands behind their names; one that
    says nothing is returned itself.
    """
    said = opening_of(error)
    return f"{type(error).__name__}: {said}" if said and isinstance(error, BARE) else said or repr(error)


class OptkitError(Exception):
    """A mistake or a limit that the user can act on; never shown with a traceback."""

    exit_status: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", remedy: str = "") -> None:
        self.what, self.where, self.why, self.remedy = what, where, why, remedy
        sentences = " ".join(_sentence(part) for part in (what, why, remedy) if part)
        super().__init__(f"{where}: {sentences}" if where else sentences)


class UsageError(OptkitError):
    """A command line that cannot be followed."""

    exit_status = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a recipe, with its place.
    Line and column count from 1; 0 if there is none.
    """

    message: str
    file: str = ""
    line: int = 0
    column: int = 0

    def __post_init__(self) -> None:
        if self.message[-1:].isalnum():  # a sentence of a field's own check
            object.__setattr__(self, "message", f"{self.message}.")

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        return f"{place}: {self.message}" if place else self.message


class RecipeError(OptkitError):
    """One or more problems in a recipe, all of them at once."""

    exit_status = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class SourceError(OptkitError):
    """A model or text that cannot be found, read or trusted."""


class StageError(OptkitError):
    """A stage that cannot do what it was asked to."""


class MissingPackageError(OptkitError):
    """A package that is needed here and not installed; the message holds the exact `pip install`."""

    def __init__(self, package: str, *, where: str, install: str = "", command: str = "") -> None:
        self.package = package
        super().__init__(
            f"the package `{package}` is not installed",
            where=where,
            remedy="Run: " + (command or f"pip install '{install or package}'"),
        )


@contextmanager
def needing(package: str, where: str, install: str) -> Iterator[None]:
    """Raise MissingPackageError for what is imported inside and not installed."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(package, where=where, install=install) from error


class ResourceError(OptkitError):
    """Memory or disk ran out; the message says where and what to lower."""


class StoreError(OptkitError):
    """The store or an output directory is in use, damaged or not ours."""


class ArtifactError(OptkitError):
    """A directory that is not an artifact, or one that was damaged."""


class UnsoundError(ArtifactError):
    """An artifact that was made, and that does not pass the checks of `verify` or, if it shall be
    pushed, its gates.
    """

    exit_status = 3


class PushError(OptkitError):
    """A place that does not take an artifact, or cannot be reached."""


class EvalError(OptkitError):
    """A measurement that cannot be made, or would not be honest."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest known word, else ` Known: a, b, c.`"""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else f" Known: {', '.join(names)}."
