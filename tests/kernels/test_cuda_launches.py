"""What products are launched with, on a CPU: as many and such arguments as their kernels take."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optkit.algorithms.eight_bit import FLOAT8, INT8
from optkit.kernels.cuda import finishing, matrix, wide
from optkit.kernels.cuda.finishing import Products, finish, finish_coded
from optkit.kernels.cuda.matrix import Matrix, coded_rows, dequantized, multiply, scratch_bytes, tiled
from optkit.kernels.cuda.nvrtc import defined
from optkit.kernels.cuda.wide import Lined, multiply_wide
from tests.kernels.test_cuda_kernels import example
from tests.support.eager_kernels import Launch

ROWS, OUTPUTS, INPUTS = 5, 256, 512


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched so far, which compute nothing."""
    names: list[str] = []
    sizes = {"shared_memory_per_multiprocessor": 228 << 10, "shared_memory_per_block_optin": 227 << 10}
    properties = SimpleNamespace(multi_processor_count=132, **sizes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def compiled(source: str, name: str, macros: dict[str, int], device: int) -> Launch:
        return Launch(source, name, defined(macros), lambda *_: names.append(name))

    for module, kept in ((matrix, "launch_of"), (wide, "_kernel"), (finishing, None)):
        monkeypatch.setattr(module, "compiled", compiled)
        if kept:
            monkeypatch.setattr(module, kept, getattr(module, kept).__wrapped__)
    return names


def matrix_of(weights: str) -> Matrix:
    if "4 bits" in weights:
        packed = example(OUTPUTS, INPUTS, 128, "symmetric" in weights)[0]
        return tiled(packed, torch.bfloat16, torch.ones(OUTPUTS))
    if weights == "floats":
        return Matrix(torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16), OUTPUTS, INPUTS, torch.bfloat16)
    codes = torch.ones(OUTPUTS, INPUTS).to((FLOAT8 if weights == "E4M3" else INT8).dtype)
    given = torch.ones(1) if weights == "int8" else None
    return Matrix(codes, OUTPUTS, INPUTS, torch.bfloat16, torch.ones(OUTPUTS), given)


@pytest.mark.parametrize("weights", ["4 bits", "4 bits, symmetric", "E4M3", "int8", "floats"])
def test_products_of_few_rows(weights: str, launched: list[str]) -> None:
    given = matrix_of(weights)
    norm = torch.ones(INPUTS, dtype=torch.bfloat16)
    for rows in (ROWS, 32):
        x, gated = (torch.ones(rows, width, dtype=torch.bfloat16) for width in (INPUTS, OUTPUTS // 2))
        scratch = torch.empty(scratch_bytes(given.form, rows), dtype=torch.uint8)
        multiply(given, x, gated, norm=norm, epsilon=1e-5, gated=True)
        multiply(given, x, torch.ones(rows, OUTPUTS), add=True, ordered=scratch)
    assert launched == ["linear"] * 2 + ["arrange", "linear"] * 2
    if "bits" in weights:
        launched.clear()
        dequantized(given)
        assert launched == ["dequantize"]


def test_products_of_many_rows_of_4_bits(launched: list[str]) -> None:
    given, x = matrix_of("4 bits"), torch.ones(40, INPUTS, dtype=torch.bfloat16)
    lined = Lined.empty(40, OUTPUTS // 2, x)
    multiply_wide(given, x, lined, norm=x[0], epsilon=1e-5, gated=True)
    multiply_wide(given, Lined.empty(40, INPUTS, x), torch.ones(40, OUTPUTS), add=True)
    finish(
        Products(given, torch.ones(40, OUTPUTS, dtype=torch.bfloat16)),
        x[:, : OUTPUTS // 2].clone(),
        add=False,
        gated=True,
    )
    assert launched == ["line_up", "wide", "wide", "finish"]


@pytest.mark.parametrize("weights", ["E4M3", "int8"])
def test_what_is_behind_products_of_codes(weights: str, launched: list[str]) -> None:
    given: Any = matrix_of(weights)
    codes, scales = coded_rows(given, torch.ones(ROWS, INPUTS, dtype=torch.bfloat16), None, 0.0)
    assert (codes.dtype, scales.shape) == (given.weight.dtype, (ROWS,))
    sums = torch.ones(ROWS, OUTPUTS, dtype=torch.int32 if weights == "int8" else torch.bfloat16)
    finish(Products(given, sums, scales), torch.ones(ROWS, OUTPUTS, dtype=torch.bfloat16), add=True, gated=False)
    behind = Matrix(given.weight[:, : OUTPUTS // 2], OUTPUTS, OUTPUTS // 2, torch.bfloat16, given.scales)
    assert finish_coded(Products(given, sums, scales), behind).codes.shape == (ROWS, OUTPUTS // 2)
    assert launched == ["arrange", "finish", "finish_coded"]
