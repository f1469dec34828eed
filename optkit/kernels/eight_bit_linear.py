"""What linear layers share whose weights and inputs are both numbers of 8 bits."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from optkit.algorithms.eight_bit import NumberFormat, round_inputs
from optkit.kernels.linear_layer import hold_


class EightBitLinear(nn.Module):
    """`x W^T + b` with x and W rounded to 8 bits.
    A scale for each output or the whole W, for each token or all of x.
    """

    numbers: ClassVar[NumberFormat]
    """What x and W are rounded to."""
    codes: Tensor
    """[out, in], of the dtype of `numbers`."""
    scales: Tensor
    """float32 [out], or [1] for the whole weight."""
    input_scale: Tensor | None
    """float32 [1]; None if each token is rounded with a scale of its own."""
    bias: Tensor | None

    def __init__(
        self, codes: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.dtype = dtype
        hold_(
            self,
            codes=codes,
            scales=scales.float().flatten(),
            input_scale=None if input_scale is None else input_scale.float().flatten(),
            bias=None if bias is None else bias.float(),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        rows = hidden.reshape(-1, self.in_features).float()
        if self.input_scale is None:
            codes, scales = round_inputs(rows, self.numbers)
        else:
            codes, scales = self.numbers.round(rows / self.input_scale), self.input_scale
        product = self._sums(codes).float().mul_(scales).mul_(self.scales)
        if self.bias is not None:
            product = product.add_(self.bias)
        return product.to(self.dtype).view(*hidden.shape[:-1], self.out_features)

    @abstractmethod
    def _sums(self, codes: Tensor) -> Tensor:
        """Codes [rows, in] -> a new float [rows, out]: the sums of products of codes."""
