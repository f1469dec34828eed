"""The expected error of floats in blocks and its slope, beside autograd of the formula."""

import pytest
import torch
from torch import Tensor

from optkit.algorithms.float_errors import AT_ONCE, float_errors, laid
from optkit.algorithms.smoothing import OF_FLOATS


def expected(values: Tensor, factors: Tensor, counts: Tensor, block: int, reach: float) -> Tensor:
    sizes = (values * factors).unflatten(1, (-1, block))
    largest = sizes.amax(2, keepdim=True).clamp(min=1e-30)
    units = (sizes / largest).detach() * reach
    steps = torch.where(units < 2, 0.5, torch.where(units < 4, 1.0, 2.0)) * largest / reach
    errors = torch.minimum(steps.square() / 12, sizes.square())
    if reach == 6:
        errors = errors.masked_fill(sizes == largest, 0)
    return (errors * counts.view(-1, block)).sum()


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("type", ["nvfp4", "mxfp4"])
def test_the_error_and_its_slopes_are_those_of_the_formula(
    type: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AT_ONCE, "cpu", at_once)
    torch.manual_seed(0)
    block, reach = OF_FLOATS[type].block or 0, OF_FLOATS[type].reach
    values = torch.randn(40, 3 * block).abs() ** 3  # many next to nothing
    values[7, :block] = 0
    values[8, 1] = values[8, 2] = 50.0
    factors = torch.exp(torch.randn(3 * block) / 2).requires_grad_()
    with torch.no_grad():
        factors[2] = factors[1]  # so that two of a block are the largest
    counts = torch.rand(3 * block).requires_grad_()
    wide = [each.detach().double().requires_grad_() for each in (factors, counts)]
    reference = expected(values.double(), wide[0], wide[1], block, reach)
    for given in (values, laid(values)):
        found = float_errors(given, factors, counts, block, reach)
        assert float(found.detach()) == pytest.approx(float(reference.detach()), rel=1e-5)
        slopes = torch.autograd.grad(3 * found, (factors, counts))
        for slope, known in zip(slopes, torch.autograd.grad(reference, wide, retain_graph=True), strict=True):
            assert torch.allclose(slope, 3 * known.float(), rtol=1e-4, atol=1e-4 * float(known.abs().max()))
