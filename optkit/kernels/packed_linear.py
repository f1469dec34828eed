"""A linear layer's packed weight, and the layer that computes with any of them.

`PackedLinear` keeps the packed words and dequantizes them at every call: right for all bits and
shapes, and slower than a kernel that reads the codes themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.algorithms.packing import unpack
from optkit.kernels.linear_layer import hold_


@dataclass(frozen=True)
class PackedWeight:
    """The weight `(code - zero[group]) * scale[group]` of a layer, and what its format says."""

    words: Tensor
    """int32 [out, ceil(in * bits / 32)]: unsigned codes, packed along the inputs."""
    scales: Tensor
    """float [out, groups]."""
    zeros: Tensor | None
    """uint8 [out, groups]; None if all of them are 2^(bits - 1)."""
    group_of_input: Tensor | None
    """int64 [in] if inputs are not grouped in order (activation order), else None."""
    bits: int
    inputs: int

    @property
    def outputs(self) -> int:
        return int(self.words.shape[0])

    @property
    def groups(self) -> int:
        return int(self.scales.shape[1])

    @property
    def group_size(self) -> int | None:
        """Inputs per group; None if groups differ in size."""
        if self.inputs % self.groups:
            return None
        size = self.inputs // self.groups
        if self.group_of_input is not None:
            counts = torch.bincount(self.group_of_input, minlength=self.groups)
            return size if bool((counts == size).all()) else None
        return size

    @property
    def order(self) -> Tensor | None:
        """int64 [in]: the inputs sorted by their group; None if they are so already."""
        return None if self.group_of_input is None else torch.argsort(self.group_of_input, stable=True)

    def codes(self) -> Tensor:
        """Return uint8 [out, in], in the order of the inputs."""
        return unpack(self.words, self.bits, self.inputs, 1)

    def grouped_codes(self) -> Tensor:
        """Return uint8 [out, in], with the inputs sorted by their group."""
        order = self.order
        return self.codes() if order is None else self.codes()[:, order]

    def shifts(self) -> Tensor | None:
        """Return float [out, groups]: zero - 2^(bits - 1), None if all of them are 0."""
        return None if self.zeros is None else self.zeros.float() - (1 << (self.bits - 1))


class PackedLinear(nn.Module):
    """`x W^T + b`, W dequantized from its packed words at each call and dropped afterwards."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_of_input: Tensor
    bias: Tensor | None

    def __init__(self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.bits, self.in_features, self.out_features = weight.bits, weight.inputs, weight.outputs
        size = weight.group_size if weight.group_of_input is None else None
        self.in_order = size is not None
        group_of_input = weight.group_of_input
        if group_of_input is None:
            group_of_input = torch.arange(weight.inputs, device=weight.words.device) // (
                size or -(-weight.inputs // weight.groups)
            )
        hold_(
            self,
            words=weight.words,
            scales=weight.scales.to(dtype),
            zeros=weight.zeros,
            group_of_input=group_of_input[:0] if self.in_order else group_of_input,
            bias=None if bias is None else bias.to(dtype),
        )

    def dequantize(self) -> Tensor:
        """Return float [out, in], in the dtype of the scales."""
        codes = unpack(self.words, self.bits, self.in_features, 1).to(self.scales.dtype)
        middle = 1 << (self.bits - 1)
        if self.in_order:
            groups = codes.view(self.out_features, self.scales.shape[1], -1)
            zeros = middle if self.zeros is None else self.zeros.unsqueeze(-1)
            return groups.sub_(zeros).mul_(self.scales.unsqueeze(-1)).view(self.out_features, self.in_features)
        zeros = middle if self.zeros is None else self.zeros[:, self.group_of_input]
        return codes.sub_(zeros).mul_(self.scales[:, self.group_of_input])

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        return F.linear(hidden, self.dequantize(), self.bias)
