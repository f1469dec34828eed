"""What GPTQ has in C++ against its loops in torch, and Gram matrices against float64."""

import os

import pytest
import torch

from optkit.algorithms import column_kernels
from optkit.algorithms.gptq import GptqOptions, _round_block, gptq, relative_error
from optkit.algorithms.grid import Grid, round_to_nearest
from optkit.algorithms.hessian import Hessian
from optkit.algorithms.refinement import _descend_block, refit_scales
from optkit.algorithms.scale_search import search_scales
from optkit.environment import ARCHITECTURE, cpu_has
from optkit.kernels.cpu.native import why_not_native

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
multiplied = pytest.mark.skipif(
    ARCHITECTURE in os.environ or not cpu_has("avx512_bf16"), reason="the kernels are for CPUs without bfloat16"
)


def block(inputs: int, outputs: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(inputs)
    values, scales = torch.randn(2, inputs, outputs, generator=generator)
    square = torch.randn(inputs, 4 * inputs, generator=generator)
    return [values, scales.abs() * 0.1 + 0.05, torch.full_like(values, 8.0), square @ square.T / inputs]


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 200), (96, 7), (1, 3)])
def test_blocks_are_rounded_and_descend_as_by_the_loops(inputs: int, outputs: int) -> None:
    values, scales, zeros, hessian = block(inputs, outputs)
    scales[:, 0] = 1e20  # a weight that stays 0
    factor = torch.linalg.cholesky(hessian, upper=True)
    codes = torch.randint(0, 16, values.shape, generator=torch.Generator().manual_seed(1)).float()
    pairs = [
        [
            rounding(values.clone(), scales, zeros, factor, 15)
            for rounding in (column_kernels.round_block, _round_block)
        ],
        [
            descend(values.clone(), codes, scales, hessian, 15)
            for descend in (column_kernels.descend_block, _descend_block)
        ],
    ]
    for found, expected in pairs:
        same = (found[0] == expected[0]).all(0)
        assert same.float().mean() > 0.98, "codes may differ where a value lies between two"
        torch.testing.assert_close(found[1][:, same], expected[1][:, same], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 32, True), (3, 24, False), (8, None, False)])
def test_scales_are_searched_as_in_torch(
    monkeypatch: pytest.MonkeyPatch, bits: int, group: int | None, symmetric: bool
) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight, importance = torch.randn(40, 96, generator=generator), torch.rand(96, generator=generator)
    grid = Grid(bits, group, symmetric, torch.bfloat16)
    found = search_scales(weight, grid, importance, compiled=True)
    expected = search_scales(weight, grid, importance)
    monkeypatch.setattr(column_kernels, "_compiled", None)
    without = search_scales(weight, grid, importance, compiled=True)
    assert all(map(torch.equal, expected, without)), "what reads no text is the same before and after they are loaded"

    def loss(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        error = weight.double() - round_to_nearest(weight.double(), scales.double(), zeros, grid).dequantize()
        return grid.grouped(error.square() * importance).sum(-1)

    torch.testing.assert_close(loss(*found), loss(*expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(100, 7, 10), (96, 130, 1), (72, 64, 24)])
def test_scales_are_refitted_as_in_float64(inputs: int, outputs: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    rows = torch.randn(2, 2 * inputs, inputs, generator=generator)
    hessian, weight = rows.mT @ rows / inputs, torch.randn(2, inputs, outputs, generator=generator)
    steps = torch.randint(-8, 8, weight.shape, generator=generator).float()
    given = hessian @ weight, hessian, steps, torch.full((2, groups, outputs), 0.1)
    exact = refit_scales(*(each.double() for each in given))  # what C++ has is for float32
    torch.testing.assert_close(refit_scales(*given).double(), exact, rtol=1e-5, atol=1e-6)


def test_stacked_layers_are_what_each_is_alone() -> None:
    values, scales, zeros, hessian = block(64, 40)
    factor = torch.linalg.cholesky(hessian, upper=True)
    stacked = [torch.stack([each, each.flip(-1)]) for each in (values, scales, zeros)]
    both = torch.stack([factor, factor])
    codes, errors = column_kernels.round_block(stacked[0], stacked[1], stacked[2], both, 15)
    for found, alone in zip(
        (codes, errors), column_kernels.round_block(values, scales, zeros, factor, 15), strict=True
    ):
        assert torch.equal(found, torch.stack([alone, alone.flip(-1)]))


@multiplied
@pytest.mark.parametrize(("tokens", "inputs"), [(1001, 100), (300, 33), (1, 16)])
def test_gram_matrices_of_rounded_rows_are_those_of_float64(tokens: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, inputs, generator=generator) * torch.rand(inputs, generator=generator) ** 3
    hessian = Hessian(inputs, equal_tokens=False, rounded=True)
    for part in rows.split(600):
        hessian.add(part)
    sizes, rounded = rows.double().square().mean(0).sqrt(), rows.bfloat16().double()
    for given, limit in ((rounded, 2e-6), (rows.double(), 0.02 * tokens**-0.5)):
        off = (hessian.matrix().double() - given.T @ given / tokens).abs() / sizes.outer(sizes)
        assert off.max() < limit


@multiplied
def test_layers_rounded_by_such_a_matrix_are_as_good_as_by_float64s() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2000, 96, generator=generator) @ torch.randn(96, 96, generator=generator)
    weight, exact = torch.randn(64, 96, generator=generator), (rows.double().T @ rows.double() / 2000).float()
    rounded = Hessian(96, equal_tokens=False, rounded=True)
    rounded.add(rows)
    losses = [
        relative_error(weight, gptq(weight, each, Grid(4, 32, False), GptqOptions()).weight.dequantize(), exact)
        for each in (rounded.matrix(), exact)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
