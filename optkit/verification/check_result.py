"""One thing that was checked, and how problems are told in a line."""

from __future__ import annotations

from optkit.common.frozen import Frozen
from optkit.common.grouping import some


class Check(Frozen):
    """One thing that was checked."""

    name: str
    ok: bool
    detail: str
    """What was checked, or what is wrong."""


def check_of(name: str, problems: list[str], detail: str) -> Check:
    """Return a check that holds if there are no problems; `detail` is what was checked."""
    return Check(name=name, ok=not problems, detail=some(problems) if problems else detail)
