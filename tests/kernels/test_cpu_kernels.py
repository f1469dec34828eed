"""The CPU kernels of our own against float64, and how they come into being."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.environment import EXACT
from optkit.kernels.cpu import huge_pages, native
from optkit.kernels.cpu.coded_linear import CodedLinear, why_not_coded
from optkit.kernels.cpu.float_linear import FEW_ROWS, FloatLinear, use_float_kernels_, why_not_float
from optkit.kernels.cpu.native import STEP_ROWS, dense_linear, exact_products, packed_linear, why_not_native
from optkit.kernels.packed_linear import PackedWeight
from tests.support.packed_models import random_packed

compiled = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


IN_16_BITS = 3e-5
"""What rounding many rows of activations to 16 bits costs the shortest sums tried here."""


def check(found: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None, coded: bool = True) -> None:
    expected = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert found.shape == expected.shape
    assert found.dtype == rows.dtype
    assert bool(found.isfinite().all())
    most = rows.double().abs() @ weight.double().abs().T  # what the sums would be if nothing in them cancelled
    rounding = max(ROUNDING[rows.dtype], IN_16_BITS) if coded and len(rows) > STEP_ROWS else ROUNDING[rows.dtype]
    assert float(((found.double() - expected).abs() / most).max()) < rounding


@compiled
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size"),
    [(64, 128, 32), (1, 64, 64), (7, 192, 96), (33, 128, 128), (40, 48, 16), (16, 80, 80), (5, 544, 272)],
)
def test_codes_against_float64(bits: int, symmetric: bool, outputs: int, inputs: int, group_size: int) -> None:
    for shuffled in (False, True):
        weight, dense = random_packed(outputs, inputs, group_size, bits, symmetric, shuffled)
        for bias in (None, torch.randn(outputs)):
            layer = CodedLinear(weight, bias, torch.float32)
            for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 19, 41):
                rows = torch.randn(count, inputs)
                with torch.inference_mode():
                    check(layer(rows), rows, dense, bias)
                    with exact_products():
                        check(layer(rows), rows, dense, bias, coded=False)


@compiled
def test_a_variable_keeps_activations_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = random_packed(48, 256, 64, 4, False)
    layer, rows = CodedLinear(weight, None, torch.float32), torch.randn(STEP_ROWS + 1, 256)
    with exact_products():
        exact, said = layer(rows), native.precision()
    monkeypatch.setenv(EXACT, "1")
    assert torch.equal(layer(rows), exact)
    assert native.precision() == said == "float32"
    monkeypatch.setenv(EXACT, "0")
    assert native.precision() == f"float32 (x86: 16 bits above {STEP_ROWS} rows)"


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_activations_of_all_dtypes(dtype: torch.dtype) -> None:
    weight, dense = random_packed(48, 256, 64, 4, False)
    bias = torch.randn(48).to(dtype)
    layer = CodedLinear(weight, bias, dtype)
    for shape in ((256,), (1, 256), (2, 3, 256)):
        rows = torch.randn(*shape).to(dtype)
        found = layer(rows)
        assert found.shape == (*shape[:-1], 48)
        check(found.view(-1, 48), rows.view(-1, 256), dense, bias)
    strided = torch.randn(5, 512).to(dtype)[:, ::2]
    check(layer(strided), strided, dense, bias)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (5, 7), (1, 33), (131, 96), (6, 16), (48, 768)])
def test_floats_against_float64(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    for count in (1, 2, 3, 4, 7, STEP_ROWS, STEP_ROWS + 1, 95):
        rows = torch.randn(count, inputs)
        check(dense_linear(rows, weight), rows, weight)


@compiled
def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN
    try:
        weight, dense = random_packed(35, 64, 32, 4, False)
        for count in (1, 9, 130):
            rows = torch.randn(count, 64)
            check(CodedLinear(weight, None, torch.float32)(rows), rows, dense)
    finally:
        torch.use_deterministic_algorithms(False)


@compiled
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("count", [1, STEP_ROWS + 1])
def test_widest_sums_and_what_is_not_finite(bits: int, sign: int, count: int) -> None:
    """One group of all inputs; the widest codes beside the zero point that is furthest from them."""
    inputs, top, middle = 14_336, (1 << bits) - 1, 1 << (bits - 1)
    words = torch.full((1, inputs * bits // 32, 16), -1 if sign > 0 else 0, dtype=torch.int32)
    shifts = torch.full((1, 1, 16), -middle if sign > 0 else top - middle, dtype=torch.int8)
    rows = torch.ones(count, inputs)
    for size in (1.0, 2.0**100, 2.0**-100):
        found = packed_linear(rows * size, words, torch.ones(1, 1, 16), shifts, bits, 16)
        torch.testing.assert_close(found, torch.full((count, 16), sign * size * top * inputs), rtol=1e-5, atol=0)
    for nothing in (0.0, 1e-40):  # a subnormal number may become 0
        assert (packed_linear(rows * nothing, words, torch.ones(1, 1, 16), shifts, bits, 16).abs() < 1e-30).all()
    for broken in (torch.nan, torch.inf, -torch.inf):
        rows[-1, 3] = broken
        found = packed_linear(rows, words, torch.ones(1, 1, 16), shifts, bits, 16)
        assert not found[-1].isfinite().any()
        assert found[:-1].isfinite().all()


@compiled
def test_no_float_copy_is_held() -> None:
    weight, _ = random_packed(128, 256, 64, 4, False)
    held = sum(buffer.numel() * buffer.element_size() for buffer in CodedLinear(weight, None, torch.float32).buffers())
    assert held == 128 * 256 // 2 + 128 * 4 * (4 + 1)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_graph_under_torch_compile(dtype: torch.dtype) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = CodedLinear(random_packed(24, 64, 32, 4, False, True)[0], torch.randn(24), dtype)
            self.head = nn.Linear(24, 10).to(dtype)
            self.head.__class__ = FloatLinear

        def forward(self, rows: Tensor) -> Tensor:
            found: Tensor = self.head(F.silu(self.gate(rows)))
            return found

    model, rows = Gated().eval().requires_grad_(False), torch.randn(1, 3, 64).to(dtype)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(rows)
    torch.testing.assert_close(found, model(rows))


def test_reasons_against_coded() -> None:
    assert why_not_coded(random_packed(8, 64, 32, 4, True)[0], "cuda") == "optkit's CPU kernels run on CPUs"
    assert why_not_coded(random_packed(8, 64, 32, 3, True)[0], "cpu") == "optkit's CPU kernels have no 3 bits"
    assert (
        why_not_coded(random_packed(8, 60, 20, 4, True)[0], "cpu") == "groups of 20 inputs do not fill words of 8 codes"
    )
    weight = random_packed(8, 64, 32, 4, True)[0]
    uneven = torch.cat([torch.zeros(40), torch.ones(24)]).long()
    assert (
        why_not_coded(PackedWeight(weight.words, weight.scales, None, uneven, 4, 64), "cpu")
        == "its groups differ in size"
    )


def test_reasons_against_float() -> None:
    assert why_not_float(nn.Identity()) == "it is no plain linear layer"
    assert why_not_float(nn.Linear(4, 4).double()) == "optkit's CPU kernels take float32 and bfloat16 in CPU memory"


@compiled
def test_float_layers_take_the_kernel_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"head": nn.Linear(64, 40), "norm": nn.LayerNorm(64)})
    model.requires_grad_(False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert use_float_kernels_(model) == []
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    weight = model["head"].weight
    assert use_float_kernels_(model) == ["float: head uses optkit's CPU kernel"]
    assert type(model["head"]) is FloatLinear
    assert model["head"].weight is weight
    for count in (1, FEW_ROWS, FEW_ROWS + 1):
        rows = torch.randn(count, 64)
        check(model["head"](rows), rows, weight, model["head"].bias)
    share = nn.Linear(64, 40, bias=False)
    share.weight = nn.Parameter(weight[:20, :32].contiguous(), requires_grad=False)  # as a rank holds it
    share.__class__ = FloatLinear
    rows = torch.randn(2, 1, 32)
    check(share(rows), rows, share.weight, None)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`why_not_native` as in a new process, with an empty cache and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native.torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(native, "_register_shapes", lambda: None)
    monkeypatch.setattr(native, "_loaded", [])
    return native.why_not_native.__wrapped__


def test_without_a_compiler(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert fresh() == "optkit's CPU kernels need a C++ compiler, and there is no g++ or clang++"
    monkeypatch.setenv("CXX", "my-cxx")
    assert fresh() == "optkit's CPU kernels need a C++ compiler, and there is no my-cxx"


def test_a_compiler_that_fails(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess("g++", 1, "", "In file\nlinear.cpp:9: fatal error: no such header\n")

    monkeypatch.setattr(shutil, "which", lambda name: "my-g++")
    monkeypatch.setattr(native, "run", fail)
    assert fresh() == "my-g++ does not compile optkit's CPU kernels (linear.cpp:9: fatal error: no such header)"


def test_a_library_that_cannot_be_loaded_or_is_wrong(
    fresh: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Path) -> None:
        raise OSError("wrong ELF class")

    monkeypatch.setattr(native, "_compiled", lambda compiler: tmp_path / "x.so")
    monkeypatch.setattr(shutil, "which", lambda name: "my-g++")
    monkeypatch.setattr(native, "_is_right", lambda: False)
    assert fresh() == "optkit's CPU kernels, compiled by my-g++, do not compute what they should"
    monkeypatch.setattr(native.torch.ops, "load_library", refuse)
    assert fresh() == "optkit's CPU kernels cannot be compiled and loaded (wrong ELF class)"


@compiled
def test_a_library_is_compiled_once(fresh: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def make(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(native, "run", make)
    monkeypatch.setattr(native, "_try", lambda library: None)
    assert fresh() is None
    assert fresh() is None
    assert len(calls) == 1
    assert [path.suffix for path in (tmp_path / "optkit" / "kernels").iterdir()] == [".so"]


def _permissions(address: int) -> str:
    """Of the mapping of this process that an address lies in."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[1]
    raise AssertionError(f"no mapping holds {address:#x}")


