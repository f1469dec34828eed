"""Layers in GPTQ's format, as AutoGPTQ and gptqmodel write them (see `optkit.algorithms.packing`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optkit.algorithms.packing import unpack
from optkit.kernels.integer import bits_of, integer_layer, packed_weight
from optkit.kernels.packed import PackedWeight
from optkit.kernels.stored import StoredLayer
from optkit.model.checkpoint import Checkpoint

LEAVES = ("qweight", "qzeros", "scales", "g_idx")
WEIGHT = ".qweight"


def gptq_layers(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[GptqLayer] | None:
    """Return the layers if `quant_method` is gptq, None if packed for one kernel alone (Marlin)."""
    if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        return None
    return [
        GptqLayer(checkpoint, name.removesuffix(WEIGHT), config) for name in checkpoint.tensors if name.endswith(WEIGHT)
    ]


class GptqLayer(StoredLayer):
    """A layer in GPTQ's format."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that its weight is made of."""
        return self.present(LEAVES)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        words, outputs = self.checkpoint.tensors[f"{self.name}{WEIGHT}"].shape
        if order := self.info("g_idx"):
            return outputs, order.shape[0]
        return outputs, words * 32 // int(self.scheme["bits"])

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
        words, scales = parts["qweight"].T.contiguous(), parts["scales"].T.contiguous()
        outputs, inputs = self.shape
        bits = bits_of(words, scales, (outputs, inputs), self.where)
        below = 0 if self.scheme.get("checkpoint_format") == "gptq_v2" else 1
        zeros = unpack(parts["qzeros"], bits, outputs, 1).T.contiguous() + below
        return packed_weight(words, scales, zeros, parts.get("g_idx"), bits, inputs)
