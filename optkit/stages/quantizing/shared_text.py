"""`devices:`, a field of stages that calibrate: several devices share the sequences of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from optkit.common.field_types import Devices
from optkit.devices.enough import refuse_devices
from optkit.model.shape import ModelShape
from optkit.model.task import Task
from optkit.model.together import together
from optkit.stage import Context, Cost, Report, Transform
from optkit.stages.quantizing.fitting import unknown_architecture


class SharedText(Transform):
    """A stage that can run in several processes, each with a device and a share of the text."""

    finds_parts: ClassVar[bool] = True
    sees_images: ClassVar[bool] = True
    shows_experts: ClassVar[bool] = True

    devices: Devices = Field(default=1, exclude_if=lambda value: value == 1)
    """GPUs, or on a CPU processes, that share the sequences of the calibration text."""

    @model_validator(mode="after")
    def _has_a_text_to_share(self) -> Self:
        text: Any = getattr(self, "calibration", None)
        if self.devices > 1 and text is None:
            raise ValueError("devices share a calibration text, and none is read here. Leave devices out")
        if self.devices > 1 and self.devices > text.samples:
            raise ValueError(
                f"{text.samples} calibration samples cannot be shared by {self.devices} devices. "
                f"Set devices to at most {text.samples}"
            )
        return self

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Do what one process does alone, in as many as there are devices. Raises as `launched`."""
        return self.launched(source, target, context) or super().run(source, target, context)

    def launched(self, source: Path, target: Path, context: Context) -> Report | None:
        """Return the report of as many processes as there are devices; None if this is one of them.

        Raises what one raises alone; StageError with the last lines of a process that was lost.
        """
        if self.devices == together(self.devices).count:
            return None
        from optkit.training.launch import launch

        return launch(self, source, target, context, self.devices, self.kind)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return what all processes need together.
        Raises StageError for more devices than there are, and for a model that cannot be calibrated.
        """
        refuse_devices(self.devices, device, self.kind)
        if getattr(self, "calibration", None) and shape.task is Task.UNKNOWN:
            raise unknown_architecture(f"{self.kind}.calibration", "Calibration opens", "Leave calibration out")
        return super().predict(shape, device)
