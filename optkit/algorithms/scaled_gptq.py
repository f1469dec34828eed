"""GPTQ on any numbers whose scales stand: 8 bits, and floats of 4 bits.
It rounds one input at a time and compensates in those left (arXiv:2210.17323).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from optkit.algorithms import column_kernels
from optkit.algorithms.column_kernels import Numbers
from optkit.algorithms.gptq import HELD_STEP, GptqOptions, damped_inverse_factor, rounding_order
from optkit.algorithms.pruning import zeros_of_pruning
from optkit.algorithms.threads import one_thread

BLOCK = 128
"""Inputs whose errors are carried to the inputs after them at once."""
DAMPING = 0.01
"""Added to the Hessian's diagonal, as a fraction of its mean."""
Rounding: TypeAlias = Callable[[Tensor], Tensor]
"""Returns the nearest numbers of a format, in its dtype."""


def compensated_codes(
    weight: Tensor,
    hessian: Tensor,
    scales: Tensor,
    tile: tuple[int, int],
    nearest: Rounding,
    numbers: Numbers | None = None,
) -> Tensor:
    """Return codes [out, in] in the dtype of `nearest`, for a weight float32 [out, in].

    scales: float [tiles of outputs, tiles of inputs]. Inputs with the largest activations are
    rounded first. The zeros of a pruned weight stay. numbers: those of `nearest`, if a GPU's kernel can do
    what it does in a loop. Raises ValueError if no damping makes the Hessian positive definite.
    """
    options = GptqOptions(damping=DAMPING)
    _, factor, _ = damped_inverse_factor(hessian, options)
    order = rounding_order(hessian, options)
    rest = weight.T[order].contiguous()  # [in, out]
    steps = scales.repeat_interleave(tile[0], 0)[: weight.shape[0]].T[torch.div(order, tile[1], rounding_mode="floor")]
    if (zeros := zeros_of_pruning(weight)) is not None:
        steps = steps.masked_fill(zeros.T[order], HELD_STEP)
    if numbers and column_kernels.walks(rest):
        codes = column_kernels.round_columns(rest, steps, steps, factor, numbers).to(nearest(rest[:1]).dtype)
    else:
        codes = _round_in_turn(rest, steps, factor, nearest)
    return codes[order.argsort()].T.contiguous()


def left_variances(hessian: Tensor) -> Tensor:
    """Return the part of each input's mean square that later inputs cannot compensate for.

    hessian: float32 [in, in]. Raises ValueError if no damping makes the Hessian positive
    definite.
    """
    options = GptqOptions(damping=DAMPING)
    _, factor, _ = damped_inverse_factor(hessian, options)
    return factor.diagonal().square().reciprocal()[rounding_order(hessian, options).argsort()]


def _round_in_turn(rest: Tensor, steps: Tensor, factor: Tensor, nearest: Rounding) -> Tensor:
    """Return codes, [in, out], of weights that are used up."""
    codes = torch.empty_like(rest, dtype=nearest(rest[:1]).dtype)
    with one_thread():
        for start in range(0, len(rest), BLOCK):
            part = slice(start, min(start + BLOCK, len(rest)))
            codes[part], errors = _round_block(rest[part], steps[part], factor[part, part], nearest)
            rest[part.stop :].addmm_(factor[part, part.stop :].T, errors, alpha=-1)
    return codes


def _round_block(rest: Tensor, steps: Tensor, factor: Tensor, nearest: Rounding) -> tuple[Tensor, Tensor]:
    """Return codes, and errors as float, [inputs, out], of one block."""
    errors, codes = torch.empty_like(rest), torch.empty_like(rest, dtype=nearest(rest[:1]).dtype)
    diagonal = factor.diagonal().tolist()
    for index, (value, step) in enumerate(zip(rest, steps, strict=True)):
        codes[index] = nearest(value / step)
        errors[index] = (value - codes[index].to(rest.dtype) * step) / diagonal[index]
        rest[index + 1 :].addr_(factor[index, index + 1 :], errors[index], alpha=-1)
    return codes, errors
