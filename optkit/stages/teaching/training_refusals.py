"""What a training cannot have.
More devices than there are, weights that cannot be divided, sequences longer than the model's
positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optkit.devices.enough import refuse_devices
from optkit.errors import StageError
from optkit.model.shape import ModelShape
from optkit.model.weights import expert_counts

if TYPE_CHECKING:
    from optkit.stages.teaching.stage import TrainingStage


def check_devices(stage: TrainingStage, shape: ModelShape, device: str) -> None:
    """Raise StageError for more devices than there are, and weights that cannot be divided."""
    refuse_devices(stage.devices, device, stage.kind)
    if stage.devices > 1 and stage.parallel == "fsdp":
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
