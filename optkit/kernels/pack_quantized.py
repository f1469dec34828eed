"""Layers of integers packed along the inputs, compressed-tensors' format "pack-quantized".
See `optkit.algorithms.packing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optkit.algorithms.packing import unpack
from optkit.kernels.integer import bits_of, integer_layer, packed_weight
from optkit.kernels.packed import PackedWeight
from optkit.kernels.stored import StoredLayer
from optkit.model.shape import TensorInfo

LEAVES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


class PackQuantizedLayer(StoredLayer):
    """A layer in the format "pack-quantized"."""

    @classmethod
    def reads(cls, scheme: Mapping[str, Any]) -> bool:
        """Whether this class knows everything that a group of `config_groups` says."""
        return not scheme.get("input_activations")

    @classmethod
    def is_weight(cls, leaf: str, info: TensorInfo) -> bool:
        """Whether a tensor is the weight of such a layer."""
        return leaf == "weight_packed" and info.dtype == "I32"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that its weight is made of."""
        return self.present(LEAVES)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs; reads 16 bytes."""
        outputs, inputs = (
            int(size) for size in self.read(("weight_shape",), "cpu", required=("weight_shape",))["weight_shape"]
        )
        return outputs, inputs

    def build(self, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
        """Return the fastest layer for it, on the device. Raises SourceError if its tensors do
        not fit each other.
        """
        return integer_layer(self.integers(device), bias, dtype, device)

    def integers(self, device: str) -> PackedWeight:
        """Return its codes, scales and zero points on the device. Raises SourceError if its
        tensors do not fit each other.
        """
        parts = self.read(LEAVES, device, required=("weight_scale", "weight_shape"))
        words, scales, packed = parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point")
        outputs, inputs = self.shape
        bits = bits_of(words, scales, (outputs, inputs), self.where)
        zeros = None if packed is None else unpack(packed, bits, outputs, 0)
        return packed_weight(words, scales, zeros, parts.get("weight_g_idx"), bits, inputs)
