"""How trainings went: a sentence for each, and their loss curves as a picture (SVG).
Each training has a panel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from optkit.common.attachment import Attachment
from optkit.common.plot import COLOURS, GREY, Axis, Key, Line, Panel, Point, even_axis, picture, round_numbers
from optkit.scorecard.numbers import format_value, significant
from optkit.scorecard.scorecard import StepLine
from optkit.training.training_record import KEY, Judged, TrainingRecord

CURVES = "loss_curve.svg"
PANEL = (640, 260)
"""Width and height of what is drawn in, in pixels."""
DASHES = "5 4"
LEAST = 1e-12
"""A loss nearer to 0 is drawn as 0."""
WIDE_RANGE = 12
"""Largest loss divided by the smallest from which on the scale is logarithmic."""
FEW = 30
"""Up to so many points of the training loss have a mark."""


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
    parts += [text for text in (_speed(record), _memory(record), _energy(record)) if text]
    return f"{training.kind}: {'; '.join(parts)}"


def loss_curves(found: Sequence[Training]) -> str:
    """Return the picture: training and held-out loss over tokens, before the learning rate."""
    return picture([_panel(each) for each in found], legend=list(_legend(found)), size=PANEL, columns=1)


def pictures(steps: Iterable[StepLine]) -> dict[str, Attachment]:
    """Return the loss curves of the stages that trained, as one picture with its place.
    Nothing if none did.
    """
    found = trainings(steps)
    return {CURVES: Attachment(CURVES, loss_curves(found).encode(), "image/svg+xml")} if found else {}


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


def _energy(record: TrainingRecord) -> str:
    if record.energy_j is None:
        return ""
    return (
        f"{significant(record.energy_j / 1000, 3)} kJ, {significant(record.energy_j / record.tokens * 1000, 3)} "
        "mJ a token"
    )


def _loss(value: float) -> str:
    return significant(value, 4)


def _panel(training: Training) -> Panel:
    record = training.record
    drawn = [(each.tokens, each.loss) for each in record.points] + [(each.tokens, each.loss) for each in record.judged]
    up = _loss_axis([loss for _, loss in drawn])
    last = max(tokens for tokens, _ in drawn)
    across = Axis((0, last), [(each, _tokens(each, last)) for each in round_numbers(0, last)], "tokens")
    most = max(each.learning_rate for each in record.points)
    right = Axis((0, most), [(0, "0"), (most, f"{most:.2g}")]) if most > 0 else None
    mark: Literal["", "dot"] = "dot" if len(record.points) <= FEW else ""
    lines = [
        Line([Point(each.tokens, each.loss, mark) for each in record.points], COLOURS[0], 1.8, radius=3),
        Line([_judged(record, each) for each in record.judged], COLOURS[1], 1.8),
    ]
    if right:
        rate = [Point(each.tokens, each.learning_rate) for each in record.points]
        lines.insert(0, Line(rate, GREY, 1.2, DASHES, on_right=True))
    return Panel(f"{training.kind}: loss over tokens", across, up, lines, right)


def _judged(record: TrainingRecord, each: Judged) -> Point:
    return Point(each.tokens, each.loss, "dot", f"step {each.step:,}: {record.judged_by} {_loss(each.loss)}")


def _legend(found: Sequence[Training]) -> Iterator[Key]:
    yield Key("training loss", COLOURS[0])
    for words in dict.fromkeys(each.record.judged_by for each in found if each.record.judged):
        yield Key(words, COLOURS[1])
    yield Key("learning rate (right)", GREY, DASHES)


def _loss_axis(losses: Sequence[float]) -> Axis:
    """Return an axis around the losses, even or logarithmic."""
    low, high = (0.0 if abs(loss) < LEAST else loss for loss in (min(losses), max(losses)))
    if low <= 0 or high / low < WIDE_RANGE:
        return even_axis(low, high)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    lines = [part * 10.0**power for power in powers for part in (1, 2, 5)]
    ends = (
        max(each for each in lines if each <= low * (1 + 1e-9)),
        min(each for each in lines if each >= high * (1 - 1e-9)),
    )
    return Axis(ends, [(each, f"{each:.4g}") for each in lines if ends[0] <= each <= ends[1]], log=True)


def _tokens(tokens: float, largest: float) -> str:
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if largest >= 2 * scale:
            return f"{tokens / scale:,.4g}{unit if tokens else ''}"
    return f"{tokens:,.0f}"
