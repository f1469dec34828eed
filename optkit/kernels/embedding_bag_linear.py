"""Linear layers of 2, 4 or 8 bits on the CPU, exact in float32, through FBGEMM's embedding bags.

torch's own int4 kernel is fast for bfloat16 alone: its float32 version is a scalar loop, 15 times
slower than a dense float32 product. An embedding bag with weights per sample adds up quantized rows
times numbers, so it can be a matrix-vector product. The rows are the inputs, a bag is a group of
inputs, and the weights are the activations. It gives the sum over the inputs k of a group of x[k]
(code[k, n] - 2^(bits - 1)), for all outputs n at once, in float32. Scales and zero points act on
these sums.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from optkit.kernels.linear_layer import RowsLinear, hold_
from optkit.kernels.packed_linear import PackedWeight

BAG_ROWS = 8
"""Up to so many rows of activations a bag is faster than dequantizing and a dense product.

Microseconds at float32, 4 bits, group 64, 1536 outputs x 576 inputs (EPYC with AVX-512, 2 threads,
torch 2.13; best of 4):
    rows                       1     2     4     8    16    64   512   2048
    bag                       45    76   135   253   486
    dequantized, dense       130   167   246   303   373   747  4262  16883
    dense, weight in cache    49    95   145   148   211   601  4092  16499
At 4096 x 4096 and one row, weights from memory: bag 589, dense 2631.
"""
HEADER_BYTES = {2: 4, 4: 4, 8: 8}
"""Bytes after each row for its scale and offset: float16 for 2 and 4 bits, float32 for 8."""


def why_not_bag(weight: PackedWeight, device: str) -> str | None:
    """Return why a layer cannot be a `BagLinear`, None if it can."""
    if device != "cpu" or "fbgemm" not in torch.backends.quantized.supported_engines:
        return "FBGEMM's kernels run on x86 CPUs alone"
    if weight.bits not in HEADER_BYTES:
        return f"FBGEMM has no kernel for {weight.bits} bits"
    if weight.group_size is None:
        return "its groups differ in size"
    if weight.outputs * weight.bits % 8:
        return f"{weight.outputs} outputs do not fill whole bytes"
    return None


class BagLinear(RowsLinear):
    """`x W^T + b` with W in 2, 4 or 8 bits; computes in float32 whatever the dtype of x."""

    rows: Tensor
    """uint8 [in, out * bits / 8 + header], the inputs sorted by their group."""
    scales: Tensor
    """float32 [groups, out]."""
    offsets: Tensor | None
    """float32 [groups, out]: (zero - 2^(bits - 1)) * scale."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.bits, self.in_features, self.out_features = weight.bits, weight.inputs, weight.outputs
        self.group_size = weight.inputs // weight.groups
        self.dtype = dtype
        self.indices, self.starts = _indices(weight.inputs), _starts(weight.inputs, self.group_size)
        scales = weight.scales.float().T.contiguous()
        shifts = weight.shifts()
        hold_(
            self,
            rows=_rows(weight),
            scales=scales,
            offsets=None if shifts is None else shifts.T.contiguous() * scales,
            order=weight.order,
            bias=None if bias is None else bias.to(dtype),
        )

    def dequantize(self) -> Tensor:
        """Return float32 [in, out], the inputs sorted by their group."""
        each = self.indices[: self.in_features]
        # [groups, group, out]
        codes = _bag(self.bits, self.rows, each, each, None).view(len(self.scales), self.group_size, -1)
        weight = codes.mul_(self.scales.unsqueeze(1))
        if self.offsets is not None:
            weight = weight.sub_(self.offsets.unsqueeze(1))
        return weight.view(self.in_features, self.out_features)

    def products(self, rows: Tensor) -> Tensor:
        if len(rows) > BAG_ROWS:
            return rows @ self.dequantize().to(self.dtype)
        return self._bags(rows.float()).to(self.dtype)

    def _bags(self, hidden: Tensor) -> Tensor:
        count, groups = len(hidden), len(self.scales)
        indices, starts = self.indices[: count * self.in_features], self.starts[: count * groups]
        sums = _bag(self.bits, self.rows, indices, starts, hidden.view(-1)).view(count, groups, self.out_features)
        product = sums.mul_(self.scales).sum(1)
        if self.offsets is None:
            return product
        return product.addmm_(hidden.view(count, groups, -1).sum(-1), self.offsets, alpha=-1)


def _rows(weight: PackedWeight) -> Tensor:
    """Return the rows of an embedding table.
    A row has codes of one input along the outputs, then scale 1 and offset -2^(bits - 1).
    """
    codes, per_byte = weight.grouped_codes().T.contiguous(), 8 // weight.bits
    packed = codes[:, ::per_byte]
    for place in range(1, per_byte):
        packed = packed | codes[:, place::per_byte] << (place * weight.bits)
    header = torch.tensor(
        [1.0, -float(1 << (weight.bits - 1))], dtype=torch.float32 if weight.bits == 8 else torch.float16
    )
    return torch.cat([packed, header.view(torch.uint8).expand(weight.inputs, -1)], dim=1)


def _bag(bits: int, rows: Tensor, indices: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
    operations = torch.ops.quantized
    sums = {
        8: operations.embedding_bag_byte_rowwise_offsets,
        4: operations.embedding_bag_4bit_rowwise_offsets,
        2: operations.embedding_bag_2bit_rowwise_offsets,
    }[bits]
    return sums(rows, indices, starts, False, 0, False, weights, None, False)  # type: ignore[no-any-return]


@cache
def _indices(inputs: int) -> Tensor:
    """int32 [BAG_ROWS * inputs]: every row of the table, for each row of activations.
    All layers of one width share it.
    """
    return torch.arange(inputs, dtype=torch.int32).repeat(BAG_ROWS)


@cache
def _starts(inputs: int, group_size: int) -> Tensor:
    """int32 [BAG_ROWS * groups]: where each bag begins."""
    return torch.arange(0, BAG_ROWS * inputs, group_size, dtype=torch.int32)
