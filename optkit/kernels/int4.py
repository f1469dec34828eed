"""Linear layers on torch's own int4 kernel for x86 CPUs, with bfloat16 activations.

A weight is `(code - 8) * scale + zero` with bfloat16 scales and zeros [groups, out, 2], zero = (8 -
zero point) * scale. The kernel reads codes in tiles; `_read_codes` reads them back, for products with
so many rows that a dense product is faster.

`aten::_convert_weight_to_int4pack_for_cpu`, int32 [out, in] -> uint8 [out, in / 2]: tiles of 64
(AVX-512) or 32 (AVX2) outputs x 1 input, whose first half is in the low halves of the bytes. Without
AVX2 the kernel is a scalar loop and is not used.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from optkit.kernels.linear_layer import RowsLinear, hold_
from optkit.kernels.packed_linear import PackedWeight

GROUP_SIZES = (32, 64, 128, 256)
CPU_TILES = {"AVX512": 64, "AVX2": 32}
"""Outputs of a tile by instruction set, as `torch.backends.cpu.get_cpu_capability()` names it."""
DENSE_ROWS = 128
"""From so many rows of activations on, dequantizing and a dense product take less time than the
int4 kernel.

Microseconds at bfloat16, group 64, 1536 outputs x 576 inputs (EPYC with AVX-512, 2 threads, torch
2.13; best of 150):
    rows                       1     4    16    64   128   192   512
    int4                      20    28    84   304   600   895  2370
    dequantized, dense       423   427   458   397   512   726  1558
    dense, weight in cache    39    41    60   145   260         930
At 4096 x 4096 and one row, weights from memory: int4 224, dense 817.
"""


def why_not_int4(weight: PackedWeight, dtype: torch.dtype, device: str) -> str | None:
    """Return why a layer cannot be an `Int4Linear`, None if it can."""
    if weight.bits != 4:
        return f"torch's int4 kernel has no {weight.bits} bits"
    if dtype != torch.bfloat16:
        return f"torch's int4 kernel computes in bfloat16 and the model is {str(dtype).removeprefix('torch.')}"
    if torch.device(device).type != "cpu":
        return "torch's int4 kernel is used on CPUs alone"
    if unavailable := _why_unavailable():
        return unavailable
    if weight.group_size not in GROUP_SIZES:
        return (
            "torch's int4 kernel has groups of 32, 64, 128 or 256 inputs, not "
            f"{weight.group_size or 'of different sizes'}"
        )
    outputs = CPU_TILES[torch.backends.cpu.get_cpu_capability()]
    if weight.outputs % outputs or weight.inputs % 2:
        return (
            f"torch's int4 kernel takes multiples of {outputs} outputs and 2 inputs, not "
            f"{weight.outputs} x {weight.inputs}"
        )
    return None


class Int4Linear(RowsLinear):
    """`x W^T + b` with W in 4 bits and x in bfloat16."""

    codes: Tensor
    """In the kernel's layout."""
    scales_and_zeros: Tensor
    """bfloat16 [groups, out, 2]."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.inputs, weight.outputs
        self.group_size = weight.inputs // weight.groups
        scales = weight.scales.float()
        shifts = weight.shifts()
        zeros = torch.zeros_like(scales) if shifts is None else -shifts * scales
        hold_(
            self,
            codes=_write_codes(weight.grouped_codes()),
            scales_and_zeros=torch.stack([scales.T, zeros.T], dim=-1).to(torch.bfloat16).contiguous(),
            order=weight.order,
            bias=None if bias is None else bias.to(torch.bfloat16),
        )

    def dequantize(self) -> Tensor:
        """Return bfloat16 [in, out], the inputs sorted by their group."""
        codes = _read_codes(self.codes, self.out_features, self.in_features)
        steps = codes.view(-1, self.group_size, self.out_features).to(torch.bfloat16).sub_(8)
        scales, zeros = self.scales_and_zeros.unsqueeze(1).unbind(-1)  # [groups, 1, out]
        return torch.addcmul(zeros.contiguous(), steps, scales.contiguous()).view(self.in_features, self.out_features)

    def products(self, rows: Tensor) -> Tensor:
        """See `RowsLinear`; all numbers are bfloat16."""
        if len(rows) < DENSE_ROWS:
            return _product(rows, self.codes, self.group_size, self.scales_and_zeros)
        return rows @ self.dequantize()


def _product(rows: Tensor, codes: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
    kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
    return kernel(rows.contiguous(), codes, group_size, scales_and_zeros)  # type: ignore[no-any-return]


def _write_codes(codes: Tensor) -> Tensor:
    """uint8 [out, in] -> the kernel's layout."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int().contiguous(), 1)  # type: ignore[no-any-return]


def _read_codes(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """Undo `_write_codes`, transposed: uint8 [in, out]."""
    tile = CPU_TILES[torch.backends.cpu.get_cpu_capability()]
    tiles = packed.view(outputs // tile, inputs, tile // 2)
    # eight codes at a time, which is how they are copied
    rows = torch.cat([tiles & 15, tiles >> 4], dim=-1).view(torch.int64)
    return rows.transpose(0, 1).contiguous().view(torch.uint8).view(inputs, outputs)


@cache
def _why_unavailable() -> str | None:
    """Return why the kernel cannot be used here, None if it computes right."""
    if torch.backends.cpu.get_cpu_capability() not in CPU_TILES:
        return "torch's int4 kernel is fast with AVX2 or AVX-512 alone"
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (128, 256), generator=generator, dtype=torch.uint8)
    packed = _write_codes(codes)
    scales_and_zeros = torch.full((4, 128, 2), 0.5, dtype=torch.bfloat16)
    rows = torch.randint(-2, 3, (1, 256), generator=generator).bfloat16()
    expected = rows.float() @ ((codes.float() - 8) * 0.5 + 0.5).T
    right = torch.equal(_read_codes(packed, 128, 256), codes.T)
    right = right and torch.allclose(
        _product(rows, packed, 64, scales_and_zeros).float(), expected, rtol=0.02, atol=0.5
    )
    return None if right else f"torch {torch.__version__}'s int4 kernel does not compute here what it is documented to"
