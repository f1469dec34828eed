"""Search the scale of each group for the least squared rounding error."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from optkit.algorithms import column_kernels
from optkit.algorithms.grid import Grid, minmax_scales
from optkit.algorithms.threads import one_thread

STEPS = 20
"""Scales tried for each sign or zero point by default."""
SMALLEST = 0.4
"""The smallest scale that is tried, as a fraction of the one that reaches every weight."""
CHUNK = {"loop": 1 << 17, "cpu": 1 << 22, "cuda": 1 << 26}
"""Weights searched at a time: few enough to stay in a core's cache if torch goes through them, enough to
fill a kernel on a CPU or GPU.
"""


def search_scales(
    weight: Tensor, grid: Grid, importance: Tensor | None = None, steps: int = STEPS, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, float [out, groups], with the least squared error tried.

    weight: float [out, in]; importance: float [in], what an error at each input counts (the
    diagonal of the Hessian), all 1 if None;
    steps: scales tried for each sign or zero point; compiled: a CPU computes in C++ if that is loaded,
    which may take another of two scales with nearly equal errors. So only who loads it says so.
    Tried are fractions of the scales of `minmax_scales`, which cut the outermost weights. A
    symmetric grid reaches one step further below zero than above, so it is tried with both signs of
    the scale (llama.cpp's Q4_0 takes the outermost weight's); an asymmetric one with the zero
    points next to the exact one.
    """
    compiled = (compiled or weight.is_cuda) and column_kernels.usable(weight)
    rows = max(1, CHUNK[weight.device.type if compiled else "loop"] // weight.shape[1])
    # [1, groups, group_size]
    weights = grid.grouped((torch.ones_like(weight[0]) if importance is None else importance)[None])
    with nullcontext() if compiled else one_thread():
        parts = [_search(chunk, grid, weights, steps, compiled) for chunk in weight.split(rows)]
    scales, zeros = zip(*parts, strict=True)
    return torch.cat(scales), torch.cat(zeros)


def _search(weight: Tensor, grid: Grid, importance: Tensor, steps: int, compiled: bool) -> tuple[Tensor, Tensor]:
    widest, exact = minmax_scales(weight, grid)
    signs, shifts = ((1, -1), (0,)) if grid.symmetric else ((1,), (0, -1, 1))
    grouped = grid.grouped(weight)
    if compiled:
        fractions = [fraction * sign for fraction in torch.linspace(1, SMALLEST, steps).tolist() for sign in signs]
        tried = grid.stored(widest * widest.new_tensor(fractions)[:, None, None])
        return column_kernels.search_groups(grouped, importance, tried, exact, len(shifts), grid.top)
    scales, zeros, least = widest, exact, torch.full_like(widest, torch.inf)
    for fraction in torch.linspace(1, SMALLEST, steps).tolist():
        for sign in signs:
            tried = grid.stored(widest * (fraction * sign))
            for shift in shifts:
                zero = (exact + shift).clamp(0, grid.top) if shift else exact
                error = _error(grouped, tried, zero, importance, grid)
                better = error < least
                least = torch.where(better, error, least)
                scales, zeros = torch.where(better, tried, scales), torch.where(better, zero, zeros)
    return scales, zeros


def _error(grouped: Tensor, scales: Tensor, zeros: Tensor, importance: Tensor, grid: Grid) -> Tensor:
    rounded = grid.round(grouped, scales, zeros).sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
    return rounded.sub_(grouped).square_().mul_(importance).sum(-1)
