"""AWQ: input channel scales under which rounding costs the outputs of linear layers the least.

Lin et al. 2024, arXiv:2306.00978: weights that meet large activations are multiplied by s before
they are rounded. Their inputs are divided by it, so that their errors shrink. What differs: the
error of the outputs is tr(E H E^T) with the Hessian H, gathered once. So a candidate costs a matrix
product on some rows and not a pass over text; candidates are rounded as the weights will be, with
scales that are searched, by GPTQ too; and after the powers of the activations a descent on a convex
bound of the error gives each channel a scale of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from optkit.algorithms.gptq import GptqOptions, damped_hessian, gptq
from optkit.algorithms.grid import Grid, round_to_nearest
from optkit.algorithms.scale_search import search_scales

ROWS = 256
"""Output channels that candidates are compared on, spread evenly over all of them."""
FEWEST_ROWS = 16
"""Rows of each reader, however many readers there are."""
CLIPPINGS = 10
"""Rounding scales tried for a candidate; the final rounding tries more."""
DESCENT_STEPS = 40
DESCENT_RATE = 0.05
"""Largest change of log s in a step."""
MOMENTA = 0.9, 0.999
"""What is left after a step of the slope's mean, and of its square's."""
DAMPING = 0.01
LARGEST = 128.0
"""No channel's scale is further than this factor from their geometric mean."""

Rounding: TypeAlias = Literal["nearest", "gptq"]


@dataclass(frozen=True)
class Reader:
    """Layers that saw the very same inputs and are rounded to the same grid."""

    weight: Tensor
    """float32 [out, in], stacked."""
    hessian: Tensor
    """float32 [in, in]: the sum of x x^T."""
    grid: Grid


@dataclass(frozen=True)
class InputScales:
    """Scales of input channels, and what they are worth on the rows that were looked at."""

    scales: Tensor
    """float32 [in], with geometric mean 1."""
    error: float
    """Squared error of the outputs with them, as a fraction of the outputs' square."""
    plain_error: float
    """The same without them."""


