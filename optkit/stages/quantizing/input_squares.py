"""The mean square of each input of every linear layer on a text: llama.cpp's importance matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optkit.common.out_of_resources import out_of_memory
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.stages.quantizing.hessians import refuse_infinite, watch_inputs

if TYPE_CHECKING:
    from pathlib import Path

    from optkit.source.calibration import Calibration
    from optkit.stage import Context


class InputSquares:
    """Sums up the squares of the inputs of a layer."""

    def __init__(self, inputs: Tensor) -> None:
        self.tokens = 0
        self.sum = torch.zeros(inputs.shape[-1], device=inputs.device)

    def add(self, inputs: Tensor) -> None:
        """Take in float [..., in]."""
        rows = inputs.flatten(0, -2).float()
        self.tokens += len(rows)
        self.sum += rows.square().sum(0)


def input_squares(source: Path, calibration: Calibration, context: Context, stage: str) -> dict[str, Tensor]:
    """Return layer -> mean square of each of its inputs, float32 [in], one block in memory at a time.

    Raises StageError for inputs that are NaN or Inf, ResourceError without memory.
    """
    skeleton = Skeleton(Checkpoint(source), trust_remote_code=context.trust_remote_code)
    less = f"Lower {stage}.samples or {stage}.sequence_length"
    found = {}
    with context.progress.task(stage, len(skeleton.blocks), "blocks") as task, torch.no_grad():
        with out_of_memory("in front of the first block", context.device, less):
            tokens = calibration.tokens(source, context.data, context.trust_remote_code)
            inputs = skeleton.capture_inputs(tokens, context.device)
        for index, block in enumerate(skeleton.blocks):
            with skeleton.loaded(block, context.device, less):
                for name, seen in watch_inputs(skeleton, index, inputs, skeleton.linears(block), InputSquares).items():
                    refuse_infinite(seen.sum, name, skeleton)
                    found[name] = (seen.sum / seen.tokens).cpu()
                if index + 1 < len(skeleton.blocks):
                    skeleton.advance_(index, inputs)
            task.advance(note=block.name)
    return found
