"""`optkit env`: the environments of other people's quantizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from optkit_cli.options import CONTEXT_SETTINGS, Command, Group, invocation, takes

if TYPE_CHECKING:
    from optkit.backends.environments import Environment

name_argument = click.argument("name", metavar="NAME")


@click.group(
    cls=Group, context_settings=CONTEXT_SETTINGS, short_help="Environments of other quantizers: list, build, remove."
)
def command() -> None:
    """Show, build and remove the environments in which `backend: NAME` runs others' quantizers.

    A recipe that names a backend builds its environment when it is needed. Each holds one library
    with its own versions of everything but torch, which it shares with optkit. They lie in
    $OPTKIT_ENVS, else in ~/.cache/optkit/envs.
    """


@command.command("list", cls=Command, short_help="Show every library, and what is built.")
@takes("json")
def list_environments() -> None:
    """Show every library that can be a backend.
    The list has versions, size and place of its environment, and whether it is in use.
    """
    from optkit.backends.environments import Environments
    from optkit.backends.libraries import LIBRARIES
    from optkit_cli.output import print_result

    found = Environments().list()
    names = {each.name for each in found}
    missing = [library for library in LIBRARIES.values() if library.name not in names]
    print_result([each.model_dump(mode="json") for each in found], lambda: [_table(found, missing)])


@command.command("build", cls=Command, short_help="Build the environment of a library now.")
@name_argument
@takes("quiet")
def build(name: str) -> None:
    """Build the environment of library NAME now, for later runs offline, unless it is there."""
    from optkit.backends.environments import Environments
    from optkit_cli.output import show
    from optkit_cli.progress import open_progress

    show(_table([Environments().require(name, open_progress())], []))


@command.command("remove", cls=Command, short_help="Delete the environments of a library.")
@name_argument
@takes("quiet")
def remove(name: str) -> None:
    """Delete every environment of library NAME, also those of other installations of optkit."""
    from optkit.backends.environments import Environments
    from optkit_cli.output import show
    from optkit_cli.progress import open_progress
    from optkit_cli.tables import size_text

    removed = Environments().remove(name, open_progress())
    if not invocation().quiet:
        show(*(f"removed {each.directory}, {size_text(each.size_bytes)}" for each in removed))


OTHER = "of another installation (Python, torch or set of requirements; `optkit env remove` deletes it too)"


def _table(found: list[Environment], missing: list[Any]) -> Any:
    """Return two lines for each environment, and one for each library that has none."""
    from rich.text import Text

    from optkit_cli.tables import definition_list, size_text

    lines: list[tuple[Text | str, Text | str]] = []
    for each in found:
        versions = ", ".join(f"{name} {version}" for name, version in each.told_versions.items() if name != "python")
        state = each.state if each.state == "ready" else OTHER
        lines.append((each.name, f"{state}: {versions}; {size_text(each.size_bytes)} in {each.directory}"))
    lines += [(library.name, f"not built: {library.summary}") for library in missing]
    return definition_list(lines)
