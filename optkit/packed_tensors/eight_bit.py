"""Weights of 8 bits, floats or integers, beside inputs that are rounded too.
They are float-quantized and int-quantized of compressed-tensors.

Schemes are those of llm-compressor's presets FP8_DYNAMIC, FP8, FP8_BLOCK and W8A8. No torch is
needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from optkit.model.shape import TensorInfo
from optkit.packed_tensors.base import COMPRESSED_TENSORS

Number: TypeAlias = Literal["float", "int"]
Scales: TypeAlias = Literal["tensor", "channel", "block"]
Activations: TypeAlias = Literal["dynamic", "static", "none"]
NOUNS = {"float": "floats", "int": "integers"}
BLOCK = 128
"""Outputs and inputs of a block of weights, and inputs of a group of activations."""


@dataclass(frozen=True)
class EightBitFormat:
    """float-quantized or int-quantized of compressed-tensors (0.19).
    See `optkit.algorithms.eight_bit`.
    """

    number: Number
    scales: Scales
    activations: Activations
    method: ClassVar[str] = COMPRESSED_TENSORS

    @property
    def label(self) -> str:
        """Return e.g. `8-bit floats, a scale per channel, dynamic activations`."""
        inputs = "float activations" if self.activations == "none" else f"{self.activations} activations"
        return f"8-bit {NOUNS[self.number]}, a scale per {self.scales}, {inputs}"

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        blocks = math.ceil(outputs / BLOCK), math.ceil(inputs / BLOCK)
        tensors = {
            "weight": TensorInfo("F8_E4M3" if self.number == "float" else "I8", (outputs, inputs)),
            "weight_scale": TensorInfo(
                weight_dtype, {"tensor": (1,), "channel": (outputs, 1), "block": blocks}[self.scales]
            ),
        }
        if self.activations == "static":
            tensors["input_scale"] = TensorInfo(weight_dtype, (1,))
        return tensors

    def scheme(self) -> dict[str, Any]:
        weights: dict[str, Any] = {
            "num_bits": 8,
            "type": self.number,
            "symmetric": True,
            "strategy": self.scales,
            "dynamic": False,
        }
        if self.scales == "block":
            weights["block_structure"] = [BLOCK, BLOCK]
        return {
            "weights": weights,
            "input_activations": self._input_activations(),
            "output_activations": None,
            "format": f"{self.number}-quantized",
        }

    def _input_activations(self) -> dict[str, Any] | None:
        if self.activations == "none":
            return None
        common = {"num_bits": 8, "type": self.number, "symmetric": True, "dynamic": self.activations == "dynamic"}
        if self.activations == "static":
            return {**common, "strategy": "tensor"}
        if self.scales == "block":
            return {**common, "strategy": "group", "group_size": BLOCK}
        return {**common, "strategy": "token"}
