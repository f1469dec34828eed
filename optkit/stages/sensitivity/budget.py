"""Which forms a layer may take, what they cost in bytes, and what a budget leaves for them.

No torch is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, field_validator, model_validator

from optkit.common.field_types import CodeBits, GroupSize
from optkit.common.frozen import Frozen
from optkit.devices.datasheets import Device
from optkit.errors import StageError
from optkit.model.linear_layers import EXPERTS, Layer, Selection, stacks
from optkit.model.output_layer import HEAD, tied_embedding
from optkit.model.shape import ModelShape
from optkit.packed_tensors.integers import PackQuantized

WORD = re.compile(r"([234568])(?:g(-1|[89]|[1-9]\d+))?(a?)")


class Choice(Frozen):
    """One form that a layer may take. A word says the same: `3g32a` is 3 bits in groups of 32, asymmetric."""

    model_config = ConfigDict(json_schema_extra={"type": ["string", "integer", "object"]})

    bits: CodeBits
    """Bits of a weight."""
    group_size: GroupSize | None = 64
    """Inputs that share a scale. null (or -1): one scale per output channel."""
    symmetric: bool = True
    """Without zero points."""

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, value: Any) -> Any:
        if not isinstance(value, str | int | float):
            return value
        if not (match := WORD.fullmatch(str(value))):
            raise ValueError(
                f"'{value}' is no form of a layer. A form is 2 to 6 or 8 bits, g and a group size, and a for zero "
                "points. A group has at least 8 weights, and 64 if nothing is said. Write it as 4g64, 3g32a or "
                "{bits: 3, group_size: 32}"
            )
        group = {"group_size": int(match[2])} if match[2] else {}
        return {"bits": int(match[1]), "symmetric": not match[3], **group}

    @field_validator("group_size", mode="before")
    @classmethod
    def _per_channel(cls, value: Any) -> Any:
        return None if value == -1 else value

    @property
    def word(self) -> str:
        """What stands for this choice in one word."""
        return f"{self.bits}g{self.group_size or -1}{'' if self.symmetric else 'a'}"

    @property
    def form(self) -> PackQuantized:
        """How such a layer lies on disk."""
        return PackQuantized(self.bits, self.group_size, self.symmetric)

    def fits(self, layer: Layer) -> bool:
        """Say whether a layer can have this form.
        Groups have to divide its inputs, and experts may have no zero points.
        """
        even = not self.group_size or layer.inputs % self.group_size == 0
        return even and (self.symmetric or EXPERTS not in layer.name)

    def size_bytes(self, layer: Layer, weight_dtype: str) -> int:
        """Return the bytes of all tensors that take the place of a layer's weight."""
        return sum(info.size_bytes for info in self.form.tensors(weight_dtype, layer.outputs, layer.inputs).values())


@dataclass(frozen=True)
class Item:
    """Layers that get one choice together."""

    layers: tuple[Layer, ...]
    choices: tuple[Choice, ...]
    """Those that fit all of them."""
    sizes: tuple[int, ...]
    """Bytes of the layers under each choice."""

    @property
    def weights(self) -> int:
        """Weights of the layers."""
        return sum(layer.outputs * layer.inputs for layer in self.layers)


def make_items(
    layers: Mapping[str, Layer], shape: ModelShape, choices: Sequence[Choice], fused: bool, stage: str
) -> list[Item]:
    """Return the layers in groups that get one choice.
    They are all experts, and with `fused` what vLLM joins; others are alone.

    Raises StageError for a layer that no choice fits.
    """
    items = []
    for names in _groups(layers, fused):
        members = [layers[name] for name in names]
        fitting = tuple(choice for choice in choices if all(choice.fits(layer) for layer in members))
        if not fitting:
            raise StageError(
                f"no choice fits its {members[0].inputs} columns",
                where=members[0].name,
                why="The group size must divide the columns, and experts must be symmetric",
                remedy=f"Add one to {stage}.choices, or exclude the layer",
            )
        dtypes = [shape.tensors[f"{layer.name}.weight"].dtype for layer in members]
        sizes = [
            sum(choice.size_bytes(layer, dtype) for layer, dtype in zip(members, dtypes, strict=True))
            for choice in fitting
        ]
        items.append(Item(tuple(members), fitting, tuple(sizes)))
    return items


