"""The search of AWQ's scales against ten lines of the paper, and what it may never do."""

import pytest
import torch
from torch import Tensor

from optkit.algorithms.awq import InputScales, Reader, _bound, _Costed, search_input_scales
from optkit.algorithms.gptq import GptqOptions, gptq
from optkit.algorithms.grid import Grid, minmax_scales, round_to_nearest
from optkit.algorithms.scale_search import search_scales

OUTPUTS, INPUTS, TOKENS = 96, 64, 512
GRIDS = [Grid(4, 32, False), Grid(4, 32, True), Grid(3, 16, False), Grid(4, None, True)]


def outlying_inputs(seed: int = 0) -> Tensor:
    """Return float [tokens, in] with channels of very different size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(0.8 * torch.randn(INPUTS, generator=generator))
    return torch.randn(TOKENS, INPUTS, generator=generator) * sizes


def random_weight(seed: int = 1) -> Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed)) * 0.1


def output_error(weight: Tensor, inputs: Tensor, scales: Tensor, grid: Grid, searched: bool = True) -> float:
    """Return what rounding W s does to the outputs for inputs x / s, measured on the inputs
    themselves.
    """
    scaled = weight * scales
    chosen = search_scales(scaled, grid, (inputs / scales).square().sum(0)) if searched else minmax_scales(scaled, grid)
    rounded = round_to_nearest(scaled, *chosen, grid).dequantize()
    return float(
        ((inputs / scales) @ rounded.T - inputs @ weight.T).square().sum() / (inputs @ weight.T).square().sum()
    )


def autoawq_scales(weight: Tensor, inputs: Tensor, grid: Grid) -> Tensor:
    """Return what AutoAWQ 0.2.9 finds: mean |x|^a / mean relative |w|^(1 - a) with the least error
    among 20 values of a.
    """
    grouped = grid.grouped(weight).abs()
    relative = (grouped / (grouped.amax(-1, keepdim=True) + 1e-6)).flatten(1).mean(0)
    found = []
    for ratio in (step / 20 for step in range(20)):
        scales = (inputs.abs().mean(0).pow(ratio) / (relative.pow(1 - ratio) + 1e-4)).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        found.append((output_error(weight, inputs, scales, grid, searched=False), scales))
    return min(found, key=lambda pair: pair[0])[1]


def search(weight: Tensor, inputs: Tensor, grid: Grid, rows: Tensor | None = None) -> InputScales:
    return search_input_scales([Reader(weight, inputs.T @ inputs, grid)], rows, 10)


@pytest.mark.parametrize("grid", GRIDS)
def test_outputs_stay_nearer_than_with_autoawqs_scales_and_with_none(grid: Grid) -> None:
    weight, inputs = random_weight(), outlying_inputs()
    found = search(weight, inputs, grid)
    error = output_error(weight, inputs, found.scales, grid)
    assert error < 0.95 * output_error(weight, inputs, torch.ones(INPUTS), grid)
    assert error < 1.03 * output_error(weight, inputs, autoawq_scales(weight, inputs, grid), grid)
    assert error < 0.95 * output_error(weight, inputs, autoawq_scales(weight, inputs, grid), grid, searched=False)


def test_the_reported_errors_are_those_of_the_outputs() -> None:
    weight, inputs = random_weight(), outlying_inputs()
    found = search(weight, inputs, GRIDS[0])
    assert found.plain_error == pytest.approx(output_error(weight, inputs, torch.ones(INPUTS), GRIDS[0]), rel=0.15)
    assert found.error == pytest.approx(output_error(weight, inputs, found.scales, GRIDS[0]), rel=0.15)


@pytest.mark.parametrize("grid", GRIDS)
def test_scales_for_gptq_keep_outputs_nearer_after_gptq(grid: Grid) -> None:
    weight, inputs = random_weight(), outlying_inputs()
    hessian = inputs.T @ inputs
    found = search_input_scales([Reader(weight, hessian, grid)], None, 10, "gptq")

    def error(scales: Tensor) -> float:
        rounded = gptq(
            weight * scales, hessian / scales / scales[:, None], grid, GptqOptions(refinements=0)
        ).weight.dequantize()
        return float(
            ((inputs / scales) @ rounded.T - inputs @ weight.T).square().sum() / (inputs @ weight.T).square().sum()
        )

    assert error(found.scales) < error(torch.ones(INPUTS))
    assert found.error == pytest.approx(error(found.scales), rel=1e-2)
    assert found.plain_error == pytest.approx(error(torch.ones(INPUTS)), rel=1e-2)


def test_it_never_takes_worse_scales_than_none() -> None:
    weight, inputs = random_weight(), torch.randn(TOKENS, INPUTS, generator=torch.Generator().manual_seed(2))
    found = search(weight, inputs, Grid(8, 32, False))
    assert found.error <= found.plain_error


def test_channels_of_one_row_share_their_scale() -> None:
    weight, inputs = random_weight(), outlying_inputs()
    rows = torch.arange(INPUTS) % 16 + 5
    found = search(weight, inputs, GRIDS[0], rows)
    for row in rows.unique():
        assert len(found.scales[rows == row].unique()) == 1
    assert len(found.scales.unique()) == 16
    assert found.error < found.plain_error


def test_readers_with_other_inputs_and_grids_share_the_scales() -> None:
    readers = [
        Reader(random_weight(seed), outlying_inputs(seed).T @ outlying_inputs(seed), grid)
        for seed, grid in enumerate(GRIDS[:2])
    ]
    found = search_input_scales(readers, None, 10)
    assert found.error < found.plain_error


@pytest.mark.parametrize("silent", [slice(0, 1), slice(0, INPUTS)])
def test_channels_without_activations_get_finite_scales(silent: slice) -> None:
    inputs = outlying_inputs()
    inputs[:, silent] = 0
    scales = search(random_weight(), inputs, GRIDS[0]).scales
    assert bool(scales.isfinite().all())
    assert 1 / 256 < float(scales.min()) <= float(scales.max()) < 256


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_slope_of_the_bound_is_that_of_autograd(grid: Grid) -> None:
    weight, costs = random_weight(), outlying_inputs().square().sum(0)
    weight[3] = 0
    weight[5, ::2] = weight[5, 0]  # several weights reach as far
    logarithm = torch.zeros(INPUTS, requires_grad=True)
    scaled = grid.grouped(weight * logarithm.exp())
    low, high = scaled.amin(-1).clamp(max=0), scaled.amax(-1).clamp(min=0)
    span = 2 * torch.maximum(-low, high) if grid.symmetric else high - low
    expected = (span.square() * grid.grouped((costs * (-2 * logarithm).exp())[None]).sum(-1)).sum()
    (slope,) = torch.autograd.grad(expected, logarithm)
    found, found_slope = _bound(_Costed(weight, costs, grid), logarithm.detach())
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(found_slope, slope, rtol=1e-4, atol=1e-4 * float(slope.abs().max()))


@pytest.mark.gpu
def test_channels_that_share_a_scale_get_the_same_one_in_each_run() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    inputs, weight = (torch.randn(512, 4096, device="cuda", generator=generator) for _ in range(2))
    readers = [Reader(weight, inputs.T @ inputs, Grid(4, 128, True))]
    found = [search_input_scales(readers, torch.arange(4096) // 16, 4).scales for _ in range(4)]
    assert all(torch.equal(found[0], each) for each in found[1:])
