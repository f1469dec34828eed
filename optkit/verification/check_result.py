"""One thing that was checked, and how problems are told in a line."""

from __future__ import annotations

from collections.abc import Iterable

from optkit.common.frozen import Frozen

SHOWN = 3


class Check(Frozen):
    """One thing that was checked."""

    name: str
    ok: bool
    detail: str
    """What was checked, or what is wrong."""


def check_of(name: str, problems: list[str], detail: str) -> Check:
    """Return a check that holds if there are no problems; `detail` is what was checked."""
    return Check(name=name, ok=not problems, detail=some(problems) if problems else detail)


def some(words: Iterable[str]) -> str:
    """Return the first of the words, and how many more there are."""
    every = list(words)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return "; ".join(every[:SHOWN]) + more
