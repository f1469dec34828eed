"""4-bit floats in small scaled blocks, MXFP4 and NVFP4, as compressed-tensors stores them.

No torch is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from optkit.model.shape import TensorInfo
from optkit.packed_tensors.base import COMPRESSED_TENSORS

BLOCKS = {"nvfp4": 16, "mxfp4": 32}
"""Inputs that share a scale."""


@dataclass(frozen=True)
class Microscaled:
    """mxfp4-pack-quantized or nvfp4-pack-quantized of compressed-tensors (0.19).
    See `optkit.algorithms.microscaling`.
    """

    type: Literal["nvfp4", "mxfp4"]
    rounds_inputs: bool = False
    """Engines round the inputs to the same floats, each block with a scale of its own."""
    method: ClassVar[str] = COMPRESSED_TENSORS

    @property
    def label(self) -> str:
        """Return e.g. `nvfp4, blocks of 16`."""
        return f"{self.type}, blocks of {BLOCKS[self.type]}{', inputs too' if self.rounds_inputs else ''}"

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        scales = (outputs, inputs // BLOCKS[self.type])
        packed = {"weight_packed": TensorInfo("U8", (outputs, inputs // 2))}
        if self.type == "mxfp4":
            return {**packed, "weight_scale": TensorInfo("U8", scales)}
        sides = ("weight", "input") if self.rounds_inputs else ("weight",)
        shared = {f"{side}_global_scale": TensorInfo("F32", (1,)) for side in sides}
        return {**packed, "weight_scale": TensorInfo("F8_E4M3", scales), **shared}

    def scheme(self) -> dict[str, Any]:
        """Return an entry of `config_groups` without `targets`.
        These are the presets MXFP4A16 and NVFP4A16; MXFP4 and NVFP4 if inputs are rounded.
        """
        weights = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group" if self.type == "mxfp4" else "tensor_group",
            "group_size": BLOCKS[self.type],
            "scale_dtype": "torch.uint8" if self.type == "mxfp4" else "torch.float8_e4m3fn",
            "dynamic": False,
        }
        dynamic = "local" if self.type == "nvfp4" else True
        return {
            "weights": weights,
            "input_activations": {**weights, "dynamic": dynamic} if self.rounds_inputs else None,
            "output_activations": None,
            "format": f"{self.type}-pack-quantized",
        }
