"""Round the layers of a block against their Hessians; several processes share the work.

Outputs do not depend on each other, so each process rounds some rows of a matrix. Of many experts of
one shape it rounds some, all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optkit.algorithms.gptq import GptqOptions, GptqResult, gptq, gptq_together, relative, row_errors
from optkit.algorithms.grid import QuantizedWeight, joined, minmax_scales, round_to_nearest
from optkit.algorithms.hessian import FEW_TOKENS, Hessian
from optkit.common.grouping import grouped
from optkit.errors import StageError
from optkit.model.skeleton_layers import float_weight, put_weight_
from optkit.model.together import ALONE, Together
from optkit.stages.quantizing.hessians import finite_matrix
from optkit.stages.quantizing.integers import packed_grid
from optkit.stages.quantizing.job import QuantizationJob
from optkit.stages.quantizing.pruned_zeros import count_zeros, held_zeros
from optkit.stages.quantizing.stacks import parts_of, together

if TYPE_CHECKING:
    from optkit.stages.quantizing.gptq_fields import GptqFields


@dataclass(frozen=True)
class Compensation:
    """How the layers of a job are rounded so that their outputs change least."""

    job: QuantizationJob
    fields: GptqFields
    rounds_to_nearest: Callable[[str], bool]
    """Whether a layer is to be rounded to nearest, whatever it saw."""
    counts_zeros: bool

    def round_(self, layers: Mapping[str, nn.Module], hessians: Mapping[str, Hessian]) -> dict[str, QuantizedWeight]:
        """Return the rounded weights of layers whose inputs were observed together, and put them there."""
        job = self.job
        found: dict[str, QuantizedWeight] = {}
        stacks = self._alike(layers, hessians)
        for several in together(
            stacks, job.selection.layers, job.formats, self._compensated(hessians), job.context.device
        ):
            job.task.advance(0, note=several[0][0])
            for stack, (whole, errors) in zip(several, self._stacks(several, layers, hessians), strict=True):
                found |= self._put_({name: layers[name] for name in stack}, whole, errors, hessians.get(stack[0]))
        return found

    def rounded(
        self,
        names: Sequence[str],
        weights: Tensor,
        hessians: Sequence[Hessian | None],
        held: Sequence[Tensor | None],
    ) -> list[tuple[QuantizedWeight, Tensor | None, float]]:
        """Return float32 [layers, out, in] on their grid, layer by layer, the errors of its outputs, as
        `row_errors` has them, and the damping. Without errors the weight was rounded to nearest.
        """
        grid, seen = packed_grid(self.job, names[0]), [each for each in hessians if each and each.tokens >= FEW_TOKENS]
        damping = self.fields.damping
        if len(seen) < len(names) or self.rounds_to_nearest(names[0]):
            nearest = (round_to_nearest(weight, *minmax_scales(weight, grid), grid) for weight in weights)
            return [(weight, None, damping) for weight in nearest]
        matrices = [finite_matrix(each, name, self.job.skeleton) for each, name in zip(seen, names, strict=True)]
        fields = self.fields
        options = GptqOptions(damping, fields.activation_order, fields.scale_search, fields.refinements)
        results: list[GptqResult] = []
        if len(names) > 1 and all(zeros is None for zeros in held):
            with suppress(ValueError):  # alone, the layer whose Hessian fails is known
                results = gptq_together(weights, matrices, grid, options)
        for name, weight, matrix, zeros in () if results else zip(names, weights, matrices, held, strict=True):
            try:
                results.append(gptq(weight, matrix, grid, options, zeros))
            except ValueError as error:
                remedy = "Exclude the layer, or calibrate on more text"
                raise StageError(str(error), where=name, remedy=remedy) from error
        return [
            (result.weight, row_errors(weight, result.weight.dequantize(), matrix), result.damping)
            for result, weight, matrix in zip(results, weights, matrices, strict=True)
        ]

    def tell_damping(self, name: str, damping: float) -> None:
        """Report a damping that was raised."""
        if damping > self.fields.damping:
            self.job.details["raised_damping"][name] = damping
            self.job.context.progress.warn(
                f"{name}: the Hessian needed a damping of {damping:g} instead of {self.fields.damping:g}"
            )

    def _compensated(self, hessians: Mapping[str, Hessian]) -> Callable[[str], bool]:
        def compensated(name: str) -> bool:
            few = name not in hessians or hessians[name].tokens < FEW_TOKENS
            return not (few or self.rounds_to_nearest(name))

        return compensated

    def _stacks(
        self, several: Sequence[list[str]], layers: Mapping[str, nn.Module], hessians: Mapping[str, Hessian]
    ) -> list[tuple[QuantizedWeight, Tensor | None]]:
        """Return the rounded weights of stacks of one shape, each with the errors of its outputs."""
        shared = self.job.together if self._compensated(hessians)(several[0][0]) else ALONE
        by_stack = len(several) >= shared.count
        mine = several[shared.part(len(several))] if by_stack else several
        parts = [[float_weight(layers[name]) for name in stack] for stack in mine]
        held = [held_zeros(part, self.fields.keep_zeros) for part in parts]
        weights = torch.cat([each for part in parts for each in part]).unflatten(0, (len(mine), -1))
        del parts  # `weights` has a copy
        if not by_stack:
            rows = shared.part(weights.shape[1])
            weights = weights[:, rows]
            held = [each if each is None else each[rows] for each in held]
        names = [stack[0] for stack in mine]
        found = self.rounded(names, weights, [hessians.get(name) for name in names], held)
        outputs = sum(self.job.selection.layers[name].outputs for name in several[0])
        if not by_stack:
            found = [(*all_rows(part, errors, shared, outputs), damping) for part, errors, damping in found]
        elif shared.count > 1:
            found = _all_stacks(found, shared, len(several), outputs)
        for stack, (_, errors, damping) in zip(several, found, strict=True):
            if errors is not None:
                self.tell_damping(stack[0], damping)
        return [(weight, errors) for weight, errors, _ in found]

    def _put_(
        self,
        layers: Mapping[str, nn.Module],
        whole: QuantizedWeight,
        errors: Tensor | None,
        hessian: Hessian | None,
    ) -> dict[str, QuantizedWeight]:
        """Put the rounded weights of layers that share their input into the modules, and return them."""
        job, sizes = self.job, [self.job.selection.layers[name].outputs for name in layers]
        quantized = dict(zip(layers, whole.rows(sizes), strict=True))
        if errors is not None:
            job.details["losses"] |= dict(zip(layers, map(relative, errors.split(sizes)), strict=True))
        elif not self.rounds_to_nearest(next(iter(layers))):
            job.details["rounded_to_nearest"] |= dict.fromkeys(layers, hessian.tokens if hessian else 0)
        for name, module in layers.items():
            rounded = quantized[name].dequantize()
            if self.counts_zeros:
                count_zeros(job, float_weight(module), rounded)
            put_weight_(module, rounded)
        return quantized

    def _alike(self, layers: Mapping[str, nn.Module], hessians: Mapping[str, Hessian]) -> list[list[str]]:
        """Return the layers in groups with the same Hessian, form and way of rounding.
        One that saw no token is alone.
        """
        job = self.job

        def key(name: str) -> tuple[Any, ...]:
            seen = id(hessians[name]) if name in hessians else name
            return seen, job.formats[name], self.rounds_to_nearest(name)

        alike = grouped(layers, key).values()
        return [part for names in alike for part in parts_of({name: job.selection.layers[name] for name in names})]


def all_rows(
    part: QuantizedWeight, errors: Tensor | None, shared: Together, outputs: int
) -> tuple[QuantizedWeight, Tensor | None]:
    """Return so many rows, and their errors, of which this process has its part."""
    codes, scales, zeros = (shared.whole(each, outputs) for each in (part.codes, part.scales, part.zeros))
    return QuantizedWeight(codes, scales, zeros, part.bits), None if errors is None else shared.whole(errors, outputs)


Found = tuple[QuantizedWeight, Tensor | None, float]


def _all_stacks(found: Sequence[Found], shared: Together, stacks: int, outputs: int) -> list[Found]:
    """Return what each process found of some stacks."""
    parts = joined([part for part, _, _ in found])
    errors = torch.cat([each for _, each, _ in found if each is not None])
    dampings = errors.new_tensor([damping for _, _, damping in found], dtype=torch.float64)

    def whole(rows: Tensor) -> Tensor:
        return shared.whole(rows.unflatten(0, (-1, outputs)), stacks)

    codes, scales, zeros, every = map(whole, (parts.codes, parts.scales, parts.zeros, errors))
    return [
        (QuantizedWeight(codes[index], scales[index], zeros[index], parts.bits), every[index], damping)
        for index, damping in enumerate(shared.whole(dampings, stacks).tolist())
    ]
