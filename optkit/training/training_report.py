"""What a training was: its curve, speed, memory and energy, as the scorecard shows them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from optkit.devices.datasheets import Device, datasheet_of
from optkit.devices.gpu_watch import GpuWatch
from optkit.devices.kept_roofs import kept_device
from optkit.devices.peak_memory import watched_peak
from optkit.environment import device_name
from optkit.errors import SourceError
from optkit.model.shape import ModelShape
from optkit.training.flops import StepFlops, step_flops
from optkit.training.memory_kinds import MemoryKinds
from optkit.training.ranks import Ranks
from optkit.training.training_options import TrainingResult
from optkit.training.training_record import Judged, Point, SpeedRecord, TrainingRecord, fewer, thinned

TERA = 1e12


@dataclass
class Spent:
    """What a device was asked for; filled in when the watched work has ended."""

    device: str
    peak_bytes: int | None = None
    """Beyond what the process held before, on a CPU."""
    energy_j: float | None = None


@dataclass(frozen=True)
class Trainee:
    """What was trained."""

    shape: ModelShape
    length: int
    """Tokens of a sequence."""
    arithmetic: str
    """What matrices were multiplied in: `bf16` or `fp32`."""
    recomputed: bool
    adapter_elements: int | None
    """Numbers of adapters beside frozen weights; None if all weights are trained."""
    teacher: ModelShape | None
    """A teacher that computed beside it."""
    frozen_head: bool = False
    """lm_head was not trained, the blocks were."""


@contextlib.contextmanager
def spending(device: str) -> Iterator[Spent]:
    """Watch a device's memory and energy."""
    spent, gpu = Spent(device), GpuWatch.of(device)
    before, energy = psutil.Process().memory_info().rss, gpu.energy_j()
    with watched_peak(device) as peak:
        yield spent
    if peak.size_bytes is not None:
        spent.peak_bytes = peak.size_bytes - before if device == "cpu" else peak.size_bytes
    after = gpu.energy_j()
    spent.energy_j = after - energy if energy is not None and after is not None else None


def account(
    result: TrainingResult, trainee: Trainee, spent: Spent, ranks: Ranks, parallel: str, predicted: MemoryKinds | None
) -> TrainingRecord:
    """Return the record; every process has to ask for it at the same time."""
    course = result.course
    step_tokens = result.tokens // course.step
    peak = max(ranks.gather(spent.peak_bytes or 0))
    energy = sum(ranks.gather(spent.energy_j or 0.0))
    rates = [0.0] * (len(course.curve) - len(course.rates)) + course.rates
    points = [
        Point(step=step, tokens=step * step_tokens, loss=loss, learning_rate=rate)
        for step, (loss, rate) in enumerate(zip(course.curve, rates, strict=True), start=1)
    ]
    judged = [
        Judged(step=int(each["step"]), tokens=int(each["step"]) * step_tokens, loss=each["total"])
        for each in course.held_out
    ]
    return TrainingRecord(
        points=thinned(points),
        judged=fewer(judged),
        steps=course.step,
        tokens=result.tokens,
        seconds=round(course.step_seconds, 3),
        devices=ranks.count,
        parallel=parallel if ranks.count > 1 else None,
        speed=_speed(result, trainee, spent.device, ranks.count),
        predicted=predicted,
        peak_bytes=peak or None,
        energy_j=None if course.resumed else energy or None,  # nobody counted that of the runs before
    )


def _speed(result: TrainingResult, trainee: Trainee, device: str, devices: int) -> SpeedRecord | None:
    """Return the speed; None if the operations of the model cannot be counted."""
    try:
        flops = step_flops(
            trainee.shape,
            trainee.length,
            recomputed=trainee.recomputed,
            frozen=trainee.adapter_elements is not None,
            frozen_head=trainee.frozen_head,
            adapter_elements=trainee.adapter_elements or 0,
            teacher=trainee.teacher,
        )
    except SourceError:
        return None
    peak = None if device == "cpu" and devices > 1 else roof_of(device)  # processes on a CPU share its rate
    seconds = result.course.step_seconds
    return speed_record(result.tokens, seconds, flops, trainee.length, devices, peak, trainee.arithmetic)


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


def roof_of(device: str) -> Device | None:
    """Return a GPU's datasheet, else the measured roof (`optkit roofline`); None without either."""
    return (datasheet_of(device_name(device)) if device != "cpu" else None) or kept_device(device)
