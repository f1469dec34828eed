"""What a packed model directory says about itself: the tensors of a quantized layer and the `quantization_config`. No torch is needed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from optkit.environment import package_version
from optkit.model.shape import TensorInfo

PackedFormat: TypeAlias = Literal["compressed-tensors", "gptq"]
COMPRESSED_TENSORS = "compressed-tensors"
GPTQ = "gptq"
GPTQ_GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Group sizes that gptqmodel opens, besides one scale per channel."""
GPTQ_MULTIPLE = 32
"""Inputs and outputs of a layer must be a multiple of this in gptqmodel's and vLLM's kernels."""


@dataclass(frozen=True)
class Packing:
    """How the weights of a directory are packed."""

    format: PackedFormat
    bits: int
    group_size: int | None
    symmetric: bool
    activation_order: bool = False
    """Whether the inputs were rounded in another order than they are stored in; told to readers, who need not care."""

    def scale_dtype(self, weight_dtype: str) -> str:
        """Return the dtype of the scales of a layer whose weights had the given one: the same, and float16 in GPTQ's format."""
        return "F16" if self.format == GPTQ else weight_dtype

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        """Return the tensors of one layer by their last name."""
        groups = inputs // (self.group_size or inputs)
        scale = self.scale_dtype(weight_dtype)
        if self.format == GPTQ:
            return {
                "qweight": TensorInfo("I32", (self._words(inputs), outputs)),
                "qzeros": TensorInfo("I32", (groups, self._words(outputs))),
                "scales": TensorInfo(scale, (groups, outputs)),
                "g_idx": TensorInfo("I32", (inputs,)),
            }
        tensors = {
            "weight_packed": TensorInfo("I32", (outputs, self._words(inputs))),
            "weight_scale": TensorInfo(scale, (outputs, groups)),
            "weight_shape": TensorInfo("I64", (2,)),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = TensorInfo("I32", (self._words(outputs), groups))
        return tensors

    def quantization_config(self, kept: Iterable[str]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json; `kept` are the Linear layers that stay as they are."""
        return self._gptq_config(kept) if self.format == GPTQ else self._compressed_tensors_config(kept)

    def _words(self, count: int) -> int:
        return math.ceil(count * self.bits / 32)

    def _gptq_config(self, kept: Iterable[str]) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size or -1,
            "sym": self.symmetric,
            "desc_act": False,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "dynamic": {f"-:^{re.escape(name)}$": {} for name in kept},
            "meta": {"quantizer": [f"optkit:{package_version('optkit') or '0'}"]},
        }

    def _compressed_tensors_config(self, kept: Iterable[str]) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size,
            "actorder": "static" if self.activation_order else None,
            "dynamic": False,
        }
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
        return {
            "quant_method": COMPRESSED_TENSORS,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(kept),
            "kv_cache_scheme": None,
        }
