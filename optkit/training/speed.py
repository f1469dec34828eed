"""How fast a training was: tokens and operations a second, and what share of the devices' rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optkit.devices.datasheets import Device, datasheet_of
from optkit.devices.kept_roofs import kept_device
from optkit.environment import device_name
from optkit.training.flops import StepFlops

TERA = 1e12


@dataclass(frozen=True)
class Speed:
    """Of a whole training, or of a part of it."""

    tokens: int
    seconds: float
    sequence: StepFlops
    """What one sequence costs."""
    length: int
    """Tokens of a sequence."""
    devices: int = 1
    peak: Device | None = None
    """What each of the devices can do; None if nobody knows."""
    arithmetic: str = "fp32"
    """What products are computed in: a key of `Device.rates`."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all devices."""
        return self.tokens / self.seconds

    @property
    def model_tflops_per_s(self) -> float:
        """Operations that the mathematics of the student needs, of one device."""
        return self._per_device(self.sequence.model)

    @property
    def hardware_tflops_per_s(self) -> float:
        """Operations that one device did, with those done again and the teacher's."""
        return self._per_device(self.sequence.hardware)

    @property
    def model_flops_utilization(self) -> float | None:
        """Share of the device's rate that the student's mathematics was; None if unknown."""
        return self.model_tflops_per_s * TERA / self.peak.rate(self.arithmetic) if self.peak else None

    @property
    def hardware_flops_utilization(self) -> float | None:
        """Share of the device's rate that was used."""
        return self.hardware_tflops_per_s * TERA / self.peak.rate(self.arithmetic) if self.peak else None

    def details(self) -> dict[str, Any]:
        """Return the numbers for a report; without what is not known."""
        found: dict[str, Any] = {
            "tokens_per_s": self.tokens_per_s,
            "tflops_per_s": self.model_tflops_per_s,
            "hardware_tflops_per_s": self.hardware_tflops_per_s,
            "flops": self.sequence.formula,
        }
        if self.peak:
            found |= {
                "mfu": self.model_flops_utilization,
                "hfu": self.hardware_flops_utilization,
                "peak_tflops_per_s": self.peak.rate(self.arithmetic) / TERA,
                "peak": f"{self.arithmetic} of {self.peak.name}, {self.peak.source}",
            }
        return found

    def _per_device(self, flops: float) -> float:
        return flops * self.tokens_per_s / self.length / self.devices / TERA


def peak_of(device: str) -> Device | None:
    """Return a GPU's datasheet, else the measured roof (`optkit roofline`); None without either."""
    return (datasheet_of(device_name(device)) if device != "cpu" else None) or kept_device(device)
