"""E4M3 floats or 8-bit integers with scales: a value is `code * scale`; tiles share a scale.

compressed-tensors 0.19 keeps weights so in the formats float-quantized and int-quantized;
`weight_scale` is
    float [1] for a whole weight (strategy tensor), [out, 1] (channel) or [ceil(out / 128), ceil(in / 128)] (block).
Activations are rounded the same way, with one scale for all of them, for each token, or for 128
inputs of a token (vLLM, DeepSeek-V3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from optkit.algorithms.column_kernels import Numbers
from optkit.algorithms.threads import one_thread

Granularity: TypeAlias = Literal["tensor", "channel", "block"]
BLOCK = 128
"""Outputs and inputs of a tile of block-wise weights, and inputs of a group of activations."""
STEPS = 20
"""Scales tried."""
SMALLEST = 0.6
"""The smallest scale that is tried, as a fraction of the one that reaches every value."""
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Values searched at a time: few enough to stay in a core's cache, enough to fill a GPU."""
TINY = 2.0**-100
"""The smallest scale; 2^-20 in float16, which has no smaller number of more than four bits."""


@dataclass(frozen=True)
class NumberFormat:
    """A set of 8-bit numbers."""

    dtype: torch.dtype
    numbers: Numbers
    reach: float
    """What the largest value of a tile is mapped to."""

    def round(self, values: Tensor) -> Tensor:
        """Return the nearest numbers of the format, ties to even, cut at its ends; in its dtype."""
        cut = values.clamp(self.numbers.lowest, self.numbers.highest)
        return (cut if self.dtype.is_floating_point else cut.round_()).to(self.dtype)


FLOAT8 = NumberFormat(torch.float8_e4m3fn, Numbers(mantissa=3, least=-6, lowest=-448, highest=448), 448.0)
"""E4M3 of the Open Compute Project's 8-bit floats: no infinities, 448 is the largest."""
INT8 = NumberFormat(torch.int8, Numbers(mantissa=7, least=7, lowest=-128, highest=127), 127.5)
"""Signed integers; as in compressed-tensors the scale is 2 max|x| / 255, so the largest value may
be cut by half a step.
"""


def tile_of(granularity: Granularity, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns that share a scale."""
    outputs, inputs = shape
    return {"tensor": (outputs, inputs), "channel": (1, inputs), "block": (BLOCK, BLOCK)}[granularity]


def amax_scales(values: Tensor, tile: tuple[int, int], numbers: NumberFormat, scale_dtype: torch.dtype) -> Tensor:
    """Return the scales that reach every value, float [tiles of rows, tiles of columns].
    They are rounded to `scale_dtype`; a tile of zeros has 1.

    values: float [rows, columns].
    """
    largest = _tiled(values, tile).abs().amax((1, 3))
    # CUDA multiplies by the reciprocal of a Python number
    return _stored(largest / largest.new_tensor(numbers.reach), scale_dtype)


def search_scales(values: Tensor, tile: tuple[int, int], numbers: NumberFormat, scale_dtype: torch.dtype) -> Tensor:
    """Return the fractions of `amax_scales` with the least squared rounding error.

    values: float [rows, columns].
    """
    rows = tile[0] * max(1, CHUNK[values.device.type] // (values.shape[1] * tile[0]))
    with one_thread():
        return torch.cat([_search(part, tile, numbers, scale_dtype) for part in values.split(rows)])


def quantize(values: Tensor, scales: Tensor, tile: tuple[int, int], numbers: NumberFormat) -> Tensor:
    """Return the codes, [rows, columns] in the format's dtype, of float values [rows, columns]."""
    return _untiled(numbers.round(_tiled(values, tile) / scales[:, None, :, None]), values.shape)


def dequantize(codes: Tensor, scales: Tensor, tile: tuple[int, int]) -> Tensor:
    """Undo `quantize`: float [rows, columns], in the dtype of the scales."""
    floats = float8_values(codes, scales.dtype) if codes.dtype == FLOAT8.dtype else codes.to(scales.dtype)
    return _untiled(_tiled(floats, tile) * scales[:, None, :, None], codes.shape)


def round_inputs(rows: Tensor, numbers: NumberFormat, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Round activations, float32 [tokens, in], with a scale per token or per `group` inputs of it.

    Returns codes [tokens, in] in the format's dtype and scales, float32 [tokens, 1] or [tokens, in
    / group].
    """
    grouped = rows.unflatten(-1, (-1, group or rows.shape[-1]))  # [tokens, groups, group]
    scales = grouped.abs().amax(-1, keepdim=True).div_(numbers.reach).clamp_(min=TINY)
    return numbers.round(grouped / scales).flatten(1), scales.squeeze(-1)


def rounded_inputs(inputs: Tensor, numbers: NumberFormat) -> Tensor:
    """Return activations, float [..., in], as they are once rounded by `round_inputs`."""
    rows = inputs.flatten(0, -2).float()
    codes, scales = round_inputs(rows, numbers)
    return dequantize(codes, scales, (1, rows.shape[-1])).view_as(inputs).to(inputs.dtype)


def float8_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return E4M3 codes in another float dtype, exactly, but NaN as 480. CPUs do it through the
    bits of float16, 10 times faster.
    """
    if codes.device.type != "cpu":
        return codes.to(dtype)
    halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080).view(torch.float16)
    return halves.to(dtype).mul_(256)  # the exponent of float16 is biased by 15, that of E4M3 by 7


def _search(part: Tensor, tile: tuple[int, int], numbers: NumberFormat, scale_dtype: torch.dtype) -> Tensor:
    tiled = _tiled(part, tile)
    best = widest = amax_scales(part, tile, numbers, scale_dtype)
    least = torch.full_like(widest, torch.inf)
    for fraction in torch.linspace(1, SMALLEST, STEPS).tolist():
        tried = _stored(widest * fraction, scale_dtype)
        spread = tried[:, None, :, None]
        error = numbers.round(tiled / spread).to(tiled.dtype).mul_(spread).sub_(tiled).square_().sum((1, 3))
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales as they will be read back from `dtype`; 1 if they are 0."""
    held = scales.clamp(2.0**-20 if dtype == torch.float16 else TINY, torch.finfo(dtype).max).to(dtype).to(scales.dtype)
    return torch.where(scales == 0, torch.ones_like(scales), held)


def _tiled(values: Tensor, tile: tuple[int, int]) -> Tensor:
    """View [rows, columns] as [tiles, rows of one, tiles, columns of one], padded with zeros."""
    rows, columns = tile
    missing = (0, -values.shape[1] % columns, 0, -values.shape[0] % rows)
    filled = torch.nn.functional.pad(values, missing) if any(missing) else values
    return filled.reshape(filled.shape[0] // rows, rows, filled.shape[1] // columns, columns)


def _untiled(tiled: Tensor, shape: torch.Size) -> Tensor:
    rows, columns = shape
    return tiled.reshape(tiled.shape[0] * tiled.shape[1], -1)[:rows, :columns].contiguous()
