"""Layers in GPTQ's format, as AutoGPTQ and gptqmodel write them (see `optkit.algorithms.packing`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.algorithms.packing import unpack
from optkit.kernels.integer_kernels import IntegerLayer, bits_of, packed_weight
from optkit.kernels.packed_linear import PackedWeight
from optkit.model.checkpoint import Checkpoint


def gptq_layers(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[GptqLayer] | None:
    """Return the layers if `quant_method` is gptq, None if packed for one kernel alone (Marlin)."""
    if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        return None
    return GptqLayer.all_of(checkpoint, config)


class GptqLayer(IntegerLayer):
    """A layer in GPTQ's format."""

    leaves = ("qweight", "qzeros", "scales", "g_idx")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        words, outputs = self.checkpoint.tensors[f"{self.name}.qweight"].shape
        if order := self.info("g_idx"):
            return outputs, order.shape[0]
        return outputs, words * 32 // int(self.scheme["bits"])

    def integers(self, device: str) -> PackedWeight:
        """See `IntegerLayer`."""
        parts = self.read(self.leaves, device, required=("qzeros", "scales"))
        words, scales = parts["qweight"].T.contiguous(), parts["scales"].T.contiguous()
        outputs, inputs = self.shape
        bits = bits_of(words, scales, (outputs, inputs), self.where)
        below = 0 if self.scheme.get("checkpoint_format") == "gptq_v2" else 1
        zeros = unpack(parts["qzeros"], bits, outputs, 1).T.contiguous() + below
        return packed_weight(words, scales, zeros, parts.get("g_idx"), bits, inputs)
