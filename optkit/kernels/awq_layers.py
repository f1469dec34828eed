"""Layers in AutoAWQ's GEMM layout (see `optkit.algorithms.packing`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optkit.algorithms.packing import pack, unpack_awq
from optkit.errors import SourceError
from optkit.kernels.integer import integer_layer, packed_weight
from optkit.kernels.packed import PackedWeight
from optkit.kernels.stored import StoredLayer
from optkit.model.checkpoint import Checkpoint

LEAVES = ("qweight", "qzeros", "scales")
WEIGHT = ".qweight"
CODES_PER_WORD = 8


def awq_layers(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[AwqLayer] | None:
    """Return the layers if `quant_method` is awq, None for another layout (GEMV, Marlin)."""
    if str(config.get("version", "gemm")).lower() != "gemm" or config.get("bits", 4) != 4:
        return None
    return [
        AwqLayer(checkpoint, name.removesuffix(WEIGHT), config) for name in checkpoint.tensors if name.endswith(WEIGHT)
    ]


class AwqLayer(StoredLayer):
    """A layer in AutoAWQ's GEMM layout."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that its weight is made of."""
        return self.present(LEAVES)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        inputs, words = self.checkpoint.tensors[f"{self.name}{WEIGHT}"].shape
        return words * CODES_PER_WORD, inputs

    def build(self, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
        """Return the fastest layer for it, on the device. Raises SourceError if its tensors do
        not fit each other.
        """
        return integer_layer(self.integers(device), bias, dtype, device)

    def integers(self, device: str) -> PackedWeight:
        """Return its codes, scales and zero points on the device. Raises SourceError if its
        tensors do not fit each other.
        """
        parts = self.read(LEAVES, device, required=("qzeros", "scales"))
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
