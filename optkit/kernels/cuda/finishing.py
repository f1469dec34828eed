"""What is behind dense products: the launches of `finish.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optkit.kernels.cuda.matrix import Matrix
from optkit.kernels.cuda.nvrtc import Kernel, compiled

MOST_FINISHING = 1024
"""Blocks side by side: more rows are taken in turn, with scales that were read once."""
THREADS = 1024
"""Of the blocks of `finish_coded` on a multiprocessor, which leaves each of them 64 registers."""
HELD = 4
"""Vectors of 16 bytes for which a thread has registers then: of either half that is gated, or two of what is added."""


@dataclass(frozen=True)
class Coded:
    """Rows of x as a matrix of 8 bits takes them."""

    codes: Tensor
    """[rows, inputs], of the matrix' dtype."""
    scales: Tensor
    """float32 [rows]."""

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True)
class Products:
    """What a dense product leaves to do: scales, the bias, a gate, a sum."""

    matrix: Matrix
    sums: Tensor
    """[rows, outputs]"""
    scales: Tensor | None = None
    """Of rows, float32 [rows], if sums are of products of codes and not scaled yet."""

    def compiled(self, name: str, **more: int) -> Kernel:
        """Return a kernel of finish.cu, with more macros than those of the matrix."""
        form = self.matrix.form
        macros = {"BITS": form.bits, "BF16": form.dtype == torch.bfloat16, "INTEGER": form.integer, "GELU": form.gelu}
        macros |= {"BIASED": self.matrix.bias is not None, "SCALED": self.scales is not None, **more}
        return compiled("finish.cu", name, macros, self.sums.get_device())


def finish(products: Products, y: Tensor, *, add: bool, gated: bool) -> None:
    """Write what `multiply` writes into y, float [rows, outputs]."""
    matrix, blocks = products.matrix, -(-y.shape[1] // (8 * 256))
    arguments = (products.sums, matrix.scales, products.scales, matrix.bias, y, matrix.outputs, len(y))
    kernel = products.compiled("finish", GATED=gated, RESIDUAL=add, WIDE=y.dtype == torch.float32)
    kernel((min(len(y), MOST_FINISHING), blocks, 1), 256, arguments)


def finish_coded(
    products: Products, behind: Matrix, added: Tensor | None = None, norm: Tensor | None = None, epsilon: float = 0.0
) -> Coded:
    """Return the gated outputs of products of codes as the matrix behind takes them.
    With `added`, float [rows, outputs], outputs are added to it in place, and normed if there is a norm.
    """
    matrix, rows, device = products.matrix, len(products.sums), products.sums.device
    codes = torch.empty(rows, behind.inputs, dtype=behind.weight.dtype, device=device)
    scales = torch.empty(rows, dtype=torch.float32, device=device)
    vectors, words = behind.inputs // 8, products.sums.element_size() // 2
    rounds = max(HELD // words // (1 if added is None else 2), -(-vectors // THREADS))
    threads = -(-vectors // (rounds * 32)) * 32
    macros = {"WIDTH": behind.inputs, "THREADS": threads, "ROUNDS": rounds, "NORM": norm is not None}
    kernel = products.compiled("finish_coded", GATED=added is None, RESIDUAL=added is not None, **macros)
    properties: Any = torch.cuda.get_device_properties(device)
    blocks = min(rows, THREADS // threads * properties.multi_processor_count)
    sources = (products.sums, matrix.scales, products.scales, matrix.bias, added, norm, epsilon)
    kernel((blocks, 1, 1), threads, (*sources, codes, scales, behind.offsets, rows))
    return Coded(codes, scales)
