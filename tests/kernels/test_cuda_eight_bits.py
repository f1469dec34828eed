"""Products of 8-bit codes on a GPU against float64, and what is behind them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.algorithms.eight_bit import FLOAT8, INT8, NumberFormat, round_inputs
from optkit.kernels.cuda import scaled_products
from optkit.kernels.cuda.finishing import finish_coded
from optkit.kernels.cuda.matrix import Matrix, coded_rows
from optkit.kernels.cuda.step_products import code_products, step_product
from tests.kernels.test_cuda_kernels import difference

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _scaled_without_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_products, "FEWEST_ROWS", 1)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (4096, 4096), (80, 576), (96, 14336)])
@pytest.mark.parametrize("numbers", [FLOAT8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_8_bits_are_those_of_codes(
    outputs: int, inputs: int, numbers: NumberFormat, dtype: torch.dtype, static: bool, biased: bool
) -> None:
    torch.manual_seed(outputs + inputs)
    limit = 1e-2 if dtype == torch.bfloat16 else 5e-3  # tensor cores add E4M3 products with 14 bits
    codes = numbers.round(torch.randn(outputs, inputs, device="cuda") * numbers.reach / 4)
    scales = torch.rand(outputs, device="cuda") + 0.5
    given = torch.full((1,), 5.0 / numbers.reach, device="cuda") if static else None
    bias = torch.randn(outputs, device="cuda").mul_(biased).to(dtype)
    matrix = Matrix(codes, outputs, inputs, dtype, scales / numbers.reach, given, bias=bias if biased else None)
    exact = codes.double() * (scales / numbers.reach).double()[:, None]
    for tokens in (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 128, 256):
        x = torch.randn(tokens, inputs, device="cuda").to(dtype)
        norm = (torch.rand(inputs, device="cuda") + 0.5).to(dtype)
        normed = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * norm.float()).to(dtype)
        before = torch.randn(tokens, outputs, device="cuda").to(dtype)
        added, wide = before.clone(), torch.full((tokens, outputs), torch.nan, device="cuda")
        step_product(matrix, x, added, add=True)
        step_product(matrix, x, wide, norm=norm, epsilon=1e-5)

        def rounded(rows: Tensor) -> Tensor:
            if given is None:
                found, token_scales = round_inputs(rows.float(), numbers)
                return found.double() * token_scales.double() @ exact.T + bias.double()
            return numbers.round(rows.float() / given).double() * given.double() @ exact.T + bias.double()

        assert difference(added, before.double() + rounded(x)) < limit
        assert difference(wide, rounded(normed)) < limit
        if outputs % 32 == 0:
            gated, full = torch.full((tokens, outputs // 2), torch.nan, dtype=dtype, device="cuda"), rounded(normed)
            step_product(matrix, x, gated, norm=norm, epsilon=1e-5, gated=True)
            expected = F.silu(full[:, : outputs // 2]) * full[:, outputs // 2 :]
            assert difference(gated, expected) < 2 * limit


@pytest.mark.parametrize(("width", "behind"), [(4096, 14336), (576, 208), (64, 4096)])
@pytest.mark.parametrize("numbers", [FLOAT8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_codes_are_left_as_the_codes_of_the_next_product(
    width: int, behind: int, numbers: NumberFormat, dtype: torch.dtype, biased: bool
) -> None:
    torch.manual_seed(width)
    next_matrices = []
    for inputs, static in ((behind, False), (width, True)):
        given = torch.full((1,), 5.0 / numbers.reach, device="cuda") if static else None
        codes = numbers.round(torch.randn(32, inputs, device="cuda"))
        next_matrices.append(Matrix(codes, 32, inputs, dtype, torch.ones(32, device="cuda"), given))
    for rows in (33, 500):
        x, before = (torch.randn(rows, width, device="cuda").to(dtype) for _ in range(2))
        norm = (torch.rand(width, device="cuda") + 0.5).to(dtype)
        for outputs, added in ((2 * behind, None), (width, before)):
            codes = numbers.round(torch.randn(outputs, width, device="cuda") * numbers.reach / 4)
            scales, bias = (torch.rand(outputs, device="cuda") / numbers.reach for _ in range(2))
            matrix = Matrix(codes, outputs, width, dtype, scales, bias=bias.to(dtype) if biased else None)
            next_matrix, how = (
                next_matrices[added is not None],
                {} if added is None else {"norm": norm, "epsilon": 1e-5},
            )
            y = x.new_empty(rows, behind) if added is None else before.clone()
            step_product(matrix, x, y, gated=added is None, add=added is not None)
            apart = coded_rows(next_matrix, y, how.get("norm"), 1e-5)
            found = finish_coded(code_products(matrix, x), next_matrix, added, **how)  # type: ignore[arg-type]
            exact = y.double()
            if added is not None:
                exact *= torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * norm.double()
            errors = [
                difference(each.double() * of_rows.double()[:, None], exact)
                for each, of_rows in ((found.codes, found.scales), apart)
            ]
            assert errors[0] < 1.05 * errors[1]
            if added is not None:
                assert difference(added, y.double()) < 1e-3
