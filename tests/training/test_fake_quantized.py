"""A layer that is trained through its rounding: the codes that it has, and its gradients."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optkit.algorithms.eight_bit import INT8, rounded_inputs
from optkit.algorithms.grid import Grid, minmax_scales, round_to_nearest
from optkit.algorithms.scale_search import search_scales
from optkit.training.fake_quantization import FakeQuantized, within_cells


def test_gradients_go_through_rounded_inputs_as_they_come() -> None:
    weight, grid = torch.randn(3, 16), Grid(8, None, True)
    start = round_to_nearest(weight, *minmax_scales(weight, grid), grid)
    layer, hidden = (
        FakeQuantized(weight, None, start, grid, "fixed", partial(rounded_inputs, numbers=INT8)),
        torch.randn(5, 16, requires_grad=True),
    )
    outer = torch.randn(5, 3)
    found = layer(hidden)
    found.backward(outer)
    steps = 2 * hidden.detach().abs().amax(-1, keepdim=True) / 255
    rounded = (hidden.detach() / steps).round().clamp(-128, 127) * steps
    assert torch.allclose(found, rounded @ layer.rounded().T, atol=1e-5)
    assert torch.allclose(hidden.grad, outer @ layer.rounded(), atol=1e-6)
    assert torch.allclose(layer.weight.grad, outer.T @ rounded, atol=1e-5)


@given(st.integers(0, 1000), st.sampled_from([2, 3, 4, 8]), st.booleans(), st.sampled_from(["minmax", "mse"]))
def test_it_begins_with_the_codes_that_it_is_given(seed: int, bits: int, symmetric: bool, search: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, grid = torch.randn(4, 32, generator=generator), Grid(bits, 16, symmetric, torch.float16)
    start = round_to_nearest(weight, *(minmax_scales if search == "minmax" else search_scales)(weight, grid), grid)
    moved = torch.randint(-1, 2, start.codes.shape, generator=generator) + start.codes.int()
    start = type(start)(moved.clamp(0, grid.top).to(torch.uint8), start.scales, start.zeros, bits)
    layer = FakeQuantized(weight, None, start, grid, "learned")
    assert torch.equal(layer.codes().codes, start.codes)
    assert torch.equal(layer.rounded(), start.dequantize())
    assert torch.equal(layer.codes().dequantize(), layer.rounded())
    near = within_cells(start.dequantize(), start, grid)
    assert torch.allclose(near, start.dequantize(), atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_are_those_of_the_formulas(symmetric: bool) -> None:
    torch.manual_seed(1)
    weight, grid = torch.randn(3, 16), Grid(3, 8, symmetric)
    start = round_to_nearest(weight, *search_scales(weight, grid), grid)
    layer = FakeQuantized(weight, None, start, grid, "learned")
    layer.weight.data.mul_(1.7)  # some are clamped now
    outer = torch.randn(3, 16)
    layer.rounded().backward(outer)
    held, growth = layer.weight.detach().requires_grad_(), torch.zeros_like(layer.growth).requires_grad_()
    scales = (layer.base * growth.exp()).unsqueeze(-1)
    position = held.view(3, 2, 8) / scales + layer.zeros.unsqueeze(-1)
    rounded = position.round()
    inside = (rounded >= 0) & (rounded <= 7)
    through = torch.where(inside, position + (rounded - position).detach(), rounded.clamp(0, 7).detach())
    ((through - layer.zeros.unsqueeze(-1)) * scales).view(3, 16).backward(outer)
    assert torch.allclose(layer.weight.grad, held.grad, atol=1e-6)
    assert torch.allclose(layer.growth.grad, growth.grad, atol=1e-5)
    assert not inside.all()
