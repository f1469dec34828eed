"""`optkit`: the group that finds a command, and the entry point that turns what happens into an exit status."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from optkit import __version__, stopping
from optkit.processes import safe_children
from optkit_cli.failures import exit_status_of
from optkit_cli.options import CONTEXT_SETTINGS, Command, Group, Invocation

COMMANDS = (
    "run",
    "plan",
    "validate",
    "eval",
    "verify",
    "show",
    "compare",
    "sensitivity",
    "roofline",
    "profile",
    "list",
    "store",
    "env",
    "doctor",
    "schema",
)
"""In the order in which a newcomer meets them; each is a module of this package with a `command`."""


class Commands(Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None where there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: Command = import_module(f"optkit_cli.{cmd_name}").command
        return command


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"optkit {__version__}")
        context.exit()


@click.group(cls=Commands, context_settings=CONTEXT_SETTINGS)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print the version and exit.")
def optkit() -> None:
    """Optimize a language model by recipe, and prove what it cost and what it bought.

    \b
    optkit run recipes/llama_int4.yaml       make the artifact, measure it, print the scorecard
    optkit list stages                       what a recipe can say

    Exit status: 0 pass, 1 error, 2 usage or recipe error, 3 a gate or a proof failed, 4 a gate is inconclusive.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    _quiet_libraries()
    words = None if arguments is None else list(arguments)
    invocation = Invocation()
    status: Any = None
    with stopping.listening(), safe_children():
        failure: BaseException | None = None
        try:
            status = optkit.main(args=words, prog_name="optkit", standalone_mode=False, obj=invocation)
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        if stopping.asked() and not isinstance(failure, KeyboardInterrupt):
            failure = stopping.request()
        return int(status or 0) if failure is None else exit_status_of(failure, debug=invocation.debug)


def _quiet_libraries() -> None:
    """Keep the chatter of transformers and the hub away from our own lines, unless the user's environment asks for it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    from optkit_cli.start import start

    start()
