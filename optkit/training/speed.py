"""How fast a training was: tokens and operations a second, and what share of the devices' rate."""

from __future__ import annotations

from optkit.devices.datasheets import Device, datasheet_of
from optkit.devices.kept_roofs import kept_device
from optkit.environment import device_name
from optkit.training.flops import StepFlops
from optkit.training.training_record import SpeedRecord

TERA = 1e12


def speed_record(
    tokens: int,
    seconds: float,
    sequence: StepFlops,
    length: int,
    devices: int = 1,
    peak: Device | None = None,
    arithmetic: str = "fp32",
) -> SpeedRecord:
    """Return how fast so many tokens were, of sequences of `length` that cost `sequence` each.

    `peak`: what each of the devices can do, None if nobody knows. `arithmetic`: what products are
    computed in, a key of `Device.rates`.
    """
    tokens_per_s = tokens / seconds
    model, hardware = (flops * tokens_per_s / length / devices / TERA for flops in (sequence.model, sequence.hardware))
    record = SpeedRecord(
        tokens_per_s=tokens_per_s, tflops_per_s=model, hardware_tflops_per_s=hardware, flops=sequence.formula
    )
    if peak is None:
        return record
    rate = peak.rate(arithmetic)
    shares = {
        "mfu": model * TERA / rate,
        "hfu": hardware * TERA / rate,
        "peak_tflops_per_s": rate / TERA,
        "peak": f"{arithmetic} of {peak.name}, {peak.source}",
    }
    return record.model_copy(update=shares)


def peak_of(device: str) -> Device | None:
    """Return a GPU's datasheet, else the measured roof (`optkit roofline`); None without either."""
    return (datasheet_of(device_name(device)) if device != "cpu" else None) or kept_device(device)
