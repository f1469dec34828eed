"""GPTQ: round the weights one input at a time, and compensate each error in the inputs left.

Frantar et al. 2022, arXiv:2210.17323, with static groups: scales are chosen before the first weight
is rounded. So the order of the inputs leaves no trace in the stored weights, and kernels need no
permutation. Additions: the scales are searched with the Hessian's diagonal as importance, and the
result is refined by turns of least-squares scales and coordinate descent (`refinement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optkit.algorithms import column_kernels
from optkit.algorithms.grid import Grid, QuantizedWeight, minmax_scales
from optkit.algorithms.refinement import descend_codes_, refit_scales
from optkit.algorithms.scale_search import search_scales
from optkit.algorithms.stacked import by_row, diagonal_of, subtract_outer_, subtract_product_, symmetric_taken, taken
from optkit.algorithms.tensor_cores import product
from optkit.algorithms.threads import one_thread

BLOCK = 128
"""Inputs whose errors are carried to the inputs after them at once."""
TRIANGLE = 512
"""Rows of a triangle that is inverted row by row."""
HARDEST_DAMPING = 10.0
NO_INPUT = 1e-20
"""A mean square of inputs that is as good as 0, which a layer behind a pruned one sees."""
HELD_STEP = 1e20
"""The scale of a weight that stays 0: so wide a step that whatever is left of the weight rounds to
the zero point.
"""

ScaleSearch: TypeAlias = Literal["minmax", "mse", "hessian"]


class Factored(NamedTuple):
    """A Hessian, and what its inverse is computed with."""

    hessian: Tensor
    """float32 [in, in], damped."""
    factor: Tensor
    """The upper Cholesky factor of its inverse, in the order of rounding."""
    damping: float
    """The damping that was used: the one asked for, or more if the Hessian needed it."""


@dataclass(frozen=True)
class GptqOptions:
    """How hard GPTQ tries."""

    damping: float = 0.01
    """Added to the Hessian's diagonal, as a fraction of its mean."""
    activation_order: bool = True
    """Round the inputs with the largest activations first."""
    scale_search: ScaleSearch = "hessian"
    refinements: int = 2
    """Turns of refitting the scales and moving the codes."""


@dataclass(frozen=True)
class GptqResult:
    """The quantized weight and what it took."""

    weight: QuantizedWeight
    damping: float
    """See `Factored`."""


def gptq(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    options: GptqOptions,
    held: Tensor | None = None,
    factored: Factored | None = None,
) -> GptqResult:
    """Quantize float32 [out, in] against its Hessian, float32 [in, in]. Rows are independent, so
    layers that share inputs can be stacked.

    held: bool [out, in], weights that become 0 and stay so (every grid has a 0). An input that was
    always 0 keeps its rounded weights. factored: `damped_inverse_factor` of the Hessian, if it is known.
    Raises ValueError if no damping makes the Hessian positive definite.
    """
    damping, parts = _prepared(weight, hessian, grid, options, factored)
    return GptqResult(_quantized(*_rounded(weight, parts, grid, options, held), grid), damping)


def gptq_together(weights: Tensor, hessians: Sequence[Tensor], grid: Grid, options: GptqOptions) -> list[GptqResult]:
    """Quantize layers of equal shape, float32 [layers, out, in], each against its own Hessian,
    float32 [in, in]: what `gptq` makes of each, up to the order of sums.

    Raises ValueError as `gptq`.
    """
    prepared = [_prepared(weight, hessian, grid, options) for weight, hessian in zip(weights, hessians, strict=True)]
    stacks = list(map(torch.stack, zip(*(parts for _, parts in prepared), strict=True)))
    dampings = [damping for damping, _ in prepared]
    prepared.clear()  # matrices of the Hessians' size, which the stacks hold too
    rounded = zip(*_rounded(weights, stacks, grid, options, None), strict=True)
    return [GptqResult(_quantized(*parts, grid), damping) for parts, damping in zip(rounded, dampings, strict=True)]


def _prepared(
    weight: Tensor, hessian: Tensor, grid: Grid, options: GptqOptions, factored: Factored | None = None
) -> tuple[float, list[Tensor]]:
    """Return the damping of one layer, and what `_rounded` takes beside the weight."""
    damped, factor, damping = factored or damped_inverse_factor(hessian, options)
    if options.scale_search == "minmax":
        scales, zeros = minmax_scales(weight, grid)
    else:
        importance = damped.diagonal() if options.scale_search == "hessian" else None
        scales, zeros = search_scales(weight, grid, importance, compiled=True)
    return damping, [damped, factor, rounding_order(hessian, options), scales, zeros]


