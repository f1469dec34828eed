"""Grids, scales and rounding against compressed-tensors and against brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.algorithms.grid import Grid, QuantizedWeight, minmax_scales, round_to_nearest
from optkit.algorithms.scale_search import search_scales


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def error(weight: torch.Tensor, quantized: QuantizedWeight, importance: torch.Tensor | None = None) -> torch.Tensor:
    difference = (quantized.dequantize() - weight).square()
    return (difference if importance is None else difference * importance).view(*quantized.scales.shape, -1).sum(-1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, None])
def test_rounding_equals_compressed_tensors(bits: int, symmetric: bool, group_size: int | None) -> None:
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = weights(24, 128)
    weight[3] = weight[3].abs() + 0.01  # a row without negative weights
    strategy = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    arguments = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    grouped = weight.view(24, -1, group_size or 128)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
    theirs = forward.fake_quantize(weight, scale, zero, arguments)
    grid = Grid(bits, group_size, symmetric)
    scales, zeros = minmax_scales(weight, grid)
    assert torch.equal(scales, scale)
    assert torch.equal(zeros - grid.middle, zero.float())
    assert torch.equal(round_to_nearest(weight, scales, zeros, grid).dequantize(), theirs)


@settings(max_examples=40)
@given(
    bits=st.sampled_from((2, 3, 4, 5, 6, 8)),
    symmetric=st.booleans(),
    seed=st.integers(0, 50),
    size=st.sampled_from((1e-6, 1.0, 1e4)),
)
def test_every_weight_is_near_its_value(bits: int, symmetric: bool, seed: int, size: float) -> None:
    weight, grid = weights(5, 64, seed) * size, Grid(bits, 16, symmetric)
    quantized = round_to_nearest(weight, *minmax_scales(weight, grid), grid)
    step = quantized.scales.repeat_interleave(16, 1)
    assert int(quantized.codes.max()) <= grid.top
    assert ((quantized.dequantize() - weight).abs() <= step * 0.5001).all()


@pytest.mark.parametrize(("size", "worse"), [(1.0, 1.01), (1e-3, 1.1), (1e-4, 1.6)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_in_float16_serve_small_weights_too(bits: int, symmetric: bool, size: float, worse: float) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)) * size
    errors = []
    for dtype in (torch.float16, torch.float32):
        grid = Grid(bits, 32, symmetric, dtype)
        for scales, zeros in (minmax_scales(weight, grid), search_scales(weight, grid)):
            assert torch.equal(scales.to(dtype).float(), scales)
            errors.append(
                float((round_to_nearest(weight, scales, zeros, grid).dequantize() - weight).norm() / weight.norm())
            )
    assert errors[0] < worse * errors[2]
    assert errors[1] < worse * errors[3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_scale_is_stored_as_zero_or_infinity(dtype: torch.dtype) -> None:
    stored = Grid(4, 32, True, dtype).stored(torch.tensor([1e-38, -1e-38, 1e-30, -3e38, 3e38]))
    assert (stored.isfinite() & (stored != 0)).all()
    assert torch.equal(stored.sign(), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]))
    assert torch.equal(stored.to(dtype).float(), stored)


def test_a_group_of_zeros_stays_zero() -> None:
    weight = torch.zeros(2, 32)
    for symmetric in (True, False):
        grid = Grid(4, 16, symmetric)
        for scales, zeros in (minmax_scales(weight, grid), search_scales(weight, grid)):
            assert not round_to_nearest(weight, scales, zeros, grid).dequantize().any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_search_never_does_worse_than_minmax(symmetric: bool) -> None:
    weight, importance, grid = (
        weights(16, 128),
        torch.rand(128, generator=torch.Generator().manual_seed(1)) ** 4,
        Grid(4, 32, symmetric),
    )
    plain = round_to_nearest(weight, *minmax_scales(weight, grid), grid)
    found = round_to_nearest(weight, *search_scales(weight, grid, importance), grid)
    assert (error(weight, found, importance) <= error(weight, plain, importance) * (1 + 1e-6)).all()
    assert error(weight, found, importance).sum() < 0.85 * error(weight, plain, importance).sum()


def test_importance_decides_which_errors_count() -> None:
    weight, grid = weights(64, 32), Grid(3, 32, True)
    weight[:, 0] *= 8
    outlier = torch.full((32,), 1e-3)
    outlier[0] = 1.0
    kept = round_to_nearest(weight, *search_scales(weight, grid, outlier), grid).dequantize()
    cut = round_to_nearest(weight, *search_scales(weight, grid, 1e-3 / outlier), grid).dequantize()
    assert (kept - weight)[:, 0].abs().mean() < 0.1 * (cut - weight)[:, 0].abs().mean()
    assert (cut - weight)[:, 1:].square().mean() < (kept - weight)[:, 1:].square().mean()


def test_negative_scale_serves_an_outermost_positive_weight() -> None:
    weight = torch.tensor([[8.0, *range(-7, 8)]])
    scales, zeros = search_scales(weight, Grid(4, 16, True))
    assert scales.item() == pytest.approx(-1, rel=0.05)
    assert zeros.item() == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_are_what_will_be_read_back(dtype: torch.dtype) -> None:
    grid = Grid(4, 16, True, dtype)
    scales, _ = search_scales(torch.cat([weights(8, 64), weights(1, 64) * 1e-7, weights(1, 64) * 1e8]), grid)
    assert torch.equal(scales.to(dtype).to(torch.float32), scales)
    assert (scales != 0).all()
    assert scales.to(dtype).isfinite().all()


def test_rows_are_cut_like_the_layers_that_were_stacked() -> None:
    weight, grid = weights(12, 32), Grid(4, 16, True)
    whole = round_to_nearest(weight, *minmax_scales(weight, grid), grid)
    parts = whole.rows([4, 8])
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), whole.dequantize())
    assert [len(part.codes) for part in parts] == [4, 8]
    assert whole.group_size == 16
