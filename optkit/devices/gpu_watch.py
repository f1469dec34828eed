"""What may spoil a timing on a GPU, and what it costs: other processes, clocks, throttling, energy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from optkit.devices.nvml import Gpu, Reading, described, find_gpu, slowdowns

OWN_BYTES = 2 << 30
"""Memory of a GPU beyond what torch reserved that one process may take: CUDA's context, libraries'
workspaces, kernels.
"""


@dataclass
class GpuWatch:
    """Reads a GPU beside the repeats; on a CPU, or without NVML, there is nothing to read."""

    device: str
    gpu: Gpu | None = None
    unknown: str = ""
    """Why a GPU cannot be read."""
    readings: list[Reading] = field(default_factory=list)

    @classmethod
    def of(cls, device: str, find: Callable[[str], Gpu | None] = find_gpu) -> GpuWatch:
        try:
            return cls(device, find(device))
        except OSError as error:
            return cls(device, unknown=str(error))

    @classmethod
    def of_all(cls, devices: Sequence[str]) -> GpuWatch:
        """Return the watch of one device, or of several that hold a model together."""
        parts = tuple(cls.of(device) for device in dict.fromkeys(devices))
        return parts[0] if len(parts) == 1 else SeveralGpus(devices[0], parts=parts)

    def read(self) -> None:
        """Note the state now; between repeats, when the device has just finished."""
        if self.gpu:
            self.readings.append(self.gpu.read())

    def energy_j(self) -> float | None:
        """Return the energy that the GPU has used so far, None if it does not tell."""
        return self.gpu.read().energy_j if self.gpu else None

    def others(self) -> str:
        """Return how one sees that somebody else is on the GPU; empty if nobody is seen."""
        count = self.gpu.processes() if self.gpu else None
        if count is not None and count > 1:
            return f"{count - 1} other processes are on the GPU" if count > 2 else "another process is on the GPU"
        foreign = foreign_bytes(self.device)
        return f"others hold {foreign / 1e9:.1f} GB of the GPU's memory" if foreign > OWN_BYTES else ""

    def warnings(self) -> Iterator[str]:
        """Yield what the user must know of the repeats so far."""
        if self.unknown:
            yield f"clocks, throttling and energy are not reported: {self.unknown}"
        if slowed := slowdowns(self.readings):
            count = sum(bool(reading.slowed_by) for reading in self.readings)
            yield f"the GPU was slowed down by {' and '.join(slowed)} at {count} of {len(self.readings)} repeats"

    def note(self) -> str:
        """Return one line on clocks, heat and power; empty if there is nothing to say."""
        text = described(self.readings, self.gpu.largest_sm_mhz()) if self.gpu and self.readings else ""
        return f"the GPU ran at {text}" if text else ""


@dataclass
class SeveralGpus(GpuWatch):
    """Reads all GPUs that hold a model together, each in a process of its own."""

    parts: tuple[GpuWatch, ...] = ()

    def read(self) -> None:
        for part in self.parts:
            part.read()

    def energy_j(self) -> float | None:
        each = [part.energy_j() for part in self.parts]
        return None if None in each else sum(value for value in each if value is not None)

    def others(self) -> str:
        """Return how one sees others on a GPU, beside this process and the holder of a shard."""
        counts = [(part.device, part.gpu.processes() if part.gpu else None) for part in self.parts]
        return next(
            (f"{count - 2} further processes are on {device}" for device, count in counts if count and count > 2), ""
        )

    def warnings(self) -> Iterator[str]:
        for part in self.parts:
            yield from (f"{part.device}: {warning}" for warning in part.warnings())

    def note(self) -> str:
        return "; ".join(f"{part.device}: {note}" for part in self.parts if (note := part.note()))


def devices_of(session: Any) -> tuple[str, ...]:
    """Return the devices of an opened model: several if it is split."""
    found: tuple[str, ...] = getattr(session, "devices", ()) or (session.device,)
    return found


def foreign_bytes(device: str) -> int:
    """Return the bytes in use on a GPU that torch has not reserved; 0 on a CPU."""
    if device == "cpu":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total) - int(free) - int(torch.cuda.memory_reserved(device)))
