"""Weights that make up for what was rounded in front of them, beside least squares in float64."""

import pytest
import torch

from optkit.algorithms import column_kernels
from optkit.algorithms.earlier_errors import Mismatch, _add_rounded_
from optkit.algorithms.hessian import mean_square


@pytest.mark.parametrize("added", [False, True])
def test_a_moved_weight_is_the_least_squares_solution(added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_kernels, "_compiled", None)  # loaded by a test before this one, it would round
    generator = torch.Generator().manual_seed(0)
    weight, wanted = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 12), (300, 12)))
    given = wanted + 0.3 * torch.randn(300, 12, generator=generator, dtype=torch.float64) * (1 + wanted[:, :1])
    lacking = torch.randn(300, 5, generator=generator, dtype=torch.float64) + given[:, :5] if added else None
    sizes = mean_square(wanted)
    counts = 1 / sizes.double()
    sums = Mismatch(12, "cpu")
    for part in (slice(0, 100), slice(100, 300)):
        each = None if lacking is None else lacking[part]
        sums.add_pair(given[part], wanted[part], sizes[part], each)

    hessian = (given * counts).T @ given / 300
    ridge = 0.05 * hessian.diagonal().mean() * 300
    target = wanted @ weight.T + (0 if lacking is None else lacking)
    # rows that hold the weight to where it was stand below the tokens
    left = torch.cat([given * counts.sqrt(), ridge.sqrt() * torch.eye(12, dtype=torch.float64)])
    right = torch.cat([target * counts.sqrt(), ridge.sqrt() * weight.T])
    expected = torch.linalg.lstsq(left, right).solution.T

    assert torch.allclose(sums.matrix().double(), hessian, rtol=1e-4, atol=1e-6)
    assert torch.allclose(sums.moved(weight.float(), 1.0, 0.05).double(), expected, atol=1e-4)
    half = sums.moved(weight.float(), 0.5, 0.05).double()
    assert torch.allclose(half, (weight + expected) / 2, atol=1e-4)


def test_a_weight_stays_if_nothing_was_rounded() -> None:
    weight, rows = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((3, 8), (40, 8)))
    sums = Mismatch(8, "cpu")
    sums.add_pair(rows, rows, None, torch.zeros(40, 3))
    assert torch.equal(sums.moved(weight, 1.0, 0.01), weight)


def test_a_weight_without_a_usable_hessian_stays() -> None:
    weight = torch.ones(2, 4)
    assert Mismatch(4, "cpu").moved(weight, 0.5, 0.0) is weight


def test_rounding_of_what_is_summed_cancels() -> None:
    left, right = (torch.randn(5000, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    total = torch.zeros(4, 4)
    _add_rounded_(total, left, right)
    off = (total.double() - left.double().T @ right.double()).abs()
    assert 0 < off.max() < 0.01 * left.norm() * right.norm() / 4
