"""Float linear layers for few rows of activations: what a quantized model keeps in floats."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.kernels.cpu.native import dense_linear, why_not_native

FEW_ROWS = 4
"""Up to so many rows the kernel reads the weight once."""


def why_not_float(module: nn.Module) -> str | None:
    """Return why a module cannot be a `FloatLinear`, None if it can; compiles the kernels."""
    if type(module) is not nn.Linear:
        return "it is no plain linear layer"
    if (
        module.weight.device.type != "cpu"
        or module.weight.dtype not in (torch.float32, torch.bfloat16)
        or not module.weight.is_contiguous()
    ):
        return "optkit's CPU kernels take float32 and bfloat16 in CPU memory"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "torch's products of one row are faster without AVX-512"
    return why_not_native()


class FloatLinear(nn.Linear):
    """A linear layer that keeps its weight, which may be an embedding's too; sums are in float32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        width, inputs = self.weight.shape  # of a rank, which may hold a part of the layer's
        rows = hidden.reshape(-1, inputs)
        if len(rows) > FEW_ROWS:
            return F.linear(hidden, self.weight, self.bias)
        product = dense_linear(rows, self.weight)
        if self.bias is not None:
            product = product + self.bias
        return product.view(*hidden.shape[:-1], width)


def use_float_kernels_(model: nn.Module) -> list[str]:
    """Let float linear layers use the kernel where it is faster at one row; return a note."""
    changed = []
    for name, module in model.named_modules():
        if why_not_float(module) is None:
            module.__class__ = FloatLinear
            changed.append(name)
    named = f"{', '.join(sorted(changed)[:3])}{', ...' if len(changed) > 3 else ''}"
    return [f"float: {named} {'uses' if len(changed) == 1 else 'use'} optkit's CPU kernel"] if changed else []
