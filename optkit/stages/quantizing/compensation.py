"""Round the layers of a block against their Hessians; several processes share the work.

Outputs do not depend on each other, so processes round rows of a matrix, or some of many experts of one
shape, all at once. Who rounds what is so chosen that all end together: a Hessian is factored wherever
rows of its layers are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optkit.algorithms.few_tokens import FEW_TOKENS
from optkit.algorithms.gptq import (
    Factored,
    GptqOptions,
    GptqResult,
    damped_hessian,
    damped_inverse_factor,
    gptq,
    gptq_together,
    relative,
    row_errors,
)
from optkit.algorithms.grid import Grid, QuantizedWeight, joined, minmax_scales, round_to_nearest
from optkit.algorithms.hessian import Hessian
from optkit.common.grouping import grouped
from optkit.errors import StageError
from optkit.model.skeleton_layers import float_weight, put_weight_
from optkit.model.together import ALONE, Together
from optkit.stages.quantizing.gptq_fields import GptqFields
from optkit.stages.quantizing.hessians import finite_matrix
from optkit.stages.quantizing.integers import packed_grid
from optkit.stages.quantizing.job import QuantizationJob
from optkit.stages.quantizing.pruned_zeros import count_zeros, held_zeros
from optkit.stages.quantizing.shares import Work, divided, factoring, rounding
from optkit.stages.quantizing.stacks import parts_of, together

Rows: TypeAlias = "tuple[QuantizedWeight, Tensor | None]"
"""Rows of weights, and of their errors as `row_errors` has them with a damping that was raised behind them, else 0,
[rows, 3]; None without compensation.
"""
DIGITS = 9
"""Of a damping that went through float32."""


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
        compensated = self._compensated(hessians)
        alike = self._alike(layers, hessians)
        units = list(together(alike, job.selection.layers, job.formats, compensated, job.context.device))
        shares, late, factored = self._shares(units, hessians)
        mine = []
        for unit, sizes in zip(units, shares, strict=True):
            job.task.advance(0, note=unit[0][0])
            first = sum(sizes[: job.together.rank])
            rows = slice(first, first + sizes[job.together.rank]) if compensated(unit[0][0]) else slice(sum(sizes))
            told = self._told(unit[0][0], hessians, factored) if unit is late else None
            mine.append(self._rows(unit, rows, layers, hessians, told))
        for unit, sizes in zip(units, shares, strict=True):
            part = mine.pop(0)
            shared = job.together if compensated(unit[0][0]) else ALONE
            for stack, (whole, errors) in zip(unit, self._stacks(unit, part, shared, sizes), strict=True):
                found |= self._put_({name: layers[name] for name in stack}, whole, errors, hessians.get(stack[0]))
        return found

    def rounded(
        self,
        names: Sequence[str],
        weights: Tensor,
        hessians: Sequence[Hessian | None],
        held: Sequence[Tensor | None],
        factored: Factored | None = None,
    ) -> list[tuple[QuantizedWeight, Tensor | None, float]]:
        """Return float32 [layers, out, in] on their grid, layer by layer, the errors of its outputs, as
        `row_errors` has them, and the damping. Without errors the weight was rounded to nearest.
        `factored`: what is known of the Hessian of the one layer.
        """
        grid, seen = packed_grid(self.job, names[0]), [each for each in hessians if each and each.tokens >= FEW_TOKENS]
        damping = self.fields.damping
        if len(seen) < len(names) or self.rounds_to_nearest(names[0]):
            nearest = (round_to_nearest(weight, *minmax_scales(weight, grid), grid) for weight in weights)
            return [(weight, None, damping) for weight in nearest]
        matrices = [finite_matrix(each, name, self.job.skeleton) for each, name in zip(seen, names, strict=True)]
        options = self._options
        results: list[GptqResult] = []
        if len(names) > 1 and all(zeros is None for zeros in held):
            with suppress(ValueError):  # alone, the layer whose Hessian fails is known
                results = gptq_together(weights, matrices, grid, options)
        for name, weight, matrix, zeros in () if results else zip(names, weights, matrices, held, strict=True):
            with _named(name):
                results.append(gptq(weight, matrix, grid, options, zeros, factored))
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

    @property
    def _options(self) -> GptqOptions:
        fields = self.fields
        return GptqOptions(fields.damping, fields.activation_order, fields.scale_search, fields.refinements)

    def _shares(
        self, units: list[list[list[str]]], hessians: Mapping[str, Hessian]
    ) -> tuple[list[list[int]], list[list[str]] | None, Factored | None]:
        """Return which rows of units each process rounds. Of several processes the last one begins with factoring
        the largest Hessian; its unit is moved behind the others, and returned with what this process knows of it.
        """
        shared, compensated = self.job.together, self._compensated(hessians)
        alone = [unit for unit in units if len(unit) == 1 and compensated(unit[0][0])]
        if shared.count == 1 or not alone:
            return divided([self._work(unit) for unit in units], shared.count), None, None
        late = max(alone, key=self._inputs)
        units.append(units.pop(next(index for index, unit in enumerate(units) if unit is late)))
        before = divided([self._work(unit) for unit in units[:-1]], shared.count, factoring(self._inputs(late)))
        factored, name = None, late[0][0]
        if shared.rank == shared.count - 1:
            matrix = finite_matrix(hessians[name], name, self.job.skeleton)
            with _named(name):
                factored = damped_inverse_factor(matrix, self._options)
        return before + divided([self._work(late, factored=True)], shared.count), late, factored

    def _told(self, name: str, hessians: Mapping[str, Hessian], factored: Factored | None) -> Factored:
        """Return for all processes what the last one made of a Hessian."""
        shared, matrix = self.job.together, finite_matrix(hessians[name], name, self.job.skeleton)
        factor, found = torch.empty_like(matrix), matrix.new_empty(1)
        if factored:
            factor.copy_(factored.factor)
            found.fill_(factored.damping if factored.damping > self.fields.damping else 0.0)
        for each in (factor, found):
            shared.tell_(each, shared.count - 1)
        damping = round(float(found), DIGITS) or self.fields.damping
        return Factored(damped_hessian(matrix, damping), factor, damping)

    def _work(self, unit: Sequence[list[str]], factored: bool = False) -> Work:
        return rounding(len(unit), self._outputs(unit[0]), self._inputs(unit), factored)

    def _inputs(self, unit: Sequence[list[str]]) -> int:
        return self.job.selection.layers[unit[0][0]].inputs

    def _outputs(self, stack: Sequence[str]) -> int:
        return sum(self.job.selection.layers[name].outputs for name in stack)

    def _rows(
        self,
        unit: Sequence[list[str]],
        rows: slice,
        layers: Mapping[str, nn.Module],
        hessians: Mapping[str, Hessian],
        factored: Factored | None,
    ) -> Rows:
        """Return rows of stacks of one shape, one behind the other, rounded; of several all of some stacks."""
        outputs = self._outputs(unit[0])
        chosen = unit if len(unit) == 1 else unit[rows.start // outputs : rows.stop // outputs]
        parts = [torch.cat([float_weight(layers[name]) for name in stack]) for stack in chosen or unit[:1]]
        if rows.start == rows.stop:
            return empty_rows(parts[0], packed_grid(self.job, unit[0][0]))
        inside = rows if len(unit) == 1 else slice(None)
        held = [held_zeros([each], self.fields.keep_zeros) for each in parts]
        held = [each if each is None else each[inside] for each in held]
        weights = torch.stack(parts)[:, inside]
        del parts  # `weights` has a copy
        names = [stack[0] for stack in chosen]
        found = self.rounded(names, weights, [hessians.get(name) for name in names], held, factored)
        whole, errors = joined([weight for weight, _, _ in found]), list[Tensor]()
        for _, each, damping in found:
            if each is None:
                return whole, None
            errors.append(F.pad(each, (0, 1), value=damping if damping > self.fields.damping else 0.0))
        return whole, torch.cat(errors)

    def _stacks(
        self, unit: Sequence[list[str]], part: Rows, shared: Together, sizes: Sequence[int]
    ) -> list[tuple[QuantizedWeight, Tensor | None]]:
        """Return the rounded weights of stacks of one shape, each with the errors of its outputs, of the rows
        that each process has.
        """
        weight, errors = all_rows(*part, partial(shared.joined, sizes=sizes))
        each = [self._outputs(unit[0])] * len(unit)
        if errors is None:
            return [(stack, None) for stack in weight.rows(each)]
        for stack, damping in zip(unit, errors[:, 2].split(each), strict=True):
            self.tell_damping(stack[0], round(float(damping.max()), DIGITS))
        return list(zip(weight.rows(each), errors[:, :2].split(each), strict=True))

    def _put_(
        self, layers: Mapping[str, nn.Module], whole: QuantizedWeight, errors: Tensor | None, hessian: Hessian | None
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


@contextmanager
def _named(layer: str) -> Iterator[None]:
    """Say which layer has a Hessian that cannot be factored."""
    try:
        yield
    except ValueError as error:
        raise StageError(str(error), where=layer, remedy="Exclude the layer, or calibrate on more text") from error


def empty_rows(weight: Tensor, grid: Grid) -> Rows:
    """Return no rows of a weight on its grid, and no errors of them."""
    groups = weight.shape[1] // (grid.group_size or weight.shape[1])
    codes, zeros = (weight.new_empty(0, columns, dtype=torch.uint8) for columns in (weight.shape[1], groups))
    return QuantizedWeight(codes, weight.new_empty(0, groups), zeros, grid.bits), weight.new_empty(0, 3)


def all_rows(part: QuantizedWeight, errors: Tensor | None, join: Callable[[Tensor], Tensor]) -> Rows:
    """Return all rows, and their errors, of which this process has a part."""
    codes, scales, zeros = map(join, (part.codes, part.scales, part.zeros))
    return QuantizedWeight(codes, scales, zeros, part.bits), None if errors is None else join(errors)
