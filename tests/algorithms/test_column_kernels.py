"""The kernels against the loops in torch; on a machine without a GPU those in Triton run in its
interpreter, if Triton is there.
"""

import os
from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from optkit.algorithms import column_kernels, microscaling, scaled_gptq
from optkit.algorithms.eight_bit import FLOAT8, INT8
from optkit.algorithms.gptq import _round_in_turn
from optkit.algorithms.grid import Grid, round_to_nearest
from optkit.algorithms.microscaling import round_to_e2m1
from optkit.algorithms.refinement import _equations, _product, descend_codes_
from optkit.algorithms.scale_search import search_scales
from tests.support.eager_kernels import walk_on_cpu

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="there is no triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Return where `columns.cu` is launched, on a CPU in torch."""
    if request.param == "cpu":
        walk_on_cpu(monkeypatch)
    return request.param


def block(inputs, outputs, device):
    generator = torch.Generator().manual_seed(inputs)
    random = torch.randn(inputs + 2, outputs, generator=generator)
    values, scales, zeros = random[:inputs], random[:inputs].abs() * 0.1 + 0.05, torch.full((inputs, outputs), 8.0)
    square = torch.randn(inputs, 4 * inputs, generator=generator)
    hessian = square @ square.T / inputs
    return [each.to(device) for each in (values, scales, zeros, hessian)]


@pytest.fixture
def loops(monkeypatch):
    """Return what computes without the kernels of a GPU."""

    def run(compute):
        with monkeypatch.context() as patch:
            patch.setattr(column_kernels, "walks", lambda tensor: False)
            return compute()

    return run


def same_but_for_ties(found, expected):
    return (found != expected).float().mean() < 0.01  # codes may differ where a value lies between two


SIZES = [(1200, 9), (300, 40), (256, 16), (96, 7), (1, 3)]


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_weights_are_rounded_and_codes_descend_as_by_the_loops(loops, inputs, outputs, device):
    values, scales, zeros, hessian = block(inputs, outputs, device)
    factor, grid = torch.linalg.cholesky(hessian, upper=True), Grid(4, None, True)

    def rounded():
        return _round_in_turn(values.clone(), factor, scales, zeros, grid)

    expected = loops(rounded)
    assert same_but_for_ties(rounded(), expected)

    def descended():
        codes = expected.clone()
        descend_codes_(codes, values.clone(), hessian, scales, zeros, grid)
        return codes

    assert same_but_for_ties(descended(), loops(descended))


@pytest.mark.parametrize(
    ("nearest", "numbers", "top"),
    [
        (round_to_e2m1, microscaling.NUMBERS, 6),
        *((each.round, each.numbers, each.numbers.highest) for each in (FLOAT8, INT8)),
    ],
    ids=["E2M1", "E4M3", "int8"],
)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_other_numbers_are_rounded_as_by_the_loop(inputs, outputs, nearest, numbers, top, device):
    values, scales, _, hessian = block(inputs, outputs, device)
    weight = values.T.contiguous()
    scales = weight.abs().amax(1, keepdim=True) / top * 0.9  # the largest lie beyond the numbers
    given = weight, hessian, scales, (1, inputs), nearest
    expected, found = scaled_gptq.compensated_codes(*given), scaled_gptq.compensated_codes(*given, numbers)
    assert found.dtype == expected.dtype
    assert same_but_for_ties(found.float(), expected.float())


def test_layers_are_rounded_side_by_side(device):
    several = [torch.stack(each) for each in zip(*(block(inputs, 40, device) for inputs in (300, 300)), strict=True)]
    several[0][1] *= 2
    values, scales, zeros, hessian = several
    factor = torch.linalg.cholesky(hessian, upper=True)
    found = column_kernels.round_columns(values.clone(), scales, zeros, factor, 15)
    for layer in range(2):
        alone = column_kernels.round_columns(values[layer], scales[layer], zeros[layer], factor[layer], 15)
        assert same_but_for_ties(found[layer], alone)


def squared_error(weight, importance, grid, scales, zeros):
    """Return each group's squared error in float64."""
    weight = weight.double()
    error = weight - round_to_nearest(weight, scales.double(), zeros, grid).dequantize()
    return grid.grouped(error.square() * importance).sum(-1)


@needs_triton
@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "stored"),
    [
        (4, 32, True, torch.bfloat16),
        (3, 24, False, torch.bfloat16),
        (4, None, False, torch.bfloat16),
        (8, 32, True, torch.float32),
    ],
)
def test_scales_are_searched_as_in_torch(monkeypatch, bits, group, symmetric, stored):
    """Losses are compared, not scales. At 8 bits the widest scale wins in 98% of the groups, and
    leaves its outermost weight half a step off with either sign: float32's rounding chooses. A GPU
    rounds `(code - zero) * scale - weight` once and torch twice, so 23% of the scales have the
    other sign (25% on an H200); the losses of these differ by 6e-6 of them at most.
    """
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(40, 96, generator=generator).to(DEVICE)
    importance = torch.rand(96, generator=generator).to(DEVICE)
    grid = Grid(bits, group, symmetric, stored)
    monkeypatch.setattr(column_kernels, "usable", lambda tensor: False)
    expected = search_scales(weight, grid, importance)
    monkeypatch.setattr(column_kernels, "usable", lambda tensor: True)
    found = search_scales(weight, grid, importance, compiled=True)
    losses = [squared_error(weight, importance, grid, *each) for each in (found, expected)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)


@needs_triton
@pytest.mark.parametrize(("groups", "width", "outputs", "layers"), [(3, 32, 40, 0), (5, 16, 130, 0), (2, 128, 7, 2)])
def test_equations_of_scales_are_those_of_the_loop(groups, width, outputs, layers):
    generator = torch.Generator().manual_seed(groups)
    rows = torch.randn(*([layers] if layers else []), groups * width, 256, generator=generator)
    hessian = (rows @ rows.mT / 256).to(DEVICE)
    steps = torch.randint(-8, 8, (*hessian.shape[:-1], outputs + 3), generator=generator).float().to(DEVICE)[..., 3:]
    expected = _equations(_product(hessian.double(), groups), groups, steps.double())
    found = column_kernels.normal_equations(hessian, groups, steps)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU at most")
def test_kernels_run_where_their_tensors_are():
    values, scales, zeros, hessian = (each.to("cuda:1") for each in block(128, 40, "cuda"))
    factor = torch.linalg.cholesky(hessian, upper=True)
    first, second, third, fourth = (each.to("cuda:0") for each in (values, scales, zeros, factor))
    expected = column_kernels.round_columns(first, second, third, fourth, 15)
    assert torch.equal(column_kernels.round_columns(values, scales, zeros, factor, 15).cpu(), expected.cpu())
