"""E2M1 in scaled blocks as a grid of codes: what learns on integer codes learns on 4-bit floats too.

A value of E2M1 is a whole number of halves, 0 to 12 of them. So a weight is `(code - 12) * scale` with
15 of the codes 0 to 24 and half the stored scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optkit.algorithms.grid import Grid, QuantizedWeight
from optkit.algorithms.microscaling import (
    E2M1,
    E4M3_LARGEST,
    E4M3_SMALLEST,
    E8M0_BIAS,
    LARGEST,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    MicroscaledWeight,
    codes_of,
    round_to_e2m1,
    rounded_inputs,
)

HALVES = int(2 * LARGEST)
"""Of the largest value."""


@dataclass(frozen=True, eq=False)
class MicroscaledGrid(Grid):
    """MXFP4, or NVFP4 with a global scale, float32 [1]."""

    global_scale: Tensor | None = None

    @classmethod
    def of(cls, global_scale: Tensor | None) -> MicroscaledGrid:
        """Return the grid of a layer."""
        return cls(4, MXFP4_BLOCK if global_scale is None else NVFP4_BLOCK, True, global_scale=global_scale)

    @property
    def top(self) -> int:
        return 2 * HALVES

    @property
    def middle(self) -> int:
        return HALVES

    @property
    def learns_scales(self) -> bool:
        return self.global_scale is not None

    @property
    def points(self) -> tuple[int, ...]:
        sizes = [int(2 * value) for value in E2M1]
        return tuple(sorted({HALVES + sign * size for size in sizes for sign in (-1, 1)}))

    def stored(self, scales: Tensor) -> Tensor:
        if self.global_scale is None:
            return torch.exp2(scales.mul(2).log2_().round_().clamp_(1 - E8M0_BIAS, E8M0_BIAS)).div_(2)
        return self._of_range(scales).float() / self.global_scale.to(scales.device) / 2

    def round(self, grouped: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return round_to_e2m1(grouped / (2 * scales.unsqueeze(-1))).mul_(2).add_(HALVES)

    def to_codes(self, weight: MicroscaledWeight) -> QuantizedWeight:
        """Return a rounded weight by the codes of this grid."""
        values = weight.values().mul_(2).add_(HALVES)
        scales = weight.float_scales() / 2
        return QuantizedWeight(values.to(torch.uint8), scales, torch.full_like(scales, HALVES, dtype=torch.uint8), 4)

    def from_codes(self, weight: QuantizedWeight) -> MicroscaledWeight:
        """Undo `to_codes`."""
        values = weight.codes.float().sub_(HALVES).div_(2)
        if self.global_scale is None:
            scales = weight.scales.mul(2).log2_().round_().add_(E8M0_BIAS).to(torch.uint8)
        else:
            scales = self._of_range(weight.scales)
        return MicroscaledWeight(codes_of(values, values < 0), scales, self.global_scale)

    def _of_range(self, scales: Tensor) -> Tensor:
        assert self.global_scale is not None
        shared = self.global_scale.to(scales.device)
        return (2 * scales * shared).clamp_(E4M3_SMALLEST, E4M3_LARGEST).to(torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class InputRounding:
    """Rounds inputs as engines do, to NVFP4 with a global scale, float32 [1], or to MXFP4."""

    global_scale: Tensor | None

    def __call__(self, hidden: Tensor) -> Tensor:
        """float [..., in], of the same shape and dtype."""
        return rounded_inputs(hidden, self.global_scale)