def search_input_scales(
    readers: Sequence[Reader], rows: Tensor | None, grid_points: int, rounding: Rounding = "nearest"
) -> InputScales:
    """Return the scales with the least error of the readers' outputs among those tried.

    rows: int64 [in], channels with the same number share their scale; None if each has its own.
    Tried are `grid_points` powers, from 0 to below 1, of the root mean square of each channel. What
    a descent from the best of them comes to, and the point between, are tried too; their weights
    are rounded to nearest or by GPTQ. Raises ValueError if GPTQ cannot.
    """
    inputs = readers[0].weight.shape[1]
    sharing = (
        torch.arange(inputs, device=readers[0].weight.device) if rows is None else rows.to(readers[0].weight.device)
    )
    sharing = sharing.unique(return_inverse=True)[1]
    count = max(FEWEST_ROWS, ROWS // len(readers))
    samples = [Reader(_spread(reader.weight, count), reader.hessian, reader.grid) for reader in readers]
    power = _averaged(torch.stack([sample.hessian.diagonal() for sample in samples]).sum(0), sharing)
    size = power.clamp(min=float(power.max()) * 1e-12 + torch.finfo(power.dtype).tiny).sqrt()
    square = sum(_output_square(sample.weight, sample.hessian) for sample in samples) or 1.0

    def error(logarithm: Tensor) -> float:
        return sum(_rounding_error(sample, logarithm.exp(), rounding) for sample in samples) / square

    tried = [_centred(size.log() * (point / grid_points)) for point in range(grid_points)]
    errors = [error(logarithm) for logarithm in tried]
    best = tried[min(range(grid_points), key=errors.__getitem__)]
    descended = _descend([_with_costs(sample, rounding) for sample in samples], best, sharing)
    for logarithm in (descended, (descended + best) / 2):
        tried.append(logarithm)
        errors.append(error(logarithm))
    chosen = min(range(len(tried)), key=errors.__getitem__)
    return InputScales(tried[chosen].exp(), errors[chosen], errors[0])


def _spread(weight: Tensor, count: int) -> Tensor:
    return weight[torch.linspace(0, len(weight) - 1, min(count, len(weight)), device=weight.device).round().long()]


def _averaged(values: Tensor, sharing: Tensor) -> Tensor:
    """Give channels that share a scale the mean of their values, float [in]."""
    return (_added(values, sharing, int(sharing.max()) + 1) / sharing.bincount())[sharing]


def _added(values: Tensor, sharing: Tensor, count: int) -> Tensor:
    """Return the sum of values with the same number, one for each number, in their order.
    `index_add_` of a GPU adds them in any order, which made other scales in each run.
    """
    return values.new_zeros(count).index_put_((sharing,), values, accumulate=True)


def _centred(logarithm: Tensor) -> Tensor:
    limit = torch.tensor(LARGEST).log().item()
    return (logarithm - logarithm.mean()).clamp(-limit, limit)


def _output_square(weight: Tensor, hessian: Tensor) -> float:
    return float((weight @ hessian).mul_(weight).sum())


def _rounding_error(reader: Reader, scales: Tensor, rounding: Rounding) -> float:
    scaled = reader.weight * scales
    if rounding == "gptq":
        hessian = reader.hessian / scales / scales[:, None]
        rounded = gptq(scaled, hessian, reader.grid, GptqOptions(DAMPING, refinements=0)).weight
    else:
        importance = reader.hessian.diagonal() / scales.square()
        found = search_scales(scaled, reader.grid, importance, CLIPPINGS, compiled=True)
        rounded = round_to_nearest(scaled, *found, reader.grid)
    return max(0.0, _output_square(rounded.dequantize() / scales - reader.weight, reader.hessian))


@dataclass(frozen=True)
class _Costed:
    """A reader, and what an error at each of its inputs costs."""

    weight: Tensor
    costs: Tensor
    grid: Grid


def _with_costs(reader: Reader, rounding: Rounding) -> _Costed:
    """Return the Hessian's diagonal as costs; for GPTQ, what later inputs cannot compensate for."""
    diagonal = reader.hessian.diagonal()
    if rounding == "gptq":
        last_first = diagonal.argsort(stable=True)
        damped = damped_hessian(reader.hessian, DAMPING)
        factor, failed = torch.linalg.cholesky_ex(damped[last_first][:, last_first])
        if not failed:
            return _Costed(
                reader.weight,
                torch.empty_like(diagonal).scatter_(0, last_first, factor.diagonal().square()),
                reader.grid,
            )
    return _Costed(reader.weight, diagonal, reader.grid)


def _descend(readers: Sequence[_Costed], start: Tensor, sharing: Tensor) -> Tensor:
    """Return log s, float [in], with a low bound of the error, sum_i(span^2 cost_i / s_i^2).

    The span of a group is that of its weights times s, so the bound's logarithm is convex in log s.
    """
    shared = start.new_zeros(int(sharing.max()) + 1).scatter_(0, sharing, start)
    mean, square = torch.zeros_like(shared), torch.zeros_like(shared)
    for step in range(DESCENT_STEPS):  # by Adam
        bounds, slopes = zip(*(_bound(reader, shared[sharing]) for reader in readers), strict=True)
        slope = _added(torch.stack(slopes).sum(0) / torch.stack(bounds).sum(), sharing, len(shared))
        mean.lerp_(slope, 1 - MOMENTA[0])
        square.lerp_(slope.square(), 1 - MOMENTA[1])
        corrected, size = (each / (1 - rate ** (step + 1)) for each, rate in zip((mean, square), MOMENTA, strict=True))
        shared -= DESCENT_RATE * (1 - step / DESCENT_STEPS) * corrected / (size.sqrt() + 1e-8)
    return _centred(shared[sharing])


def _bound(reader: _Costed, logarithm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bound of one reader, and its slope in log s, float [in]: what autograd finds, in a sixth of the
    launches.
    """
    factor = logarithm.exp()
    scaled = reader.grid.grouped(reader.weight * factor)  # [out, groups, size]
    low, high = scaled.amin(-1, keepdim=True).clamp(max=0), scaled.amax(-1, keepdim=True).clamp(min=0)
    if reader.grid.symmetric:
        span = torch.maximum(-low, high)
        ends, span = [(scaled.abs() == span, 2 * span)], 2 * span
    else:
        ends, span = [(scaled == low, -low), (scaled == high, high)], high - low
    costs = reader.grid.grouped((reader.costs / factor.square())[None])
    noise = costs.sum(-1, keepdim=True)
    slope = -2 * costs * span.square().sum(0)
    for outermost, width in ends:
        pull = 2 * span * noise * width / outermost.sum(-1, keepdim=True).clamp(min=1)
        slope = slope + (pull * outermost).sum(0)
    return (span.square() * noise).sum(), slope.flatten()
