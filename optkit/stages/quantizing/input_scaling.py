"""What `awq` and `awq_scale` share: the search for scales of input channels.
Block by block they are folded into norms and linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from optkit.algorithms.few_tokens import FEW_TOKENS
from optkit.common.field_types import BatchSize
from optkit.common.grouping import grouped
from optkit.errors import StageError
from optkit.model.calibration_memory import Work, calibrated_work, code_bytes, hessian_bytes, summed_bytes
from optkit.model.linear_layers import Layer, by_block, scaled_together
from optkit.model.shape import ModelShape
from optkit.model.together import ALONE, Together
from optkit.source.calibration import Calibration
from optkit.stages.quantizing.shared_text import SharedText

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optkit.algorithms.awq import InputScales, Reader, Rounding
    from optkit.algorithms.grid import Grid
    from optkit.model.blocks import BlockInputs
    from optkit.model.prompts import Prompts
    from optkit.model.skeleton import Skeleton
    from optkit.model.wiring import FoldGroup

MEAN_COPIES = 1
"""Matrices of the size of a Hessian that making its mean takes."""
HESSIAN_COPIES = {"nearest": 0, "gptq": 5}
"""The same of trying the scales of one input, by how candidates are rounded."""
SAMPLE_BYTES = 4 * 4 * 256
"""What trying them on some rows of a layer's weights takes for each of its inputs."""
FLOAT_COPIES = 5
"""Float32 copies of a layer's weights that rounding holds at once."""
PROBE = (2, 32)
"""Sequences and tokens that show which layer feeds which."""


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

    def working_bytes(self, shape: ModelShape, layers: Mapping[str, Layer], rounding: Rounding, device: str) -> Work:
        """Return what the work needs; what waits to be written comes on top.
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
            readers + SAMPLE_BYTES * largest + 4 * HESSIAN_COPIES[rounding] * largest**2,
            code_bytes(shape, layers) + 4 * FLOAT_COPIES * weights,
        )
        kept = hessian_bytes(shape, layers, at_once=True)
        activation = summed_bytes(shape, device)
        return calibrated_work(shape, layers, self.calibration, self.batch_size, kept, work, self.devices, activation)


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
        from optkit.model.wiring import fold_, fold_groups

        skeleton, block = self.skeleton, self.skeleton.blocks[index]
        linears = skeleton.linears(block)
        seen = self._seen(index, {name: linears[name] for name in grids})
        wiring = fold_groups(skeleton, index, self._probe.hidden, self._probe.batches[0].calls[index])

        def searched(group: FoldGroup) -> InputScales | None:
            return self._searched(group, _readers(group, linears, grids, seen), rounding, stage)

        dealt = self.inputs.together.dealt(wiring.groups, searched)
        found = [(group, result) for group, result in zip(wiring.groups, dealt, strict=True) if result]
        refused = {name: reason for name, reason in wiring.refused.items() if name in grids}
        if grids and not found:
            name, reason = next(
                iter(refused.items()), (block.name, f"its layers saw fewer than {FEW_TOKENS} calibration tokens")
            )
            raise StageError(
                "no input of the chosen layers can be scaled",
                where=f"{stage}: {name}",
                why=reason[0].upper() + reason[1:],
                remedy="Take gptq, which needs no scales",
            )
        scaled = ScaledBlock({name: each.matrix for name, each in seen.items()}, refused=refused)
        touched: dict[str, None] = {}
        for group, result in found:
            if bool((result.scales != 1).any()):
                touched |= dict.fromkeys(fold_(skeleton, group, result.scales))
            scaled.gains[group.producer] = {"plain": result.plain_error, "scaled": result.error}
            for each in {seen[name] for name in group.consumers if name in seen}:
                scales = result.scales.to(each.matrix.device)
                each.matrix.div_(scales).div_(scales[:, None])
        scaled.changed = self._values(index, touched)
        return scaled

    def _searched(
        self, group: FoldGroup, readers: Sequence[Reader], rounding: Rounding, stage: str
    ) -> InputScales | None:
        """Return the scales of a group, on the CPU; None if no reader was seen at work."""
        from optkit.algorithms.awq import search_input_scales

        if not readers:
            return None
        try:
            result = search_input_scales(readers, group.rows, self.settings.grid_points, rounding)
        except ValueError as error:
            remedy = "Set rounding: nearest, or calibrate on more text"
            raise StageError(str(error), where=f"{stage}: {group.producer}", remedy=remedy) from error
        return replace(result, scales=result.scales.cpu())

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
