"""One thing that the doctor looks at, and whether it can run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["stage", "eval", "engine", "backend", "kernel"]


@dataclass(frozen=True)
class Part:
    """One stage, eval, engine, backend or kernel."""

    role: Role
    name: str
    works: bool
    """It can run here."""
    note: str = ""
    """Its version or purpose, or why it cannot run."""
    remedy: str = ""
    """What to type so that it can."""
