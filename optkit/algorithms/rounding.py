"""Round to nearest (RTN): each weight to the closest point of its group's grid, without looking at any data."""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.algorithms.grid import Grid, QuantizedWeight


def round_to_nearest(weight: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> QuantizedWeight:
    """Round a weight, float [out, in], to the grid of the given scales and zero points, float [out, groups]."""
    groups = weight.view(weight.shape[0], scales.shape[1], -1)
    codes = (groups / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round_().clamp_(0, grid.top)
    return QuantizedWeight(codes.view(weight.shape).to(torch.uint8), scales, zeros.to(torch.uint8), grid.bits)
