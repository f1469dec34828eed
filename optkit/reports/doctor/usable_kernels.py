"""Which fast kernels can run here, and what is used without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class KernelPart:
    """A kernel on a device."""

    name: str
    why_not: str | None
    """None if it runs."""
    without: str
    """What happens if it does not."""
    remedy: str = ""


def kernel_parts(compiler: str | None) -> Iterator[KernelPart]:
    """Yield every kernel for the CPU, and for the first GPU that torch sees.
    Tries tiny products out; imports torch.
    """
    import torch

    yield from _of_cpu(compiler)
    if torch.cuda.is_available():
        yield from _of_gpu(torch.cuda.get_device_capability(0))


def _of_cpu(compiler: str | None) -> Iterator[KernelPart]:
    import torch

    from optkit.kernels.int4 import CPU_TILES
    from optkit.kernels.int8_linear import why_not_integers

    capability = torch.backends.cpu.get_cpu_capability()
    yield KernelPart(
        "int4 in bfloat16 on cpu (torch)",
        None if capability in CPU_TILES else f"torch's kernel is a scalar loop at {capability}",
        "weights are dequantized at each call",
    )
    fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    yield KernelPart(
        "int2, int4, int8 in float32 on cpu (FBGEMM)",
        None if fbgemm else "this torch was built without FBGEMM",
        "weights are dequantized at each call",
    )
    yield KernelPart(
        "compiled C++ on cpu",
        None if compiler else "no C++ compiler was found",
        "torch's own kernels, and no `compile`",
        "apt install g++",
    )
    yield KernelPart(
        "int8 products on cpu (torch._int_mm)",
        why_not_integers(1024, 1024, "cpu"),
        "int8 weights and inputs are multiplied as floats",
    )


def _of_gpu(capability: tuple[int, int]) -> Iterator[KernelPart]:
    import torch

    from optkit.kernels.float8_linear import why_not_scaled
    from optkit.kernels.int8_linear import why_not_integers

    yield KernelPart(
        "int4 in bfloat16 on cuda (torch)",
        _too_old(capability, (8, 0)),
        "weights are dequantized at each call",
        "a GPU since Ampere",
    )
    yield KernelPart(
        "int8 products on cuda (torch._int_mm)", why_not_integers(1024, 1024, "cuda"), "int8 is multiplied as floats"
    )
    yield KernelPart(
        "fp8 products on cuda (torch._scaled_mm)",
        why_not_scaled(1024, 1024, "cuda"),
        "fp8 weights are widened at each call",
    )
    yield KernelPart(
        "flash attention on cuda (torch)",
        None if torch.backends.cuda.is_flash_attention_available() else "this torch was built without it",
        "attention by the efficient or the plain kernel",
    )
    yield KernelPart(
        "triton", None if find_spec("triton") else "it is not installed", "no `compile` on cuda", "pip install triton"
    )
    compile_kernel: Callable[..., object] | None = getattr(torch.cuda, "_compile_kernel", None)
    yield KernelPart(
        "CUDA C++ compiled here (NVRTC)",
        None if compile_kernel else "this torch has no torch.cuda._compile_kernel",
        "torch's own kernels",
        "pip install -U 'torch>=2.9'",
    )


def _too_old(capability: tuple[int, int], least: tuple[int, int]) -> str | None:
    if capability >= least:
        return None
    return f"it needs compute capability {least[0]}.{least[1]}, and this GPU has {capability[0]}.{capability[1]}"
