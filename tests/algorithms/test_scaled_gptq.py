"""GPTQ on the grids of 8 bits: every code is on the grid, and the outputs are nearer than with
weights rounded to nearest.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.algorithms.eight_bit import FLOAT8, INT8, NumberFormat, amax_scales, dequantize, quantize, tile_of
from optkit.algorithms.scaled_gptq import compensated_codes


def layer() -> tuple[Tensor, Tensor]:
    """Return a weight [48, 160] and the mean of x x^T over correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 40, generator=generator) @ torch.randn(40, 160, generator=generator)
    inputs += 0.3 * torch.randn(1000, 160, generator=generator)
    return torch.randn(48, 160, generator=generator), inputs.T @ inputs / 1000


@pytest.mark.parametrize("numbers", [FLOAT8, INT8])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_outputs_are_nearer(numbers: NumberFormat, granularity: Any) -> None:
    weight, hessian = layer()
    tile = tile_of(granularity, (48, 160))
    scales = amax_scales(weight, tile, numbers, torch.float32)

    def error(codes: Tensor) -> float:
        assert codes.dtype == numbers.dtype
        off = dequantize(codes, scales, tile) - weight
        return float(((off @ hessian) * off).sum())

    nearest, compensated = (
        quantize(weight, scales, tile, numbers),
        compensated_codes(weight, hessian, scales, tile, numbers.round),
    )
    assert error(compensated) < 0.5 * error(nearest)


def test_inputs_without_correlation_are_rounded_to_nearest() -> None:
    weight, _ = layer()
    scales = amax_scales(weight, (1, 160), INT8, torch.float32)
    codes = compensated_codes(weight, torch.diag(torch.rand(160) + 0.5), scales, (1, 160), INT8.round)
    assert torch.equal(codes, quantize(weight, scales, (1, 160), INT8))


def test_a_hessian_that_is_none() -> None:
    weight, _ = layer()
    scales = amax_scales(weight, (1, 160), INT8, torch.float32)
    with pytest.raises(ValueError, match="not positive definite"):
        compensated_codes(weight, -torch.eye(160), scales, (1, 160), INT8.round)


@pytest.mark.parametrize("numbers", [FLOAT8, INT8])
def test_zeros_of_a_pruned_weight_stay(numbers: NumberFormat) -> None:
    weight, hessian = layer()
    tile = tile_of("channel", (48, 160))
    weight[:, ::2] = 0
    scales = amax_scales(weight, tile, numbers, torch.float32)
    off = {}
    for how, codes in {
        "nearest": quantize(weight, scales, tile, numbers),
        "compensated": compensated_codes(weight, hessian, scales, tile, numbers.round),
    }.items():
        assert not dequantize(codes, scales, tile)[:, ::2].any()
        change = dequantize(codes, scales, tile) - weight
        off[how] = float(((change @ hessian) * change).sum())
    assert off["compensated"] < off["nearest"]
