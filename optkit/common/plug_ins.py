"""What other packages add to a registry, by entry points of its group.

A registry is a dict of strings, name -> `module:name`, so that listing imports nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from optkit.errors import OptkitError


@dataclass(frozen=True)
class Origin:
    """Where a kind comes from."""

    target: str
    """`module:Class`."""
    distribution: str
    """The package that brought it, `optkit` for the built-in ones."""

    def __str__(self) -> str:
        return f"{self.target} of {self.distribution}"


@cache
def plugged_in(group: str) -> tuple[tuple[str, Origin], ...]:
    """Return name and origin of each entry point of a group.
    The installed packages are looked through once in a process.
    """
    points = sorted(entry_points(group=group), key=lambda point: (point.name, point.value))
    return tuple(
        (point.name, Origin(point.value, point.dist.name if point.dist else "an unknown package")) for point in points
    )


def with_plug_ins(role: str, built_in: Mapping[str, str], presets: Collection[str] = ()) -> dict[str, Origin]:
    """Return name -> origin of what there is of a role, e.g. `stage`: the built-in ones first.
    The group is `optkit.stages`.

    Raises OptkitError for a name taken twice.
    """
    found = {kind: Origin(target, "optkit") for kind, target in built_in.items()}
    for kind, origin in plugged_in(f"optkit.{role}s"):
        if kind in presets:
            raise OptkitError(
                f"the {role} '{kind}' of {origin.distribution} has the name of a preset", remedy="Rename it there"
            )
        if kind in found and found[kind] != origin:
            raise OptkitError(
                f"the {role} '{kind}' is there twice: {found[kind]} and {origin}",
                why="A recipe could mean either" if role in ("stage", "eval") else "The name could mean either",
                remedy=f"Uninstall one of them: pip uninstall {origin.distribution}",
            )
        found[kind] = origin
    return found
