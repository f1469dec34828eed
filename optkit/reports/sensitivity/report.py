"""What a sensitivity measurement says, as plain data."""

from __future__ import annotations

from collections.abc import Sequence

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from optkit.common.field_types import AtLeastOne
from optkit.common.frozen import Frozen
from optkit.errors import UsageError
from optkit.recipe.field_faults import validate
from optkit.stages.sensitivity.budget import Choice


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
    """What each number of a layer is of, by its word, e.g. `4g64`."""
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


class _Listed(Frozen):
    choices: AtLeastOne[Choice]


def parse_choices(text: str) -> tuple[Choice, ...]:
    """Return the choices of e.g. `4g64,3g32a,8`, as `choices` of a recipe lists them.

    Raises UsageError for what such a list would be refused for.
    """
    try:
        found = validate(_Listed, {"choices": YAML(typ="safe").load(f"[{text}]")})
    except YAMLError as error:
        raise UsageError(
            f"'{text}' is no list of forms", where="--choices", remedy="Write it as 4g64,3g32a,8"
        ) from error
    if isinstance(found, _Listed):
        return found.choices
    raise UsageError(found[0].message, where="--choices")


def order_layers(rows: Sequence[LayerRow]) -> tuple[LayerRow, ...]:
    """Return the layers, those that suffer most under the first choice first."""
    return tuple(sorted(rows, key=lambda row: (-row.divergence[0], row.name)))
