"""`optkit`: the group that finds a command, and the entry point that returns an exit status."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from optkit import __version__
from optkit.errors import OptkitError
from optkit.processes import signals
from optkit.processes.commands import safe_children
from optkit_cli.options import CONTEXT_SETTINGS, Command, Group, Invocation
from optkit_cli.output import document_of, only_the_result_on_stdout, print_document

COMMANDS = (
    "init",
    "run",
    "sweep",
    "plan",
    "validate",
    "eval",
    "verify",
    "reproduce",
    "bom",
    "sign",
    "show",
    "history",
    "compare",
    "report",
    "card",
    "push",
    "sensitivity",
    "roofline",
    "profile",
    "list",
    "explain",
    "store",
    "env",
    "doctor",
    "schema",
)
"""In the order in which a newcomer meets them; each is a module of this package with a `command`."""


COMPLETE = "_OPTKIT_COMPLETE"
"""The variable by which shells ask for completions."""


class Commands(Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: Command = import_module(f"optkit_cli.{cmd_name}").command
        return command


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"optkit {__version__}")
        context.exit()


@click.group(cls=Commands, context_settings=CONTEXT_SETTINGS)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and exit.",
)
def optkit() -> None:
    """Optimize a language model by recipe, and prove what it cost and what it bought.

    \b
    optkit init                 write a first recipe
    optkit run llama_int4       make the artifact, measure it, print the scorecard
    optkit list stages          what a recipe can say; optkit explain NAME

    Exit status: 0 pass, 1 error, 2 usage or recipe error, 3 a gate or a proof failed, 4 a gate is
    inconclusive.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; with `--json`, stdout is one document."""
    # of transformers and the hub, unless the user's environment asks for their chatter
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if isinstance(sys.stdout, io.TextIOWrapper):  # not every encoding has an arrow
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else list(arguments)
    invocation = Invocation()
    as_json = "--json" in words and not {"-h", "--help", "--version"} & {*words}
    with (
        only_the_result_on_stdout() if as_json else contextlib.nullcontext() as stdout,
        signals.listening(),
        safe_children(),
    ):
        if stdout is not None:
            signals.before_the_end(lambda: _say_the_end(invocation, stdout))
        status = _status_of(words, invocation, as_json)
        invocation.over = True
    lost = print_document(invocation.document)
    if lost is None:
        return status
    if not isinstance(lost, BrokenPipeError):  # one reads no further, and knows it
        from optkit_cli.failures import failure_of

        failure_of(lost).say(as_json=invocation.logs_json)
    return OptkitError.exit_status


def _status_of(words: list[str], invocation: Invocation, as_json: bool) -> int:
    status: Any = None
    error: BaseException | None = None
    stdout = sys.stdout
    try:
        status = optkit.main(args=words, prog_name="optkit", standalone_mode=False, obj=invocation)
    except BaseException as caught:
        # click exits by itself if it completes words for a shell, or nobody reads stdout, which it then replaces
        if isinstance(caught, SystemExit) and (COMPLETE in os.environ or sys.stdout is not stdout):
            raise
        # click hides which it was
        error = caught.__cause__ if isinstance(caught, click.Abort) and caught.__cause__ else caught
    if signals.asked() and not isinstance(error, KeyboardInterrupt):
        error = signals.request()
    if error is None:
        return int(status or 0)
    from optkit_cli.failures import failure_of

    if invocation.debug:
        import traceback

        traceback.print_exception(error)
    failure = failure_of(error)
    failure.say(as_json=invocation.logs_json)
    if as_json and not invocation.document:
        invocation.document = document_of(failure.document())
    return failure.exit_status


def _say_the_end(invocation: Invocation, stdout: int) -> None:
    """Write the document of a command that is ended before it could end by itself."""
    from optkit_cli.failures import failure_of

    if not invocation.over:
        os.write(stdout, document_of(failure_of(signals.request()).document()).encode())


if __name__ == "__main__":
    from optkit_cli.start import start

    start()
