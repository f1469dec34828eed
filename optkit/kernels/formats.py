"""Which layers of a checkpoint are packed, and their weights; the two formats are those of `optkit.algorithms.packing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from optkit.algorithms.packing import packed_length, unpack
from optkit.errors import SourceError
from optkit.kernels.packed import PackedWeight
from optkit.model.checkpoint import Checkpoint

BITS = (2, 3, 4, 8)
LEAVES = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
}
"""What a packed layer is made of; the first is its weight."""


def packed_method(quantization: Mapping[str, Any]) -> str | None:
    """Return `compressed-tensors` or `gptq` where a `quantization_config` describes packed weights and nothing more, else None."""
    method = quantization.get("quant_method")
    if method == "gptq":
        return method if quantization.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2") else None
    if method != "compressed-tensors" or quantization.get("format") != "pack-quantized":
        return None
    groups: Mapping[str, Any] = quantization.get("config_groups") or {}
    beyond_weights = ("input_activations", "output_activations")
    more = quantization.get("kv_cache_scheme") or any(group.get(key) for group in groups.values() for key in beyond_weights)
    return None if more or quantization.get("sparsity_config") or quantization.get("transform_config") else method


class PackedCheckpoint:
    """The packed layers of a quantized checkpoint."""

    def __init__(self, checkpoint: Checkpoint, method: str) -> None:
        self.checkpoint, self.method = checkpoint, method
        weight = f".{LEAVES[method][0]}"
        self.layers = tuple(name.removesuffix(weight) for name in checkpoint.tensors if name.endswith(weight))
        """Names of the layers, e.g. `model.layers.0.mlp.up_proj`."""
        if not self.layers:
            raise SourceError(
                f"no tensor's name ends in {weight}",
                where=str(checkpoint.directory),
                why=f"The quantization_config says {method}",
                remedy="Make the artifact again",
            )

    def tensors_of(self, layer: str) -> list[str]:
        """Return the names of the tensors that the weight of a layer is made of."""
        names = [f"{layer}.{leaf}" for leaf in LEAVES[self.method]]
        return [name for name in names if name in self.checkpoint.tensors]

    def shape(self, layer: str) -> tuple[int, int]:
        """Return outputs and inputs of a layer; reads at most 16 bytes."""
        if self.method == "compressed-tensors":
            outputs, inputs = (int(size) for size in self.checkpoint.read(f"{layer}.weight_shape"))
            return outputs, inputs
        words, outputs = self.checkpoint.tensors[f"{layer}.qweight"].shape
        if f"{layer}.g_idx" in self.checkpoint.tensors:
            return outputs, self.checkpoint.tensors[f"{layer}.g_idx"].shape[0]
        return outputs, words * 32 // int((self.checkpoint.quantization or {})["bits"])

    def bias(self, layer: str) -> str | None:
        """Return the name of a layer's bias, None where it has none."""
        name = f"{layer}.bias"
        return name if name in self.checkpoint.tensors else None

    def read(self, layer: str, device: str | torch.device) -> PackedWeight:
        """Return the packed weight of a layer, on the device. Raises SourceError where its tensors do not fit each other."""
        parts = {name.rpartition(".")[2]: self.checkpoint.read(name).to(device) for name in self.tensors_of(layer)}
        if missing := [leaf for leaf in self._required() if leaf not in parts]:
            raise SourceError(f"there is no {', '.join(missing)}", where=f"{self.checkpoint.directory}: {layer}")
        outputs, inputs = self.shape(layer)
        if self.method == "gptq":
            words, scales = parts["qweight"].T.contiguous(), parts["scales"].T.contiguous()
        else:
            words, scales = parts["weight_packed"], parts["weight_scale"]
        bits = next((bits for bits in BITS if words.shape == (outputs, packed_length(inputs, bits))), None)
        if bits is None or scales.dim() != 2 or scales.shape[0] != outputs:
            raise SourceError(
                f"words {list(words.shape)} and scales {list(scales.shape)} are no weight [{outputs}, {inputs}] of 2, 3, 4 or 8 bits",
                where=f"{self.checkpoint.directory}: {layer}",
                remedy="Make the artifact again",
            )
        zeros = self._zeros(parts, bits, outputs)
        if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
            zeros = None
        group_of_input = parts.get("g_idx", parts.get("weight_g_idx"))
        return PackedWeight(words, scales, zeros, _out_of_order(group_of_input, scales.shape[1]), bits, inputs)

    def _required(self) -> tuple[str, ...]:
        return ("qzeros", "scales") if self.method == "gptq" else ("weight_scale", "weight_shape")

    def _zeros(self, parts: Mapping[str, Tensor], bits: int, outputs: int) -> Tensor | None:
        if self.method == "gptq":
            stored = unpack(parts["qzeros"], bits, outputs, 1).T.contiguous()
            below = 0 if (self.checkpoint.quantization or {}).get("checkpoint_format") == "gptq_v2" else 1
            return stored + below
        packed = parts.get("weight_zero_point")
        return None if packed is None else unpack(packed, bits, outputs, 0)


def _out_of_order(group_of_input: Tensor | None, groups: int) -> Tensor | None:
    """Return int64 [in], None where inputs are grouped in order."""
    if group_of_input is None or bool((group_of_input < 0).any()):
        return None
    inputs = group_of_input.numel()
    in_order = torch.arange(inputs, device=group_of_input.device) // -(-inputs // groups)
    return None if torch.equal(group_of_input.long(), in_order) else group_of_input.long()
