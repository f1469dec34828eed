"""What a sensitivity measurement says, as plain data."""

from __future__ import annotations

import re
from collections.abc import Sequence

from optkit.common.frozen import Frozen
from optkit.errors import UsageError
from optkit.stages.sensitivity.budget import Choice

FORM = re.compile(r"([234568])(?:g(\d+))?(a?)")
USUAL_GROUP = 64


class LayerRow(Frozen):
    """One linear layer."""

    name: str
    kind: str
    """What layers of all blocks have in common, e.g. `mlp.down_proj`."""
    block: int
    """Index of its decoder block."""
    weights: int
    divergence: tuple[float, ...]
    """Predicted divergence of quantizing this layer alone, nats per token, for each choice."""


class SensitivityReport(Frozen):
    """The layers of a model, those that suffer most under the first choice first."""

    model: str
    rounding: str
    """`gptq` or `rtn`: how the weights were taken to be rounded."""
    protocol: str
    """Text and tokens."""
    choices: tuple[str, ...]
    """What each number of a layer is of, as `parse_choices` takes it, e.g. `4g64`."""
    labels: tuple[str, ...]
    """The same in words, e.g. `4 bits, groups of 64`."""
    bits_per_weight: tuple[float, ...]
    """Bits stored for each weight under each choice, with scales and zero points."""
    layers: tuple[LayerRow, ...]
    skipped: dict[str, str] = {}
    """Layers that were not measured, with the reason."""

    @property
    def totals(self) -> tuple[float, ...]:
        """The predicted divergence of quantizing all layers, for each choice: the sum over layers."""
        return tuple(sum(row.divergence[place] for row in self.layers) for place in range(len(self.choices)))

    def by_kind(self) -> dict[str, tuple[float, ...]]:
        """Return the sums over the layers of each kind, those of the most divergence first."""
        sums: dict[str, list[float]] = {}
        for row in self.layers:
            total = sums.setdefault(row.kind, [0.0] * len(self.choices))
            for place, nats in enumerate(row.divergence):
                total[place] += nats
        return {kind: tuple(total) for kind, total in sorted(sums.items(), key=lambda item: -item[1][0])}


def parse_choices(text: str) -> tuple[Choice, ...]:
    """Return the choices of e.g. `4g64,3g32a,8`.
    Each is bits, then g and the group size (64), then a for zero points (asymmetric).

    Raises UsageError for anything else, and for one that is there twice.
    """
    found: list[Choice] = []
    for word in (part.strip() for part in text.split(",")):
        match = FORM.fullmatch(word)
        group_size = int(match[2] or USUAL_GROUP) if match else 0
        if not match or group_size < 8:
            form = "A form is 2 to 6 or 8 bits; g and a group size of at least 8 (64 if left out); a for zero points"
            what, remedy = f"'{word}' is no form of a layer", "Write it as 4g64,3g32a,8"
            raise UsageError(what, where="--choices", why=form, remedy=remedy)
        choice = Choice.model_validate({"bits": int(match[1]), "group_size": group_size, "symmetric": not match[3]})
        if choice in found:
            raise UsageError(f"'{word}' is there twice", where="--choices", remedy="Take one out")
        found.append(choice)
    return tuple(found)


def word_for(choice: Choice) -> str:
    """Return the word that `parse_choices` reads as this choice."""
    return f"{choice.bits}g{choice.group_size}{'' if choice.symmetric else 'a'}"


def order_layers(rows: Sequence[LayerRow]) -> tuple[LayerRow, ...]:
    """Return the layers, those that suffer most under the first choice first."""
    return tuple(sorted(rows, key=lambda row: (-row.divergence[0], row.name)))
