"""Experts that a model stacks in one tensor, in MXFP4 as gpt-oss is published.

NAME         float [experts, in, out] becomes
NAME_blocks  uint8 [experts, out, in / 32, 16]: two codes a byte, the low half first
NAME_scales  uint8 [experts, out, in / 32]: E8M0
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import layers_of
from optkit.model.packed_floats import BLOCKS, SCALES
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.writer import CheckpointWriter, copy_companions
from optkit.packed_tensors.microscaled import BLOCKS as WIDTHS
from optkit.stage import Context, Report

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.algorithms.microscaling import MicroscaledWeight

KIND, WIDTH = "mx", WIDTHS["mxfp4"]
ALONE = "engines open experts alone in this form"


def with_stacked(shape: ModelShape, stacked: Mapping[str, TensorInfo]) -> ModelShape:
    """Return the shape that packing leaves. Raises StageError if blocks do not fit."""
    tensors: dict[str, TensorInfo] = {}
    for name, info in shape.tensors.items():
        tensors |= _packed(name, info) if name in stacked else {name: info}
    return ModelShape(config=_config(shape), tensors=tensors)


def pack_stacked(
    checkpoint: Checkpoint, target: Path, context: Context, stacked: Mapping[str, TensorInfo], search: bool
) -> Report:
    """Fill `target` tensor by tensor, without a model. Raises StageError and SourceError as a quantizer."""
    started, shape = time.monotonic(), checkpoint.shape
    with (
        context.progress.task(KIND, len(stacked), "tensors") as task,
        CheckpointWriter(target, beside=context.device.startswith("cuda")) as writer,
    ):
        for name in shape.tensors:
            if name in stacked:
                parts = _rounded(checkpoint, name, context.device, search).tensors(name)
            else:
                parts = {name: checkpoint.read_finite(name)}
            for written, part in parts.items():
                writer.add(written, part)
            task.advance(int(name in stacked), name)
    return finished(checkpoint, target, context, stacked, started)


def finished(
    checkpoint: Checkpoint, target: Path, context: Context, stacked: Mapping[str, TensorInfo], started: float
) -> Report:
    """Write what is beside the weights, and return the report of a run that began at `started`."""
    shape = checkpoint.shape
    copy_companions(checkpoint.directory, target, context.trust_remote_code, with_stacked(shape, stacked).config)
    return Report(
        changed=len(stacked),
        skipped=dict.fromkeys(layers_of(shape), ALONE),
        details={"formats": {"mxfp4, blocks of 32": len(stacked)}, "seconds": round(time.monotonic() - started, 2)},
    )


def _rounded(checkpoint: Checkpoint, name: str, device: str, search: bool) -> Stack:
    """Return the experts of [experts, in, out], rounded; one of them is in memory at a time."""
    from optkit.algorithms.microscaling import quantize_mxfp4

    stack = Stack(checkpoint.tensors[name].shape[0])
    for index in range(stack.count):
        expert = checkpoint.read_finite(name, index).to(device)
        stack.put_(index, quantize_mxfp4(expert.T.contiguous(), search))
    return stack


@dataclass
class Stack:
    """The packed experts of a stacked tensor, so many of [out, in]."""

    count: int
    parts: dict[str, Tensor] = field(default_factory=dict)

    def put_(self, index: int, expert: MicroscaledWeight) -> None:
        """Take one of them."""
        from optkit.algorithms.microscaling import pack

        for leaf, tensor in pack(expert).items():
            if leaf not in self.parts:
                self.parts[leaf] = tensor.new_empty(self.count, *tensor.shape, device="cpu")
            self.parts[leaf][index] = tensor

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors that stand for the stacked one of that name, once all are there."""
        codes, scales = self.parts["weight_packed"], self.parts["weight_scale"]
        return {f"{name}{BLOCKS}": codes.view(*scales.shape, -1), f"{name}{SCALES}": scales}


def _packed(name: str, info: TensorInfo) -> dict[str, TensorInfo]:
    experts, inputs, outputs = info.shape
    if inputs % WIDTH:
        raise StageError(
            f"{name} has {inputs} inputs, no multiple of {WIDTH}",
            where=f"{KIND}.type",
            why=f"Blocks of mxfp4 are {WIDTH} inputs wide",
            remedy="Take a stage that leaves experts float, such as rtn",
        )
    scales = (experts, outputs, inputs // WIDTH)
    return {f"{name}{BLOCKS}": TensorInfo("U8", (*scales, WIDTH // 2)), f"{name}{SCALES}": TensorInfo("U8", scales)}


def _config(shape: ModelShape) -> dict[str, Any]:
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {**shape.config, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}
