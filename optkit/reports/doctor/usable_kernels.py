"""What the doctor says of one part, and of the fast kernels: which can run here, and what is used without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch

from optkit.environment import find_compiler
from optkit.kernels.cpu.native import why_not_native
from optkit.kernels.float8_linear import why_not_scaled
from optkit.kernels.int8_linear import why_not_integers

Role: TypeAlias = Literal["stage", "eval", "engine", "backend", "kernel"]


@dataclass(frozen=True)
class Part:
    """One stage, eval, engine, backend or kernel."""

    role: Role
    name: str
    works: bool
    """It can run here."""
    note: str = ""
    """Its version or purpose, or why it cannot run."""
    remedy: str = ""
    """What to type so that it can."""


def kernel_parts() -> Iterator[Part]:
    """Yield every kernel for the CPU, and for the first GPU that torch sees.
    Compiles and tries tiny products out; imports torch.
    """
    yield from _of_cpu()
    if torch.cuda.is_available():
        yield from _of_gpu(torch.cuda.get_device_capability(0))


def _of_cpu() -> Iterator[Part]:
    fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    why = "" if fbgemm else "this torch was built without FBGEMM"
    yield _kernel("int2, int4, int8 on cpu (FBGEMM)", why, "without optkit's own weights are dequantized at each call")
    remedy = "" if find_compiler("C++") else "apt install g++"
    yield _kernel("optkit's own on cpu (C++)", why_not_native(), "FBGEMM's and torch's take their place", remedy)
    why_not, without = why_not_integers(1024, 1024, "cpu"), "int8 weights and inputs are multiplied as floats"
    yield _kernel("int8 products on cpu (torch._int_mm)", why_not, without)


def _of_gpu(capability: tuple[int, int]) -> Iterator[Part]:
    major, minor = capability
    why = "" if capability >= (8, 0) else f"it needs compute capability 8.0, and this GPU has {major}.{minor}"
    name, without = "int4 on cuda (optkit)", "weights are dequantized at each call"
    yield _kernel(name, why, without, "a GPU since Ampere")
    why_not, without = why_not_integers(1024, 1024, "cuda"), "int8 is multiplied as floats"
    yield _kernel("int8 products on cuda (torch._int_mm)", why_not, without)
    why_not, without = why_not_scaled(1024, 1024, "cuda"), "fp8 weights are widened at each call"
    yield _kernel("fp8 products on cuda (torch._scaled_mm)", why_not, without)
    why = "" if torch.backends.cuda.is_flash_attention_available() else "this torch was built without it"
    yield _kernel("flash attention on cuda (torch)", why, "attention by the efficient or the plain kernel")
    why = "" if find_spec("triton") else "it is not installed"
    yield _kernel("triton", why, "no `compile` on cuda", "pip install triton")
    why = "" if getattr(torch.cuda, "_compile_kernel", None) else "this torch has no torch.cuda._compile_kernel"
    yield _kernel("CUDA C++ compiled here (NVRTC)", why, "torch's own kernels", "pip install -U 'torch>=2.9'")


def _kernel(name: str, why_not: str | None, without: str, remedy: str = "") -> Part:
    """Return a kernel; if there is a reason why it does not run, with what happens without it."""
    return Part("kernel", name, False, f"{why_not}; {without}", remedy) if why_not else Part("kernel", name, True)
