"""SmoothQuant: move outliers of activations into the weights (arXiv:2211.10438), for 8 bits or for
4-bit floats in blocks.

Input channel j of a layer is divided by s_j and column j of its weight multiplied by it. The paper
has s_j = max|X_j|^alpha / max|W_j|^(1 - alpha). `search_smoothing` starts from the best alpha and
then moves each s_j down the slope of the error that rounding is expected to leave in the outputs.
Steps of size d leave errors of variance d^2 / 12. Of integers, a token's step is set by the largest of its
channels, an output's by the largest of its weights; of floats by the largest of each block, and small
numbers have smaller ones. All of them are differentiable in s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from optkit.algorithms.awq import InputScales
from optkit.algorithms.eight_bit import INT8
from optkit.algorithms.float_errors import float_errors, laid, with_slopes
from optkit.algorithms.microscaling import LARGEST, MXFP4_BLOCK, NVFP4_BLOCK

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Where the search may start."""
LIMIT = 2.0**15
"""Scales are between 1 / LIMIT and LIMIT."""
STEPS = 120
RATE = 0.05
"""The first step of each logarithm; the last is 0."""
DECAY = 0.9, 0.999
"""How much of the mean slope and of the mean squared slope a step keeps (Adam's)."""
BATCH = 512
"""Rows that one step looks at."""
OUTPUTS = 512
"""Outputs of the readers, evenly spread, that stand for all of them."""
TINY = 1e-30

RoundedInputs: TypeAlias = Literal["dynamic", "static", "none"]
"""By their own size, with one scale for all of them, or not at all."""


@dataclass(frozen=True)
class Reader:
    """A linear layer that reads the input in question."""

    weight: Tensor
    """float32 [out, in]."""
    rows: Tensor
    """float32 [rows, in]: inputs that it was seen with."""
    variances: Tensor
    """float32 [in]: what an error of 1 in the weight of an input adds to the squared error of an
    output, tokens divided by their root mean square. It is the mean square of the input if
    weights are rounded to nearest. If GPTQ rounds them, it is the share of it that the inputs after
    it cannot compensate for."""

    def inverse_size(self) -> Tensor:
        """Return 1 / the root mean square of each row, float32 [rows, 1]."""
        return self.rows.square().mean(1, keepdim=True).clamp(min=TINY).rsqrt()

    def even_rows(self) -> Tensor:
        """Return the rows, each divided by its root mean square, so that all count the same."""
        return self.rows * self.inverse_size()


@dataclass(frozen=True)
class Steps:
    """How far rounded numbers are apart: 8-bit integers, or 4-bit floats."""

    block: int | None = None
    """Inputs that share a scale, of floats; None: all of a row, of integers."""
    reach: float = INT8.reach
    """What the largest of those that share a scale is mapped to."""

    @property
    def divisor(self) -> float:
        """What `errors` are to be divided by."""
        return 12 * self.reach**2 if self.block is None else 1.0

    def laid(self, values: Tensor) -> Tensor:
        """Return values, [rows, in], as `errors` is fastest with."""
        return values if self.block is None else laid(values)

    def errors(self, values: Tensor, by: Callable[..., Tensor], scales: Tensor, counts: Tensor, mean: bool) -> Tensor:
        """Return the squared error that is expected of rounding rows of numbers, their sum or their mean.
        values: magnitudes, float32 [rows, in]; by: `torch.mul` or `torch.div`, by such scales; counts: float32
        [in], what that of each column counts.
        """
        factors = by(torch.ones_like(scales), scales)
        if self.block is None:
            squares, slopes = _largest_squares(values, factors)
            error = with_slopes(squares, (factors, slopes)) * counts.sum()
        else:
            error = float_errors(values, factors, counts, self.block, self.reach)
        return error / len(values) if mean else error


