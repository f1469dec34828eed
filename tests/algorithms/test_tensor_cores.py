"""What tensor cores add up beside the same in float64; on a CPU, what they are given."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from optkit.algorithms import refinement
from optkit.algorithms.hessian import Hessian, exact_factors, float_factors, mean_square
from optkit.algorithms.tensor_cores import has_tensor_cores, product


@pytest.mark.parametrize("equal_tokens", [True, False])
def test_factors_for_tensor_cores_are_as_good_as_float32(equal_tokens: bool) -> None:
    widths = torch.rand(48, generator=torch.Generator().manual_seed(1)) ** 4 * 100
    rows = (torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * widths).bfloat16()
    sizes = mean_square(rows) if equal_tokens else None
    scaled = rows.double() / (rows.double().square().mean(-1, keepdim=True).sqrt() if equal_tokens else 1)
    expected, most = scaled.T @ scaled, scaled.abs().T @ scaled.abs()
    for factors, off in ((exact_factors, 2.0**-17 if equal_tokens else 0), (float_factors, 2.0**-21)):
        found = sum(left.double().T @ right.double() for left, right in factors(rows, sizes))
        assert ((found - expected).abs() <= off * most + 1e-12 * most).all()


def test_products_with_steps_are_exact_on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(600, 96, generator=torch.Generator().manual_seed(0))
    hessian, steps = rows.T @ rows / 600, torch.randint(-255, 256, (96, 5)).float()
    monkeypatch.setattr(torch, "mm", lambda left, right, out_dtype: left.double() @ right.double())
    ours, theirs = (each(hessian, 3) for each in (refinement._exact_product, refinement._product))
    for group, part in enumerate(steps.split(32)):
        end = group * 32 + 32
        exact = hessian.double()[:end, group * 32 : end] @ part.double()
        torch.testing.assert_close(ours(group, part), exact, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(theirs(group, part).double(), exact, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_that_only_emulate_bfloat16_keep_float32(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fast: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    there = SimpleNamespace(is_cuda=True, device="cuda:0")
    assert has_tensor_cores(cast(torch.Tensor, there)) is fast
    assert not has_tensor_cores(torch.zeros(1))


@pytest.mark.gpu
def test_a_product_on_tensor_cores() -> None:
    left, right = torch.randn(300, 9000, device="cuda"), torch.randn(9000, 40, device="cuda")
    exact = left.double() @ right.double()
    assert (product(left, right).double() - exact).norm() < 3e-5 * exact.norm()
    assert torch.equal(product(left.double(), right.double()), exact)


@pytest.mark.gpu
def test_a_hessian_on_tensor_cores() -> None:
    rows = torch.randn(6000, 1500, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    hessian = Hessian(1500, "cuda")
    hessian.add(rows[:3000])
    hessian.add(rows[3000:])
    scaled = rows.double() / rows.double().square().mean(-1, keepdim=True).sqrt()
    expected = scaled.T @ scaled / 6000
    assert (hessian.matrix().double() - expected).norm() < 5e-5 * expected.norm()
