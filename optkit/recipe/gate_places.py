"""Where a recipe's gates were written, for what is said of them after a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from optkit.errors import OptkitError, RecipeError
from optkit.recipe.files import find_recipe, is_stream, read_text
from optkit.recipe.gates import parse_gate
from optkit.recipe.overrides import override
from optkit.recipe.yaml_places import Place, read_yaml_leniently

NONE = "none"
"""What `--against` says if there is no earlier release yet."""


def gate_places(source: Path | str, overrides: Sequence[str] = ()) -> dict[str, Place]:
    """Return the place of each gate of a recipe's file, by the gate's key; nothing if the file
    cannot be read again (a stream).
    """
    try:
        if is_stream(path := find_recipe(source)):
            return {}
        placed = read_yaml_leniently(read_text(path), str(path))
        override(placed, overrides, None)
    except OptkitError:
        return {}
    gates = placed.data.get("gates") if isinstance(placed.data, dict) else None
    return {key: placed.value_place(("gates", key)) for key in gates or ()}


def require_earlier_release(
    gates: Mapping[str, str], against: Path | str | None, places: Mapping[str, Place] | None = None
) -> None:
    """Raise RecipeError for gates that are relative to an earlier release if the user names none,
    each at its place.
    """
    if against is not None:
        return
    wanted = {key: text for key, text in gates.items() if parse_gate(key, text).of == "previous"}
    remedy = f"Give it: --against ARTIFACT, or --against {NONE} before the first one."
    problems = [
        (places or {})
        .get(key, Place())
        .problem(f"{key}: the limit {text} is relative to an earlier release, and the run is told of none. {remedy}")
        for key, text in wanted.items()
    ]
    if problems:
        raise RecipeError(problems)
