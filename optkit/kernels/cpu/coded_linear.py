"""Linear layers of 2, 4 or 8 bits on our own kernels.

Up to 32 rows are exact in float32. On x86 more are rounded to 16 bits, a scale for each group: KL
to float32 8e-8 nats a token (SmolLM2, WikiText-2), where bfloat16 has 1.4e-4 and 8 bits 4e-3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.algorithms.packing import pack
from optkit.kernels.cpu.native import packed_linear, why_not_native
from optkit.kernels.linear_layer import RowsLinear, hold_
from optkit.kernels.packed_linear import PackedWeight

LANES = 16
"""Outputs that the kernel computes together."""
BITS = (2, 4, 8)


def why_not_coded(weight: PackedWeight, device: str) -> str | None:
    """Return why a layer cannot be a `CodedLinear`, None if it can; compiles the kernels."""
    if torch.device(device).type != "cpu":
        return "optkit's CPU kernels run on CPUs"
    if weight.bits not in BITS:
        return f"optkit's CPU kernels have no {weight.bits} bits"
    size, per_word = weight.group_size, 32 // weight.bits
    if size is None:
        return "its groups differ in size"
    if size % per_word:
        return f"groups of {size} inputs do not fill words of {per_word} codes"
    return why_not_native()


class CodedLinear(RowsLinear):
    """`x W^T + b` with W in 2, 4 or 8 bits; sums are in float32 whatever the dtype of x."""

    codes: Tensor
    scales: Tensor
    shifts: Tensor | None
    """These three as `packed_linear` takes them, the inputs sorted by their group."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.bits, self.in_features, self.out_features = weight.bits, weight.inputs, weight.outputs
        shifts = weight.shifts()
        hold_(
            self,
            codes=_in_blocks(pack(weight.grouped_codes(), weight.bits, 1)),  # int32 [blocks, in * bits / 32, 16]
            scales=_in_blocks(weight.scales.float()),
            shifts=None if shifts is None else _in_blocks(shifts.to(torch.int8)),
            order=weight.order,
            bias=None if bias is None else bias.to(dtype),
        )

    def products(self, rows: Tensor) -> Tensor:
        return packed_linear(rows, self.codes, self.scales, self.shifts, self.bits, self.out_features)


def _in_blocks(columns: Tensor) -> Tensor:
    """[out, n] -> [blocks, n, 16], zeros beyond the last output."""
    padded = F.pad(columns, (0, 0, 0, -len(columns) % LANES))
    return padded.view(-1, LANES, columns.shape[1]).transpose(1, 2).contiguous()
