"""Products of 4-bit weights and more rows than `linear.cu` takes at once: the launch of `wide.cu`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from optkit.kernels.cuda.matrix import Matrix
from optkit.kernels.cuda.nvrtc import Kernel, compiled
from optkit.kernels.cuda.schedule import CHUNK, ROWS, Form

CAPABILITY = (9, 0)
"""Of the GPUs that have the instructions, wgmma with a matrix in registers."""
SHARED_BYTES = 227 << 10
"""Of a multiprocessor there."""
KEPT_BYTES = 2 << 10
"""For a block's barriers and what CUDA takes itself."""
MOST_SPLIT = 8
"""Blocks that share the inputs: a cluster of so many runs on each such GPU."""
MOST_STAGES = 6
MOST_DEPTH = 3
REGISTERS = 92
"""Of a thread's 128, for sums and codes."""


@dataclass(frozen=True)
class Widths:
    """How blocks share a product."""

    tokens: int
    """Rows of x in a block: 32, 64 or 128."""
    warpgroups: int
    """2 or 4, each for 64 outputs; then 2 blocks or 1 run on a multiprocessor."""
    split: int
    """Blocks that share the inputs."""

    def units(self, form: Form, gated: bool) -> int:
        """Return in how many parts the outputs are made."""
        tiles, made = (form.tiles // 2, 2) if gated else (form.tiles, 4)
        return -(-tiles // (made * self.warpgroups))

    @property
    def stages(self) -> int:
        """Return the chunks of x that fit in the shared memory of a block; the kernel needs three."""
        return min(MOST_STAGES, (SHARED_BYTES * self.warpgroups // 4 - KEPT_BYTES) // (self.tokens * 2 * CHUNK))

    def depth(self, form: Form) -> int:
        """Return the chunks of codes that fit in a thread's registers beside its sums."""
        registers = 8 + max(1, CHUNK // form.group_size) * (2 if form.asymmetric else 1)
        fitting = (REGISTERS - self.tokens // 2) // registers
        return max(1, min(MOST_DEPTH, fitting))

    @property
    def shared_bytes(self) -> int:
        """Return the dynamic shared memory of a block: its stages, in the end its sums instead."""
        return max(self.stages * self.tokens * 2 * CHUNK, 4 * self.tokens * (4 * ROWS * self.warpgroups + 4))

    def macros(self, form: Form) -> dict[str, int]:
        return {
            **{"TOKENS": self.tokens, "WARPGROUPS": self.warpgroups, "SPLIT": self.split, "STAGES": self.stages},
            **{"DEPTH": self.depth(form), "GROUP": min(form.group_size, CHUNK)},
            **{"ASYMMETRIC": form.asymmetric, "BF16": form.dtype == torch.bfloat16, "GELU": form.gelu},
        }


@dataclass(frozen=True)
class Lined:
    """Rows of x in the order in which `wide.cu` reads them: see `line_up`."""

    memory: Tensor
    """[rows up to a whole block, inputs]."""
    rows: int

    def __len__(self) -> int:
        return self.rows

    @classmethod
    def empty(cls, rows: int, inputs: int, like: Tensor) -> Lined:
        """Return place for rows of `inputs`, a multiple of 128."""
        return cls(like.new_empty(-(-rows // tokens_of(rows)) * tokens_of(rows), inputs), rows)


def tokens_of(rows: int) -> int:
    """Return how many rows of x a block takes."""
    return 32 if rows <= 32 else 64 if rows <= 64 else 128


def can_be_wide(matrix: Matrix) -> bool:
    """Say whether `multiply_wide` can compute with a matrix."""
    device = matrix.weight.device
    return matrix.form.bits == 4 and matrix.outputs % 4 == 0 and torch.cuda.get_device_capability(device) == CAPABILITY


def multiply_wide(
    matrix: Matrix,
    x: Tensor | Lined,
    y: Tensor | Lined,
    *,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    add: bool = False,
    gated: bool = False,
    widths: Widths | None = None,
) -> None:
    """Write x W^T into y like `multiply`, for any number of rows. What is lined is not normed, nor added to."""
    form, rows, device = matrix.form, len(x), matrix.weight.get_device()
    if widths is None:
        properties: Any = torch.cuda.get_device_properties(device)
        widths = choose_widths(form, rows, gated, properties.multi_processor_count)
    blocks, half = -(-rows // widths.tokens), form.tiles // 2 if gated else 0
    lined = x.memory if isinstance(x, Lined) else _line_up(form, widths.tokens, x, norm, epsilon)
    made = y.memory if isinstance(y, Lined) else y
    lines = isinstance(y, Lined) and widths.tokens
    flags = {"RESIDUAL": add, "GATED": gated, "WIDE": made.dtype == torch.float32, "LINED": lines}
    weights = (matrix.weight, matrix.scales, matrix.offsets, matrix.bias)
    arguments = (*weights, lined, made, form.outputs, rows, half, form.chunks)
    grid, threads = (widths.units(form, gated) * blocks * widths.split, 1, 1), 128 * widths.warpgroups
    _kernel("wide", widths, form, device, **flags)(grid, threads, arguments, widths.shared_bytes)


def _line_up(form: Form, tokens: int, x: Tensor, norm: Tensor | None, epsilon: float) -> Tensor:
    rows = len(x)
    lined = torch.empty(-(-rows // tokens) * tokens * form.chunks * CHUNK, dtype=x.dtype, device=x.device)
    macros = {"NORM": norm is not None, "ROUNDS": -(-form.chunks * 16 // 256)}
    kernel = _kernel("line_up", Widths(tokens, 4, 1), form, x.get_device(), **macros)
    kernel((rows, 1, 1), 256, (x, norm, epsilon, lined, form.inputs // 8, form.chunks))
    return lined


@cache
def choose_widths(form: Form, rows: int, gated: bool, multiprocessors: int) -> Widths:
    """Return what is good on an H200: inputs are shared by as many blocks as run at once."""
    tokens = tokens_of(rows)
    widths = Widths(tokens, 2, 1) if tokens < 128 else Widths(128, 4, 1)
    blocks, room = widths.units(form, gated) * -(-rows // tokens), 4 // widths.warpgroups * multiprocessors
    # a cluster runs inside a group of 14 to 18 multiprocessors, so larger ones leave up to a fourth of them idle
    fitting = [each for each in range(2, MOST_SPLIT + 1) if blocks * each <= (room if each == 2 else room * 3 // 4)]
    return replace(widths, split=min(max(fitting, default=1), form.chunks))


@cache
def _kernel(name: str, widths: Widths, form: Form, device: int, **flags: int) -> Kernel:
    return compiled("wide.cu", name, widths.macros(form) | flags, device)
