"""The grid that weights are rounded to: integer codes, a scale and a zero per group of inputs.

A weight of group g is `(code - zero[g]) * scale[g]`. Codes are unsigned, 0 .. 2^bits - 1, in every
format; a symmetric grid has the zero point 2^(bits - 1) everywhere, so its values reach from
-2^(bits - 1) to 2^(bits - 1) - 1 scales, as in compressed-tensors. `round_to_nearest` (RTN) takes the closest
point for each weight, without data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """How weights are rounded, and in which dtype the scales are stored."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None: all of them, one scale per output channel."""
    symmetric: bool
    scale_dtype: torch.dtype = torch.float32

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return 1 << (self.bits - 1)

    @property
    def learns_scales(self) -> bool:
        """Whether small steps change the scales."""
        return True

    @property
    def points(self) -> Sequence[int]:
        """The codes that there are."""
        return range(self.top + 1)

    def grouped(self, weight: Tensor) -> Tensor:
        """View float [out, in] (or [1, in]) as [out, groups, group_size]."""
        return weight.view(len(weight), -1, self.group_size or weight.shape[-1])

    def stored(self, scales: Tensor) -> Tensor:
        """Return the scales as read back: rounded to `scale_dtype`, never to 0 or infinity."""
        limits = torch.finfo(self.scale_dtype)
        # Subnormal numbers serve (below 6.1e-5 float16 has no others), except those of float32:
        # processors may take them for 0.
        least = max(limits.tiny * limits.eps, torch.finfo(torch.float32).tiny)
        size = scales.abs().clamp(least, limits.max).to(self.scale_dtype).to(scales.dtype)
        return torch.where(scales < 0, -size, size)

    def round(self, grouped: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Return the nearest codes, float, for weights [out, groups, group_size]."""
        # Rounding happens around the middle, as compressed-tensors does it: ties of a symmetric
        # grid go to even signed codes.
        shift = (zeros - self.middle).unsqueeze(-1)
        return (grouped / scales.unsqueeze(-1)).add_(shift).round_().add_(self.middle).clamp_(0, self.top)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight on its grid: `(codes - zeros) * scales`, group by group."""

    codes: Tensor
    """uint8 [out, in]."""
    scales: Tensor
    """float [out, groups], never 0; negative if that serves a symmetric grid better."""
    zeros: Tensor
    """uint8 [out, groups]."""
    bits: int

    @property
    def group_size(self) -> int:
        """Inputs per group."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def dequantize(self) -> Tensor:
        """Return float [out, in], in the dtype of the scales."""
        rows, groups = self.scales.shape
        steps = self.codes.view(rows, groups, -1).to(self.scales.dtype) - self.zeros.to(self.scales.dtype).unsqueeze(-1)
        return (steps * self.scales.unsqueeze(-1)).view(rows, -1)

    def on_cpu(self) -> QuantizedWeight:
        """Return it in main memory."""
        return QuantizedWeight(self.codes.cpu(), self.scales.cpu(), self.zeros.cpu(), self.bits)

    def rows(self, sizes: list[int]) -> list[QuantizedWeight]:
        """Cut the output channels into parts of the given sizes."""
        parts = zip(self.codes.split(sizes), self.scales.split(sizes), self.zeros.split(sizes), strict=True)
        return [QuantizedWeight(codes, scales, zeros, self.bits) for codes, scales, zeros in parts]


def joined(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Return parts of the output channels as one weight."""
    codes, scales, zeros = (torch.cat([getattr(part, leaf) for part in parts]) for leaf in ("codes", "scales", "zeros"))
    return QuantizedWeight(codes, scales, zeros, parts[0].bits)


def minmax_scales(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return scales and zero points, float [out, groups], that reach every weight.

    weight: float [out, in]. Symmetric: scale = 2 max|w| / (2^bits - 1), so the largest weight may
    be cut by half a step. A group of
    zeros gets the scale 1 (compressed-tensors: the dtype's epsilon; both give zeros back). Divided
    by a tensor, for torch multiplies by the reciprocal of a Python number on CUDA, and scales one
    bit off round weights that lie between two points to the other one.
    """
    grouped = grid.grouped(weight)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    span = 2 * torch.maximum(-low, high) if grid.symmetric else high - low
    scales = grid.stored(torch.where(span == 0, torch.ones_like(span), span / span.new_tensor(grid.top)))
    if grid.symmetric:
        return scales, torch.full_like(scales, grid.middle)
    return scales, (-low / scales).round().clamp(0, grid.top)


def round_to_nearest(weight: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> QuantizedWeight:
    """Round a weight, float [out, in], to the grid of scales and zeros, float [out, groups]."""
    codes = grid.round(grid.grouped(weight), scales, zeros).flatten(1)
    return QuantizedWeight(codes.to(torch.uint8), scales, zeros.to(torch.uint8), grid.bits)