@torch.no_grad()
def _largest_squares(values: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the squares of each row's largest number, of values, float32 [rows, in], times factors, [in],
    and its slopes at these. Of equal numbers the first one moves; autograd would go through all of them again.
    """
    largest, place = (values * factors).max(1)
    squares = largest.square()
    return squares.sum(), torch.zeros_like(factors).index_put_((place,), 2 * squares, accumulate=True) / factors


OF_FLOATS = {"nvfp4": Steps(NVFP4_BLOCK, LARGEST), "mxfp4": Steps(MXFP4_BLOCK, 4.76)}
"""Powers of two map the largest to 3.5 to 7: errors are as with 4.76 in the mean."""


def smoothing_scales(input_amax: Tensor, weight_amax: Tensor, alpha: float, same: Tensor | None = None) -> Tensor:
    """Return the scales of the input channels, float32 [in], with geometric mean 1.
    A channel without inputs or weights has 1.

    input_amax, weight_amax: float32 [in], over all layers that read the input; same: int64 [in],
    channels with the same number share their scale.
    """
    if same is not None:
        input_amax, weight_amax = _shared(input_amax, same), _shared(weight_amax, same)
    known = (input_amax > 0) & (weight_amax > 0)
    logs = torch.where(
        known, alpha * input_amax.clamp(min=TINY).log() - (1 - alpha) * weight_amax.clamp(min=TINY).log(), 0
    )
    logs = torch.where(known, logs - logs.sum() / known.sum().clamp(min=1), 0)
    return logs.exp().clamp(1 / LIMIT, LIMIT)


def search_smoothing(
    readers: Sequence[Reader],
    input_amax: Tensor,
    weight_amax: Tensor,
    same: Tensor | None,
    inputs: RoundedInputs = "dynamic",
    steps: Steps | None = None,
) -> tuple[str, InputScales]:
    """Return the scales with the least error of the rounded outputs, and a name.

    The name is `none`, `alpha 0.8` or `descent`, whichever is expected to be best. inputs: how they are
    rounded; steps: of 8-bit integers if None. The others are those of `smoothing_scales`.
    """
    expected = _Expected.of(readers, input_amax, inputs, steps or Steps())
    tried = {"none": torch.ones_like(input_amax)}
    tried |= {f"alpha {alpha}": smoothing_scales(input_amax, weight_amax, alpha, same) for alpha in ALPHAS}
    errors = {name: float(expected.error(scales)) for name, scales in tried.items()}
    tried["descent"] = _descend(expected, tried[min(errors, key=errors.__getitem__)], same)
    errors["descent"] = float(expected.error(tried["descent"]))
    best = min(errors, key=errors.__getitem__)
    return best, InputScales(tried[best], errors[best], errors["none"])


@dataclass(frozen=True)
class _Expected:
    """The expected rounding error of some readers' outputs, as a function of the scales."""

    steps: Steps
    rows: Tensor | None
    """float32 [rows, in]: magnitudes of inputs, each row divided by its root mean square; one row
    of the largest if they are rounded with one scale. None if they are not rounded.
    """
    columns: Tensor
    """float32 [in]: the squared columns of the readers, relative to the square of their outputs."""
    weights: tuple[Tensor, ...]
    """float32 [some outputs, in] for each reader: magnitudes of weights, relative to the size of
    its outputs.
    """
    variances: tuple[Tensor, ...]
    """float32 [in] for each reader."""

    @staticmethod
    def of(readers: Sequence[Reader], input_amax: Tensor, inputs: RoundedInputs, steps: Steps) -> _Expected:
        seen = list({id(each.rows): each for each in readers}.values())
        rows = torch.cat([each.even_rows() for each in seen])
        relative = [
            each.weight / (each.even_rows() @ each.weight.T).square().sum(1).mean().clamp(min=TINY).sqrt()
            for each in readers
        ]
        largest = rows.abs()
        if inputs == "static":
            largest = input_amax[None] * torch.cat([each.inverse_size() for each in seen]).square().mean().sqrt()
        return _Expected(
            steps,
            None if inputs == "none" else steps.laid(largest),
            torch.stack([weight.square().sum(0) for weight in relative]).sum(0),
            tuple(steps.laid(_some(weight.abs())) for weight in relative),
            tuple(each.variances for each in readers),
        )

    def error(self, scales: Tensor, step: int | None = None) -> Tensor:
        """Return the expected squared error, relative to the squared outputs."""
        error = scales.new_zeros(())
        if self.rows is not None:
            parts = 1 if step is None else max(1, len(self.rows) // BATCH)
            rows = self.rows[(step or 0) % parts :: parts]
            error = self.steps.errors(rows, torch.div, scales, scales.square() * self.columns, mean=True)
        for weights, variances in zip(self.weights, self.variances, strict=True):
            error = error + self.steps.errors(weights, torch.mul, scales, variances / scales.square(), mean=False)
        return error / self.steps.divisor


def _descend(expected: _Expected, scales: Tensor, same: Tensor | None) -> Tensor:
    """Move the scales down the slope of the expected error (Adam on their logarithms)."""
    group = torch.arange(len(scales), device=scales.device) if same is None else same
    logs = scales.new_zeros(int(group.max()) + 1).scatter_(0, group, scales.log())
    mean, square = torch.zeros_like(logs), torch.zeros_like(logs)
    for step in range(STEPS):
        with torch.enable_grad():
            moved = logs.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(expected.error(moved[group].exp(), step).log(), moved)
        mean.lerp_(slope, 1 - DECAY[0])
        square.lerp_(slope.square(), 1 - DECAY[1])
        size = (square / (1 - DECAY[1] ** (step + 1))).sqrt_().add_(1e-8)
        logs = logs - RATE * (1 - step / STEPS) / (1 - DECAY[0] ** (step + 1)) * mean / size
    return logs[group].exp().clamp(1 / LIMIT, LIMIT)


def _some(weight: Tensor) -> Tensor:
    """Return some of the rows, evenly spread, of the same summed square as all of them."""
    some = weight[:: max(1, len(weight) // OUTPUTS)]
    share: float = (len(weight) / len(some)) ** 0.5
    return some * share


def _shared(values: Tensor, same: Tensor) -> Tensor:
    """Return the largest value of the channels with the same number, for each of them."""
    groups = values.new_zeros(int(same.max()) + 1).scatter_reduce_(0, same, values, "amax")
    return groups[same]
