"""The inner loops of GPTQ and of coordinate descent on NVIDIA GPUs: the launches of `columns.cu`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from optkit.algorithms.column_kernels import Numbers
from optkit.algorithms.tensor_cores import add_product_
from optkit.kernels.cuda.nvrtc import Kernel, compiled

INPUTS, LANES, WARPS = 128, 32, 4
BIAS = 127
"""Of the exponent of float32."""
SHARED_BYTES = 4 * (INPUTS * (INPUTS + LANES) + 16 * LANES)
"""For a block's part of a factor, its values, and what 16 inputs changed."""
AT_ONCE = 8
"""Blocks of a factor that are in parts: all of them are one and a half times as large as the factor."""


def walk(descend: bool, rest: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, numbers: int | Numbers) -> Tensor:
    """Return codes as `column_kernels.round_columns` and `descend_columns` do.
    `rest` is used up; `zeros` of a descent are the codes so far.

    What a block of inputs changed is carried to those behind it by tensor cores, as `product` multiplies.
    """
    rest, scales, zeros, factor = (each.contiguous() for each in (rest, scales, zeros, factor))
    *layers, inputs, outputs = rest.shape
    codes = torch.empty_like(rest)
    changed = rest.new_empty(*layers, 3 * INPUTS, outputs, dtype=torch.bfloat16)
    pulls = rest.new_empty(*layers, AT_ONCE, 3 * INPUTS, inputs, dtype=torch.bfloat16)
    top = numbers if isinstance(numbers, int) else numbers.highest
    grid = (-(-outputs // LANES), layers[0] if layers else 1, 1)
    arguments = (rest, scales, zeros, factor, codes, changed, inputs, outputs, float(top), 0)
    kernel = _kernel(descend, None if isinstance(numbers, int) else numbers, rest.get_device())
    with torch.cuda.device_of(rest):
        from_input = kernel.again(grid, LANES * WARPS, arguments, SHARED_BYTES)
        for block, start in enumerate(range(0, inputs, INPUTS)):
            from_input(start)
            if (stop := start + INPUTS) < inputs:
                if not block % AT_ONCE:
                    _put_parts_(pulls, factor[..., start : (inputs - 1) // INPUTS * INPUTS, :])
                add_product_(rest[..., stop:, :], pulls[..., block % AT_ONCE, :, stop:].mT, changed)
    return codes


def _put_parts_(pulls: Tensor, factor: Tensor) -> None:
    """Put what follows each of the next blocks of inputs, bfloat16 [..., blocks, 3 * INPUTS, in], so that its
    product with the three parts that `columns.cu` writes is that of float32 numbers to 16 bits.
    """
    rows = factor[..., : AT_ONCE * INPUTS, :].unflatten(-2, (-1, INPUTS))
    high, again, low = pulls[..., : rows.shape[-3], :, :].split(INPUTS, -2)
    torch.sub(rows, again.copy_(high.copy_(rows)), out=low)


@cache
def _kernel(descend: bool, numbers: Numbers | None, device: int) -> Kernel:
    macros = {"DESCEND": descend} | (macros_of(numbers) if numbers else {})
    return compiled("columns.cu", "columns", macros, device)


def macros_of(numbers: Numbers) -> dict[str, int]:
    """Return how `columns.cu` is told of numbers."""
    return {"MANTISSA": numbers.mantissa, "SMALLEST": BIAS + numbers.least, "LOWEST": numbers.lowest}
