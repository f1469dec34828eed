"""GPTQ against ten lines written from the paper, and each refinement against what it promises."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optkit.algorithms import column_kernels, refinement
from optkit.algorithms.gptq import GptqOptions, damped_inverse_factor, gptq, gptq_together, relative_error
from optkit.algorithms.grid import Grid, minmax_scales, round_to_nearest
from optkit.algorithms.hessian import Hessian
from optkit.algorithms.importance import compensated
from optkit.algorithms.refinement import descend_codes_, refit_scales
from optkit.kernels.cpu.native import why_not_native

PLAIN = GptqOptions(activation_order=False, scale_search="minmax", refinements=0)


def layer(outputs: int = 24, inputs: int = 160, tokens: int = 600, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random weight and the Hessian of correlated inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    data = mixed * torch.rand(inputs, generator=generator) ** 3
    return torch.randn(outputs, inputs, generator=generator) * 0.05, data.T @ data / tokens


def reference_gptq(
    weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    """Optimal brain quantization in a fixed order, one input at a time, with the inverse of what is
    left computed afresh each time.
    """
    left, damped = (
        weight.double().clone(),
        hessian.double() + 0.01 * hessian.diagonal().mean().double() * torch.eye(len(hessian)),
    )
    quantized = torch.zeros_like(left)
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        scale = scales[:, column].double()
        quantized[:, column] = (left[:, column] / scale).round().clamp(-8, 7) * scale
        error = (left[:, column] - quantized[:, column]) / inverse[0, 0]
        left[:, rest] -= error[:, None] * inverse[0]
    return quantized.float()


@pytest.mark.parametrize("activation_order", [False, True])
def test_codes_equal_a_reference_written_from_the_paper(activation_order: bool) -> None:
    weight, hessian = layer()
    grid = Grid(4, 32, True)
    scales = minmax_scales(weight, grid)[0].repeat_interleave(32, 1)
    order = hessian.diagonal().argsort(descending=True) if activation_order else torch.arange(160)
    ours = gptq(
        weight, hessian, grid, GptqOptions(activation_order=activation_order, scale_search="minmax", refinements=0)
    )
    expected = reference_gptq(weight, hessian, scales, order)
    # A tie that rounds the other way in float32 changes what follows in its row, so single codes
    # may differ.
    assert (ours.weight.dequantize() - expected).abs().gt(1e-5).float().mean() < 0.01
    assert relative_error(weight, ours.weight.dequantize(), hessian) == pytest.approx(
        relative_error(weight, expected, hessian), rel=0.01
    )


def test_each_step_lowers_the_error() -> None:
    weight, hessian = layer()
    grid = Grid(4, 32, True)
    errors = [
        relative_error(weight, round_to_nearest(weight, *minmax_scales(weight, grid), grid).dequantize(), hessian)
    ]
    for options in (
        PLAIN,
        GptqOptions(scale_search="minmax", refinements=0),
        GptqOptions(refinements=0),
        GptqOptions(refinements=1),
        GptqOptions(refinements=4),
    ):
        errors.append(relative_error(weight, gptq(weight, hessian, grid, options).weight.dequantize(), hessian))
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 0.65 * errors[0]
    assert errors[-1] < 0.85 * errors[1]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, None])
def test_all_grids_beat_rounding(bits: int, symmetric: bool, group_size: int | None) -> None:
    weight, hessian = layer(seed=3)
    grid = Grid(bits, group_size, symmetric, torch.bfloat16)
    result = gptq(weight, hessian, grid, GptqOptions())
    rounded = round_to_nearest(weight, *minmax_scales(weight, grid), grid)
    assert result.damping == 0.01
    assert result.weight.group_size == (group_size or 160)
    assert int(result.weight.codes.max()) <= grid.top
    assert torch.equal(result.weight.scales.bfloat16().float(), result.weight.scales)
    ours, plain = (relative_error(weight, found.dequantize(), hessian) for found in (result.weight, rounded))
    assert ours < 0.7 * plain


@pytest.fixture(params=["torch", "C++"])
def refit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch or C++ refit scales."""
    if request.param == "torch":
        monkeypatch.setattr(column_kernels, "_compiled", None)
    elif reason := why_not_native():
        pytest.skip(reason)


