"""Slopes that are written out, beside autograd of the formula."""

import torch

from optkit.algorithms.float_errors import with_slopes
from optkit.algorithms.smoothing import _largest_squares


def test_slopes_of_the_largest_squares_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    values, factors = torch.randn(50, 16).abs(), torch.rand(16).add(0.5).requires_grad_()
    values[3] = 0
    squares, slopes_of = _largest_squares(values, factors)
    found = with_slopes(squares, (factors, slopes_of))
    reference = (values * factors).amax(1).square().sum()
    torch.testing.assert_close(found, reference)
    slopes = (torch.autograd.grad(3 * each, factors)[0] for each in (found, reference))
    torch.testing.assert_close(*slopes)
