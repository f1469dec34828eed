"""Improve a quantized weight: better scales for its codes, then better codes for its scales.

Both steps lower the squared error of the layer's outputs, tr((W - Q) H (W - Q)^T). Tensors are
transposed here, [in, out], so that what belongs to one input lies together in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from optkit.algorithms import column_kernels
from optkit.algorithms.grid import Grid
from optkit.algorithms.stacked import by_row, diagonal_of, subtract_outer_, subtract_product_
from optkit.algorithms.tensor_cores import bfloat16_parts, has_tensor_cores, product
from optkit.algorithms.threads import one_thread

BLOCK = 128
"""Inputs whose corrections are carried to the inputs after them at once."""
RIDGE = 1e-4
"""How hard a scale is held to where it was, relative to the pull of the data; keeps the equations
solvable.
"""
Product: TypeAlias = Callable[[int, Tensor], Tensor]
"""Multiplies the Hessian's columns of a group by its steps, float [width, out] -> [inputs up to its last, out]."""
EQUATIONS = 1 << 27
"""Most coefficients, [out, groups, groups], that are held at once: small groups make many."""


def refit_scales(pull: Tensor, hessian: Tensor, steps: Tensor, scales: Tensor) -> Tensor:
    """Return the scales, float [groups, out], with the least output error for fixed codes.
    They solve one linear system per row.

    pull: hessian @ W^T, float [..., in, out]; hessian: float [..., in, in]; steps: codes - zeros,
    float [..., in, out]; scales: the present ones, float [..., groups, out]. A row whose equations
    are not positive definite keeps its scales.
    """
    if column_kernels.solves_equations(scales):
        return column_kernels.refit_scales(pull, hessian, steps, scales, RIDGE)
    layers, groups = scales[..., 0, 0].numel(), scales.shape[-2]
    rows = max(1, EQUATIONS // groups**2 // layers)
    parts = zip(pull.split(rows, -1), steps.split(rows, -1), scales.split(rows, -1), strict=True)
    equations = _equations_of(hessian, groups)
    return torch.cat([_refit_scales(part, equations(step), step, scale) for part, step, scale in parts], dim=-1)


def _equations_of(hessian: Tensor, groups: int) -> Callable[[Tensor], Tensor]:
    """Return what makes coefficients, [..., out, groups, groups], of the steps of some rows."""
    if column_kernels.multiplies_steps(hessian, groups):
        return partial(column_kernels.normal_equations, hessian, groups)
    on_tensor_cores = hessian.dtype == torch.float32 and has_tensor_cores(hessian)
    return partial(_equations, (_exact_product if on_tensor_cores else _product)(hessian, groups), groups)


def _product(hessian: Tensor, groups: int) -> Product:
    columns, width = hessian.chunk(groups, -1), hessian.shape[-1] // groups
    return lambda group, steps: columns[group][..., : (group + 1) * width, :] @ steps


def _exact_product(hessian: Tensor, groups: int) -> Product:
    """Return the same on tensor cores.
    Steps are small integers, and three bfloat16 parts of the Hessian are all of it, so no product is
    rounded.
    """
    multiply, width = torch.mm if hessian.dim() == 2 else torch.bmm, hessian.shape[-1] // groups
    columns = hessian.split(width, -1)
    return lambda group, steps: multiply(
        torch.cat([*bfloat16_parts(columns[group][..., : (group + 1) * width, :], 3)], dim=-1),
        torch.cat([steps.bfloat16()] * 3, dim=-2),
        out_dtype=torch.float32,
    )


def _equations(times: Product, groups: int, steps: Tensor) -> Tensor:
    """Return what `column_kernels.normal_equations` does."""
    width = steps.shape[-2] // groups
    normal = steps.new_zeros(*steps.shape[:-2], steps.shape[-1], groups, groups)
    for group in range(groups):
        part = slice(group * width, (group + 1) * width)
        pulled = times(group, steps[..., part, :]).mul_(steps[..., : part.stop, :])  # [inputs up to here, out]
        normal[..., group, : group + 1] = pulled.unflatten(-2, (group + 1, width)).sum(-2).mT
    return normal


def _refit_scales(pull: Tensor, normal: Tensor, steps: Tensor, scales: Tensor) -> Tensor:
    """`normal`: the equations' coefficients, symmetric [..., out, groups, groups]; the lower triangle is enough."""
    groups = scales.shape[-2]
    wanted = (pull * steps).unflatten(-2, (groups, -1)).sum(-2).mT  # [out, groups]
    ridge = RIDGE * normal.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True) + torch.finfo(normal.dtype).tiny
    normal.diagonal(dim1=-2, dim2=-1).add_(ridge)
    lower, failed = torch.linalg.cholesky_ex(normal)
    solved = torch.cholesky_solve((wanted + ridge * scales.mT).unsqueeze(-1), lower).squeeze(-1).mT
    usable = (failed == 0).unsqueeze(-2) & solved.isfinite() & (solved.abs() > 1e-3 * scales.abs())
    return torch.where(usable, solved, scales)


def descend_codes_(codes: Tensor, target: Tensor, hessian: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> None:
    """Move every code, input after input, to the best one while all others stay.
    This is one sweep of coordinate descent (QuantEase). `target`, the weights, is used up.

    codes, target, scales, zeros: float [..., in, out] (scales and zeros repeated over their group);
    hessian: float [..., in, in]. arXiv:2309.01885, section 3. The order is that of the given tensors.
    """
    gradient = product(hessian, target.sub_((codes - zeros).mul_(scales)))
    if column_kernels.walks(codes):
        codes.copy_(column_kernels.descend_columns(gradient, codes, scales, hessian, grid.top))
        return
    descend_block = column_kernels.descend_block if column_kernels.compiled(codes) else _descend_block
    inputs = codes.shape[-2]
    for start in range(0, inputs, BLOCK):
        part = slice(start, min(start + BLOCK, inputs))
        ahead, code, scale = (each[..., part, :] for each in (gradient, codes, scales))
        codes[..., part, :], moved = descend_block(ahead, code, scale, hessian[..., part, part], grid.top)
        subtract_product_(gradient[..., part.stop :, :], hessian[..., part.stop :, part], moved)


def _descend_block(gradient: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return new codes and each weight's move, float [..., inputs, out], of one block.
    See `column_kernels.descend_block`.
    """
    better, moved = torch.empty_like(codes), torch.empty_like(codes)
    diagonal = diagonal_of(hessian)
    with one_thread():
        for index, (ahead, code, scale, new, move) in enumerate(by_row(gradient, codes, scales, better, moved)):
            new.copy_((ahead / (scale * diagonal[index])).add_(code).round_().clamp_(0, top))
            move.copy_((new - code) * scale)
            subtract_outer_(gradient[..., index + 1 :, :], hessian[..., index, index + 1 :], move)
    return better, moved