def _rounded(
    weight: Tensor, parts: list[Tensor], grid: Grid, options: GptqOptions, held: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, float [..., in, out], scales and zeros, [..., out, groups]; parts as `_prepared`, used up."""
    damped, factor, order, scales, zeros = parts
    parts.clear()
    back = order.argsort()
    group_of_input = order // (weight.shape[-1] // scales.shape[-1])
    each_zero = taken(zeros.mT, group_of_input)  # [in, out]
    steps = _steps(scales, group_of_input, order, held)
    codes = _round_in_turn(taken(weight.mT, order), factor, steps, each_zero, grid)
    del factor, steps
    if options.refinements:
        ordered = symmetric_taken(damped, order)
        pull = product(damped, weight.mT)

        def refit() -> Tensor:
            return grid.stored(refit_scales(pull, damped, taken(codes - each_zero, back), scales.mT).mT)

        scales = refit()
        for _ in range(options.refinements):
            steps = _steps(scales, group_of_input, order, held)
            descend_codes_(codes, taken(weight.mT, order), ordered, steps, each_zero, grid)
            scales = refit()
    return taken(codes, back), scales, zeros


def _quantized(codes: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> QuantizedWeight:
    return QuantizedWeight(codes.T.to(torch.uint8).contiguous(), scales.contiguous(), zeros.to(torch.uint8), grid.bits)


def relative_error(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """Return the squared output error relative to the outputs, for weights float [out, in]."""
    return relative(row_errors(weight, quantized, hessian))


def row_errors(weight: Tensor, quantized: Tensor, hessian: Tensor) -> Tensor:
    """Return the squared error of each output and its square, float32 [out, 2]."""
    pairs = ((each, product(each, hessian)) for each in (weight - quantized, weight))
    return torch.stack([pulled.mul_(each).sum(-1) for each, pulled in pairs], dim=-1)


def relative(errors: Tensor) -> float:
    """Return the squared error of some outputs, [out, 2] as `row_errors` has them, as a share of their square."""
    error, size = errors.sum(0).tolist()
    return max(0.0, error) / size if size else 0.0


def rounding_order(hessian: Tensor, options: GptqOptions) -> Tensor:
    """Return the inputs in the order in which they are rounded, int64 [in]."""
    if options.activation_order:
        return hessian.diagonal().argsort(descending=True, stable=True)
    return torch.arange(len(hessian), device=hessian.device)


def damped_hessian(hessian: Tensor, damping: float) -> Tensor:
    """Return a Hessian with a fraction of its mean diagonal, or of `NO_INPUT`, added to the diagonal."""
    damped = hessian.clone()
    damped.diagonal().add_(damping * hessian.diagonal().mean().clamp_min(NO_INPUT))
    return damped


def damped_inverse_factor(hessian: Tensor, options: GptqOptions) -> Factored:
    """Return a Hessian, float32 [in, in], damped and factored.

    The factor is the inverse of the lower factor of the Hessian in the opposite order, both turned round: a
    quarter of the work of inverting the Hessian and factoring that.
    """
    last_first = rounding_order(hessian, options).flip(0)
    damping = options.damping
    while damping <= HARDEST_DAMPING:
        damped = damped_hessian(hessian, damping)
        lower, failed = torch.linalg.cholesky_ex(damped[last_first][:, last_first])
        if not failed:
            factor = lower_inverse(lower)
            del lower
            factor = factor.flip(0, 1)
            if factor.isfinite().all():
                return Factored(damped, factor, damping)
        damping = max(10 * damping, 1e-4)
    raise ValueError(f"the Hessian is not positive definite, even with damping {HARDEST_DAMPING}")


def lower_inverse(lower: Tensor) -> Tensor:
    """Return the inverse of a lower triangle, float [size, size]; most of it is products of matrices."""
    size = len(lower)
    if size <= TRIANGLE:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, identity, upper=False)  # type: ignore[no-any-return]
    half = size // 2 // TRIANGLE * TRIANGLE or TRIANGLE
    found, between = torch.zeros_like(lower), torch.empty_like(lower[half:, :half])
    found[:half, :half], found[half:, half:] = lower_inverse(lower[:half, :half]), lower_inverse(lower[half:, half:])
    above, below, corner = found[:half, :half], found[half:, half:], found[half:, :half]
    for end in range(TRIANGLE, size - half + TRIANGLE, TRIANGLE):  # what is 0 in a triangle is not multiplied
        rows = slice(end - TRIANGLE, end)
        torch.mm(below[rows, :end], lower[half:, :half][:end], out=between[rows])
    for start in range(0, half, TRIANGLE):
        columns = slice(start, start + TRIANGLE)
        corner[:, columns] = between[:, start:] @ above[start:, columns].neg()
    return found


def _steps(scales: Tensor, group_of_input: Tensor, order: Tensor, held: Tensor | None) -> Tensor:
    """Return the scale of each weight in the order of rounding, float [..., in, out].
    HELD_STEP stands for those that stay 0.
    """
    steps = taken(scales.mT, group_of_input)
    return steps if held is None else steps.masked_fill_(held.T[order], HELD_STEP)


def _round_in_turn(rest: Tensor, factor: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> Tensor:
    """Return codes, float [..., in, out], for weights `rest` [..., in, out] that are used up.
    Scales and zeros are [..., in, out] too.
    """
    if column_kernels.walks(rest):
        return column_kernels.round_columns(rest, scales, zeros, factor, grid.top)
    codes = torch.empty_like(rest)
    round_block = column_kernels.round_block if column_kernels.compiled(rest) else _round_block
    inputs = rest.shape[-2]
    for start in range(0, inputs, BLOCK):
        part = slice(start, min(start + BLOCK, inputs))
        value, scale, zero = (each[..., part, :] for each in (rest, scales, zeros))
        codes[..., part, :], errors = round_block(value, scale, zero, factor[..., part, part], grid.top)
        subtract_product_(rest[..., part.stop :, :], factor[..., part, part.stop :].mT, errors)
    return codes


def _round_block(rest: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return codes and errors, float [..., inputs, out], of one block; see `column_kernels.round_block`."""
    codes, errors = torch.empty_like(rest), torch.empty_like(rest)
    diagonal = diagonal_of(factor)
    with one_thread():
        for index, (value, scale, zero, code, error) in enumerate(by_row(rest, scales, zeros, codes, errors)):
            code.copy_((value / scale).add_(zero).round_().clamp_(0, top))
            error.copy_((value - (code - zero) * scale) / diagonal[index])
            subtract_outer_(rest[..., index + 1 :, :], factor[..., index, index + 1 :], error)
    return codes, errors
