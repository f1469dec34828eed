"""The error that rounding to 4-bit floats in blocks is expected to leave, and its slope, in few passes.

A block's unit is its largest number / reach. Numbers below 2 units are half a unit apart, those below 4 one
unit, larger ones two. An error of variance step^2 / 12 moves with the largest of the block alone, but of
numbers that are next to nothing: they become 0 and are their own error.

Memory is what this takes time for: what lies side by side in it are the numbers of one column, a few
blocks are worked on at once, and comparisons are arithmetic, since masks of another type are slow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.algorithms.microscaling import LARGEST

AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 23}
"""Numbers that are worked on together; on a CPU they stay in its cache."""
EXPONENT, NEXT = 0x7F800000, 2.0**-23
"""The bits of a float32 that are a power of two; how far 1 is from the number before it, twice."""
FINEST = 0.5**2 / 12
"""The least error of a number that does not become 0, in squared units."""
TINY = 1e-30


def with_slopes(value: Tensor, *slopes: tuple[Tensor, Tensor]) -> Tensor:
    """Return a value with its slopes at numbers, each beside them: autograd need not know how it was made."""
    return value + sum(((numbers - numbers.detach()) * slope).sum() for numbers, slope in slopes)


def float_errors(values: Tensor, factors: Tensor, counts: Tensor, block: int, reach: float) -> Tensor:
    """Return the sum of what squared errors count: values, float32 [rows, in], times factors are rounded in
    blocks of columns.

    values: magnitudes, best one column behind the other in memory (`laid`); factors, counts: float32 [in],
    of which it has slopes.
    """
    with torch.no_grad():
        columns = values.T.unflatten(0, (-1, block))
        step = max(1, AT_ONCE[values.device.type] // (block * len(values)))
        parts = zip(
            columns.split(step), factors.view(-1, block).split(step), counts.view(-1, block).split(step), strict=True
        )
        found = [_errors(*part, reach) for part in parts]
        errors, slopes = (torch.cat(each).flatten() for each in zip(*found, strict=True))
        error, of_factors = errors @ counts, slopes / factors
    return with_slopes(error, (factors, of_factors), (counts, errors))


def laid(values: Tensor) -> Tensor:
    """Return values, [rows, in], with those of a column side by side in memory."""
    return values.T.contiguous().T


def _errors(values: Tensor, factors: Tensor, counts: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """Return the summed squared errors of columns, and the slopes of what all count to the logarithms of factors.
    Both are float32 [blocks, block], as factors and counts are; values: [blocks, block, rows].
    """
    sizes = torch.mul(values, factors[..., None], out=values.new_empty(values.shape))
    largest = sizes.amax(1, keepdim=True).clamp_(min=TINY)
    sizes.div_(largest)
    top = sizes.sub(1 - NEXT).div_(NEXT).clamp_(min=0)  # 1 for the largest, 0 for the others
    steps = sizes.mul_(reach).clamp(min=1)
    steps.view(torch.int32).bitwise_and_(EXPONENT)
    errors = torch.minimum(sizes.square_(), steps.square_().div_(4 * 12), out=steps)
    if reach == LARGEST:
        errors.addcmul_(errors, top, value=-1)
    lost = F.threshold(torch.neg(errors, out=sizes), -FINEST, 0, inplace=True).neg_()
    unit = largest.div_(reach).square_()
    errors.mul_(unit)
    lost.mul_(unit)
    of_columns, of_lost = errors.sum(-1), lost.sum(-1)
    moved = errors.sub_(lost).mul_(counts[..., None]).sum(1, keepdim=True)
    top.mul_(moved.div_(top.sum(1, keepdim=True).clamp_(min=1)))  # equal ones move the block together
    return of_columns, 2 * (of_lost * counts + top.sum(-1))
