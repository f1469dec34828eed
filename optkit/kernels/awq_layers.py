"""Layers in AutoAWQ's GEMM layout (see `optkit.algorithms.packing`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.algorithms.packing import pack, unpack_awq
from optkit.errors import SourceError
from optkit.kernels.integer_kernels import IntegerLayer, packed_weight
from optkit.kernels.packed_linear import PackedWeight
from optkit.model.checkpoint import Checkpoint

CODES_PER_WORD = 8


def awq_layers(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[AwqLayer] | None:
    """Return the layers if `quant_method` is awq, None for another layout (GEMV, Marlin)."""
    if str(config.get("version", "gemm")).lower() != "gemm" or config.get("bits", 4) != 4:
        return None
    return AwqLayer.all_of(checkpoint, config)


class AwqLayer(IntegerLayer):
    """A layer in AutoAWQ's GEMM layout."""

    leaves = ("qweight", "qzeros", "scales")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        inputs, words = self.checkpoint.tensors[f"{self.name}.qweight"].shape
        return words * CODES_PER_WORD, inputs

    def integers(self, device: str) -> PackedWeight:
        """See `IntegerLayer`."""
        parts = self.read(self.leaves, device, required=("qzeros", "scales"))
        outputs, inputs = self.shape
        groups = len(parts["scales"])
        expected = {"scales": [groups, outputs], "qzeros": [groups, outputs // CODES_PER_WORD]}
        wrong = next((leaf for leaf, shape in expected.items() if list(parts[leaf].shape) != shape), None)
        if wrong or not groups or inputs % groups:
            leaf = wrong or "scales"
            raise SourceError(
                f"{leaf} {list(parts[leaf].shape)} do not fit a weight [{outputs}, {inputs}] of 4 bits",
                where=self.where,
                remedy="Make the artifact again",
            )
        weight = unpack_awq(parts)
        return packed_weight(pack(weight.codes, weight.bits, 1), weight.scales, weight.zeros, None, weight.bits, inputs)
