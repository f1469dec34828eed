"""GPTQ's own format, as AutoGPTQ, gptqmodel and vLLM have it.

No torch is needed to describe it; `pack` imports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from optkit.environment import package_version
from optkit.model.output_layer import HEAD
from optkit.model.shape import TensorInfo
from optkit.packed_tensors.base import LayerFormat
from optkit.packed_tensors.integers import Float16Scales, words

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from optkit.algorithms.grid import QuantizedWeight

GPTQ = "gptq"
GPTQ_GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Group sizes that gptqmodel opens, besides one scale per channel."""
GPTQ_MULTIPLE = 32
"""Inputs and outputs of a layer must be a multiple of this in gptqmodel's and vLLM's kernels."""


@dataclass(frozen=True)
class GptqPacked(Float16Scales):
    """The format of AutoGPTQ, gptqmodel and vLLM, symmetric; see `optkit.algorithms.packing`."""

    bits: int
    group_size: int | None
    method: ClassVar[str] = GPTQ
    symmetric: ClassVar[bool] = True

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        groups = inputs // (self.group_size or inputs)
        return {
            "qweight": TensorInfo("I32", (words(inputs, self.bits), outputs)),
            "qzeros": TensorInfo("I32", (groups, words(outputs, self.bits))),
            "scales": TensorInfo("F16", (groups, outputs)),
            "g_idx": TensorInfo("I32", (inputs,)),
        }

    def model_config(self, formats: Mapping[str, LayerFormat], kept: Iterable[str]) -> dict[str, Any]:
        """Return the `quantization_config`.
        Layers of another form are listed in `dynamic`, as gptqmodel has it.
        """
        others = {
            f"+:^{re.escape(name)}$": {"bits": form.bits, "group_size": form.group_size or -1}
            for name, form in formats.items()
            if isinstance(form, GptqPacked) and form != self
        }
        return {
            "quant_method": GPTQ,
            "bits": self.bits,
            "group_size": self.group_size or -1,
            "sym": True,
            "desc_act": False,
            "lm_head": HEAD in formats,
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "dynamic": {f"-:^{re.escape(name)}$": {} for name in kept} | others,
            "meta": {"quantizer": [f"optkit:{package_version('optkit') or '0'}"]},
        }

    def pack(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        from optkit.algorithms.packing import pack_gptq

        return pack_gptq(weight)

    def unpack(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        from optkit.algorithms.packing import unpack_gptq

        return unpack_gptq(tensors, self.bits)
