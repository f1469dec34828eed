"""Round stacked experts on a text: each is a linear layer for as long as its inputs are watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from optkit.errors import StageError
from optkit.model.calibration_memory import no_such_experts
from optkit.model.checkpoint import Checkpoint
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.linear_layers import Selection
from optkit.model.packed_floats import BLOCKS, SCALES
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.together import ALONE
from optkit.model.writer import CheckpointWriter
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob
from optkit.stages.quantizing.stacked_experts import KIND, Stack, finished

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optkit.algorithms.microscaling import MicroscaledWeight
    from optkit.model.blocks import BlockInputs
    from optkit.model.skeleton import Skeleton
    from optkit.stages.quantizing.input_ranges import InputRange

Stacked: TypeAlias = Mapping[str, TensorInfo]
"""Tensor [experts, in, out] -> its header."""


def expert_of(stored: str, index: int) -> str:
    """Return what an expert of a stacked tensor is called: `experts.gate_up_proj` has `experts.3.gate_up_proj`."""
    holder, _, leaf = stored.rpartition(".")
    return f"{holder}.{index}.{leaf}"


def refuse_for_stacked(stacked: Stacked, text: Calibration, devices: int, beside_unmodified: str) -> None:
    """Raise StageError for a text that all experts shall see, for several devices, and for blocks that are held to
    those of the unmodified model.
    """
    if beside_unmodified:
        raise StageError(
            "stacked experts are held to their own inputs alone",
            where=f"{KIND}.{beside_unmodified}",
            why="They lie in one tensor, and what learns is a linear layer",
            remedy=f"Leave out {beside_unmodified}; effort: balanced compensates",
        )
    if text.experts == "all":
        raise no_such_experts(
            f"{KIND}.calibration.experts", f"The checkpoint stores them joined ({next(iter(stacked))})"
        )
    if devices > 1:
        raise StageError(
            f"{devices} devices were asked for, and stacked experts are rounded on one",
            where=f"{KIND}.devices",
            why="Sums of their inputs are not added up over processes",
            remedy="Leave devices out",
        )


def shape_apart(shape: ModelShape, stacked: Stacked) -> ModelShape:
    """Return the shape with a linear layer for each expert."""
    tensors = {name: info for name, info in shape.tensors.items() if name not in stacked}
    for name, info in stacked.items():
        experts, inputs, outputs = info.shape
        part = TensorInfo(info.dtype, (outputs, inputs))
        tensors |= {f"{expert_of(name, index)}.weight": part for index in range(experts)}
    return replace(shape, tensors=tensors)


def compensate_stacked(
    source: Path, target: Path, context: Context, stacked: Stacked, blocks: Callable[[QuantizationJob], Iterator[Any]]
) -> Report:
    """Fill `target`; `blocks` yields what is left of the stacked tensors of each block, by name.
    Raises StageError, SourceError and ResourceError as a quantizer.
    """
    from optkit.model.named_skeleton import open_skeleton

    started = time.monotonic()
    skeleton = open_skeleton(Checkpoint(source), context.trust_remote_code)
    checkpoint = skeleton.checkpoint
    with context.progress.task(KIND, len(skeleton.blocks), "blocks") as task:
        kept = KeptBlocks(context.workspace, context.device, context.progress, KIND, checkpoint.shape.size_bytes)
        job = QuantizationJob(skeleton, source, Selection({}, {}), {}, context, task, kept, ALONE)
        with CheckpointWriter(target, beside=context.device.startswith("cuda")) as writer:
            for name in skeleton.outside_tensors:
                writer.add(name, checkpoint.read_finite(name))
            for block, made in zip(skeleton.blocks, kept.each(blocks(job), task), strict=True):
                for name in skeleton.block_tensors(block):
                    if name not in stacked:
                        writer.add(name, checkpoint.read_finite(name))
                for name, tensor in made.items():
                    writer.add(name, tensor)
                task.advance(note=block.name)
    report = finished(checkpoint, target, context, stacked, started)
    details = {**report.details, **job.details}
    return replace(report, details=details, notes=tuple(job.notes), calibrated_on=job.calibrated_on)


@contextmanager
def experts_apart(skeleton: Skeleton, index: int, stacked: Stacked) -> Iterator[dict[str, nn.Linear]]:
    """Let a loaded block compute with a linear layer for each expert for a while.
    They are given by their names; their weights are views of the block's.
    """
    from optkit.model.experts import stacked_apart

    block, layers, held = skeleton.blocks[index], dict[str, Any](), {}
    for name, module in list(block.module.named_modules()):
        leaves = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        stored = {leaf: skeleton.tensor_names.get(f"{block.name}.{name}.{leaf}", "") for leaf in leaves}
        if stored := {leaf: tensor for leaf, tensor in stored.items() if tensor in stacked}:
            experts, held[name] = stacked_apart(module), module
            block.module.set_submodule(name, experts)
            for leaf, tensor in stored.items():
                layers |= {expert_of(tensor, each): getattr(part, leaf) for each, part in enumerate(experts)}
    try:
        yield layers
    finally:
        for name, module in held.items():
            block.module.set_submodule(name, module)


def advance_again_(
    job: QuantizationJob, inputs: BlockInputs, stacked: Stacked, index: int, output: BlockOutput
) -> None:
    """Bring inputs behind a loaded block whose experts compute with what `round_experts_` made of them."""
    from optkit.kernels.microscaled import MicroscaledLinear

    with experts_apart(job.skeleton, index, stacked) as layers:
        for name, info in stacked.items():
            for expert in range(info.shape[0]) if expert_of(name, 0) in layers else ():
                codes, scales = (output.replaced[f"{name}{leaf}"][expert] for leaf in (BLOCKS, SCALES))
                weight = layers[expert_of(name, expert)].weight.data
                weight.copy_(MicroscaledLinear(codes.flatten(1), scales, None, None, weight.dtype).dequantize())
    job.skeleton.advance_(index, inputs)


def round_experts_(
    layers: Mapping[str, nn.Linear],
    stacked: Stacked,
    turns: Iterable[tuple[Collection[str], Mapping[str, InputRange]]],
    rounded: Callable[[str, Tensor, InputRange | None], MicroscaledWeight],
) -> dict[str, Tensor]:
    """Return the tensors of a block's experts, which compute with their rounded weights from now on.
    `turns`: names of layers, and what was seen of their inputs. `rounded` is given the name of each,
    its weight, [out, in], and what was seen.
    """
    stacks = {stored: Stack(info.shape[0]) for stored, info in stacked.items() if expert_of(stored, 0) in layers}
    places = {
        expert_of(stored, index): (stack, index) for stored, stack in stacks.items() for index in range(stack.count)
    }
    for turn, seen in turns:
        for name in turn:
            layer, (stack, index) = layers[name], places[name]
            made = rounded(name, layer.weight.detach().contiguous(), seen.get(name))
            layer.weight.data.copy_(made.dequantize())
            stack.put_(index, made)
        del seen  # before the block runs again
    return dict(part for stored, stack in stacks.items() for part in stack.tensors(stored).items())
