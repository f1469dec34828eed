"""A W4A16 linear layer on optkit's own int4 kernel for NVIDIA GPUs.
Group sizes are 32, 64 and multiples of 128, with or without zero points.

Few tokens read packed weights alone; many are a dense product with the weight dequantized for the
call, which costs the time of reading and writing it once. Works under torch.compile(fullgraph=True)
and in CUDA graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optkit.kernels.cuda.matrix import Matrix
from optkit.kernels.cuda.step_products import step_product
from optkit.kernels.linear_layer import hold_


class TiledLinear(nn.Module):
    """`x W^T + b` with W in 4 bits and x in bfloat16 or float16."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    order: Tensor | None
    """int64 [in]: the inputs sorted by their group, if they are not so already."""
    bias: Tensor | None

    def __init__(self, matrix: Matrix, order: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size = matrix.inputs, matrix.outputs, matrix.group_size
        hold_(self, codes=matrix.weight, scales=matrix.scales, offsets=matrix.offsets, order=order, bias=matrix.bias)

    @property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int, int]:
        return self.codes, self.scales, self.offsets, self.bias, self.out_features, self.in_features, self.group_size

    def matrix(self) -> Matrix:
        """Return the weight and bias as the kernel takes them, views of this layer's own."""
        return _matrix(*self._parts)

    def take_(self, matrix: Matrix) -> None:
        """Let the layer's tensors be those of an equal matrix, e.g. views of a stacked one."""
        self.codes, self.scales, self.offsets, self.bias = matrix.weight, matrix.scales, matrix.offsets, matrix.bias  # type: ignore[assignment]

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        rows = hidden.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows[:, self.order]
        product: Tensor = w4a16(rows.contiguous(), *self._parts)
        return product.view(*hidden.shape[:-1], self.out_features)


def _matrix(
    codes: Tensor, scales: Tensor, offsets: Tensor | None, bias: Tensor | None, outputs: int, inputs: int, group: int
) -> Matrix:
    return Matrix(codes, outputs, inputs, scales.dtype, scales, offsets, group, bias)


@torch.library.custom_op("optkit::w4a16", mutates_args=())
def w4a16(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    outputs: int,
    inputs: int,
    group_size: int,
) -> Tensor:
    """float [tokens, in] -> float [tokens, out], by the kernel that is good for so many tokens."""
    matrix = _matrix(codes, scales, offsets, bias, outputs, inputs, group_size)
    if not len(rows):
        return rows.new_empty(0, outputs)
    product = rows.new_empty(len(rows), outputs)
    step_product(matrix, rows, product)
    return product


@w4a16.register_fake
def _(rows: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, bias: Tensor, outputs: int, *_: int) -> Tensor:
    return rows.new_empty(len(rows), outputs)
