"""The grid that weights are rounded to: integer codes, one scale and one zero point per group of inputs.

A weight of group g is `(code - zero[g]) * scale[g]`. Codes are unsigned, 0 .. 2^bits - 1, in every format; a symmetric grid has the
zero point 2^(bits - 1) everywhere, so its values reach from -2^(bits - 1) to 2^(bits - 1) - 1 scales (the convention of compressed-tensors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SEARCH_STEPS = 60
"""Scales tried by `search_scales`, besides the one of `minmax_scales`."""
SEARCH_SHRINK = 0.5
"""The smallest scale that is tried, as a fraction of the one that reaches every weight."""


@dataclass(frozen=True)
class Grid:
    """How weights are rounded: `bits` per code, inputs per group, with or without zero points."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None means that each output channel has one scale."""
    symmetric: bool
    lowest_zero: int = 0
    """Smallest zero point that the storage format can hold: 1 in GPTQ's format, which stores zero - 1."""

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return 1 << (self.bits - 1)

    def width(self, inputs: int) -> int:
        """Return the inputs per group of a layer with so many inputs."""
        return self.group_size or inputs


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight on its grid: `(codes - zeros) * scales`, group by group."""

    codes: Tensor
    """uint8 [out, in]."""
    scales: Tensor
    """float [out, groups], never 0, negative where that serves a symmetric grid better."""
    zeros: Tensor
    """uint8 [out, groups]."""
    bits: int

    @property
    def group_size(self) -> int:
        """Inputs per group."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def dequantize(self) -> Tensor:
        """Return float [out, in], in the dtype of the scales."""
        rows, groups = self.scales.shape
        steps = self.codes.view(rows, groups, -1).to(self.scales.dtype) - self.zeros.to(self.scales.dtype).unsqueeze(-1)
        return (steps * self.scales.unsqueeze(-1)).view(rows, -1)


def minmax_scales(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, both float [out, groups], that reach every weight, as compressed-tensors computes them.

    weight: float [out, in]. Symmetric: scale = 2 max|w| / (2^bits - 1), so that the largest weight may be cut by half a step. A group
    of zeros gets the scale 1 (compressed-tensors: the dtype's epsilon; both give zeros back).
    """
    groups = weight.view(weight.shape[0], -1, grid.width(weight.shape[1]))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    span = 2 * torch.maximum(-low, high) if grid.symmetric else high - low
    scales = torch.where(span == 0, torch.ones_like(span), span / grid.top)
    if grid.symmetric:
        return scales, torch.full_like(scales, grid.middle)
    return scales, (-low / scales).round().clamp(grid.lowest_zero, grid.top)


def search_scales(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, both float [out, groups], with the least squared rounding error among those tried.

    weight: float [out, in]; importance: float [in], the weight of each input's error (the diagonal of the Hessian), all 1 when None.
    Tried are the scales of `minmax_scales` and `SEARCH_STEPS` smaller ones that cut the outermost weights; a symmetric grid reaches one step further
    below zero than above, so each is tried with both signs there (as llama.cpp's Q4_0 takes the sign of the outermost weight).
    """
    width = grid.width(weight.shape[1])
    groups = weight.view(weight.shape[0], -1, width)  # [out, groups, width]
    loads = torch.ones_like(weight[0]) if importance is None else importance.to(weight.dtype)
    loads = loads.view(1, -1, width)
    best_scales, best_zeros = minmax_scales(weight, grid)
    best = _error(groups, best_scales, best_zeros, loads, grid)
    reach = groups.abs().amax(-1) / grid.middle if grid.symmetric else best_scales
    reach = torch.where(reach == 0, torch.ones_like(reach), reach)
    low = groups.amin(-1).clamp(max=0)
    for step in range(SEARCH_STEPS):
        scales = reach * (1.0 - (1.0 - SEARCH_SHRINK) * step / SEARCH_STEPS) * (16 / 15 if grid.symmetric else 1)
        for sign in (1, -1) if grid.symmetric else (1,):
            signed = scales * sign
            zeros = best_zeros if grid.symmetric else (-low / reach).round().clamp(grid.lowest_zero, grid.top)
            error = _error(groups, signed, zeros, loads, grid)
            better = error < best
            best = torch.where(better, error, best)
            best_scales, best_zeros = torch.where(better, signed, best_scales), torch.where(better, zeros, best_zeros)
    return best_scales, best_zeros


def _error(groups: Tensor, scales: Tensor, zeros: Tensor, loads: Tensor, grid: Grid) -> Tensor:
    scale, zero = scales.unsqueeze(-1), zeros.unsqueeze(-1)
    rounded = (groups / scale + zero).round_().clamp_(0, grid.top).sub_(zero).mul_(scale)
    return rounded.sub_(groups).square_().mul_(loads).sum(-1)
