"""Which nodes of an ONNX graph a stage takes, by patterns on their or their weights' names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from optkit.errors import StageError, did_you_mean

LISTED = 20
"""Names of nodes that a report lists for one reason."""


def choose(
    nodes: Mapping[str, Sequence[str]],
    include: Sequence[str],
    exclude: Sequence[str],
    stage: str,
    refused: Mapping[str, str],
) -> dict[str, str]:
    """Return for each node why the glob patterns leave it out, empty if they take it.

    `nodes`: name -> all the names that a pattern may mean; `refused`: other nodes -> why the stage
    cannot take them. Raises StageError if there are no nodes, and for a pattern that matches
    none of them (exclude: none of the others either).
    """
    refuse_nothing(nodes, refused, stage)
    aliases = [alias for each in nodes.values() for alias in each]
    refuse_unmatched(f"{stage}.include", include, aliases, len(nodes))
    refuse_unmatched(f"{stage}.exclude", exclude, [*aliases, *refused], len(nodes))
    return {name: _left_out(each, include, exclude) for name, each in nodes.items()}


def refuse_nothing(chosen: Collection[str], skipped: Mapping[str, str], stage: str) -> None:
    """Raise StageError if no node is left."""
    if chosen:
        return
    counts = Counter(skipped.values()).most_common(3)
    raise StageError(
        "no node is left to quantize",
        where=stage,
        why="; ".join(f"{count:,}: {reason}" for reason, count in counts) or "The graph has none of the kind",
        remedy="Widen `include`, narrow `exclude`, or take the stage out of the recipe",
    )


def refuse_unmatched(where: str, patterns: Iterable[str], names: Sequence[str], count: int) -> None:
    """Raise StageError, with a did-you-mean, for a glob pattern that matches nothing.
    `count` nodes have the names.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            parts = {
                f"*{mark}{part}{mark}*"
                for name in names
                for mark in "/."
                for part in name.split(mark)[1:-1]
                if re.fullmatch(r"[^/.]*[^/.\d]", part)  # no index, no name of a layer with one
            }
            hint = did_you_mean(pattern, [*parts, *names]) if parts else ""
            shown = hint if "Did you mean" in hint else f"Names look like {names[0]}"
            raise StageError(f"`{pattern}` matches none of {count:,} nodes", where=where, remedy=shown.strip())


def listed(reasons: Mapping[str, str]) -> dict[str, Any]:
    """Return nodes -> reason turned around, the most frequent first: reason -> {"count", "nodes":
    the first names}.
    """
    return {
        reason: {"count": count, "nodes": [name for name, each in reasons.items() if each == reason][:LISTED]}
        for reason, count in Counter(reasons.values()).most_common()
    }


def _left_out(aliases: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> str:
    if not any(fnmatchcase(alias, pattern) for alias in aliases for pattern in include):
        return "not included"
    return "excluded" if any(fnmatchcase(alias, pattern) for alias in aliases for pattern in exclude) else ""
