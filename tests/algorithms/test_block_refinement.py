"""Better scales and values of weights in blocks of floats, beside all that could be stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.algorithms.block_refinement import descend_scales_, descend_values_
from optkit.algorithms.microscaling import E2M1, compensated, nvfp4_global_scale, quantize_mxfp4, quantize_nvfp4
from optkit.algorithms.microscaling import round_to_e2m1 as nearest
from optkit.algorithms.scaled_gptq import compensated_codes

VALUES = torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.float64)


def problem(outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a weight [in, out] and the Hessian of inputs that depend on each other, in float64."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64) + 2 * torch.eye(inputs)
    seen = torch.randn(4 * inputs, inputs, generator=generator, dtype=torch.float64) @ mixed
    return torch.randn(inputs, outputs, generator=generator, dtype=torch.float64), seen.T @ seen / len(seen)


def errors(target: Tensor, values: Tensor, scales: Tensor, hessian: Tensor) -> Tensor:
    """Return the squared error of each output."""
    off = target - values * scales.repeat_interleave(len(values) // len(scales), 0)
    return (off * (hessian @ off)).sum(0)


def test_the_last_scale_is_the_best_of_all_that_can_be_stored() -> None:
    target, hessian = problem(5, 48)
    values, scales = nearest(target), torch.full((3, 5), 0.7, dtype=torch.float64)
    grid = torch.arange(1, 40, dtype=torch.float64) / 16
    before = errors(target, values, scales, hessian)
    descend_scales_(
        scales, values, target, hessian, lambda wanted: grid[(wanted[None] - grid[:, None]).abs().argmin(0)]
    )
    found = errors(target, values, scales, hessian)
    tried = [errors(target, values, torch.cat([scales[:2], each.expand(1, 5)]), hessian) for each in grid]
    assert torch.allclose(found, torch.stack(tried).amin(0))
    assert (found < before).all()


def test_a_block_of_zeros_keeps_its_scale() -> None:
    target, hessian = problem(2, 32)
    values, scales = nearest(target), torch.ones(2, 2, dtype=torch.float64)
    values[:16] = 0
    descend_scales_(scales, values, target, hessian, lambda wanted: wanted)
    assert scales[0].tolist() == [1, 1]
    assert (scales[1] != 1).all()


def test_the_last_value_is_the_best_of_all_numbers() -> None:
    target, hessian = problem(5, 160)
    values, scales = nearest(target), torch.full((10, 5), 0.9, dtype=torch.float64)
    before = errors(target, values, scales, hessian)
    descend_values_(values, target, hessian, scales.repeat_interleave(16, 0), nearest)
    found = errors(target, values, scales, hessian)
    tried = [errors(target, torch.cat([values[:-1], each.expand(1, 5)]), scales, hessian) for each in VALUES]
    assert torch.allclose(found, torch.stack(tried).amin(0))
    assert (found < 0.8 * before).all()


@pytest.mark.parametrize("type", ["nvfp4", "mxfp4"])
def test_turns_behind_gptq_lower_the_error_and_keep_zeros(type: str) -> None:
    weight, hessian = (each.float() for each in problem(40, 96))
    weight = weight.T.contiguous()
    weight[:, ::3] = 0
    shared = nvfp4_global_scale([weight])
    start = quantize_nvfp4(weight, shared, True) if type == "nvfp4" else quantize_mxfp4(weight, True)
    tile = (1, weight.shape[1] // start.scales.shape[1])
    codes = compensated_codes(weight, hessian, start.float_scales(), tile, nearest)
    found = compensated(weight, start, hessian)
    assert not found.dequantize()[:, ::3].any()

    def error(rounded: Tensor) -> float:
        off = (weight - rounded).double()
        return (off @ hessian.double() * off).sum().item()

    gptq_alone = codes * start.float_scales().repeat_interleave(tile[1], 1)
    assert error(found.dequantize()) < 0.9 * error(gptq_alone)
    assert found.scales.dtype == start.scales.dtype
