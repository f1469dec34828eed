"""The inner loops of GPTQ and of coordinate descent as Triton kernels, one launch per block.

Outputs do not depend on each other, so each program takes a few of them and walks over the inputs
of the block one after another; the same loops in torch launch about ten small kernels for each
input. Tensors are [in, out], contiguous, float32.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

OUTPUTS = 16
"""Outputs of a program: 64 bytes of each input's row."""


def usable(tensor: Tensor) -> bool:
    """Say whether the kernels can run where a tensor is: on a CUDA device, with Triton installed."""
    return tensor.is_cuda and find_spec("triton") is not None


def round_block(values: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return codes and errors, float [inputs, out], of one block of GPTQ.

    values, scales, zeros: float [inputs, out]; factor: the block's part of the inverse Hessian's
    upper Cholesky factor [inputs, inputs].
    """
    from optkit.algorithms.triton_columns import round_kernel

    codes, errors = torch.empty_like(values), torch.empty_like(values)
    _launch(round_kernel, (values, scales, zeros, factor, codes, errors), top)
    return codes, errors


def descend_block(gradient: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Descend one block: return new codes and each weight's move, float [inputs, out].

    gradient, codes, scales: float [inputs, out]; hessian: the block's part of it, float [inputs,
    inputs].
    """
    from optkit.algorithms.triton_columns import descend_kernel

    better, moved = torch.empty_like(codes), torch.empty_like(codes)
    _launch(descend_kernel, (gradient, codes, scales, hessian, better, moved), top)
    return better, moved


def _launch(kernel: object, tensors: tuple[Tensor, ...], top: int) -> None:
    first = tensors[0]
    inputs, outputs = first.shape
    padded = 1 << (inputs - 1).bit_length()
    grid = (-(-outputs // OUTPUTS),)
    held = [tensor.contiguous() for tensor in tensors]
    # Triton launches on the current device, whichever device the tensors are on.
    with torch.cuda.device_of(first):
        kernel[grid](*held, inputs, outputs, float(top), padded=padded, width=OUTPUTS, num_warps=4)  # type: ignore[index]
