"""How long work reports that it is getting on.
The command line draws it, the library is silent by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self


class ToActOn(str):
    """A note of a session that asks someone to act, e.g. because layers have no fast kernel here."""


def asking(notes: Iterable[str]) -> list[str]:
    """Return those of a session's notes that ask someone to act."""
    return [note for note in notes if isinstance(note, ToActOn)]


def as_pairs(notes: Iterable[str]) -> list[tuple[str, bool]]:
    """Return notes for another process, each with whether it asks someone to act."""
    return [(note, isinstance(note, ToActOn)) for note in notes]


def of_pairs(pairs: Iterable[tuple[str, bool]]) -> tuple[str, ...]:
    """Return the notes that `as_pairs` described."""
    return tuple(ToActOn(note) if asks else note for note, asks in pairs)


class Task(Protocol):
    """One bar: entered when the work starts, left when it ends."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, /, *_: object) -> None: ...
    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count `steps` of the total as done; `note` says what was just finished, or is under way."""

    def begin(self) -> None:
        """Say that what is done so far was done by an earlier run: from here on steps take their time."""


class Progress(Protocol):
    """Where stages and evals report to."""

    def task(self, label: str, total: int, unit: str = "") -> Task:
        """Open a bar of `total` steps, e.g. `progress.task("gptq", 30, "blocks")`."""

    def say(self, line: str) -> None:
        """Print one line of information."""

    def warn(self, line: str) -> None:
        """Print one line that the user must not miss."""


class Named:
    """Reports to another, and names the one of several models or recipes that is worked on."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._to, self._of = progress, f"{name}: " if name else ""

    def task(self, label: str, total: int, unit: str = "") -> Task:
        return self._to.task(self._of + label, total, unit)

    def say(self, line: str) -> None:
        self._to.say(self._of + line)

    def warn(self, line: str) -> None:
        self._to.warn(self._of + line)


class SilentTask:
    """A bar that is not drawn."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        return None

    def advance(self, steps: int = 1, note: str = "") -> None:
        return None

    def begin(self) -> None:
        return None


class SilentProgress:
    """Draws and prints nothing."""

    def task(self, label: str, total: int, unit: str = "") -> Task:
        return SilentTask()

    def say(self, line: str) -> None:
        return None

    def warn(self, line: str) -> None:
        return None
