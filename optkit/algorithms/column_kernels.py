"""The loops of GPTQ and of coordinate descent in CUDA, or those of a block of inputs in C++.
The search for scales is one launch of Triton for all that are tried.

Outputs do not depend on each other, so each program takes a few of them and walks over the inputs
of the block one after another; the same loops in torch launch about ten small kernels for each
input. Tensors are [in, out], float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optkit.algorithms.tensor_cores import has_tensor_cores

WALK = "optkit.kernels.cuda.columns:walk"
"""What rounds and descends on a GPU: a name, for kernels lie above this. `walks` says of any GPU whether they
run there. Those of a CPU need a compiler; once they compute right, `use_compiled` hands them in.
"""
WEIGHTS = 4096
"""Weights of a program that searches scales, if a group has no more."""
TOGETHER = 128
"""Outputs of a program that multiplies steps."""
GROUPS = (16, 32, 64, 128)
"""Inputs of a group that it takes."""
FIRST = (9, 0)
"""The compute capability whose memory on the chip holds what it reads ahead."""

_compiled: Any = None


class Numbers(NamedTuple):
    """Numbers without zero points; those between two powers of two are equally far apart."""

    mantissa: int
    """How many times a power of two is halved for the steps up to the next one."""
    least: int
    """The exponent below which steps are no smaller."""
    lowest: int
    highest: int


def use_compiled(operators: Any) -> None:
    """Let CPUs compute by these operators: optkit/kernels/cpu/columns.cpp, once it is loaded."""
    global _compiled
    _compiled = operators


def usable(tensor: Tensor) -> bool:
    """Say whether the kernels can run where a tensor is: on a CUDA device with Triton installed, or on a
    CPU for which they are compiled.
    """
    return find_spec("triton") is not None if tensor.is_cuda else compiled(tensor)


def compiled(tensor: Tensor) -> bool:
    """Say whether a tensor is on a CPU for which the kernels are compiled."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and _compiled is not None


def walks(tensor: Tensor) -> bool:
    """Say whether `round_columns` and `descend_columns` can run where a tensor is: on an NVIDIA GPU with
    tensor cores for bfloat16.
    """
    return torch.version.cuda is not None and tensor.dtype == torch.float32 and has_tensor_cores(tensor)


def multiplies_bfloat16(tensor: Tensor) -> bool:
    """Say whether `add_gram_` can run where a tensor is: on a CPU with products of bfloat16."""
    return tensor.device.type == "cpu" and hasattr(_compiled, "add_gram_")


def add_gram_(total: Tensor, rows: Tensor, equal_tokens: bool) -> None:
    """Add x x^T over rows x, float [n, in], to the lower triangle of a total, float32 [in, in].
    `equal_tokens` divides each row by its root mean square.

    Rows are rounded to bfloat16, their products added in float32. Over 4,096 rows an element is off by
    4e-5 of the root of its diagonal elements' product, over more rows by less in proportion to the root
    of their number.
    """
    _compiled.add_gram_(total, rows.float().contiguous(), equal_tokens)


def round_columns(rest: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, numbers: int | Numbers) -> Tensor:
    """Return the codes of GPTQ, float [..., in, out], for weights `rest` [..., in, out] that are used up.
    They are integers up to the one given, or numbers for which `zeros` mean nothing.

    scales, zeros: float [..., in, out]; factor: the inverse Hessian's upper Cholesky factor [..., in, in].
    """
    return _walk()(False, rest, scales, zeros, factor, numbers)


def descend_columns(gradient: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, top: int) -> Tensor:
    """Return better codes, float [..., in, out], for a gradient that is used up.

    codes, scales: float [..., in, out]; hessian: float [..., in, in].
    """
    return _walk()(True, gradient, scales, codes, hessian, top)


@cache
def _walk() -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = resolve_name(WALK)
    return found


