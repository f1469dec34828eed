"""What NVIDIA's management library says of a GPU; it comes with the driver."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WAITING = "OPTKIT_PARENT_ON_GPU"
"""Environment variable: how many processes of optkit are on the GPU and wait for this one."""
LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
INSUFFICIENT_SIZE = 7
SM, MEMORY = 1, 2
"""Clocks, as nvmlClockType_t numbers them."""
SLOWDOWNS = {
    0x04: "its power limit",
    0x08: "a slowdown of the hardware",
    0x10: "another GPU that it keeps in step with",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
}
"""Bits of nvmlClocksThrottleReasons that mean lower clocks than asked for; idling and clocks that
somebody set are none.
"""


@dataclass(frozen=True)
class Reading:
    """A GPU at one moment; None for what it does not tell."""

    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    slowed_by: tuple[str, ...]
    energy_j: float | None
    """Since the driver was loaded."""


class Gpu:
    """One GPU, by the UUID that torch has of it."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        """Find it; raises OSError with a sentence if the library or the GPU is missing."""
        self._library = library or ctypes.CDLL(LIBRARY)
        self._handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._must("nvmlInit_v2")
        self._must("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self._handle))

    def read(self) -> Reading:
        """Return its state now."""
        power = self._number("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        energy = self._number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)
        reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong) or 0
        return Reading(
            sm_mhz=self._number("nvmlDeviceGetClockInfo", ctypes.c_uint, SM),
            memory_mhz=self._number("nvmlDeviceGetClockInfo", ctypes.c_uint, MEMORY),
            temperature_c=self._number("nvmlDeviceGetTemperature", ctypes.c_uint, 0),
            power_w=None if power is None else power / 1000,
            slowed_by=tuple(reason for bit, reason in SLOWDOWNS.items() if reasons & bit),
            energy_j=None if energy is None else energy / 1000,
        )

    def largest_sm_mhz(self) -> int | None:
        """Return the highest clock of its multiprocessors."""
        return self._number("nvmlDeviceGetMaxClockInfo", ctypes.c_uint, SM)

    def processes(self) -> int | None:
        """Return how many processes compute on it, ours too; a container may not see others.

        A process of optkit that waits for this one does not count.
        """
        count = ctypes.c_uint(0)
        status = self._call("nvmlDeviceGetComputeRunningProcesses_v3", self._handle, ctypes.byref(count), None)
        waiting = int(os.environ.get(WAITING, "0"))
        return max(0, count.value - waiting) if status in (0, INSUFFICIENT_SIZE) else None

    def _number(self, function: str, kind: Any, *arguments: int) -> int | None:
        found = kind()
        status = self._call(function, self._handle, *arguments, ctypes.byref(found))
        return int(found.value) if status == 0 else None

    def _must(self, function: str, *arguments: Any) -> None:
        if status := self._call(function, *arguments):
            raise OSError(f"NVML: {function} returned {status}")

    def _call(self, function: str, *arguments: Any) -> int:
        try:
            return int(getattr(self._library, function)(*arguments))
        except AttributeError:
            return -1


def find_gpu(device: str) -> Gpu | None:
    """Return the GPU behind a torch device, None for a CPU; raises OSError if NVML has none."""
    if device == "cpu":
        return None
    import torch

    return Gpu(str(torch.cuda.get_device_properties(device).uuid))


def slowdowns(readings: Sequence[Reading]) -> list[str]:
    """Return what slowed a GPU down in any of the readings, the most frequent first."""
    reasons = [reason for reading in readings for reason in reading.slowed_by]
    return sorted(set(reasons), key=lambda reason: (-reasons.count(reason), reason))


def described(readings: Sequence[Reading], largest_mhz: int | None) -> str:
    """Return e.g. `1,980 MHz (of 1,980), memory 3,201 MHz, 41 to 48 °C, up to 412 W`, or nothing."""
    clocks = [each.sm_mhz for each in readings if each.sm_mhz is not None]
    memory = [each.memory_mhz for each in readings if each.memory_mhz is not None]
    heat = [each.temperature_c for each in readings if each.temperature_c is not None]
    power = [each.power_w for each in readings if each.power_w is not None]
    parts = [f"{_span(clocks)} MHz" + (f" (of {largest_mhz:,})" if largest_mhz else "")] if clocks else []
    parts += [f"memory {_span(memory)} MHz"] if memory else []
    parts += [f"{_span(heat)} °C"] if heat else []
    parts += [f"up to {max(power):.0f} W"] if power else []
    return ", ".join(parts)


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
