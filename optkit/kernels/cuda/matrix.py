"""Weights as `linear.cu` streams them, and the launch of its kernels.

4 bits: the weight lies in tiles of 16 outputs x 128 inputs, lane by lane as tensor cores take them,
so that a warp loads 512 bytes at once. 8 and 16 bits: the weight lies as torch has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from optkit.algorithms.packing import pack
from optkit.kernels.cuda.nvrtc import Kernel, compiled
from optkit.kernels.cuda.schedule import (
    CHUNK,
    ROWS,
    Form,
    Schedule,
    choose_tiles,
    ordered_bytes,
    sums_bytes,
    token_tiles,
)
from optkit.kernels.packed_linear import PackedWeight

CODE_BASES = {torch.bfloat16: 128, torch.float16: 1024}
"""What the kernel adds to a code so that its bits are a float."""


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs] for `multiply`, on a CUDA device."""

    weight: Tensor
    """4 bits: int32 [tiles, chunks, 2, 32, 4]; 8 and 16 bits: [outputs, inputs]."""
    outputs: int
    inputs: int
    dtype: torch.dtype
    """Of x and y: bfloat16 or float16."""
    scales: Tensor | None = None
    """4 bits: float [tiles, chunks, groups of a chunk, 8, 2], those of outputs i and i + 8 side by
    side. 8 bits: float32 [outputs].
    """
    offsets: Tensor | None = None
    """4 bits: the same for code base + zero point; None if all zero points are 8. 8 bits: the scale
    of inputs, float32 [1]; None if each token has its own.
    """
    group_size: int = CHUNK
    bias: Tensor | None = None
    gelu: bool = False
    """Its gated outputs go through GELU, not SiLU."""

    @cached_property
    def form(self) -> Form:
        """What of it decides which kernel computes with it."""
        bits = 16 if self.scales is None else 4 if self.weight.dtype == torch.int32 else 8
        asymmetric, integer = bits == 4 and self.offsets is not None, self.weight.dtype == torch.int8
        return Form(bits, self.outputs, self.inputs, self.dtype, self.group_size, asymmetric, integer, self.gelu)

    def parts(self, sizes: list[int]) -> list[Matrix]:
        """Return the matrices of consecutive outputs, as views. `sizes` but the last are multiples
        of 16.
        """
        found, start = [], 0
        for size in sizes:
            if self.form.bits != 4:
                scales = None if self.scales is None else self.scales[start : start + size]
                cut = replace(self, weight=self.weight[start : start + size], scales=scales, outputs=size)
            else:
                tiles = slice(start // ROWS, -(-(start + size) // ROWS))
                scales = None if self.scales is None else self.scales[tiles]
                offsets = None if self.offsets is None else self.offsets[tiles]
                cut = replace(self, weight=self.weight[tiles], scales=scales, offsets=offsets, outputs=size)
            found.append(replace(cut, bias=None if self.bias is None else self.bias[start : start + size]))
            start += size
        return found


def why_not_tiled(weight: PackedWeight, dtype: torch.dtype, device: str) -> str | None:
    """Return why a packed weight cannot be a `Matrix`, None if it can."""
    chosen = torch.device(device)
    if chosen.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(chosen) < (8, 0):
        return "optkit's int4 kernel needs an NVIDIA GPU of compute capability 8.0"
    if weight.bits != 4:
        return f"optkit's int4 kernel has no {weight.bits} bits"
    if dtype not in CODE_BASES:
        return (
            "optkit's int4 kernel computes in bfloat16 and float16, and the model is "
            f"{str(dtype).removeprefix('torch.')}"
        )
    if weight.inputs % 8:
        return f"optkit's int4 kernel takes multiples of 8 inputs, not {weight.inputs}"
    size = weight.group_size
    if weight.groups > 1 and size not in (32, 64) and (size is None or size % CHUNK):
        return (
            f"optkit's int4 kernel has groups of 32, 64 and multiples of 128 inputs, not {size or 'of different sizes'}"
        )
    return None


def tiled(weight: PackedWeight, dtype: torch.dtype, bias: Tensor | None = None) -> Matrix:
    """Return a packed weight of 4 bits in tiles; `why_not_tiled` says for which there are none."""
    tiles, chunks = -(-weight.outputs // ROWS), -(-weight.inputs // CHUNK)
    words = weight.words if weight.group_of_input is None else pack(weight.grouped_codes(), 4, 1)
    padded = words.new_zeros(tiles * ROWS, chunks * CHUNK // 8)
    padded[: words.shape[0], : words.shape[1]] = words
    # output 16 tile + 8 half + g, word 16 chunk + 4 j + t  ->  [tile, chunk, half, g, t, j]
    codes = padded.view(tiles, 2, 8, chunks, 4, 4).permute(0, 3, 1, 2, 5, 4).reshape(tiles, chunks, 2, 32, 4)
    size = weight.inputs // weight.groups if weight.groups > 1 else chunks * CHUNK
    scales = _by_tile(weight.scales.to(dtype), size, tiles, chunks)
    offsets = (
        None
        if weight.zeros is None
        else _by_tile((weight.zeros.float() + CODE_BASES[dtype]).to(dtype), size, tiles, chunks)
    )
    return Matrix(
        codes.contiguous(),
        weight.outputs,
        weight.inputs,
        dtype,
        scales,
        offsets,
        size,
        None if bias is None else bias.to(dtype),
    )


def stacked(matrices: list[Matrix]) -> Matrix:
    """Return matrices of the same inputs as one, outputs one behind the other.
    All but the last have multiples of 16 outputs.
    """
    first = matrices[0]

    def joined(tensors: list[Tensor | None]) -> Tensor | None:
        return None if tensors[0] is None else torch.cat([tensor for tensor in tensors if tensor is not None])

    return replace(
        first,
        weight=torch.cat([matrix.weight for matrix in matrices]),
        outputs=sum(matrix.outputs for matrix in matrices),
        scales=joined([matrix.scales for matrix in matrices]),
        offsets=first.offsets if first.form.bits == 8 else joined([matrix.offsets for matrix in matrices]),
        bias=joined([matrix.bias for matrix in matrices]),
    )


def can_stack(matrices: list[Matrix]) -> bool:
    """Say whether matrices are of one form, so that they can be one."""
    forms = {(replace(matrix.form, outputs=0), matrix.bias is None) for matrix in matrices}
    scales = {None if matrix.form.bits != 8 or matrix.offsets is None else float(matrix.offsets) for matrix in matrices}
    return len(forms) == len(scales) == 1 and all(matrix.outputs % ROWS == 0 for matrix in matrices[:-1])


def multiply(
    matrix: Matrix,
    x: Tensor,
    y: Tensor,
    *,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    add: bool = False,
    gated: bool = False,
    schedule: Schedule | None = None,
    ordered: Tensor | None = None,
) -> None:
    """Write x W^T into y, float32 or x's dtype.
    x [tokens, inputs] of at most 32 tokens, y [tokens, outputs], both contiguous.

    `norm` [inputs]: x is RMS-normed by it first. `add`: the product is added to y. `gated`: y
    [tokens, outputs / 2] is silu(first half of the outputs) times the second. `ordered`: scratch
    memory for x, of `scratch_bytes`; made here if needed and not given.
    """
    tokens = x.shape[0]
    launch = launch_of(
        matrix.form, tokens, norm is not None, add, gated, y.dtype == torch.float32, schedule, x.get_device()
    )
    source, sums = (x, None) if launch.shared else _arrange(matrix, x, norm, epsilon, ordered)
    weights = (matrix.weight, matrix.scales, matrix.offsets, matrix.bias)
    arguments = (*weights, source, sums, norm, epsilon, y, matrix.outputs, tokens, launch.second_half)
    launch.kernel((launch.blocks, 1, 1), launch.threads, arguments, launch.shared_bytes)


@dataclass(frozen=True)
class Launch:
    """A compiled kernel and how it is launched for matrices of one form."""

    kernel: Kernel
    blocks: int
    threads: int
    shared_bytes: int
    shared: bool
    second_half: int
    """The first tile of the second half of the outputs, if they are gated."""


@cache
def launch_of(
    form: Form,
    tokens: int,
    norm: bool,
    add: bool,
    gated: bool,
    wide: bool,
    schedule: Schedule | None,
    device: int,
    choices: int = 0,
    groups: int = 1,
) -> Launch:
    """Return how so many tokens are multiplied; with `choices` so many of each of some groups of `experts.cu`."""
    properties: Any = torch.cuda.get_device_properties(device)
    tiles = choose_tiles(form, tokens, gated, int(properties.shared_memory_per_block_optin), schedule)
    chosen = tiles.schedule
    macros = form.macros(token_tiles(tokens), chosen) | {"CHOICES": choices or False, "ALONE": tokens == 1}
    macros |= {"GATED": gated, "RESIDUAL": add, "WIDE": wide, "SHARED": tiles.shared, "NORM": norm and tiles.shared}
    half = form.tiles // 2
    units = -(-half // (chosen.row_tiles // 2)) if gated else -(-form.tiles // chosen.row_tiles)
    return Launch(
        kernel=compiled("linear.cu", "linear", macros, device),
        blocks=min(units, -(-chosen.blocks * properties.multi_processor_count // groups)),
        threads=32 * chosen.warps,
        shared_bytes=tiles.shared_bytes,
        shared=tiles.shared,
        second_half=half if gated else 0,
    )


def dequantized(matrix: Matrix) -> Tensor:
    """Return a matrix of 4 or 16 bits as float [outputs, inputs]."""
    if matrix.form.bits == 16:
        return matrix.weight
    weight = torch.empty(matrix.outputs, matrix.inputs, dtype=matrix.dtype, device=matrix.weight.device)
    arguments = (matrix.weight, matrix.scales, matrix.offsets, weight, matrix.outputs)
    blocks = -(-matrix.form.tiles * matrix.form.chunks // 8)
    kernel = compiled("linear.cu", "dequantize", matrix.form.macros(), weight.get_device())
    kernel((blocks, 1, 1), 256, arguments)
    return weight


def scratch_bytes(form: Form, tokens: int) -> int:
    """Return what `multiply` needs at most as `ordered`: x in the kernel's order, and its sums."""
    return ordered_bytes(form, tokens) + sums_bytes(form, tokens)


def coded_rows(matrix: Matrix, x: Tensor, norm: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x, float [rows, inputs], normed and rounded as a matrix of 8 bits takes it, and its
    scales, float32 [rows].
    """
    codes, scales = torch.empty_like(x, dtype=matrix.weight.dtype), x.new_empty(len(x), dtype=torch.float32)
    arguments = (x, norm, epsilon, codes, scales, len(x), matrix.offsets)
    _arranging(matrix, x, norm, plain=True)((len(x), 1, 1), 256, arguments)
    return codes, scales


def _arrange(
    matrix: Matrix, x: Tensor, norm: Tensor | None, epsilon: float, ordered: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return x, normed and in the kernel's order, and its sums over inputs that share a scale; of 8
    bits the scales of tokens.
    """
    tokens = x.shape[0]
    if ordered is None:
        ordered = torch.empty(scratch_bytes(matrix.form, tokens), dtype=torch.uint8, device=x.device)
    sums = ordered[ordered_bytes(matrix.form, tokens) :]
    arguments = (x, norm, epsilon, ordered, sums, tokens, matrix.offsets)
    _arranging(matrix, x, norm, plain=False)((token_tiles(tokens) * 8, 1, 1), 256, arguments)
    return ordered, sums


def _arranging(matrix: Matrix, x: Tensor, norm: Tensor | None, plain: bool) -> Kernel:
    macros = matrix.form.macros() | {"PLAIN": plain, "NORM": norm is not None}
    return compiled("linear.cu", "arrange", macros, x.get_device())


def _by_tile(values: Tensor, group_size: int, tiles: int, chunks: int) -> Tensor:
    """float [outputs, groups] -> [tiles, chunks, groups of a chunk, 8, 2], padded with zeros."""
    outputs, groups = values.shape
    inside = max(1, CHUNK // group_size)
    group_of_place = torch.arange(chunks * inside, device=values.device) * (CHUNK // inside) // group_size
    padded = values.new_zeros(tiles * ROWS, chunks * inside)
    known = group_of_place < groups
    padded[:outputs, known] = values[:, group_of_place[known]]
    return padded.view(tiles, 2, 8, chunks, inside).permute(0, 3, 4, 2, 1).contiguous()
