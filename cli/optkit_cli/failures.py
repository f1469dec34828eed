"""What the user sees when a command does not end well, and the exit status that a pipeline sees."""

from __future__ import annotations

import errno
import sys
import traceback
from pathlib import Path

import click

from optkit.errors import OptkitError
from optkit.stopping import KEPT, said_of


def exit_status_of(error: BaseException, *, debug: bool) -> int:
    """Print one clean message on stderr, after the traceback where that is wanted, and return the exit status."""
    if debug:
        traceback.print_exception(error)
    match error:
        case click.UsageError() if error.ctx is not None and error.message == error.ctx.get_help():
            _say(error.message)
            return error.exit_code
        case click.ClickException():
            _say(f"error: {' '.join(error.format_message().split())}")
            if isinstance(error, click.UsageError) and error.ctx is not None:
                _say(f"{error.ctx.get_usage()}\nTry: {error.ctx.command_path} --help")
            return error.exit_code
        case click.Abort() | KeyboardInterrupt():
            word, status = said_of(error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt())
            _say(f"{word}; {KEPT}")
            return status
        case OptkitError():
            for line in str(error).splitlines():
                _say(f"error: {line}")
            return error.exit_status
        case MemoryError():
            _say("error: out of memory. Run on a machine with more of it, or a recipe with smaller batches.")
            return OptkitError.exit_status
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _say(f"error: {error.filename or 'the output'}: the disk is full. Free some space and run the same command again.")
            return OptkitError.exit_status
        case OSError() if error.filename is not None:
            _say(f"error: {error.filename}: {error.strerror}.")
            return OptkitError.exit_status
        case _:
            _say(f"error: {_describe_bug(error)} This is a bug in optkit. Run the command again with --debug to see the traceback.")
            return OptkitError.exit_status


def _describe_bug(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" at {Path(last[0].filename).name}:{last[0].lineno}" if last else ""
    what = " ".join(str(error).split())
    return f"{type(error).__name__}{place}: {what}." if what else f"{type(error).__name__}{place}."


def _say(line: str) -> None:
    click.echo(line, err=True, color=sys.stderr.isatty())
