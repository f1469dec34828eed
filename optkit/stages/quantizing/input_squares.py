"""The mean square of each input of every linear layer on a text: llama.cpp's importance matrix."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from optkit.algorithms.pruning import InputSquares
from optkit.common.out_of_resources import out_of_memory
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.quantizing.hessians import refuse_infinite, watch_inputs


def input_squares(source: Path, calibration: Calibration, context: Context, stage: str) -> dict[str, Tensor]:
    """Return layer -> mean square of each of its inputs, float32 [in], one block in memory at a time.

    Raises StageError for inputs that are NaN or Inf, ResourceError without memory.
    """
    skeleton = Skeleton(Checkpoint(source), trust_remote_code=context.trust_remote_code)
    less = f"Lower {stage}.samples or {stage}.sequence_length"
    found = {}

    def start(given: Tensor) -> InputSquares:
        return InputSquares(given.shape[-1], given.device)

    with context.progress.task(stage, len(skeleton.blocks), "blocks") as task, torch.no_grad():
        with out_of_memory("in front of the first block", context.device, less):
            tokens = calibration.tokens(source, context.data, context.trust_remote_code)
            inputs = skeleton.capture_inputs(tokens, context.device)
        for index, block in enumerate(skeleton.blocks):
            with skeleton.loaded(block, context.device, less):
                for name, seen in watch_inputs(skeleton, index, inputs, skeleton.linears(block), start).items():
                    refuse_infinite(seen.mean(), name, skeleton)
                    found[name] = seen.mean().cpu()
                if index + 1 < len(skeleton.blocks):
                    skeleton.advance_(index, inputs)
            task.advance(note=block.name)
    return found
