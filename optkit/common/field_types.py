"""Types of the fields of stages and evals, with limits.
What cannot be meant is refused where it is written, not hours later.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from optkit.common.byte_sizes import size_bytes

T = TypeVar("T")


class Form:
    """A pattern that a text matches; `words` say in a refusal what such a text is."""

    def __init__(self, pattern: str, words: str) -> None:
        self.pattern = pattern
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "pattern": self.pattern}

    def _checked(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise PydanticCustomError("form", "{words}", {"words": self.words})
        return text


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def _printable(text: str) -> str:
    if found := _CONTROL.search(text):
        raise ValueError(f"the character U+{ord(found[0]):04X} cannot be printed, and no name has it. Remove it.")
    return text


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    repeated = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if repeated is not None:
        raise ValueError(f"{_written(repeated)} is here twice. Write it once.")
    return values


def _written(value: Any) -> str:
    plain = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
    return f"'{plain}'" if isinstance(plain, str) else json.dumps(plain)


Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""How many of something."""
Amount = Annotated[int, Field(ge=0, le=1_000_000)]
"""How many of something that may be left out."""
Several = Annotated[int, Field(ge=2, le=1_000_000)]
"""How many of something that needs a second one: for an interval, or a next token."""
Length = Annotated[int, Field(ge=1, le=2**24)]
"""Tokens of a prompt."""
SequenceLength = Annotated[int, Field(ge=2, le=2**24)]
"""Tokens of a sequence, the last of which is predicted."""
Tokens = Annotated[int, Field(ge=1, le=10**14)]
"""Tokens of a whole training."""
BatchSize = Annotated[int, Field(ge=1, le=65_536)]
"""Sequences that are computed together."""
GroupSize = Annotated[int, Field(ge=8, le=65_536)]
"""Weights or channels that share a scale."""
LARGEST_WIDTH = 2**24
Width = Annotated[int, Field(ge=1, le=LARGEST_WIDTH)]
"""Channels or heads of a layer."""
Devices = Annotated[int, Field(ge=1, le=1024)]
"""Processes or GPUs."""
Bytes = Annotated[int, BeforeValidator(size_bytes, json_schema_input_type=int | str)]
"""A size, e.g. `20 GiB`."""
CodeBits = Literal[2, 3, 4, 5, 6, 8]
"""Bits of a code that readers of compressed-tensors open."""
Bits = Annotated[float, Field(ge=1, le=32)]
"""Bits of a weight, on average."""
Share = Annotated[float, Field(gt=0, lt=1)]
"""A part of a whole, neither nothing nor all."""
Part = Annotated[float, Field(ge=0, lt=1)]
"""A part of a whole that may be nothing."""
Damping = Annotated[float, Field(gt=0, le=1)]
"""A fraction that is added."""
NonNegative = Annotated[float, Field(ge=0, le=1e6)]
"""Weight of a term of a sum, or a threshold."""
LearningRate = Annotated[float, Field(gt=0, le=1)]
"""A step of AdamW."""
Factor = Annotated[float, Field(gt=0, le=1e6)]
"""What something is multiplied or divided by."""
Duration = Annotated[float, Field(gt=0, le=1e7)]
"""Seconds or minutes, as the field says."""
Rate = Annotated[float, Field(gt=0, le=1e6)]
"""How many in a second."""
Name = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
"""A name, a path or a pattern."""
Distinct = Annotated[
    tuple[T, ...], Field(max_length=1000), AfterValidator(_distinct), Field(json_schema_extra={"uniqueItems": True})
]
"""A list in which nothing stands twice."""
AtLeastOne = Annotated[
    tuple[T, ...],
    Field(min_length=1, max_length=1000),
    AfterValidator(_distinct),
    Field(json_schema_extra={"uniqueItems": True}),
]
"""A list in which something stands, and nothing twice."""
