"""What became of a child process that did not do its work.
It is its own error, or the way in which it ended.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optkit import errors
from optkit.errors import OptkitError

LAST_LINES = 3
LIMITS = (MemoryError, OSError, ImportError, RuntimeError)
"""What `common.out_of_resources` tells apart, the most special first."""


class ChildError(Exception):
    """What ended another process that we started.
    Its message names the process, the exception and the place.

    Its cause says of memory and disk what the exception over there said:
    `common.out_of_resources` reads it.
    """

    words = ""
    """The exception without its place, e.g. `ValueError: too large`, and further lines of it."""
    last_words = ""
    """What the process printed before, as a sentence."""
    time = 0.0
    """When it was told, in seconds since 1970."""

    @property
    def first_words(self) -> str:
        """The first line of it."""
        return self.words.partition("\n")[0]


class ChildEndedError(ChildError):
    """Another process ended without a result."""

    def __init__(self, process: str, status: int | None, log: Path | None = None) -> None:
        """Take the status that Popen gives, and what the process printed to.
        The status is None of a process that is there and silent.
        """
        self.how, self.last_words = ending(status), last_words(log)
        super().__init__(f"{process} {self.how} and without a result")
        self.__cause__ = MemoryError() if status == -signal.SIGKILL else None


def ending(status: int | None) -> str:
    """Return e.g. `was ended by SIGSEGV`; of SIGKILL why the system sends it."""
    if status is None:
        return "says nothing any more"
    if status >= 0:
        return f"ended with status {status}"
    memory = " (the system ends a process so when memory runs out)" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{memory}"


def last_lines(log: Path, count: int = LAST_LINES) -> list[str]:
    """Return the last lines of a file that say something; none if there is no such file."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return [line.strip() for line in text.splitlines() if line.strip()][-count:]


def last_words(log: Path | None) -> str:
    """Return what a process printed last, as a sentence."""
    if log is None:
        return "What it printed stands above"
    lines = last_lines(log)
    return f"Its last words: {' / '.join(lines)}" if lines else "It said nothing"


def error_of(said: Mapping[str, Any], process: str, log: Path | None = None) -> OptkitError | ChildError:
    """Return the error that `child_program.described` describes.
    One of optkit's is the nearest that `optkit.errors` has; any other is a ChildError.

    Its traceback is printed below ours, and written below what the process printed.
    """
    known = [getattr(errors, kind) for kind in said["kinds"] if hasattr(errors, kind)]
    if known:
        kind: type[OptkitError] = known[0]
        refused = kind.__new__(kind)
        Exception.__init__(refused, said["text"])
        vars(refused).update({"what": said["text"], "where": "", "why": "", "remedy": ""} | said["parts"])
        return refused
    error = ChildError(f"{process} failed with {said['one_line']}")
    error.words, error.last_words, error.time = said["words"], last_words(log), said["time"]
    error.__cause__ = _limit(said)
    error.add_note(f"\nIn {process}:\n{said['trace']}")
    if log is not None and log.is_file():
        with log.open("a", encoding="utf-8") as file:
            file.write(said["trace"])
    return error


def _limit(said: Mapping[str, Any]) -> Exception:
    """Return an exception that `common.out_of_resources` reads as it reads the described one."""
    kind = next((kind for kind in LIMITS if kind.__name__ in said["kinds"]), Exception)
    error = kind(said["text"]) if said["errno"] is None else OSError(said["errno"], said["text"])
    if said["cause"]:
        error.__cause__ = _limit(said["cause"])
    return error
