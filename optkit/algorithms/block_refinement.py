"""Improve a weight in scaled blocks of floats: better scales for its values, then better values.

Both lower the squared error of the layer's outputs, tr((W - Q) H (W - Q)^T), one block or one input
at a time while all others stay (coordinate descent, after QuantEase, arXiv:2309.01885). A scale is
one number of few bits, and the error is quadratic in it: so the stored scale nearest to the best
one is the best stored one. Tensors are transposed here, [in, out].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from optkit.algorithms.threads import one_thread

BLOCK = 128
"""Inputs whose corrections are carried to the inputs after them at once."""
Nearest: TypeAlias = Callable[[Tensor], Tensor]
"""Returns the nearest numbers of a format, as floats."""
DescendBlock: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Returns better values and the moves of weights, [inputs, out], of gradient, values, steps and the
Hessian's part of one block."""


def descend_scales_(scales: Tensor, values: Tensor, target: Tensor, hessian: Tensor, nearest: Nearest) -> None:
    """Move the scale of each block to the best one that can be stored.

    scales: float [blocks, out]; values: those of the codes, float [in, out]; target: float [in, out];
    hessian: float [in, in]. A block whose values are all 0 keeps its scale.
    """
    width = len(values) // len(scales)
    gradient = hessian @ (target - values * scales.repeat_interleave(width, 0))
    for index, scale in enumerate(scales):
        part = slice(index * width, (index + 1) * width)
        value = values[part]
        curve = (value * (hessian[part, part] @ value)).sum(0)
        better = nearest(scale + (value * gradient[part]).sum(0) / curve)
        moved = torch.where((curve > 0) & (better > 0), better, scale) - scale
        scale += moved
        gradient.addmm_(hessian[:, part], value * moved, alpha=-1)


def descend_values_(
    values: Tensor,
    target: Tensor,
    hessian: Tensor,
    steps: Tensor,
    nearest: Nearest,
    descend_block: DescendBlock | None = None,
) -> None:
    """Move each value to the best one of its format, input after input.

    values, target and steps (the scale of each weight): float [in, out]; hessian: float [in, in].
    descend_block: a faster way to do what `nearest` does in a loop.
    """
    gradient = hessian @ (target - values * steps)
    descend_block = descend_block or partial(_descend_block, nearest=nearest)
    for start in range(0, len(values), BLOCK):
        part = slice(start, min(start + BLOCK, len(values)))
        values[part], moved = descend_block(gradient[part], values[part], steps[part], hessian[part, part])
        gradient[part.stop :].addmm_(hessian[part.stop :, part], moved, alpha=-1)


def _descend_block(
    gradient: Tensor, values: Tensor, steps: Tensor, hessian: Tensor, nearest: Nearest
) -> tuple[Tensor, Tensor]:
    """Return better values and the moves of weights of one block, whose gradient is used up."""
    better, moved = torch.empty_like(values), torch.empty_like(values)
    diagonal = hessian.diagonal().tolist()
    with one_thread():
        for index, (value, step) in enumerate(zip(values, steps, strict=True)):
            better[index] = nearest(value + gradient[index] / (step * diagonal[index]))
            moved[index] = (better[index] - value) * step
            gradient[index + 1 :].addr_(hessian[index + 1 :, index], moved[index], alpha=-1)
    return better, moved
