"""What a roofline says of a model on a device, as plain data."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ConfigDict

from optkit.common.frozen import Frozen
from optkit.devices.datasheets import Device
from optkit.reports.roofline.forms import DEFAULT_FORMS, STORED, Form, parse_form
from optkit.reports.roofline.limits import (
    Side,
    compute_binds_from,
    decode_limit,
    most_sequences,
    pays_until,
    prefill_limit,
)
from optkit.reports.roofline.work import Work


class Cell(Frozen):
    """What of a `Limit` is reported."""

    model_config = ConfigDict(from_attributes=True)

    batch: int
    tokens_per_s: float
    bound_by: Side
    weight_bytes: float
    cache_bytes: float
    matrix_flops: float
    attention_flops: float


class FormLimits(Frozen):
    """One form of the weights."""

    name: str
    label: str
    size_bytes: float
    """Of all weights in memory."""
    arithmetic: str
    """What the products of the decoder blocks are computed in."""
    decode: tuple[Cell, ...]
    """New tokens per second, of all sequences together, each with `prompt` tokens."""
    prefill: tuple[Cell, ...]
    """Prompt tokens per second."""
    compute_binds_from: int | None
    """The smallest batch at which decoding is bound by arithmetic; None if it never is."""
    compared: bool
    """Whether it has fewer bits than the reference, so that it could gain."""
    pays_until: int | None
    """The smallest batch at which it decodes less than 1.1 times what the reference does; None
    if there is none.
    """
    most_sequences: int
    """The largest batch whose weights and KV cache fit in the device's memory."""


class RooflineReport(Frozen):
    """The limits of a model on a device."""

    model: str
    weights: int
    """Weights of all matrices."""
    device: str
    source: str
    bandwidth: float
    rates: dict[str, float]
    memory_bytes: float
    prompt: int
    """Tokens of a prompt, and those in the cache while a token is decoded."""
    reference: str
    """The form that others are compared with: the device's 16-bit float."""
    forms: tuple[FormLimits, ...]
    notes: tuple[str, ...]


def default_forms(work: Work, device: Device) -> tuple[str, ...]:
    """Return the forms that a device computes with; the model's own too if it is quantized."""
    known = tuple(
        device.wide if name == "bf16" else name for name in DEFAULT_FORMS if name != "fp8" or "fp8" in device.rates
    )
    return (*known, STORED) if work.quantized else known


def build_report(
    model: str,
    work: Work,
    device: Device,
    *,
    batches: Sequence[int],
    prompt: int,
    forms: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> RooflineReport:
    """Return the limits of every form at every batch. Raises UsageError for a form that does not
    exist.
    """
    reference = parse_form(device.wide, device.wide)
    chosen = [
        parse_form(name, work.dtype if name == STORED else device.wide) for name in forms or default_forms(work, device)
    ]
    return RooflineReport(
        model=model,
        weights=work.elements,
        device=device.name,
        source=device.source,
        bandwidth=device.bandwidth,
        rates=dict(device.rates),
        memory_bytes=device.memory_bytes,
        prompt=prompt,
        reference=reference.name,
        forms=tuple(_form(work, form, reference, device, batches, prompt) for form in chosen),
        notes=(*work.notes, *_replaced(chosen, device), *notes),
    )


def _form(work: Work, form: Form, reference: Form, device: Device, batches: Sequence[int], prompt: int) -> FormLimits:
    compared = work.stored_bytes(form) < work.stored_bytes(reference)
    return FormLimits(
        name=form.name,
        label=form.label,
        size_bytes=work.stored_bytes(form),
        arithmetic=form.arithmetic,
        decode=tuple(Cell.model_validate(decode_limit(work, form, device, batch, prompt)) for batch in batches),
        prefill=tuple(Cell.model_validate(prefill_limit(work, form, device, batch, prompt)) for batch in batches),
        compute_binds_from=compute_binds_from(work, form, device, prompt),
        compared=compared,
        pays_until=pays_until(work, form, reference, device, prompt) if compared else None,
        most_sequences=most_sequences(work, form, device, prompt),
    )


def _replaced(forms: Sequence[Form], device: Device) -> tuple[str, ...]:
    """Return a sentence for each dtype that the device does not compute in."""
    wanted = dict.fromkeys(form.arithmetic for form in forms if form.arithmetic not in device.rates)
    return tuple(f"{device.name} has no rate for {name}: that of {device.wide} is taken" for name in wanted)
