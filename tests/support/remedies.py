"""Each error of a command that a test calls names options of that command alone."""

import re

import click
import pytest
from optkit_cli import failures, main

from optkit.errors import OptkitError

OTHER_COMMANDS = r"`[^`]*`|\b(optkit|pip|hf|nsys|docker|ray|llama-\S+) [^;\n]*"
OPTION = r"(?<![\w-])--[a-z][a-z-]+"


def foreign_options(words: list[str], message: str) -> set[str]:
    """Return the options that a message names and the command of these words does not have."""
    command: click.Command | None = main.optkit
    has = {"--debug"}
    for word in words:
        if isinstance(command, click.Group) and word in command.list_commands(click.Context(command)):
            command = command.get_command(click.Context(command), word)
    for parameter in command.params if command else ():
        has |= {*parameter.opts}
    return {*re.findall(OPTION, re.sub(OTHER_COMMANDS, "", message))} - has


def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at each error from now on."""
    status_of, failure_of = main._status_of, failures.failure_of
    said: list[str] = []

    def remembered(words: list[str], invocation: main.Invocation, as_json: bool) -> int:
        said[:] = words
        return status_of(words, invocation, as_json)

    def looked_at(error: BaseException) -> failures.Failure:
        if isinstance(error, OptkitError) and (foreign := foreign_options(said, str(error))):
            pytest.fail(f"optkit {' '.join(said)} has no {', '.join(foreign)}: {error}")
        return failure_of(error)

    monkeypatch.setattr(main, "_status_of", remembered)
    monkeypatch.setattr(failures, "failure_of", looked_at)
