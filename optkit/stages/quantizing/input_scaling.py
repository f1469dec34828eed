"""What `awq` and `awq_scale` share: the search for scales of input channels.
Block by block they are folded into norms and linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from optkit.algorithms.few_tokens import FEW_TOKENS
from optkit.common.field_types import BatchSize
from optkit.common.grouping import grouped
from optkit.errors import StageError
from optkit.model.calibration_memory import Work, calibrated_work, code_bytes, hessian_bytes, summed_bytes
from optkit.model.linear_layers import Layer, by_block, scaled_together, stacks
from optkit.model.shape import ModelShape
from optkit.model.together import ALONE, Together
from optkit.source.calibration import Calibration
from optkit.stages.quantizing.shared_text import SharedText

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optkit.algorithms.awq import InputScales, Reader, Rounding
    from optkit.algorithms.grid import Grid
    from optkit.algorithms.smoothing import RoundedInputs, Steps
    from optkit.model.blocks import BlockInputs
    from optkit.model.prompts import Prompts
    from optkit.model.skeleton import Skeleton
    from optkit.model.wiring import FoldGroup
    from optkit.stages.quantizing.input_ranges import InputRange

MEAN_COPIES = 1
"""Matrices of the size of a Hessian that making its mean takes."""
HESSIAN_COPIES = {"nearest": 0, "gptq": 5.5}
"""The same of trying the scales of one input, by how candidates are rounded."""
SAMPLE_BYTES = 4 * 4 * 256
"""What trying them on some rows of a layer's weights takes for each of its inputs."""
FLOAT_COPIES = 5
"""Float32 copies of a layer's weights that rounding holds at once."""
PROBE = (2, 32)
"""Sequences and tokens that show which layer feeds which."""
SEARCH_ROWS = 4096
"""Inputs of each layer that smoothing is searched on; on a quarter of them the divergence of 8 bits was 4
to 9% larger.
"""
ROW_COPIES, ROW_COPIES_OF_FLOATS = 4, 5
"""Float32 copies of the sampled inputs of some layers that searching their smoothing holds at once."""
WEIGHT_COPIES = 5
"""The same of their weights."""


class InputScaling(SharedText):
    """The fields of a stage that scales inputs."""

    calibration: Calibration = Calibration(dataset="c4")
    """The text whose hidden states decide which errors matter."""
    grid_points: int = Field(default=10, ge=1, le=100)
    """Powers of the activations, from 0 to below 1, that are tried as scales; a descent follows
    from the best.
    """
    equal_tokens: bool = True
    """Divide each layer's input by its root mean square, token by token, so that no token with
    enormous activations outweighs the rest.
    """
    batch_size: BatchSize = 8
    """Sequences that run through a block at once."""

    def working_bytes(
        self, shape: ModelShape, layers: Mapping[str, Layer], rounding: Rounding, device: str, smooths: bool = False
    ) -> Work:
        """Return what the work needs; what waits to be written comes on top. `smooths`: instead of AWQ's search.
        Raises StageError for a text that is too short for any layer.
        """
        if (tokens := math.prod(self.calibration.size)) < FEW_TOKENS:
            raise StageError(
                f"the calibration text has {tokens:,} tokens, not {FEW_TOKENS}",
                where="calibration",
                why="Fewer do not tell which inputs of a layer to scale",
                remedy="Raise calibration.samples or calibration.sequence_length",
            )
        largest = max(layer.inputs for layer in layers.values())
        groups = (group for block in by_block(shape, layers) for group in scaled_together(block))
        readers = max(_reader_bytes(group, layers) for group in groups)
        weights = max(layer.outputs * layer.inputs for layer in layers.values())
        work = max(
            4 * MEAN_COPIES * largest**2,
            readers + SAMPLE_BYTES * largest + int(4 * HESSIAN_COPIES[rounding]) * largest**2,
            code_bytes(shape, layers) + 4 * FLOAT_COPIES * weights,
        )
        kept = hessian_bytes(shape, layers, at_once=True)
        if smooths:
            blocks, matrix = by_block(shape, layers), 4 * largest**2
            sampled, work = smoothing_bytes(blocks, layers, self.calibration, matrix, ROW_COPIES_OF_FLOATS)
            kept = kept * (rounding == "gptq") + sampled
        activation = summed_bytes(shape, device)
        return calibrated_work(shape, layers, self.calibration, self.batch_size, kept, work, self.devices, activation)


