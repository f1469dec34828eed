"""What the user sees when a command does not end well, and the exit status that a pipeline sees."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import click

from optkit.common.files import remedy_of
from optkit.common.out_of_resources import NO_ROOM, errno_of, is_out_of_memory, more_room
from optkit.common.visible import visible
from optkit.errors import OptkitError, Problem
from optkit.processes.child_program import one_line
from optkit.processes.crashes import ChildError
from optkit.processes.signals import KEPT, said_of


@dataclass(frozen=True)
class Failure:
    """Why a command did not end well, for stderr and for the document of `--json`."""

    kind: str
    """The class of an optkit error, else UsageError, Interrupted, Terminated, ResourceError,
    OSError or Bug.
    """
    exit_status: int
    message: str
    where: str = ""
    why: str = ""
    remedy: str = ""
    problems: tuple[Problem, ...] = ()
    spoken: tuple[str, ...] = ()
    """The lines of stderr, if they are not the message's."""

    def document(self) -> dict[str, Any]:
        """Return what stdout holds with `--json`."""
        fields = asdict(self)
        del fields["spoken"]
        return {"status": "error"} | fields

    def say(self, *, as_json: bool = False) -> None:
        """Print it on stderr, as text or as lines of JSON."""
        if as_json:
            for text in [str(each) for each in self.problems] or [self.message]:
                click.echo(json_line("error", text), err=True)
            return
        errors = [f"error: {text}" for text in ([str(each) for each in self.problems] or [self.message])]
        for line in [line for text in self.spoken for line in text.split("\n")] or errors:
            click.echo(visible(line), err=True, color=sys.stderr.isatty())


def json_line(level: str, message: str, **far: Any) -> str:
    """Return one line of a log; `far` says how far a task is."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    nowhere = {"step": None, "done": None, "of": None, "unit": None}
    return json.dumps({"time": now, "level": level, **nowhere, **far, "message": message})


def failure_of(error: BaseException) -> Failure:
    """Return what an exception that ended a command means to the user."""
    failed = OptkitError.exit_status
    match error:
        case click.UsageError() if error.ctx is not None and error.message == error.ctx.get_help():
            return Failure("UsageError", error.exit_code, error.message, spoken=(error.message,))
        case click.ClickException():
            return _usage_error(error)
        case click.Abort() | KeyboardInterrupt():
            word, status = said_of(error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt())
            return Failure(word.capitalize(), status, f"{word}; {KEPT}", spoken=(f"{word}; {KEPT}",))
        case OptkitError():
            problems = getattr(error, "problems", ())
            return Failure(
                type(error).__name__, error.exit_status, str(error), error.where, error.why, error.remedy, problems
            )
        case _ if is_out_of_memory(error):
            remedy = "Run on a machine with more of it, or a recipe with smaller batches."
            return Failure("ResourceError", failed, f"out of memory. {remedy}", remedy=remedy)
        case _ if (number := errno_of(error)) in NO_ROOM:
            where, remedy = str(getattr(error, "filename", None) or "the output"), f"{more_room(number)}."
            return Failure("ResourceError", failed, f"{where}: {NO_ROOM[number]}. {remedy}", where, remedy=remedy)
        case OSError() if error.filename is not None:
            where, remedy = str(error.filename), remedy_of(error)
            said = f"{where}: {error.strerror}.{remedy and f' {remedy}.'}"
            return Failure("OSError", failed, said, where, remedy=remedy and f"{remedy}.")
        case _:
            why, remedy = "This is a bug in optkit.", "Run the command again with --debug to see the traceback."
            said = str(error) if isinstance(error, ChildError) else one_line(error)
            return Failure("Bug", failed, f"{said}. {why} {remedy}", why=why, remedy=remedy)


def _usage_error(error: click.ClickException) -> Failure:
    message = " ".join(error.format_message().split())
    if isinstance(error, click.MissingParameter) and (meaning := getattr(error.param, "help", "")):
        message += f" It is: {meaning}"
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return Failure("UsageError", error.exit_code, message)
    remedy = f"Try: {error.ctx.command_path} --help"
    return Failure(
        "UsageError",
        error.exit_code,
        message,
        remedy=remedy,
        spoken=(f"error: {message}", error.ctx.get_usage(), remedy),
    )