@pytest.mark.usefixtures("refit")
@pytest.mark.parametrize("equations", [refinement.EQUATIONS, 8, 1])
def test_refitted_scales_solve_the_normal_equations(equations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refinement, "EQUATIONS", equations)  # all three rows at once, two of them, one by one
    weight, hessian = layer(outputs=3, inputs=32)
    grid = Grid(4, 16, True)
    codes = round_to_nearest(weight, *minmax_scales(weight, grid), grid)
    steps = codes.codes.float() - 8
    found = refit_scales(hessian @ weight.T, hessian, steps.T.contiguous(), codes.scales.T).T
    root = torch.linalg.cholesky(hessian.double() + 1e-9 * torch.eye(32)).T
    for row in range(3):
        columns = torch.zeros(32, 2, dtype=torch.float64)
        columns[:16, 0], columns[16:, 1] = steps[row, :16].double(), steps[row, 16:].double()
        best = torch.linalg.lstsq(root @ columns, (root @ weight[row].double())[:, None]).solution[:, 0]
        assert torch.allclose(found[row].double(), best, rtol=2e-3)


def grouped_layer(groups: int, width: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight [rows, in], the damped Hessian of correlated inputs, rounded steps [in, rows]
    and their scales [groups, rows].
    """
    generator = torch.Generator().manual_seed(groups)
    inputs = groups * width
    data = torch.randn(256, 32, generator=generator) @ torch.randn(32, inputs, generator=generator)
    data = (data + torch.randn(256, inputs, generator=generator)) * torch.rand(inputs, generator=generator) ** 3
    hessian = data.T @ data / 256
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    weight, grid = torch.randn(rows, inputs, generator=generator) * 0.05, Grid(4, width, True)
    rounded = round_to_nearest(weight, *minmax_scales(weight, grid), grid)
    return weight, hessian, (rounded.codes.float() - 8).T.contiguous(), rounded.scales.T.contiguous()


@pytest.mark.usefixtures("refit")
@pytest.mark.parametrize("groups", [48, 152, 448])
def test_scales_of_real_widths_are_as_good_in_float32_as_in_float64(groups: int) -> None:
    width, rows = 4, 3
    weight, hessian, steps, scales = grouped_layer(groups, width, rows)
    found = refit_scales(hessian @ weight.T, hessian, steps, scales).double()

    def error(row: int, chosen: torch.Tensor) -> float:
        difference = weight[row].double() - steps[:, row].double() * chosen.repeat_interleave(width)
        return float(difference @ hessian.double() @ difference)

    for row in range(rows):
        spread = torch.zeros(groups * width, groups, dtype=torch.float64)
        spread[torch.arange(groups * width), torch.arange(groups * width) // width] = steps[:, row].double()
        normal = spread.T @ hessian.double() @ spread
        ridge = refinement.RIDGE * normal.diagonal().mean()
        wanted = spread.T @ (hessian.double() @ weight[row].double()) + ridge * scales[:, row].double()
        best = torch.linalg.solve(normal + ridge * torch.eye(groups, dtype=torch.float64), wanted)
        assert torch.linalg.norm(found[:, row] - best) < 1e-3 * torch.linalg.norm(best)
        assert error(row, found[:, row]) < error(row, best) * (1 + 1e-5)
        assert error(row, best) < 0.5 * error(row, scales[:, row].double())


@pytest.mark.usefixtures("refit")
def test_a_row_whose_equations_are_not_positive_definite_keeps_its_scales() -> None:
    weight, hessian, steps, scales = grouped_layer(4, 8, 2)
    hessian[0, :], hessian[:, 0], hessian[0, 0] = 0, 0, -1e3
    steps[0] = torch.tensor([0.0, 5.0])  # the first row does not meet the input that bends its equations
    found = refit_scales(hessian @ weight.T, hessian, steps, scales)
    assert torch.equal(found[:, 1], scales[:, 1])
    assert not torch.isclose(found[:, 0], scales[:, 0]).any()


def test_a_layer_of_4864_inputs_in_groups_of_32_is_quantized() -> None:
    weight, hessian, _, _ = grouped_layer(152, 32, 4)
    grid = Grid(4, 32, True)
    ours = gptq(weight, hessian, grid, GptqOptions(refinements=1)).weight
    rounded = round_to_nearest(weight, *minmax_scales(weight, grid), grid)
    assert ours.scales.shape == (4, 152)
    assert relative_error(weight, ours.dequantize(), hessian) < 0.2 * relative_error(
        weight, rounded.dequantize(), hessian
    )


class LapackCalls(TorchDispatchMode):
    """Collects the names of torch's linear algebra."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "linalg" in func.__name__ or "cholesky" in func.__name__ or "lu_" in func.__name__:
            self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def test_nothing_is_solved_by_lu(monkeypatch: pytest.MonkeyPatch) -> None:
    # A batched LU runs inside torch's threads, and there Intel's MKL never returns after
    # torch.set_num_threads.
    monkeypatch.setattr(column_kernels, "_compiled", None)
    weight, hessian = layer()
    with LapackCalls() as calls:
        gptq(weight, hessian, Grid(4, 32, True), GptqOptions())
        compensated(weight, hessian, torch.arange(100))
    assert calls.names == {"linalg_cholesky_ex", "linalg_solve_triangular", "cholesky_solve", "_linalg_check_errors"}


def test_descent_leaves_no_code_that_a_single_move_improves() -> None:
    weight, hessian = layer(outputs=4, inputs=40)
    grid = Grid(3, None, True)
    scales, zeros = minmax_scales(weight, grid)
    codes = round_to_nearest(weight, scales, zeros, grid).codes.T.float().contiguous()
    each_scale, each_zero = scales.T.expand(40, 4), zeros.T.expand(40, 4)

    def errors() -> torch.Tensor:
        difference = weight.T - (codes - each_zero) * each_scale
        return (difference * (hessian @ difference)).sum(0)

    before = errors()
    for _ in range(50):
        descend_codes_(codes, weight.T.clone(), hessian, each_scale, each_zero, grid)
    settled = errors()
    assert (settled < before).all()
    for column in range(40):
        for move in (-1.0, 1.0):
            codes[column] += move
            inside = (codes[column] >= 0) & (codes[column] <= grid.top)
            assert (errors()[inside] >= settled[inside] * (1 - 1e-4)).all()
            codes[column] -= move


def test_an_input_that_was_always_zero_is_rounded_to_nearest() -> None:
    weight, hessian = layer()
    hessian[5], hessian[:, 5] = 0, 0
    quantized = gptq(weight, hessian, Grid(4, 32, True), GptqOptions(scale_search="minmax", refinements=0)).weight
    grid = Grid(4, 32, True)
    nearest = round_to_nearest(weight, *minmax_scales(weight, grid), grid).codes
    assert torch.equal(quantized.codes[:, 5], nearest[:, 5])
    none = gptq(weight, torch.zeros(160, 160), grid, GptqOptions(scale_search="minmax", refinements=0))
    assert torch.equal(none.weight.codes, nearest)
    assert none.damping == GptqOptions().damping


def test_damping_is_raised_and_told_where_the_hessian_needs_it() -> None:
    weight, hessian = layer()
    bent = hessian - 0.05 * hessian.diagonal().mean() * torch.eye(160)
    result = gptq(weight, bent, Grid(4, 32, True), GptqOptions(damping=1e-3))
    assert result.damping == pytest.approx(0.1)
    with pytest.raises(ValueError, match="not positive definite, even with damping 10"):
        gptq(weight, -hessian, Grid(4, 32, True), GptqOptions())


def test_stacked_layers_are_quantized_as_alone() -> None:
    weight, hessian = layer()
    grid = Grid(4, 32, False)
    parts = gptq(weight, hessian, grid, GptqOptions()).weight.rows([10, 14])
    alone = gptq(weight[10:], hessian, grid, GptqOptions()).weight
    assert relative_error(weight[10:], parts[1].dequantize(), hessian) == pytest.approx(
        relative_error(weight[10:], alone.dequantize(), hessian), rel=0.02
    )


def test_hessian_sums_outer_products_over_batches() -> None:
    data = torch.randn(7, 5, 900, generator=torch.Generator().manual_seed(0))
    hessian = Hessian(900, equal_tokens=False)
    hessian.add(data[:3])
    hessian.add(data[3:])
    rows = data.flatten(0, 1).double()
    assert hessian.tokens == 35
    assert torch.allclose(hessian.matrix().double(), rows.T @ rows / 35, atol=1e-5)


def test_equal_tokens_forget_the_size_of_a_token() -> None:
    data = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    huge = data.clone()
    huge[0] *= 1000
    both = []
    for inputs in (data, huge):
        hessian = Hessian(8)
        hessian.add(inputs)
        both.append(hessian.matrix())
    assert torch.allclose(*both, atol=1e-5)
    assert both[0].diagonal().sum() == pytest.approx(8)
    silent = Hessian(8)
    silent.add(torch.zeros(2, 8))
    assert not silent.matrix().any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_held_weights_stay_zero_and_the_others_make_up_for_it(symmetric: bool) -> None:
    weight, hessian = layer(seed=5)
    held = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    pruned, grid = weight.masked_fill(held, 0), Grid(4, 32, symmetric)
    free, kept = (
        gptq(pruned, hessian, grid, GptqOptions()).weight,
        gptq(pruned, hessian, grid, GptqOptions(), held).weight,
    )
    rounded = round_to_nearest(pruned, *minmax_scales(pruned, grid), grid)
    assert (free.dequantize()[held] != 0).float().mean() > 0.1
    assert not kept.dequantize()[held].any()
    assert not rounded.dequantize()[held].any()
    errors = [relative_error(pruned, each.dequantize(), hessian) for each in (free, kept, rounded)]
    assert errors == sorted(errors)
    assert torch.equal(
        gptq(weight, hessian, grid, GptqOptions(), torch.zeros_like(held)).weight.codes,
        gptq(weight, hessian, grid, GptqOptions()).weight.codes,
    )


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        (Grid(4, 32, True), GptqOptions()),
        (Grid(3, 40, False), GptqOptions(activation_order=False, scale_search="mse")),
        (Grid(4, None, True), GptqOptions(scale_search="minmax", refinements=0)),
    ],
)
def test_layers_together_are_what_each_is_alone(grid: Grid, options: GptqOptions) -> None:
    weights, hessians = map(torch.stack, zip(*(layer(seed=seed) for seed in range(3)), strict=True))
    hessians[1] -= 0.02 * hessians[1].diagonal().mean() * torch.eye(160)
    found = gptq_together(weights, hessians, grid, options)
    alone = [gptq(weight, hessian, grid, options) for weight, hessian in zip(weights, hessians, strict=True)]
    assert found[1].damping > options.damping
    for together, one, weight, hessian in zip(found, alone, weights, hessians, strict=True):
        assert together.damping == one.damping
        assert (together.weight.codes != one.weight.codes).float().mean() < 1e-3
        errors = [relative_error(weight, each.weight.dequantize(), hessian) for each in (together, one)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_the_factor_is_that_of_the_inverse() -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(2400, 1200, generator=generator) * torch.logspace(0, -2, 1200)
    damped, factor, damping = damped_inverse_factor(inputs.T @ inputs / 2400, GptqOptions())
    order = damped.diagonal().argsort(descending=True, stable=True)
    expected = torch.linalg.cholesky(torch.linalg.inv(damped.double()[order][:, order]), upper=True)
    assert damping == GptqOptions().damping
    assert (factor - expected).abs().max() < 1e-6 * expected.abs().max()
    assert not factor.tril(-1).any()
