"""How trainings went, in a sentence each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optkit.scorecard.numbers import format_value, significant
from optkit.scorecard.scorecard import StepLine
from optkit.training.training_record import KEY, TrainingRecord


@dataclass(frozen=True)
class Training:
    """A stage that trained."""

    kind: str
    record: TrainingRecord


def trainings(steps: Iterable[StepLine]) -> list[Training]:
    """Return the stages that trained, in order."""
    found = ((step.kind, (step.report.get("details") or {}).get(KEY)) for step in steps)
    return [Training(kind, TrainingRecord.model_validate(record)) for kind, record in found if record]


def training_line(training: Training) -> str:
    """Return what a training did, cost and reached.
    For example `distill: loss 2.314 to 1.871, held-out loss 2.402 to 1.955; ...`.
    """
    record = training.record
    first, last = record.points[0], record.points[-1]
    parts = [f"loss {_loss(first.loss)} to {_loss(last.loss)}"]
    if record.judged:
        parts[0] += f", {record.judged_by} {_loss(record.judged[0].loss)} to {_loss(record.kept.loss)}"
    parts.append(f"{record.steps:,} steps, {record.tokens:,} tokens")
    if record.devices > 1:
        parts[-1] += f" on {record.devices} devices ({record.parallel})"
    parts += filter(None, (_speed(record), _memory(record)))
    if record.energy_j is not None:
        each = significant(record.energy_j / record.tokens * 1000, 3)
        parts.append(f"{significant(record.energy_j / 1000, 3)} kJ, {each} mJ a token")
    return f"{training.kind}: {'; '.join(parts)}"


def _speed(record: TrainingRecord) -> str:
    speed = record.speed
    if speed is None:
        return ""
    used = f", MFU {speed.mfu:.1%}" if speed.mfu is not None else ""
    used += f" (HFU {speed.hfu:.1%})" if speed.hfu is not None and speed.hfu != speed.mfu else ""
    of = f" of {speed.peak}" if speed.peak else ""
    each = " a device" if record.devices > 1 else ""
    return (
        f"{format_value(speed.tokens_per_s, 'tokens/s')}, {significant(speed.tflops_per_s, 3)} TFLOP/s{each} "
        f"({speed.flops}){used}{of}"
    )


def _memory(record: TrainingRecord) -> str:
    measured = f"peak memory {format_value(record.peak_bytes, 'bytes')}" if record.peak_bytes is not None else ""
    if record.predicted is None:
        return measured
    kinds = ", ".join(f"{name} {format_value(size, 'bytes')}" for name, size in record.predicted.by_kind().items())
    predicted = f"{format_value(record.predicted.total, 'bytes')} predicted ({kinds})"
    return f"{measured}, {predicted}" if measured else f"peak memory {predicted}"


def _loss(value: float) -> str:
    return significant(value, 4)
