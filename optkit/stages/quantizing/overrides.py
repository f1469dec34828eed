"""`overrides:` of a quantizer: other bits, groups or rounding for some layers, or none at all.
A pattern matches the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from optkit.common.field_types import CodeBits, Name
from optkit.common.frozen import Frozen
from optkit.errors import StageError

KEEP = "keep"


class Override(Frozen):
    """What is different for some layers; a field that is left out is as in the stage."""

    bits: CodeBits | None = None
    """Bits of a weight."""
    group_size: int | None = Field(default=None, ge=-1, le=65_536)
    """Inputs that share a scale; -1: one scale per output channel."""
    symmetric: bool | None = None
    """Without zero points."""
    method: Literal["rtn"] | None = None
    """`rtn`: rounded to nearest, whatever the stage does with other layers."""

    @model_validator(mode="after")
    def _says_something(self) -> Override:
        if self.model_dump(exclude_none=True) == {}:
            raise ValueError("says nothing: give bits, group_size, symmetric or method, or write keep")
        if self.group_size is not None and self.group_size != -1 and self.group_size < 8:
            raise ValueError(f"group_size {self.group_size}: use at least 8, or -1 for one scale per output channel")
        return self


Overrides: TypeAlias = dict[Name, Override | Literal["keep"]]


def override_of(
    name: str, overrides: Mapping[str, Override | Literal["keep"]], stage: str
) -> Override | Literal["keep"] | None:
    """Return what the longest pattern that matches a layer says, None if none does.

    Raises StageError if two patterns of the same length say different things.
    """
    matching = sorted((pattern for pattern in overrides if fnmatchcase(name, pattern)), key=len, reverse=True)
    if not matching:
        return None
    rivals = [
        pattern
        for pattern in matching[1:]
        if len(pattern) == len(matching[0]) and overrides[pattern] != overrides[matching[0]]
    ]
    if rivals:
        raise StageError(
            f"`{matching[0]}` and `{rivals[0]}` both match {name} and say different things",
            where=f"{stage}.overrides",
            why="The longest pattern decides, and these are equally long",
            remedy="Write one of them out further",
        )
    return overrides[matching[0]]