def smoothing_bytes(
    blocks: Sequence[Sequence[str]],
    layers: Mapping[str, Layer],
    text: Calibration,
    compensating: int,
    copies: int = ROW_COPIES,
) -> tuple[int, int]:
    """Return the bytes of the inputs that searching the smoothing of a block keeps, and of what it works with."""
    rows = min(SEARCH_ROWS, math.prod(text.size))

    def sampled(stacks: Sequence[Sequence[str]]) -> int:
        return sum(4 * rows * layers[stack[0]].inputs for stack in stacks)

    def worked(group: Sequence[Sequence[str]]) -> int:
        weights = sum(4 * layers[name].outputs * layers[name].inputs for stack in group for name in stack)
        return max(copies * sampled(group) + WEIGHT_COPIES * weights, sampled(group) + weights + compensating)

    return max(sampled(stacks(block)) for block in blocks), max(
        worked(group) for block in blocks for group in scaled_together(block)
    )


def _reader_bytes(group: Sequence[Sequence[str]], layers: Mapping[str, Layer]) -> int:
    """Return the bytes of the float32 weights and matrices of some layers.
    Their scales are searched together.
    """
    weights = sum(layers[name].outputs * layers[name].inputs for stack in group for name in stack)
    return 4 * (weights + sum(layers[stack[0]].inputs ** 2 for stack in group))


