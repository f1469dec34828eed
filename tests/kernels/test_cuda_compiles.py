"""Our CUDA kernels compile, which NVRTC says without a GPU: `pip install --no-deps nvidia-cuda-nvrtc==13.0.88`."""

import ctypes
import importlib.util
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
import torch

from optkit.algorithms.eight_bit import FLOAT8, INT8
from optkit.algorithms.microscaling import NUMBERS
from optkit.errors import OptkitError
from optkit.kernels.cuda import nvrtc
from optkit.kernels.cuda.columns import macros_of
from optkit.kernels.cuda.decoding import MOST_CLUSTERED
from optkit.kernels.cuda.experts import schedule_of
from optkit.kernels.cuda.nvrtc import SOURCES, compile_source, defined, kept_binary
from optkit.kernels.cuda.schedule import Form, Schedule
from optkit.kernels.cuda.wide import Widths
from tests.kernels.test_cuda_wide import WIDTHS

pytestmark = pytest.mark.slow

HEADS: list[dict[str, int]] = [
    {"HEADS": heads, "KV_HEADS": kv_heads, "SIZE": size, "ROTARY": rotary, "SHARES": shares, "STAGES": 1 + shares % 4}
    for heads, kv_heads, size, rotary, shares in (
        (32, 8, 128, 128, 8),
        (8, 4, 256, 256, 1),
        (24, 8, 128, 96, 4),
        (64, 8, 64, 64, 2),
        (16, 1, 128, 128, 32),
        (32, 32, 96, 96, 1),
    )
]
FORMS = {
    "4 bits": Form(4, 4096, 4096, torch.bfloat16, 32, asymmetric=True),
    "4 bits, symmetric": Form(4, 4096, 4096, torch.float16, 128, asymmetric=False),
    "E4M3": Form(8, 4096, 4096, torch.bfloat16, 128, asymmetric=False),
    "E4M3 in float16": Form(8, 4096, 576, torch.float16, 128, asymmetric=False, gelu=True),
    "int8": Form(8, 4096, 4096, torch.bfloat16, 128, asymmetric=False, integer=True),
    "16 bits": Form(16, 4096, 14336, torch.bfloat16, 128, asymmetric=False, gelu=True),
}
USES: list[tuple[int, tuple[str, ...]]] = [
    (1, ("SHARED", "NORM", "GATED")),
    (1, ("SHARED", "RESIDUAL")),
    (4, ("NORM", "WIDE")),
    (2, ("GATED",)),
]


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    found = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    libraries = sorted(
        path for place in places for path in place.glob("*/lib/libnvrtc*.so.13*") if ".alt." not in path.name
    )
    if not libraries:
        pytest.skip("the package nvidia-cuda-nvrtc is not there")
    for library in libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def compiles(source: str, macros: Mapping[str, int], architecture: str = "sm_90a") -> None:
    code = (SOURCES / "numbers.cuh").read_text(encoding="utf-8") + (SOURCES / source).read_text(encoding="utf-8")
    assert compile_source(code, defined(macros), architecture, source)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("flags", [*product(("", "BF16", "BF16 SCALED"), ("", "QK_NORM"), ("", "CAPPED"))], ids=str)
def test_attention(heads: dict[str, int], flags: tuple[str, ...]) -> None:
    given = dict.fromkeys(" ".join(flags).split(), 1)
    if 1 < heads["SHARES"] <= MOST_CLUSTERED and "CAPPED" not in given:
        given["CLUSTER"] = 1
    compiles("attention.cu", heads | given)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("token_tiles", "flags"), USES, ids=str)
