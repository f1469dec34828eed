"""Linear layers of 8-bit floats (E4M3).
NVIDIA GPUs since Ada have an 8-bit matrix product; elsewhere weights are widened at each call.

The product of codes is taken first and scales are applied to it, if a whole row has one scale:
`Float8Linear`. Weights in blocks, or inputs that are not rounded, are dequantized: `WidenedLinear`.
Either way the weights stay in 8 bits in memory.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.algorithms.eight_bit import FLOAT8, dequantize, float8_values, round_inputs
from optkit.errors import first_line
from optkit.kernels.eight_bit_linear import EightBitLinear
from optkit.kernels.linear_layer import hold_

MULTIPLE = 16
"""`torch._scaled_mm` takes multiples of so many outputs and inputs."""
CAPABILITY = (8, 9)
"""The first NVIDIA GPUs that multiply 8-bit floats (Ada)."""


class Float8Linear(EightBitLinear):
    """`x W^T + b` with x and W rounded to E4M3.
    A scale for each output or the whole W, for each token or all of x.
    """

    numbers = FLOAT8

    def __init__(
        self, codes: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__(codes, scales, input_scale, bias, dtype)
        # float16 ends at 65504, and 448^2 is 200704
        self.product_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self.scaled = why_not_scaled(self.out_features, self.in_features, str(codes.device)) is None

    def _sums(self, codes: Tensor) -> Tensor:
        """float8 [rows, in] -> float [rows, out]: the sums of products of codes."""
        if self.scaled:
            return _product(codes, self.codes, self.product_dtype)
        return float8_values(codes, self.product_dtype) @ float8_values(self.codes, self.product_dtype).T


class WidenedLinear(nn.Module):
    """`x W^T + b` with W in E4M3, dequantized at each call.
    x is rounded in groups of inputs or not at all.
    """

    codes: Tensor
    """float8_e4m3fn [out, in]."""
    scales: Tensor
    """float32 [tiles of outputs, tiles of inputs]."""
    bias: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        tile: tuple[int, int],
        input_group: int | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.tile, self.input_group, self.dtype = tile, input_group, dtype
        hold_(self, codes=codes, scales=scales.float(), bias=None if bias is None else bias.to(dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        if self.input_group is not None:
            rows = hidden.reshape(-1, self.in_features).float()
            codes, scales = round_inputs(rows, FLOAT8, self.input_group)
            hidden = dequantize(codes, scales, (1, self.input_group)).view_as(hidden)
        return F.linear(hidden.to(self.dtype), dequantize(self.codes, self.scales, self.tile).to(self.dtype), self.bias)


def why_not_scaled(outputs: int, inputs: int, device: str) -> str | None:
    """Return why a layer cannot use `torch._scaled_mm` on a device, None if it can."""
    if outputs % MULTIPLE or inputs % MULTIPLE:
        return f"torch._scaled_mm takes multiples of {MULTIPLE} outputs and inputs, not {outputs} x {inputs}"
    return _why_unavailable(device)


def _product(codes: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """float8 [rows, in] and float8 [out, in] -> float [rows, out], of the given dtype."""
    one = torch.ones((), device=codes.device)
    return torch._scaled_mm(codes, weight.T, one, one, out_dtype=dtype)


@cache
def _why_unavailable(device: str) -> str | None:
    """Return why `torch._scaled_mm` is not used on a device, None if it computes right there."""
    chosen = torch.device(device)
    if not _is_capable(chosen):
        return "8-bit floats are multiplied by NVIDIA GPUs of compute capability 8.9 and above alone"
    generator = torch.Generator().manual_seed(0)
    codes, weight = (FLOAT8.round(torch.randn(size, 256, generator=generator) * 16).to(chosen) for size in (3, 64))
    expected = codes.double() @ weight.double().T
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 1e-2)):
        try:
            found = _product(codes, weight, dtype).double()
        except RuntimeError as error:
            return f"torch._scaled_mm fails: {first_line(error)}"
        if float((found - expected).norm() / expected.norm()) > tolerance:
            return f"torch {torch.__version__}'s _scaled_mm does not compute here what it is documented to"
    return None


def _is_capable(device: torch.device) -> bool:
    """Whether a device multiplies 8-bit floats faster than wider ones."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= CAPABILITY
    )
