"""The pattern n:m: of every m neighbouring inputs of an output, n stay.

No torch is needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Pattern:
    """At least `zeros` of every `of` neighbouring inputs are 0."""

    zeros: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the pattern of `2:4` (2 of every 4 stay), None of `unstructured`."""
        if text == "unstructured":
            return None
        found = re.fullmatch(r"(\d+):(\d+)", text)
        if not found or not 0 < int(found[1]) < int(found[2]):
            raise ValueError(f"{text} is no pattern: take unstructured, or n:m with 0 < n < m")
        return cls(int(found[2]) - int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.of - self.zeros}:{self.of}"

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        return self.zeros / self.of
