"""How linear layers lie in a bitsandbytes checkpoint (0.50), and what config.json says about it.

No torch is needed.

    4 bits (nf4, fp4)
        weight                          uint8 [ceil(out * in / 2), 1]: two codes a byte, blocks of 64 weights,
                                        row after row
        weight.absmax                   the scale of each block: float32, or uint8 if the scales are
                                        quantized once more
        weight.quant_map                float32 [16]: the values of the codes
        weight.nested_absmax            float32, a scale for 256 of those scales
        weight.nested_quant_map         float32 [256]: the values of their codes
        weight.quant_state.bitsandbytes__nf4    uint8: JSON with shape, dtype and block sizes
    8 bits (LLM.int8())
        weight                          int8 [out, in]
        SCB                             float32 [out]: the largest weight of each output, which is 127
        weight_format                   uint8 []: 0, row after row

Layers that are Conv1D in the model are Linear here, so theirs are [out, in] too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from optkit.model.shape import FLOAT_NAMES, TensorInfo
from optkit.packed_tensors.base import BITSANDBYTES, LayerFormat

BLOCK = 64
NESTED_BLOCK = 256
OFFSET = 0.012345678901234568
"""Stands for the mean of the scales, which only the weights tell; its digits are as many as most
have.
"""


@dataclass(frozen=True)
class FourBit:
    """Codes of 4 bits with a scale for each block of 64."""

    type: Literal["nf4", "fp4"]
    double_quantization: bool
    compute_dtype: str | None
    """A torch name; None until the dtype of the weights is known."""
    method: ClassVar[str] = BITSANDBYTES

    @property
    def label(self) -> str:
        """Return e.g. `nf4, blocks of 64, scales in 8 bits`."""
        return f"{self.type}, blocks of {BLOCK}{', scales in 8 bits' if self.double_quantization else ''}"

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        """Return the tensors of one layer by their last name.
        The JSON may be a few digits longer or shorter in the end.
        """
        blocks = math.ceil(outputs * inputs / BLOCK)
        state: dict[str, Any] = {"quant_type": self.type, "blocksize": BLOCK, "dtype": FLOAT_NAMES[weight_dtype]}
        state["shape"] = [outputs, inputs]
        tensors = {
            "weight": TensorInfo("U8", (math.ceil(outputs * inputs / 2), 1)),
            "weight.absmax": TensorInfo("U8" if self.double_quantization else "F32", (blocks,)),
            "weight.quant_map": TensorInfo("F32", (16,)),
        }
        if self.double_quantization:
            state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": OFFSET}
            tensors["weight.nested_absmax"] = TensorInfo("F32", (math.ceil(blocks / NESTED_BLOCK),))
            tensors["weight.nested_quant_map"] = TensorInfo("F32", (256,))
        tensors[f"weight.quant_state.bitsandbytes__{self.type}"] = TensorInfo("U8", (len(json.dumps(state)),))
        return tensors

    def model_config(self, formats: Mapping[str, LayerFormat], kept: Iterable[str]) -> dict[str, Any]:
        return {
            "quant_method": BITSANDBYTES,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.type,
            "bnb_4bit_use_double_quant": self.double_quantization,
            "bnb_4bit_compute_dtype": self.compute_dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": _patterns(kept, formats),
        }


@dataclass(frozen=True)
class EightBitRows:
    """Integers of 8 bits with a scale for each output."""

    threshold: float
    method: ClassVar[str] = BITSANDBYTES

    @property
    def label(self) -> str:
        """Return e.g. `8-bit integers, outliers above 6.0 in float16`."""
        return f"8-bit integers, {f'outliers above {self.threshold} in float16' if self.threshold else 'no outliers'}"

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        return {
            "weight": TensorInfo("I8", (outputs, inputs)),
            "SCB": TensorInfo("F32", (outputs,)),
            "weight_format": TensorInfo("U8", ()),
        }

    def model_config(self, formats: Mapping[str, LayerFormat], kept: Iterable[str]) -> dict[str, Any]:
        return {
            "quant_method": BITSANDBYTES,
            "load_in_4bit": False,
            "load_in_8bit": True,
            "llm_int8_threshold": self.threshold,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": _patterns(kept, formats),
        }


def _patterns(kept: Iterable[str], formats: Mapping[str, LayerFormat]) -> list[str]:
    """Return what transformers leaves as it is. It takes a name for the beginning or end of others
    too; a pattern does not let it.
    """
    return [
        rf"(.*\.)?{re.escape(name)}$" if any(each.startswith(name) or each.endswith(name) for each in formats) else name
        for name in kept
    ]