def test_linear(form: str, token_tiles: int, flags: tuple[str, ...]) -> None:
    how = Schedule(8, 2, 2, 1, span=3)
    for more in ((), ("PLAIN",)) if FORMS[form].bits == 8 else ((),):
        compiles("linear.cu", FORMS[form].macros(token_tiles, how) | dict.fromkeys((*flags, *more), 1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flags", ["BF16 RESIDUAL", "WIDE SHARED_OUT"])
def test_experts(form: str, flags: str) -> None:
    compiles("experts.cu", {"EXPERTS": 128, "CHOICES": 8, "MOST": 8} | dict.fromkeys(flags.split(), 1))
    for more in ("GATED NORM", "ALONE"):
        how = schedule_of(FORMS[form], 1, gated=more != "ALONE")
        macros = dict.fromkeys(more.split(), 1) | {"SHARED": 1, "CHOICES": 8}
        compiles("linear.cu", FORMS[form].macros(1, how) | macros)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("flags", [("GATED",), ("GATED", "GELU", "NORM"), ("RESIDUAL",), ("WIDE",)], ids=str)
def test_wide(widths: Widths, flags: tuple[str, ...]) -> None:
    form = FORMS["4 bits" if "GATED" in flags else "4 bits, symmetric"]
    compiles("wide.cu", widths.macros(form) | dict.fromkeys(flags, 1))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_exchange(ranks: int, architecture: str) -> None:
    for flags in ({}, {"BF16": 1, "RESIDUAL": 1}, {"BF16": 1, "SCALED": 512}):
        compiles("exchange.cu", {"RANKS": ranks, "RANK": ranks - 1, "PACKETS": 262400} | flags, architecture)


@pytest.mark.parametrize("numbers", ["", "BF16", "INTEGER", "INTEGER BF16"])
def test_what_is_behind_a_product(numbers: str) -> None:
    for flags in ("GATED", "GATED GELU", "RESIDUAL", "WIDE"):
        named = dict.fromkeys(f"{numbers} {flags}".split(), 1)
        coded = {"BITS": 8, "WIDTH": 4096, "THREADS": 448, "ROUNDS": 4, "NORM": 1} | named
        for more in (("SCALED",),) if "INTEGER" in numbers else ((), ("SCALED",)):
            compiles("finish.cu", coded | dict.fromkeys(more, 1))
        compiles("finish.cu", {"BITS": 16} | {name: 1 for name in named if name != "INTEGER"})


@pytest.mark.parametrize(
    "macros", [{}, {"DESCEND": 1}, *map(macros_of, (NUMBERS, FLOAT8.numbers, INT8.numbers))], ids=str
)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_columns(macros: dict[str, int], architecture: str) -> None:
    compiles("columns.cu", macros, architecture)


def test_tokens_and_older_gpus() -> None:
    compiles("tokens.cu", {"BF16": 1, "WIDTH": 4096, "VOCABULARY": 128256})
    compiles("linear.cu", FORMS["int8"].macros() | {"SHARED": 1}, "sm_80")
    compiles("attention.cu", HEADS[0], "sm_80")


def test_the_message_shows_errors_before_warnings() -> None:
    code = "void f() { int unused; }\nthis is no C++;"
    with pytest.raises(OptkitError, match=r"NVRTC cannot compile it\. [^;]*error"):
        compile_source(code, {}, "sm_90", "nothing.cu")


def test_a_kernel_is_compiled_once_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given: tuple[str, dict[str, int], str] = ('extern "C" __global__ void f(int* x) { *x = A; }', {"A": 1}, "sm_90a")
    first = kept_binary(*given, "f.cu")
    (kept,) = (tmp_path / "optkit" / "cuda_kernels").iterdir()
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: b"another")
    assert first == kept.read_bytes() == kept_binary(*given, "f.cu")
    assert kept_binary(given[0], {"A": 2}, "sm_90a", "f.cu") == b"another"
    assert kept_binary(given[0], {"A": 1}, "sm_90", "f.cu") == b"another"
    kept.write_bytes(first[:-1])
    assert kept_binary(*given, "f.cu") == b"another", "it was cut off"


def test_what_cannot_be_kept_is_compiled_each_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept_binary('extern "C" __global__ void f() {}', {}, "sm_90a", "f.cu")