def _groups(names: Iterable[str], fused: bool) -> list[list[str]]:
    every = list(names)
    others = [name for name in every if EXPERTS not in name]
    experts = [name for name in every if EXPERTS in name]
    return [*(stacks(others) if fused else ([name] for name in others)), *([experts] if experts else [])]


@dataclass(frozen=True)
class Budget:
    """What the quantized layers may take, by one of the limits that were given."""

    size_bytes: int
    field: str
    """Of the stage, with the value that was given: `average_bits 4.5`."""
    bytes_each: float
    """Bytes of what `field` counts, e.g. of one bit of each weight."""
    other_bytes: int = 0
    """Of what counts too and is not chosen."""
    digits: int = 4
    unit: str = ""

    def refuse_idle(self, items: Sequence[Item], stage: str) -> None:
        """Raise StageError if even the smallest choices do not fit, or all of the largest do."""
        name = self.field.partition(" ")[0]
        least, most = (sum(extreme(item.sizes) for item in items) for extreme in (min, max))
        if least > self.size_bytes:
            taken = self._text(least)
            raise StageError(
                f"the smallest choices take {taken} {self.unit}"
                + (f", {self.other_bytes:,} bytes of them outside the chosen layers" if self.other_bytes else ""),
                where=f"{stage}: {self.field}",
                remedy=f"Set {name} to {taken} or more, or add smaller choices",
            )
        if most <= self.size_bytes:
            taken = self._text(most)
            raise StageError(
                f"the largest choices take {taken} {self.unit}, which fits",
                where=f"{stage}: {self.field}",
                why="Nothing is left to choose",
                remedy=f"Set {name} below {taken}, add larger choices, or take gptq with the largest one",
            )

    def _text(self, size: int) -> str:
        """Return what such layers take, in the unit of the limit."""
        scale = 10**self.digits
        taken = math.ceil((size + self.other_bytes) / self.bytes_each * scale) / scale
        return f"{taken:,.{self.digits}f}".rstrip("0").rstrip(".") if self.digits else f"{taken:,.0f}"


def tightest_budget(
    items: Sequence[Item],
    shape: ModelShape,
    average_bits: float | None,
    size_bytes: int | None,
    decode_ms: float | None,
    device: Device | None,
) -> Budget:
    """Return which of the limits leaves least for the layers of the items.
    All of them are sums of bytes, so a choice that fits it fits all.

    Raises StageError for a time of a model with experts, of which a token reads some alone.
    """
    found = []
    plain = sum(shape.tensors[f"{layer.name}.weight"].size_bytes for item in items for layer in item.layers)
    other = shape.size_bytes - plain
    if average_bits is not None:
        each = sum(item.weights for item in items) / 8
        found.append(
            Budget(math.floor(average_bits * each), f"average_bits {average_bits:g}", each, unit="bits a weight")
        )
    if size_bytes is not None:
        found.append(Budget(size_bytes - other, f"size_bytes {size_bytes:,}", 1, other, 0, "bytes"))
    if decode_ms is not None and device is not None:
        if any(EXPERTS in layer.name for item in items for layer in item.layers):
            raise StageError(
                "the model has experts",
                where="auto_bits.decode_ms",
                why="A token reads some of them alone, so bytes do not tell its time",
                remedy="Give average_bits or size_bytes",
            )
        if f"{HEAD}.weight" in shape.tensors:  # else the embedding is read as lm_head
            other -= shape.tensors[tied_embedding(shape)].size_bytes
        each = device.bandwidth / 1000
        field = f"decode_ms {decode_ms:g} on {device.name}"
        found.append(Budget(math.floor(decode_ms * each) - other, field, each, other, unit="ms"))
    return min(found, key=lambda budget: budget.size_bytes)


@dataclass(frozen=True)
class Allocation:
    """A model's layers, what they may become and how much there is for it."""

    selection: Selection
    items: Sequence[Item]
    budget: Budget

    def uniform(self) -> list[Choice]:
        """Return the choices that every layer can have and that fit the budget."""
        sizes = {
            choice: sum(item.sizes[item.choices.index(choice)] for item in self.items)
            for choice in self.items[0].choices
            if all(choice in item.choices for item in self.items)
        }
        return [choice for choice, size in sizes.items() if size <= self.budget.size_bytes]

    def unfit(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Return how many layers each choice was not offered to because it does not fit them."""
        counts = {
            choice.form.label: sum(len(item.layers) for item in self.items if choice not in item.choices)
            for choice in choices
        }
        return {label: count for label, count in counts.items() if count}
