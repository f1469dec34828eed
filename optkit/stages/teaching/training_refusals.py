"""What a training cannot have.
More devices than there are, weights that cannot be divided, sequences longer than the model's
positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optkit.environment import cpu_cores, visible_gpus
from optkit.errors import StageError
from optkit.model.shape import ModelShape
from optkit.model.weights import expert_counts

if TYPE_CHECKING:
    from optkit.stages.teaching.stage import TrainingStage


def check_devices(stage: TrainingStage, shape: ModelShape, device: str) -> None:
    """Raise StageError for more devices than there are, and weights that cannot be divided."""
    if stage.devices == 1:
        return
    there = cpu_cores() if device == "cpu" else visible_gpus()
    if stage.devices > there:
        raise StageError(
            f"{stage.devices} devices are asked for, and there {'is' if there == 1 else 'are'} {there}",
            where=stage.kind,
            why="Each process takes a core of the CPU at least"
            if device == "cpu"
            else "Each process takes a GPU of its own",
            remedy=f"Set `devices` to at most {there}",
        )
    if ":" in device:
        raise StageError(
            f"{stage.devices} devices are asked for, and {device} is one",
            where=stage.kind,
            remedy="Say `--device cuda`",
        )
    if stage.parallel == "fsdp":
        _refuse_indivisible(stage, shape)


def _refuse_indivisible(stage: TrainingStage, shape: ModelShape) -> None:
    """Refuse what FSDP2 cannot divide."""
    if expert_counts(shape.config)[0]:
        what, why = (
            "experts",
            "An expert that no token of a device is sent to has no gradient there, which FSDP2 would wait for",
        )
    elif shape.config.get("quantization_config"):
        what, why = "packed layers", "FSDP2 gives each device a part of the rows of float weights"
    else:
        return
    raise StageError(
        f"the weights of {what} cannot be divided", where=stage.kind, why=why, remedy="Set `parallel: ddp`"
    )


def check_positions(stage: TrainingStage, shape: ModelShape) -> None:
    """Raise StageError for sequences longer than the model was built for."""
    if shape.positions and stage.sequence_length > shape.positions:
        raise StageError(
            f"sequences of {stage.sequence_length:,} tokens, and the model was built for {shape.positions:,}",
            where=stage.kind,
            remedy=f"Set `sequence_length` to at most {shape.positions:,}",
        )