@dataclass
class ScaledBlock:
    """A block whose input scales are folded."""

    hessians: dict[str, Tensor] = field(default_factory=dict)
    """Layer -> mean of x x^T of its inputs as they are now, float32 [in, in]; without layers that
    saw few tokens.
    """
    changed: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the checkpoint that have another value now."""
    gains: dict[str, dict[str, float]] = field(default_factory=dict)
    """Producer -> error of its readers' outputs, as a fraction of their square, without the scales
    and with them.
    """
    refused: dict[str, str] = field(default_factory=dict)
    """Layer -> why its inputs are not scaled."""


@dataclass(frozen=True, eq=False)
class _Seen:
    """The inputs of layers that were given the same tensor."""

    matrix: Tensor
    """Mean of x x^T, float32 [in, in]."""
    tokens: int


class BlockScaler:
    """Searches and folds the input scales of one loaded block after another."""

    def __init__(
        self,
        skeleton: Skeleton,
        tokens: Tensor | Prompts,
        device: str,
        settings: InputScaling,
        together: Together = ALONE,
    ) -> None:
        """`tokens`: int64 [sequences, sequence_length], or prompts with images; each process takes its share."""
        from optkit.model.prompts import few_of

        self.skeleton, self.settings = skeleton, settings
        self.inputs: BlockInputs = skeleton.capture_inputs(tokens, device, settings.batch_size, together)
        self._probe = skeleton.capture_inputs(few_of(tokens, *PROBE), device)

    def scale_(self, index: int, grids: Mapping[str, Grid], rounding: Rounding, stage: str) -> ScaledBlock:
        """Scale the inputs of the given layers of a block.
        The grids that they are going to be rounded to, and how, are given.

        Raises StageError if none of them can be scaled, and for inputs that are NaN or Inf.
        """
        linears = self.skeleton.linears(self.skeleton.blocks[index])
        seen = self._seen(index, {name: linears[name] for name in grids})

        def search(group: FoldGroup) -> InputScales | None:
            from optkit.algorithms.awq import search_input_scales

            readers = _readers(group, linears, grids, seen)
            return search_input_scales(readers, group.rows, self.settings.grid_points, rounding) if readers else None

        scaled, found = self._folded(index, grids, search, stage)
        scaled.hessians = {name: each.matrix for name, each in seen.items()}
        for group, result in found:
            for each in {seen[name] for name in group.consumers if name in seen}:
                scales = result.scales.to(each.matrix.device)
                each.matrix.div_(scales).div_(scales[:, None])
        return scaled

    def smooth_(
        self, index: int, names: Collection[str], steps: Steps, inputs: RoundedInputs, rounding: Rounding, stage: str
    ) -> ScaledBlock:
        """Scale the inputs of the given layers of a block for the `steps` of floats, whose inputs may be rounded
        too. Raises as `scale_` does.
        """
        from optkit.stages.quantizing.hessians import refuse_infinite, watch_inputs
        from optkit.stages.quantizing.input_ranges import InputRange

        linears = self.skeleton.linears(self.skeleton.blocks[index])
        rows = -(-SEARCH_ROWS // (len(self.inputs.batches) * self.inputs.together.count))

        def start(given: Tensor) -> InputRange:
            return InputRange(given.shape[-1], given.device, rows, hessian=rounding == "gptq")

        seen = watch_inputs(self.skeleton, index, self.inputs, {name: linears[name] for name in names}, start)
        for name, each in seen.items():
            refuse_infinite(each.amax, name, self.skeleton)
        ranges = {name: each for name, each in seen.items() if each.tokens >= FEW_TOKENS}

        def search(group: FoldGroup) -> InputScales | None:
            return searched_smoothing(linears, group, ranges, inputs, steps)[1]

        return self._folded(index, names, search, stage)[0]

    def _folded(
        self, index: int, names: Collection[str], search: Callable[[FoldGroup], InputScales | None], stage: str
    ) -> tuple[ScaledBlock, list[tuple[FoldGroup, InputScales]]]:
        """Fold what is found for each group of a block, and return that beside what it changed."""
        from optkit.model.wiring import fold_, fold_groups

        skeleton, block = self.skeleton, self.skeleton.blocks[index]
        wiring = fold_groups(skeleton, index, self._probe.hidden, self._probe.batches[0].calls[index])
        dealt = self.inputs.together.dealt(wiring.groups, partial(_searched, search, stage))
        found = [(group, result) for group, result in zip(wiring.groups, dealt, strict=True) if result]
        refused = {name: reason for name, reason in wiring.refused.items() if name in names}
        if names and not found:
            name, reason = next(
                iter(refused.items()), (block.name, f"its layers saw fewer than {FEW_TOKENS} calibration tokens")
            )
            raise StageError(
                "no input of the chosen layers can be scaled",
                where=f"{stage}: {name}",
                why=reason[0].upper() + reason[1:],
                remedy="Take gptq, which needs no scales",
            )
        scaled = ScaledBlock(refused=refused)
        touched: dict[str, None] = {}
        for group, result in found:
            if bool((result.scales != 1).any()):
                touched |= dict.fromkeys(fold_(skeleton, group, result.scales))
            scaled.gains[group.producer] = {"plain": result.plain_error, "scaled": result.error}
        scaled.changed = self._values(index, touched)
        return scaled, found

    def _seen(self, index: int, layers: Mapping[str, nn.Module]) -> dict[str, _Seen]:
        """Return what layers of a loaded block saw, without those that saw few tokens. Raises
        StageError for inputs that are NaN or Inf.
        """
        from optkit.stages.quantizing.hessians import collect_hessians, finite_matrix

        sums = collect_hessians(self.skeleton, index, self.inputs, layers, self.settings.equal_tokens)
        seen: dict[str, _Seen] = {}
        for names in grouped(sums, lambda name: id(sums[name])).values():
            *_, hessian = (sums.pop(name) for name in names)
            if hessian.tokens >= FEW_TOKENS:
                seen |= dict.fromkeys(names, _Seen(finite_matrix(hessian, names[0], self.skeleton), hessian.tokens))
        return seen

    def _values(self, index: int, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        skeleton, block = self.skeleton, self.skeleton.blocks[index]
        named = block.module.named_parameters(prefix=block.name)
        changed = {skeleton.tensor_name(name): parameter.detach() for name, parameter in named}
        return {name: value.to(skeleton.stored_dtype(name)) for name, value in changed.items() if name in tensors}


def _searched(search: Callable[[FoldGroup], InputScales | None], stage: str, group: FoldGroup) -> InputScales | None:
    """Return the scales of a group, on the CPU; None if no reader was seen at work."""
    try:
        result = search(group)
    except ValueError as error:
        remedy = "Set rounding: nearest, or calibrate on more text"
        raise StageError(str(error), where=f"{stage}: {group.producer}", remedy=remedy) from error
    return result and replace(result, scales=result.scales.cpu())


def searched_smoothing(
    linears: Mapping[str, nn.Module],
    group: FoldGroup,
    ranges: Mapping[str, InputRange],
    inputs: RoundedInputs,
    steps: Steps | None = None,
) -> tuple[str, InputScales | None]:
    """Return what `search_smoothing` finds for a group; nothing if none of its consumers was seen at work."""
    import torch

    from optkit.algorithms.smoothing import Reader, search_smoothing
    from optkit.model.skeleton_layers import float_weight

    weights = {name: float_weight(linears[name]) for name in group.consumers if name in ranges}
    if not weights:
        return "", None
    input_amax = torch.stack([ranges[name].amax for name in weights]).amax(0)
    weight_amax = torch.stack([weight.abs().amax(0) for weight in weights.values()]).amax(0)
    same = None if group.rows is None else group.rows.to(input_amax.device)
    seen = {id(ranges[name]): ranges[name] for name in weights}  # each once: variances take a factor of its Hessian
    given = {key: (each.rows, each.variances()) for key, each in seen.items()}
    readers = [Reader(weight, *given[id(ranges[name])]) for name, weight in weights.items()]
    return search_smoothing(readers, input_amax, weight_amax, same, inputs, steps)


def _readers(
    group: FoldGroup, linears: Mapping[str, nn.Module], grids: Mapping[str, Grid], seen: Mapping[str, _Seen]
) -> list[Reader]:
    """Return the consumers that are rounded and were seen at work.
    Those with equal inputs and grid are together.
    """
    import torch

    from optkit.algorithms.awq import Reader
    from optkit.model.skeleton_layers import float_weight

    rounded = (name for name in group.consumers if name in seen and name in grids)
    alike = grouped(rounded, lambda name: (seen[name], grids[name]))
    return [
        Reader(torch.cat([float_weight(linears[name]) for name in names]), each.matrix * each.tokens, grid)
        for (each, grid), names in alike.items()
    ]
