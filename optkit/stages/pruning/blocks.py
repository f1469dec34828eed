"""Prune the layers of a model one decoder block after another.
Later blocks see what is left of the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from optkit.algorithms.few_tokens import FEW_TOKENS
from optkit.algorithms.gptq import relative_error
from optkit.algorithms.hessian import Hessian
from optkit.algorithms.pruning import InputSquares, kept, wanda_scores
from optkit.algorithms.sparsegpt import curvature, sparsegpt
from optkit.algorithms.sparsity_pattern import Pattern
from optkit.common.grouping import grouped
from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.model.blocks import BlockInputs
from optkit.model.calibration_memory import less_memory
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.prompts import Prompts
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import advance_with, float_weight, put_weight_, weight_of
from optkit.model.together import ALONE, Together
from optkit.stage import Context
from optkit.stages.quantizing.hessians import collect_hessians, finite_matrix, in_turns, refuse_infinite, watch_inputs

LESS_MEMORY = less_memory("prune")


@dataclass(frozen=True)
class PruneOptions:
    """How weights are chosen; the fields of the stage `prune`."""

    method: Literal["magnitude", "wanda", "sparsegpt"]
    pattern: Pattern | None
    damping: float
    refinements: int
    equal_tokens: bool
    batch_size: int


@dataclass
class BlockPruner:
    """One run over a model, and what it finds on the way."""

    skeleton: Skeleton
    sparsities: Mapping[str, float]
    """Layer to prune -> the share of zeros that it gets; a pattern takes its place."""
    options: PruneOptions
    context: Context
    together: Together = ALONE
    losses: dict[str, float] = field(default_factory=dict)
    """Layer -> the squared error of its outputs, as a fraction of their square, on the calibration
    text (SparseGPT).
    """
    by_magnitude: dict[str, int] = field(default_factory=dict)
    """Layers that saw too few tokens -> how many."""
    raised_damping: dict[str, float] = field(default_factory=dict)

    def blocks(self, tokens: Tensor | Prompts | None, keep: KeptBlocks) -> Iterator[dict[str, Tensor]]:
        """Yield the pruned weights by tensor, as they are stored, of each block that is not kept.
        tokens: int64 [sequences, sequence_length], or prompts with images.
        """
        skeleton, device = self.skeleton, self.context.device
        inputs, left = None, range(len(skeleton.blocks))
        if tokens is not None and self.options.method != "magnitude":
            with out_of_memory("in front of the first block", device, LESS_MEMORY):
                inputs = skeleton.capture_inputs(tokens, device, self.options.batch_size, self.together)
            replay = partial(advance_with, skeleton, inputs, device, LESS_MEMORY)
            found = {"losses": self.losses, "few": self.by_magnitude, "raised": self.raised_damping}
            left = keep.resume(len(skeleton.blocks), inputs, found, replay)
        for index in left:
            block = skeleton.blocks[index]
            with skeleton.loaded(block, device, LESS_MEMORY):
                modules = {name: module for name, module in skeleton.linears(block).items() if name in self.sparsities}
                self._prune_(modules, index, inputs)
                pruned = {f"{name}.weight": self._stored(name, module) for name, module in modules.items()}
                if inputs is not None and index + 1 < len(skeleton.blocks):
                    skeleton.advance_(index, inputs)
            yield pruned
            del pruned  # before the next block's is made

    def _prune_(self, modules: Mapping[str, nn.Module], index: int, inputs: BlockInputs | None) -> None:
        """Put pruned weights into the modules of a loaded block."""
        options = self.options
        if inputs is None or not modules:
            self._by_magnitude_(modules)
        elif options.method == "wanda":
            squares = block_input_squares(self.skeleton, index, inputs, modules)
            self._by_magnitude_(self._barely_seen(modules, squares))
            for name, module in modules.items():
                if name not in self.by_magnitude:
                    norms = squares[name].norms()
                    refuse_infinite(norms, name, self.skeleton)
                    weight = float_weight(module)
                    stays = kept(wanda_scores(weight, norms), self.sparsities[name], options.pattern, by_output=True)
                    put_weight_(module, weight.masked_fill(~stays, 0))
        else:
            for turn in in_turns(self.skeleton, modules):
                hessians = collect_hessians(self.skeleton, index, inputs, turn, options.equal_tokens)
                self._by_magnitude_(self._barely_seen(turn, hessians))
                for together in _alike(hessians, self.by_magnitude):
                    self._by_sparsegpt_({name: turn[name] for name in together}, hessians[together[0]])
                del hessians  # before the next turn's are made

    def _by_magnitude_(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            weight = float_weight(module)
            stays = kept(weight.abs(), self.sparsities[name], self.options.pattern, by_output=False)
            put_weight_(module, weight.masked_fill(~stays, 0))

    def _by_sparsegpt_(self, modules: Mapping[str, nn.Module], hessian: Hessian) -> None:
        """Prune layers that share their input."""
        name = next(iter(modules))
        matrix = finite_matrix(hessian, name, self.skeleton)
        try:
            curved = curvature(matrix, self.options.damping)
        except ValueError as error:
            raise StageError(str(error), where=name, remedy="Exclude the layer, or calibrate on more text") from error
        if curved.damping > self.options.damping:
            self.raised_damping[name] = curved.damping
            self.context.progress.warn(
                f"{name}: the Hessian needed a damping of {curved.damping:g} instead of {self.options.damping:g}"
            )
        for layer, module in modules.items():
            weight = float_weight(module)
            pruned = sparsegpt(weight, curved, self.sparsities[layer], self.options.pattern, self.options.refinements)
            self.losses[layer] = relative_error(weight, pruned, matrix)
            put_weight_(module, pruned)

    def _barely_seen(self, modules: Mapping[str, nn.Module], sums: Mapping[str, Any]) -> dict[str, nn.Module]:
        """Return the layers that saw fewer than FEW_TOKENS tokens, and take note of them."""
        seen = {name: sums[name].tokens if name in sums else 0 for name in modules}
        few = {name: tokens for name, tokens in seen.items() if tokens < FEW_TOKENS}
        self.by_magnitude |= few
        return {name: modules[name] for name in few}

    def _stored(self, name: str, module: nn.Module) -> Tensor:
        """Return the weight of a module as its checkpoint has it."""
        return weight_of(module).detach().to(self.skeleton.stored_dtype(f"{name}.weight"), copy=True)


def block_input_squares(
    skeleton: Skeleton, index: int, inputs: BlockInputs, layers: Mapping[str, nn.Module]
) -> dict[str, InputSquares]:
    """Return the summed squares of the inputs of each layer of a loaded block that saw a token."""
    return watch_inputs(skeleton, index, inputs, layers, lambda given: InputSquares(given.shape[-1], given.device))


def _alike(hessians: Mapping[str, Hessian], without: Mapping[str, int]) -> Sequence[list[str]]:
    """Return the layers in groups with the same Hessian."""
    found = grouped((name for name in hessians if name not in without), lambda name: id(hessians[name]))
    return list(found.values())
