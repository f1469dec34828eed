"""Quantization-aware training: layers that compute with the weights which their codes stand for.
They learn the weights behind the codes.

    rounded = (clamp(round(w / s) + z, 0, 2^bits - 1) - z) * s
    d rounded / d w = 1 if nothing was clamped, else 0    straight through (arXiv:1308.3432)
    d rounded / d s = code - z - w / s if nothing was clamped, else code - z
                                                          LSQ (arXiv:1902.08153)

Scales are learned by their logarithm, so that a step of AdamW changes each by the same share; s is
rounded to the dtype that it is stored in before anything is computed with it. The codes at the end
stand for exactly the last `rounded`.

Inputs may be rounded too, as engines do it: gradients go straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.algorithms.eight_bit import INT8, rounded_inputs
from optkit.algorithms.grid import Grid, QuantizedWeight, minmax_scales
from optkit.algorithms.pruning import zeros_of_pruning
from optkit.model.skeleton_layers import weight_of
from optkit.training.student import Student, ZerosStay

Scales = Literal["learned", "fixed", "recomputed"]
Rounding: TypeAlias = Callable[[Tensor], Tensor]
"""Returns inputs, float [..., in], as an engine rounds them."""
CELL = 0.49
"""Weights begin at most so far from the point that their code stands for, in steps to the next point;
at half a step they would be between two.
"""


@dataclass(frozen=True)
class Coded:
    """A quantized layer as it is computed with."""

    weight: QuantizedWeight
    grid: Grid
    round_inputs: Rounding | None = None
    """None: inputs stay as they are."""


class FakeQuantized(nn.Module):
    """A linear layer whose weight is on a grid at each call; `round_inputs` rounds what it is given."""

    zeros: Tensor
    base: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: nn.Parameter | None,
        start: QuantizedWeight,
        grid: Grid,
        scales: Scales,
        round_inputs: Rounding | None = None,
    ) -> None:
        """weight: float32 [out, in]; `start` are its first codes (not if scales are recomputed)."""
        super().__init__()
        self.round_inputs = round_inputs
        self.grid, self.scales = grid, scales
        self.out_features, self.in_features = weight.shape
        kept = weight if scales == "recomputed" else within_cells(weight, start, grid)
        self.weight = nn.Parameter(kept.detach().clone())
        self.bias = bias
        self.register_buffer("zeros", start.zeros.float().to(weight.device))
        self.register_buffer("base", start.scales.float().to(weight.device))
        self.growth = nn.Parameter(torch.zeros_like(self.base), requires_grad=scales == "learned")

    def forward(self, hidden: Tensor) -> Tensor:
        """float [..., in] -> float [..., out]."""
        return F.linear(straight_through(self.round_inputs, hidden), self.rounded(), self.bias)

    def rounded(self) -> Tensor:
        """Return the weight that its codes stand for, float32 [out, in]."""
        with torch.autocast(self.weight.device.type, enabled=False):
            rounded: Tensor = _Rounding.apply(self.weight, *self._scales_and_zeros(), self.grid)
            return rounded

    @torch.no_grad()
    def codes(self) -> QuantizedWeight:
        """Return the codes of now."""
        scales, zeros = self._scales_and_zeros()
        scales = self.grid.stored(scales)
        codes = self.grid.round(self.grid.grouped(self.weight), scales, zeros).flatten(1)
        return QuantizedWeight(codes.to(torch.uint8), scales, zeros.to(torch.uint8), self.grid.bits)

    def _scales_and_zeros(self) -> tuple[Tensor, Tensor]:
        if self.scales == "recomputed":
            return minmax_scales(self.weight.detach(), self.grid)
        return self.base * self.growth.exp(), self.zeros


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> Tensor:
        grouped, stored = grid.grouped(weight), grid.stored(scales)
        steps = grid.round(grouped, stored, zeros).sub_(zeros.unsqueeze(-1))
        position = grouped / stored.unsqueeze(-1)
        inside = (position + zeros.unsqueeze(-1) - grid.top / 2).abs_() <= (grid.top + 1) / 2
        ctx.save_for_backward(inside, steps - position.masked_fill_(~inside, 0))
        return (steps * stored.unsqueeze(-1)).view_as(weight)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inside, of_scale = ctx.saved_tensors
        grouped = outer.view_as(of_scale)
        return (grouped * inside).view_as(outer), (grouped * of_scale).sum(-1), None, None


class _InputRounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rounded: Rounding) -> Tensor:
        return rounded(hidden)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return outer, None


def straight_through(rounded: Rounding | None, hidden: Tensor) -> Tensor:
    """Return inputs rounded, if they are; gradients come back as they are."""
    found: Tensor = _InputRounding.apply(hidden, rounded) if rounded else hidden
    return found


def within_cells(weight: Tensor, start: QuantizedWeight, grid: Grid) -> Tensor:
    """Return float [out, in] moved as little as it takes to be rounded to the codes of `start`.
    The outermost codes have no outer edge.
    """
    rows, groups = start.scales.shape
    scales, zeros = (each.to(weight.device, weight.dtype).unsqueeze(-1) for each in (start.scales, start.zeros))
    codes = start.codes.to(weight.device).view(rows, groups, -1).int()
    position = weight.view(rows, groups, -1) / scales + zeros
    points = torch.tensor(grid.points, device=weight.device)
    edges, gaps = weight.new_zeros(2, grid.top + 1), CELL * points.diff()
    edges[0, points[1:]], edges[1, points[:-1]] = points[1:] - gaps, points[:-1] + gaps
    edges[0, points[0]], edges[1, points[-1]] = -torch.inf, torch.inf
    return ((position.clamp(edges[0][codes], edges[1][codes]) - zeros) * scales).view_as(weight)


@dataclass(frozen=True)
class CodedStudent(Student):
    """A student whose layers compute with codes; what is behind these alone is trained."""

    layers: Mapping[str, FakeQuantized]
    """By their names in the checkpoint."""
    pruned: Collection[str] = ()
    """Those whose weights were pruned."""

    def codes(self) -> dict[str, QuantizedWeight]:
        """Return the codes of every layer, on the CPU."""
        return {name: layer.codes().on_cpu() for name, layer in self.layers.items()}

    def keep_zeros_(self, of_all: bool) -> None:
        """Let weights of 0 stay 0, in all layers or in the pruned ones: they get no gradient."""
        for name, layer in self.layers.items():
            if of_all or name in self.pruned:
                layer.weight.register_hook(ZerosStay(layer.weight))


def code_student(
    student: Student,
    modules: Mapping[str, str],
    starts: Mapping[str, QuantizedWeight],
    grids: Mapping[str, Grid],
    scales: Scales,
    rounds_inputs: bool = False,
) -> CodedStudent:
    """Put layers with codes in a student; modules: name in the model -> name in the checkpoint."""
    student.model.requires_grad_(False)
    layers, pruned = {}, []
    round_inputs = partial(rounded_inputs, numbers=INT8) if rounds_inputs else None
    for place, name in modules.items():
        module = student.model.get_submodule(place)
        stored = weight_of(module).detach()
        pruned += [name] if zeros_of_pruning(stored) is not None else []
        weight = stored if isinstance(module, nn.Linear) else stored.T.contiguous()
        bias = module.bias if isinstance(module.bias, nn.Parameter) else None
        layers[name] = FakeQuantized(weight, bias, starts[name], grids[name], scales, round_inputs)
        parent, _, child = place.rpartition(".")
        setattr(student.model.get_submodule(parent), child, layers[name])
    return CodedStudent(student.model, student.checkpoint, student.tensor_names, layers, pruned)
