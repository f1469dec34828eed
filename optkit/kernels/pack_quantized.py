"""Layers of integers packed along the inputs, compressed-tensors' format "pack-quantized".
See `optkit.algorithms.packing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.algorithms.packing import unpack
from optkit.kernels.integer_kernels import IntegerLayer, bits_of, packed_weight
from optkit.kernels.packed_linear import PackedWeight
from optkit.model.shape import TensorInfo


class PackQuantizedLayer(IntegerLayer):
    """A layer in the format "pack-quantized"."""

    leaves = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    @classmethod
    def reads(cls, scheme: Mapping[str, Any]) -> bool:
        """Whether this class knows everything that a group of `config_groups` says."""
        return not scheme.get("input_activations")

    @classmethod
    def is_weight(cls, leaf: str, info: TensorInfo) -> bool:
        """Whether a tensor is the weight of such a layer."""
        return leaf == "weight_packed" and info.dtype == "I32"

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs; reads 16 bytes."""
        outputs, inputs = (
            int(size) for size in self.read(("weight_shape",), "cpu", required=("weight_shape",))["weight_shape"]
        )
        return outputs, inputs

    def integers(self, device: str) -> PackedWeight:
        """See `IntegerLayer`."""
        parts = self.read(self.leaves, device, required=("weight_scale", "weight_shape"))
        words, scales, packed = parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point")
        outputs, inputs = self.shape
        bits = bits_of(words, scales, (outputs, inputs), self.where)
        zeros = None if packed is None else unpack(packed, bits, outputs, 0)
        return packed_weight(words, scales, zeros, parts.get("weight_g_idx"), bits, inputs)