def round_block(values: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return codes and errors, float [..., inputs, out], of one block of GPTQ, on a CPU.

    values, scales, zeros: float [..., inputs, out]; factor: the block's part of the inverse
    Hessian's upper Cholesky factor [..., inputs, inputs].
    """
    return _compiled.round_block(*_contiguous(values, scales, zeros, factor), top)  # type: ignore[no-any-return]


def descend_block(gradient: Tensor, codes: Tensor, scales: Tensor, hessian: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Descend one block on a CPU: return new codes and each weight's move, float [..., inputs, out].

    gradient, codes, scales: float [..., inputs, out]; hessian: the block's part of it, float [...,
    inputs, inputs].
    """
    return _compiled.descend_block(*_contiguous(gradient, codes, scales, hessian), top)  # type: ignore[no-any-return]


def search_groups(
    grouped: Tensor, importance: Tensor, tried: Tensor, exact: Tensor, shifts: int, top: int
) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, float [out, groups], with the least squared error tried.

    grouped: float [out, groups, group_size]; importance: float [1, groups, group_size]; tried:
    scales, float [candidates, out, groups]; exact: zero points, float [out, groups], of which the
    first so many of +0, -1 and +1 are tried.
    """
    held = _contiguous(grouped, importance, tried, exact)
    if not grouped.is_cuda and _compiled:
        return _compiled.search_groups(*held, shifts, top)  # type: ignore[no-any-return]
    from optkit.algorithms.triton_columns import search_kernel

    scales, zeros = torch.empty_like(exact), torch.empty_like(exact)
    rows, size = exact.numel(), grouped.shape[-1]
    padded = 1 << (size - 1).bit_length()
    width = max(1, WEIGHTS // padded)
    with torch.cuda.device_of(grouped):
        search_kernel[-(-rows // width),](
            *held, scales, zeros, rows, exact.shape[1], size, len(tried), float((top + 1) // 2), float(top),
            padded=padded, width=width, shifts=shifts, num_warps=4 if padded <= WEIGHTS else 8,
        )  # fmt: skip
    return scales, zeros


def solves_equations(tensor: Tensor) -> bool:
    """Say whether `refit_scales` can run where a tensor is: on a CPU for which it is compiled."""
    return not tensor.is_cuda and usable(tensor)


def refit_scales(pull: Tensor, hessian: Tensor, steps: Tensor, scales: Tensor, ridge: float) -> Tensor:
    """Return what `refinement.refit_scales` does."""
    return _compiled.refit_scales(*_contiguous(pull, hessian, steps, scales), ridge)  # type: ignore[no-any-return]


def multiplies_steps(hessian: Tensor, groups: int) -> bool:
    """Say whether `normal_equations` can run where a Hessian is, for so many groups of its inputs."""
    if not (hessian.is_cuda and hessian.dtype == torch.float32 and usable(hessian)):
        return False
    return hessian.shape[-1] // groups in GROUPS and torch.cuda.get_device_capability(hessian.device) >= FIRST


def normal_equations(hessian: Tensor, groups: int, steps: Tensor) -> Tensor:
    """Return the lower triangles of steps^T hessian steps, float [..., out, groups, groups], summed over the
    inputs of each group; steps: whole numbers up to 256, float [..., in, out]; hessian: float [..., in, in].
    """
    import triton.language as tl

    from optkit.algorithms.triton_columns import normal_kernel

    *layers, inputs, outputs = steps.shape
    normal = steps.new_zeros(*layers, outputs, groups, groups)
    grid = (-(-outputs // TOGETHER), groups, normal[..., 0, 0, 0].numel())
    apart = steps.stride(0) if layers else 0
    with torch.cuda.device_of(hessian):
        normal_kernel[grid](
            hessian.contiguous(), steps, normal, inputs, outputs, steps.stride(-2), apart,
            number=tl.bfloat16 if hessian.is_cuda else tl.float32,  # Triton's interpreter multiplies no other
            size=inputs // groups, width=TOGETHER, num_warps=8, num_stages=3,
        )  # fmt: skip
    return normal


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]
