"""Weights in blocks of 4-bit floats, as compressed-tensors has them.
The formats are "mxfp4-pack-quantized" and "nvfp4-pack-quantized".

No kernel of torch multiplies with E2M1 weights and wider activations, so they are dequantized at
each call (see `optkit.algorithms.microscaling`); what is kept has the size that it has on disk.
Inputs are rounded to the same floats first if config.json says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.algorithms.microscaling import E2M1, exponent_scales, rounded_inputs
from optkit.errors import SourceError
from optkit.kernels.linear_layer import hold_
from optkit.kernels.stored_layer import QuantizedLayer
from optkit.progress import ToActOn

NAMES = {"mxfp4-pack-quantized": "mxfp4", "nvfp4-pack-quantized": "nvfp4"}


class MicroscaledLinear(nn.Module):
    """`x W^T + b`, W dequantized from 4-bit floats at each call and dropped afterwards."""

    packed: Tensor
    """uint8 [out, in / 2]."""
    scales: Tensor
    """uint8 (E8M0) or float8_e4m3fn [out, blocks]."""
    global_scale: Tensor | None
    """float32 [1], of NVFP4 only."""
    input_global_scale: Tensor | None
    """The same of inputs that are rounded."""
    bias: Tensor | None

    def __init__(
        self,
        packed: Tensor,
        scales: Tensor,
        global_scale: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        rounds_inputs: bool = False,
        input_global_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.rounds_inputs = rounds_inputs
        self.out_features, self.in_features = packed.shape[0], packed.shape[1] * 2
        self.dtype = dtype
        self.values, self.steps = _pairs(packed.device), _scales(scales.device, scales.dtype)
        bias = None if bias is None else bias.to(dtype)
        hold_(self, packed=packed, scales=scales, global_scale=global_scale, bias=bias)
        hold_(self, input_global_scale=input_global_scale)

    def dequantize(self) -> Tensor:
        """Return float [out, in]: computed in float32 and rounded once, as compressed-tensors does."""
        pairs = torch.index_select(self.values, 0, self.packed.int().view(-1)).view(torch.float32)
        scales = torch.index_select(self.steps, 0, self.scales.view(torch.uint8).int().view(-1))
        if self.global_scale is not None:
            scales /= self.global_scale
        blocks = pairs.view(len(scales), -1).mul_(scales.unsqueeze(-1))
        return blocks.view(self.out_features, self.in_features).to(self.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        inputs = rounded_inputs(hidden, self.input_global_scale) if self.rounds_inputs else hidden
        return F.linear(inputs, self.dequantize(), self.bias)


class MicroscaledLayer(QuantizedLayer):
    """A layer in one of the two formats."""

    leaves = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    dtypes = frozenset({"U8"})

    @classmethod
    def reads(cls, scheme: Mapping[str, Any]) -> bool:
        inputs, weights = scheme.get("input_activations"), scheme.get("weights") or {}
        same = ("num_bits", "type", "symmetric", "strategy", "group_size")
        dynamic = "local" if scheme.get("format") == "nvfp4-pack-quantized" else True
        return not inputs or (
            all(inputs.get(word) == weights.get(word) for word in same) and inputs.get("dynamic") == dynamic
        )

    @property
    def shape(self) -> tuple[int, int]:
        outputs, half = self.checkpoint.tensors[f"{self.name}.weight_packed"].shape
        return outputs, half * 2

    def build(self, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
        layer = self._linear(bias, dtype, device)
        name = NAMES[str(self.scheme["format"])]
        rounded = "; inputs are rounded in blocks" if layer.rounds_inputs else ""
        why = f"because torch has no kernel for them{rounded}"
        return layer, ToActOn(f"{name}: {{layers}} are dequantized at each call, {why}")

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        return self._linear(None, dtype, device).dequantize()

    def _linear(self, bias: Tensor | None, dtype: torch.dtype, device: str) -> MicroscaledLinear:
        name = NAMES[str(self.scheme["format"])]
        block, stored = (32, torch.uint8) if name == "mxfp4" else (16, torch.float8_e4m3fn)
        rounds = bool(self.scheme.get("input_activations"))
        needed = self.leaves[1:2] if name == "mxfp4" else self.leaves[1 : 3 + rounds]
        parts = self.read(self.leaves, device, required=needed)
        packed, scales, (outputs, inputs) = parts["weight_packed"], parts["weight_scale"], self.shape
        if scales.dtype != stored or scales.shape != (outputs, inputs // block) or inputs % block:
            raise SourceError(
                f"scales {str(scales.dtype).removeprefix('torch.')} {list(scales.shape)} are not those of a weight "
                f"[{outputs}, {inputs}] in {name}",
                where=self.where,
                remedy="Make the artifact again",
            )
        shared, of_inputs = parts.get("weight_global_scale"), parts.get("input_global_scale")
        return MicroscaledLinear(packed, scales, shared, bias, dtype, rounds, of_inputs)


@cache
def _pairs(device: torch.device) -> Tensor:
    """int64 [256]: the float32 values of the two codes of each byte, the low half first.
    One lookup for both is four times faster.
    """
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1).view(torch.int64).view(-1)


@cache
def _scales(device: torch.device, stored: torch.dtype) -> Tensor:
    """float32 [256]: the scale of each byte, E8M0 or E4M3.
    It is looked up 15 times faster than torch's CPU converts E4M3.
    """
    each = torch.arange(256, device=device).to(torch.uint8)
    return exponent_scales(each) if stored == torch.uint8 else each.view(stored).float()
