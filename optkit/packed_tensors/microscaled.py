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
    method: ClassVar[str] = COMPRESSED_TENSORS

    @property
    def label(self) -> str:
        """Return e.g. `nvfp4, blocks of 16`."""
        return f"{self.type}, blocks of {BLOCKS[self.type]}"

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        """Return the tensors of one layer by their last name."""
        scales = (outputs, inputs // BLOCKS[self.type])
        packed = {"weight_packed": TensorInfo("U8", (outputs, inputs // 2))}
        if self.type == "mxfp4":
            return {**packed, "weight_scale": TensorInfo("U8", scales)}
        return {**packed, "weight_scale": TensorInfo("F8_E4M3", scales), "weight_global_scale": TensorInfo("F32", (1,))}

    def scheme(self) -> dict[str, Any]:
        """Return an entry of `config_groups` without `targets`: the presets MXFP4A16 and NVFP4A16."""
        weights = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group" if self.type == "mxfp4" else "tensor_group",
            "group_size": BLOCKS[self.type],
            "scale_dtype": "torch.uint8" if self.type == "mxfp4" else "torch.float8_e4m3fn",
            "dynamic": False,
        }
        return {
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": f"{self.type}-pack-quantized",
        }
