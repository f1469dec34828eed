"""SmoothQuant: move the outliers of activations into the weights, so that both can be rounded to 8 bits (arXiv:2211.10438).

Input channel j of a layer is divided by s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), and column j of its weight multiplied by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optkit.algorithms.eight_bit import INT8, amax_scales, dequantize, quantize, rounded_inputs

ALPHAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Tried by `search_alpha`, beside no smoothing at all."""
LIMIT = 2.0**15
"""Scales are between 1 / LIMIT and LIMIT."""


@dataclass(frozen=True)
class Reader:
    """A linear layer that reads the input in question."""

    weight: Tensor
    """float32 [out, in]."""
    rows: Tensor
    """float32 [rows, in]: inputs that it was seen with."""


def smoothing_scales(input_amax: Tensor, weight_amax: Tensor, alpha: float, same: Tensor | None = None) -> Tensor:
    """Return the scales of the input channels, float32 [in], their geometric mean 1; 1 for a channel without inputs or weights.

    input_amax, weight_amax: float32 [in], over all layers that read the input; same: int64 [in], channels with the same number share
    their scale.
    """
    if same is not None:
        input_amax, weight_amax = _shared(input_amax, same), _shared(weight_amax, same)
    known = (input_amax > 0) & (weight_amax > 0)
    logs = torch.where(known, alpha * input_amax.clamp(min=1e-30).log() - (1 - alpha) * weight_amax.clamp(min=1e-30).log(), 0)
    logs = torch.where(known, logs - logs.sum() / known.sum().clamp(min=1), 0)
    return logs.exp().clamp(1 / LIMIT, LIMIT)


def search_alpha(
    readers: Sequence[Reader], input_amax: Tensor, weight_amax: Tensor, same: Tensor | None, static: bool
) -> tuple[float | None, Tensor]:
    """Return the alpha whose scales leave the smallest error in the outputs of the readers once everything is rounded, and its scales.

    None stands for no smoothing. The error of a reader is that of its outputs on its rows, relative to them; static: inputs are rounded
    with one scale for all of them. Arguments as for `smoothing_scales`.
    """
    wanted = [each.rows @ each.weight.T for each in readers]
    best: tuple[float | None, Tensor] = None, torch.ones_like(input_amax)
    least = _error(readers, wanted, best[1], input_amax if static else None)
    for alpha in ALPHAS:
        scales = smoothing_scales(input_amax, weight_amax, alpha, same)
        error = _error(readers, wanted, scales, input_amax if static else None)
        if error < least:
            best, least = (alpha, scales), error
    return best


def _error(readers: Sequence[Reader], wanted: Sequence[Tensor], scales: Tensor, input_amax: Tensor | None) -> float:
    """Return the sum over the readers of the squared error of their outputs, each relative to the squared outputs."""
    step = None if input_amax is None else amax_scales((input_amax / scales).amax().view(1, 1), (1, 1), INT8, torch.float32).view(1)
    total = 0.0
    for each, outputs in zip(readers, wanted, strict=True):
        smoothed, tile = each.weight * scales, (1, each.weight.shape[1])
        steps = amax_scales(smoothed, tile, INT8, torch.float32)
        rounded = dequantize(quantize(smoothed, steps, tile, INT8), steps, tile)
        found = rounded_inputs(each.rows / scales, INT8, scale=step) @ rounded.T
        total += float((found - outputs).square().sum() / outputs.square().sum().clamp(min=1e-30))
    return total


def _shared(values: Tensor, same: Tensor) -> Tensor:
    """Return the largest value of the channels with the same number, for each of them."""
    groups = values.new_zeros(int(same.max()) + 1).scatter_reduce_(0, same, values, "amax")
    return groups[same]
