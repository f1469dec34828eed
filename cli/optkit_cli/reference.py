"""The generated pages of the site: commands, recipes, the scorecard's JSON, errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from itertools import groupby

import click
from optkit_evals.meanings import MEANINGS

from optkit.devices.datasheets import DEVICES, rates_text
from optkit.recipe.reference import definitions, fields_of, inner_models, recipe_pages, sections
from optkit.recipe.registry import EVALS, eval_class
from optkit.scorecard.scorecard import SCHEMA, Scorecard
from optkit_cli.main import optkit
from optkit_cli.messages import error_classes, messages


def reference_pages() -> dict[str, str]:
    """Return name -> Markdown of every generated page."""
    pages = recipe_pages() | {
        "cli": cli_page(),
        "scorecard": scorecard_page(),
        "errors": errors_page(),
        "devices": devices_page(),
        "metrics": metrics_page(),
    }
    return {name: text.rstrip() + "\n" for name, text in pages.items()}


def cli_page() -> str:
    """Return every command with its options."""
    context = click.Context(optkit, info_name="optkit", **optkit.context_settings)
    return f"# Commands\n\n{_about(optkit)}\n\n" + "\n\n".join(_command(each) for each in _commands(context))


def scorecard_page() -> str:
    """Return the fields of scorecard.json."""
    return (
        f"# scorecard.json\n\n`schema` is {SCHEMA}; it is raised when the meaning of a field changes. "
        "`optkit schema scorecard` prints the JSON Schema.\n\n"
        f"{fields_of(Scorecard, 'scorecard.md')}\n\n{sections(inner_models(Scorecard), 'scorecard.md')}"
    )


def devices_page() -> str:
    """Return what `--device` can name besides the devices of this machine."""
    rows = (
        (
            f"`{name}`: {each.name}, {each.memory_bytes / 1e9:.0f} GB at {each.bandwidth / 1e12:.4g} TB/s",
            f"{rates_text(each.rates)}. Source: {_escaped(each.source)}",
        )
        for name, each in DEVICES.items()
    )
    return f"# Devices\n\nRates are dense, with float32 sums, by the makers' datasheets.\n\n{definitions(rows)}"


def metrics_page() -> str:
    """Return what each metric of the evals means."""
    units = {name: unit for kind in EVALS for name, unit in eval_class(kind).metrics.items()}
    rows = (
        (f"`{name}`", f"{_escaped(each.text)} Unit: {units[name]}; {each.better} is better.")
        for name, each in MEANINGS.items()
    )
    return f"# Metrics\n\n`optkit explain METRIC` prints the same.\n\n{definitions(rows)}"


def errors_page() -> str:
    """Return the classes of errors, and every message with its cause and its cure."""
    said = {error: list(group) for error, group in groupby(messages(), lambda message: message.error)}
    parts = [
        "# Errors\n\nA message says where, what, why and what to do. `‹name›` stands for a value.\n"
        "Search this page for the words of yours. `--debug` shows the traceback.\n"
    ]
    for each in error_classes():
        about = inspect.cleandoc(each.__doc__ or "")
        rows = definitions((_escaped(message.what), _escaped(message.cure)) for message in said.get(each.__name__, []))
        parts.append(f"## `{each.__name__}`\n\n{about} Exit status {each.exit_status}.\n\n{rows}")
    return "\n".join(parts)


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it is, but for what stands in backticks."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([\\<>*_\[\]#|])", r"\\\1", part) for part in parts)


def _commands(group: click.Context) -> Iterator[click.Context]:
    """Return a context for each command, those of a group behind it."""
    assert isinstance(group.command, click.Group)
    for name in group.command.list_commands(group):
        command = group.command.get_command(group, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=group)
        yield context
        if isinstance(command, click.Group):
            yield from _commands(context)


def _command(context: click.Context) -> str:
    command = context.command
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    rows = [record for each in command.params if (record := each.get_help_record(context)) and record[1]]
    options = definitions((f"`{words}`", _escaped(meaning)) for words, meaning in rows)
    return f"## `{context.command_path}`\n\n```console\n$ {usage}\n```\n\n{_about(command)}\n\n{options}"


def _about(command: click.Command) -> str:
    r"""Return a command's help; what stands behind `\b` keeps its lines."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(
        f"```text\n{each.partition(chr(10))[2]}\n```" if each.startswith("\b") else _escaped(each)
        for each in paragraphs
    )
