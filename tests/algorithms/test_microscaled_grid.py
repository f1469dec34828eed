"""4-bit floats as codes that learn: the same values, and the nearest ones."""

import pytest
import torch

from optkit.algorithms.microscaled_grid import MicroscaledGrid
from optkit.algorithms.microscaling import E2M1, nvfp4_global_scale, quantize_mxfp4, quantize_nvfp4
from optkit.training.fake_quantization import FakeQuantized, within_cells


@pytest.mark.parametrize("type", ["nvfp4", "mxfp4"])
def test_values_are_those_of_the_format(type: str) -> None:
    weight = 0.02 * torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    shared = nvfp4_global_scale([weight]) if type == "nvfp4" else None
    rounded = quantize_mxfp4(weight) if shared is None else quantize_nvfp4(weight, shared)
    grid = MicroscaledGrid.of(shared)
    coded = grid.to_codes(rounded)
    assert coded.dequantize().equal(rounded.dequantize())
    assert grid.stored(coded.scales).equal(coded.scales)
    assert grid.from_codes(coded).dequantize().equal(rounded.dequantize())
    assert grid.from_codes(coded).float_scales().equal(rounded.float_scales())
    layer = FakeQuantized(weight, None, coded, grid, "learned")
    assert layer.rounded().equal(rounded.dequantize())
    assert layer.codes().codes.equal(coded.codes)
    kept = within_cells(weight, coded, grid)
    moved = ~kept.isclose(weight)
    assert moved.float().mean() < 0.05  # near an edge between two values, and no further than that
    torch.testing.assert_close(kept, weight, rtol=0, atol=0.02 * 2 * rounded.float_scales().max().item())


def test_codes_are_the_nearest_of_all_values() -> None:
    grid, scales, zeros = MicroscaledGrid.of(None), torch.full((1, 1), 0.5), torch.full((1, 1), 12.0)
    values = torch.tensor(sorted({sign * value for value in E2M1 for sign in (-1, 1)}))
    assert [2 * value + 12 for value in values.tolist()] == list(grid.points)
    given = torch.linspace(-7, 7, 999).view(1, 1, -1)
    nearest = values[(given.flatten()[:, None] - values).abs().argmin(1)]
    assert grid.round(given, scales, zeros).flatten().equal(2 * nearest + 12)


def test_scales_are_stored_in_their_own_numbers() -> None:
    scales = torch.tensor([0.3, 1e-30, 5.0]) / 2
    assert MicroscaledGrid.of(None).stored(scales).mul(2).tolist() == [0.25, 2.0**-100, 4.0]
    shared = torch.tensor([100.0])
    stored = MicroscaledGrid.of(shared).stored(scales).mul(2) * shared
    assert stored.tolist() == pytest.approx([30.0, 2.0**-9, 448.0])
