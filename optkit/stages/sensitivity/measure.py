"""How much quantizing each layer alone to each of several grids moves the predictions.
One pass over a few sequences, forward and back, measures it.

At most one block is in memory, with what its layers saw and the hidden states in front of every
block.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from math import isfinite
from typing import Literal

from torch import Tensor

from optkit.algorithms.grid import Grid
from optkit.algorithms.sensitivity import Seen, rounding_divergences
from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.empty_model import TORCH_DTYPES
from optkit.model.prompts import Prompts, tokens_in
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import float_weight
from optkit.packed_tensors.integers import PackQuantized
from optkit.progress import Progress
from optkit.stages.quantizing.hessians import load_kernels
from optkit.stages.sensitivity.gradients import BlockGradients
from optkit.stages.sensitivity.needed_memory import PROBES

Rounding = Literal["gptq", "rtn"]


def measure_sensitivity(
    skeleton: Skeleton,
    tokens: Tensor | Prompts,
    grids: Mapping[str, Sequence[Grid]],
    rounding: Rounding,
    device: str,
    progress: Progress,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Return layer -> the predicted divergence of quantizing it alone to each of its grids.
    In nats per token.

    tokens: int64 [sequences, sequence_length], or prompts with images. A layer that no token reaches
    (an expert) has 0 throughout. Raises what `Skeleton` raises,
    StageError for a layer that the language model does not run, that GPTQ cannot round or whose
    divergence is NaN or Inf, ResourceError without memory.
    """
    inside = {name for block in skeleton.blocks for name in skeleton.linears(block)}
    if outside := [name for name in grids if name not in inside]:
        raise StageError(
            f"{len(outside):,} layers are no part of the language model's decoder blocks ({outside[0]}, ...)",
            where="sensitivity",
            why="Text does not reach them",
            remedy="Exclude them",
        )
    if rounding == "gptq":
        load_kernels(device)
    found: dict[str, list[float]] = {}
    total = tokens_in(tokens)
    for name, weight, seen in layer_gradients(skeleton, tokens, grids, device, progress, seed):
        nats = _divergences(name, weight, seen, grids[name], rounding)
        found[name] = [each / total for each in nats]
    return {name: found[name] for name in grids}


def _divergences(
    name: str, weight: Tensor, seen: Sequence[Seen], grids: Sequence[Grid], rounding: Rounding
) -> list[float]:
    """Return the predicted divergence of a layer in each grid, in nats, summed over all tokens."""
    try:
        nats = rounding_divergences(weight, seen, grids, rounding == "gptq")
    except ValueError as error:
        remedy = "Exclude the layer, round to nearest (rtn), or take more text"
        raise StageError(str(error), where=f"sensitivity: {name}", remedy=remedy) from error
    return finite(nats, f"sensitivity: {name}", "Take other text, or see whether the model computes on it at all")


def finite(nats: list[float], where: str, remedy: str) -> list[float]:
    """Return predicted divergences. Raises StageError for NaN and Inf."""
    if not all(map(isfinite, nats)):
        why = "Activations or gradients do not fit float32 on this text"
        raise StageError("its predicted divergence is NaN or Inf", where=where, why=why, remedy=remedy)
    return nats


def layer_gradients(
    skeleton: Skeleton, tokens: Tensor | Prompts, names: Container[str], device: str, progress: Progress, seed: int
) -> Iterator[tuple[str, Tensor, list[Seen]]]:
    """Yield layer, its weight, float32 [out, in], and what it saw of each sequence that reached it.
    The last block's layers come first.
    """
    remedy = "Lower the samples or their sequence_length"
    with progress.task("sensitivity", 2 * len(skeleton.blocks), "blocks") as task:
        with out_of_memory("in front of the first block", device, remedy):
            passes = BlockGradients(skeleton, tokens, device, PROBES, seed)
        for index, block in enumerate(skeleton.blocks):
            with skeleton.loaded(block, device, remedy):
                passes.forward_(index)
            task.advance(note=block.name)
        with out_of_memory("behind the last block", device, remedy):
            passes.turn_()
        for index in reversed(range(len(skeleton.blocks))):
            block = skeleton.blocks[index]
            with skeleton.loaded(block, device, remedy):
                layers = {name: module for name, module in skeleton.linears(block).items() if name in names}
                seen = passes.backward_(index, layers)
                for name, module in layers.items():
                    yield name, float_weight(module), seen.pop(name)
            task.advance(note=block.name)


def grids_of(checkpoint: Checkpoint, forms: Mapping[str, Sequence[PackQuantized]]) -> dict[str, list[Grid]]:
    """Return the grids of the forms that each layer may take.
    Scales are in the dtype that they would be stored in.
    """
    grids = {}
    for name, candidates in forms.items():
        stored = checkpoint.tensors[f"{name}.weight"].dtype
        grids[name] = [
            Grid(form.bits, form.group_size, form.symmetric, TORCH_DTYPES[form.scale_dtype(stored)])
            for form in candidates
        ]
    return grids
