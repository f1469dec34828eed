"""The products of a decode step for any number of sequences, each by what is fastest for so many:
our kernel, or a dense product.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.cuda.finishing import Coded, Products, finish, finish_coded
from optkit.kernels.cuda.matrix import Matrix, coded_rows, dequantized, multiply
from optkit.kernels.cuda.scaled_products import is_scaled, scaled_product
from optkit.kernels.cuda.schedule import CHUNK, MOST_TOKENS
from optkit.kernels.cuda.wide import Lined, can_be_wide, multiply_wide
from optkit.kernels.int8_linear import integer_product

MOST_STREAMED = {torch.int32: 64, torch.float8_e4m3fn: 6, torch.int8: 16, torch.bfloat16: 16, torch.float16: 16}
"""Rows up to which `linear.cu` is faster than a dense product, by the dtype of a weight, on an H200;
of 4 bits (int32) it takes 32 at a time.
"""
WIDE = {False: range(33, 1025), True: range(17, 1025)}
"""Rows for which `wide.cu` is faster than `linear.cu` and than weights dequantized for a dense product,
on an H200, by whether a matrix has more outputs than inputs.
"""


def is_wide(matrix: Matrix, rows: int) -> bool:
    """Say whether `wide.cu` multiplies so many rows."""
    return rows in WIDE[matrix.outputs > matrix.inputs] and can_be_wide(matrix)


def takes_lined(matrix: Matrix, rows: int) -> bool:
    """Say whether who makes so many rows can write them as `wide.cu` reads them."""
    return is_wide(matrix, rows) and matrix.inputs % CHUNK == 0


def is_coded(matrix: Matrix, rows: int) -> bool:
    """Say whether so many rows are multiplied as codes."""
    return matrix.form.bits == 8 and rows > MOST_STREAMED[matrix.weight.dtype]


def takes_coded(matrix: Matrix, behind: Matrix, rows: int) -> bool:
    """Say whether what a matrix makes of codes can be written as the codes that `behind` takes."""
    return is_coded(matrix, rows) and is_coded(behind, rows) and matrix.weight.dtype == behind.weight.dtype


def leaves_scales(matrix: Matrix, rows: int) -> bool:
    """Say whether products of codes are of 16 bits and to be scaled, which kernels of attention and exchanges do."""
    unscaled = is_coded(matrix, rows) and not is_scaled(matrix, rows)
    return unscaled and not matrix.form.integer and matrix.dtype == torch.bfloat16


def step_gated(
    matrix: Matrix, behind: Matrix, x: Tensor | Coded, norm: Tensor | None, epsilon: float, ordered: Tensor
) -> Any:
    """Return gated outputs as `behind` takes them, a Tensor, Lined or Coded."""
    if takes_coded(matrix, behind, len(x)):
        return finish_coded(code_products(matrix, x, norm, epsilon), behind)
    made = torch.empty(len(x), behind.inputs, dtype=matrix.dtype, device=matrix.weight.device)
    lined = is_wide(matrix, len(x)) and takes_lined(behind, len(x))
    y = Lined.empty(len(x), behind.inputs, made) if lined else made
    step_product(matrix, x, y, norm=norm, epsilon=epsilon, gated=True, ordered=ordered)
    return y


def step_product(
    matrix: Matrix,
    x: Tensor | Lined | Coded,
    y: Tensor | Lined,
    *,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    add: bool = False,
    gated: bool = False,
    ordered: Tensor | None = None,
) -> None:
    """Write x W^T into y like `multiply`, for any number of rows; can be captured in a CUDA graph."""
    if isinstance(x, Coded) or (isinstance(x, Tensor) and is_coded(matrix, len(x))):
        assert isinstance(y, Tensor)
        if is_scaled(matrix, len(x)) and not gated:
            scaled_product(matrix, _as_coded(matrix, x, norm, epsilon), y, add=add)
            return
        finish(code_products(matrix, x, norm, epsilon), y, add=add, gated=gated)
        return
    if isinstance(x, Lined) or isinstance(y, Lined) or is_wide(matrix, len(x)):
        multiply_wide(matrix, x, y, norm=norm, epsilon=epsilon, add=add, gated=gated)
        return
    if len(x) > MOST_STREAMED[matrix.weight.dtype]:
        _dense(matrix, x, y, norm, epsilon, add, gated)
        return
    for rows, written in zip(x.split(MOST_TOKENS), y.split(MOST_TOKENS), strict=True):
        multiply(matrix, rows, written, norm=norm, epsilon=epsilon, add=add, gated=gated, ordered=ordered)


def code_products(matrix: Matrix, x: Tensor | Coded, norm: Tensor | None = None, epsilon: float = 0.0) -> Products:
    """Return the products of a matrix of 8 bits and x, whose scales are left to do, unless `is_scaled`."""
    x = _as_coded(matrix, x, norm, epsilon)
    codes, scales = x.codes, x.scales
    if is_scaled(matrix, len(codes)):
        sums = torch.empty(len(codes), matrix.outputs, dtype=matrix.dtype, device=codes.device)
        scaled_product(matrix, x, sums)
        return Products(matrix, sums)
    if matrix.form.integer:
        return Products(matrix, integer_product(codes, matrix.weight), scales)
    wide = torch.bfloat16 if matrix.dtype == torch.bfloat16 else torch.float32  # float16 ends before 448^2
    one = _one(codes.device)
    sums = torch._scaled_mm(codes, matrix.weight.T, one, one, out_dtype=wide, use_fast_accum=True)
    return Products(matrix, sums, scales)


def _as_coded(matrix: Matrix, x: Tensor | Coded, norm: Tensor | None = None, epsilon: float = 0.0) -> Coded:
    """Return x, normed, as a matrix of 8 bits takes it."""
    return x if isinstance(x, Coded) else Coded(*coded_rows(matrix, x, norm, epsilon))


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def _dense(matrix: Matrix, x: Tensor, y: Tensor, norm: Tensor | None, epsilon: float, add: bool, gated: bool) -> None:
    weight = (matrix.weight if matrix.form.bits == 16 else dequantized(matrix)).T
    if norm is not None:
        x = F.rms_norm(x, norm.shape, norm, epsilon)
    if gated:
        finish(Products(matrix, torch.mm(x, weight)), y, add=add, gated=True)
    elif add and matrix.bias is None:
        y.addmm_(x, weight)
    else:
        product = torch.empty_like(y) if add else y
        wide = {} if y.dtype == x.dtype else {"out_dtype": y.dtype}
        torch.mm(x, weight, out=product, **wide)
        if matrix.bias is not None:
            product += matrix.bias
        if add:
            y += product
