"""What a step of a plan will need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from optkit.common.frozen import Frozen


class Cost(Frozen):
    """What a step or a measurement is predicted to need, before it runs."""

    disk_bytes: int = 0
    """Bytes that it leaves in the store."""
    kept_bytes: int = 0
    """Bytes that it keeps on the disk until it ends, if there is room, to go on from after a stop."""
    ram_bytes: int = 0
    """Peak bytes of main memory."""
    gpu_bytes: int = 0
    """Peak bytes of GPU memory; 0 when the step runs on the CPU. Of several GPUs, those of each."""
    by_kind: dict[str, int] = {}
    """What the peak on the device is for, e.g. `{"weights": 538060416, "activations": 812646400}`;
    empty if the stage does not say.
    """
    notes: tuple[str, ...] = ()
    """Of the notes of its `Report` those that are known before it runs."""

    def noting(self, notes: Iterable[str]) -> Self:
        """Return it with further notes."""
        return self.model_copy(update={"notes": (*self.notes, *notes)})
