"""What a training leaves in the scorecard: its loss curve, speed, memory and energy.

No torch is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optkit.common.frozen import Frozen
from optkit.training.memory_kinds import MemoryKinds

MOST_POINTS = 200
"""Points of a curve that are kept; what lies between them is averaged."""
MOST_JUDGED = 100
"""Held-out losses that are kept, beside the first and the least."""
KEY = "training"
"""The key of the record in a report's details."""


class Point(Frozen):
    """The training loss of one step, or the mean of several that end with it."""

    step: int
    """From 1."""
    tokens: int
    """Trained on up to its end."""
    loss: float
    """Mean over tokens; nats per token if it is a cross-entropy or a divergence."""
    learning_rate: float


class Judged(Frozen):
    """The loss on sequences that are held out."""

    step: int
    """After so many; 0 before the first."""
    tokens: int
    loss: float


class SpeedRecord(Frozen):
    """How fast it was, without what is not known."""

    tokens_per_s: float
    tflops_per_s: float
    """10^12 operations a second and device that the student's mathematics needs."""
    hardware_tflops_per_s: float
    """The same with what was computed again, and the teacher's."""
    flops: str
    """How they were counted."""
    mfu: float | None = None
    """Share of the device's rate: model FLOPs utilization."""
    hfu: float | None = None
    """The same of all that was computed."""
    peak_tflops_per_s: float | None = None
    """That rate."""
    peak: str = ""
    """What the device's rate is, and its source."""


class TrainingRecord(Frozen):
    """One training."""

    points: tuple[Point, ...]
    judged: tuple[Judged, ...] = ()
    judged_by: str = "held-out loss"
    """What the numbers of `judged` are."""
    steps: int
    tokens: int
    seconds: float
    """Of all steps; judging, checkpoints and opening apart."""
    devices: int = 1
    parallel: str | None = None
    """`ddp` or `fsdp`; None on one device."""
    speed: SpeedRecord | None = None
    predicted: MemoryKinds | None = None
    """Peak memory of a device, as the plan said it."""
    peak_bytes: int | None = None
    """The measured peak of a device, the largest of all; None if it cannot be told."""
    energy_j: float | None = None
    """Of all devices, if they tell, and one run made all steps."""

    def details(self) -> dict[str, Any]:
        """Return what belongs into a report's details."""
        return {KEY: self.model_dump(mode="json")}

    @property
    def kept(self) -> Judged:
        """What was held out says so of the weights that were kept: those that it judged best."""
        return min(self.judged, key=lambda each: each.loss)


def fewer(judged: Sequence[Judged], most: int = MOST_JUDGED) -> tuple[Judged, ...]:
    """Return about `most` held-out losses, evenly spread, with the first, the least and the last."""
    stride, least = -(-len(judged) // most), min(judged, key=lambda each: each.loss)
    spread = judged[::-1][::stride]
    return tuple(each for each in judged if each in (judged[0], least) or each in spread)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """Return at most `most` points.
    Each is the mean loss of equally many neighbours, at the place of the last of them.
    """
    stride = -(-len(points) // most)
    groups = (points[start : start + stride] for start in range(0, len(points), stride or 1))
    return tuple(
        group[-1].model_copy(update={"loss": sum(each.loss for each in group) / len(group)}) for group in groups
    )
