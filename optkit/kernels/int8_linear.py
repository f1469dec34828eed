"""A linear layer of 8-bit integers and inputs (W8A8), on torch's integer matrix product."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from optkit.algorithms.eight_bit import INT8
from optkit.errors import first_line
from optkit.kernels.eight_bit_linear import EightBitLinear

CUDA_ROWS = 17
"""`torch._int_mm` on CUDA takes no fewer rows."""
CUDA_MULTIPLE = 8
"""On CUDA inputs and outputs must be multiples of this."""


class Int8Linear(EightBitLinear):
    """`x W^T + b` with x and W in 8-bit integers, their products summed in 32-bit ones.

    Microseconds at 1536 outputs x 576 inputs, one thread (EPYC with AVX-512 VNNI, torch 2.13; best
    of 20):
        rows                            1     4    16    64   512   2048
        integers, inputs given         10    30    52   138   912   3728
        float32, dense                 50   144   334  1078  8211  33851
    """

    numbers = INT8

    def __init__(
        self, codes: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__(codes, scales, input_scale, bias, dtype)
        self.integers = why_not_integers(self.out_features, self.in_features, str(codes.device)) is None

    def _sums(self, codes: Tensor) -> Tensor:
        """int8 [rows, in] -> float32 [rows, out]: the sums of products of codes."""
        if not self.integers:
            return codes.float() @ self.codes.float().T
        return integer_product(codes, self.codes).float()


def why_not_integers(outputs: int, inputs: int, device: str) -> str | None:
    """Return why a layer's products cannot be summed in integers on a device, None if they can."""
    chosen = torch.device(device)
    if chosen.type == "cuda" and (outputs % CUDA_MULTIPLE or inputs % CUDA_MULTIPLE):
        return f"torch._int_mm takes multiples of {CUDA_MULTIPLE} outputs and inputs on CUDA, not {outputs} x {inputs}"
    return _why_unavailable(device)


def integer_product(codes: Tensor, weight: Tensor) -> Tensor:
    """int8 [rows, in] and int8 [out, in] -> int32 [rows, out]."""
    rows = len(codes)
    if codes.is_cuda and rows < CUDA_ROWS:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, CUDA_ROWS - rows))
    return torch._int_mm(codes, weight.T)[:rows]


@cache
def _why_unavailable(device: str) -> str | None:
    """Return why `torch._int_mm` cannot be used on a device, None if the largest sums are right."""
    chosen = torch.device(device)
    if chosen.type not in ("cpu", "cuda"):
        return f"torch._int_mm is not used on {chosen.type}"
    generator = torch.Generator().manual_seed(0)
    codes, weight = (torch.randint(-128, 128, (size, 256), generator=generator, dtype=torch.int8) for size in (20, 64))
    codes[0] = weight[0] = -128
    expected = codes.int() @ weight.int().T
    try:
        found = integer_product(codes.to(chosen), weight.to(chosen)).cpu()
    except RuntimeError as error:
        return f"torch._int_mm fails: {first_line(error)}"
    return (
        None
        if torch.equal(found, expected)
        else f"torch {torch.__version__}'s _int_mm does not compute here what it is documented to"
    )