@compiled
def test_weights_move_into_one_stretch_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, dense = random_packed(33, 64, 32, 4, False)
    embedding = nn.Embedding(40, 33).requires_grad_(False)
    head = nn.Linear(33, 40, bias=False)
    head.weight = embedding.weight  # tied
    head.__class__ = FloatLinear
    model = nn.ModuleDict({"embedding": embedding, "layer": CodedLinear(weight, None, torch.float32), "head": head})
    before = embedding.weight.clone()
    monkeypatch.setattr(huge_pages, "PAGE_BYTES", 1 << 20)
    huge_pages.into_huge_pages_(model)
    # too small to be moved
    assert model["layer"].codes.untyped_storage().data_ptr() != model["head"].weight.untyped_storage().data_ptr()
    monkeypatch.setattr(huge_pages, "PAGE_BYTES", 64)
    huge_pages.into_huge_pages_(model)
    layer = model["layer"]
    held = [layer.codes, layer.scales, layer.shifts, model["head"].weight]
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == 1
    assert not any(tensor.data_ptr() % 16 for tensor in held)
    if sys.platform == "linux":
        assert _permissions(layer.codes.data_ptr()) == "rw-p"  # shared ones ("rw-s") get no huge pages
    assert model["head"].weight is embedding.weight
    assert torch.equal(embedding.weight, before)
    rows = torch.randn(2, 64)
    check(layer(rows), rows, dense)
    monkeypatch.delattr(huge_pages.mmap, "MADV_HUGEPAGE")
    huge_pages.into_huge_pages_(model)
