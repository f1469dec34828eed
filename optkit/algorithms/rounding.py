"""Round to nearest (RTN): each weight to the closest point of its group's grid, without data."""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.algorithms.grid import Grid, QuantizedWeight


def round_to_nearest(weight: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> QuantizedWeight:
    """Round a weight, float [out, in], to the grid of scales and zeros, float [out, groups]."""
    codes = grid.round(grid.grouped(weight), scales, zeros).flatten(1)
    return QuantizedWeight(codes.to(torch.uint8), scales, zeros.to(torch.uint8), grid.bits)
