"""The limits of an opened model, by its tensors' bytes and its checkpoint's operations."""

from __future__ import annotations

from dataclasses import replace

from optkit.devices.datasheets import Device
from optkit.devices.gpu_watch import devices_of
from optkit.measure import Session
from optkit.reports.roofline.forms import STORED, parse_form
from optkit.reports.roofline.limits import Limit, phase_limit
from optkit.reports.roofline.work import Work

NAMES = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"}


def session_limits(
    session: Session, work: Work, device: Device, batch: int, prompt: int, context: int
) -> tuple[Limit, Limit]:
    """Return the limits of prefill and of a decode step.
    Prefill has `batch` prompts of `prompt` tokens, decoding `context` tokens in each sequence.
    """
    device = _together(device, len(set(devices_of(session))))
    form = parse_form(STORED, NAMES.get(str(getattr(session, "product_dtype", "float32")), "fp32"))

    def moved(tokens: int) -> tuple[float, float]:
        weights = session.decode_bytes(batch, 0)
        return float(weights), float(session.decode_bytes(batch, tokens) - weights)

    prefill = phase_limit(work, form, device, batch, moved(prompt), (prompt, 0))
    return prefill, phase_limit(work, form, device, batch, moved(context), (1, context))


def _together(device: Device, count: int) -> Device:
    """Return what devices with equal shares do, as if they exchanged data in no time."""
    rates = {name: rate * count for name, rate in device.rates.items()}
    return replace(device, bandwidth=device.bandwidth * count, rates=rates, memory_bytes=device.memory_bytes * count)
