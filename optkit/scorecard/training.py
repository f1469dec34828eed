"""How trainings went: a sentence for each, and their loss curves as a picture (SVG).
Each training has a panel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from optkit.common.attachment import Attachment
from optkit.scorecard.numbers import format_value, significant
from optkit.scorecard.record import StepLine
from optkit.training.record import KEY, TrainingRecord

CURVES = "loss_curve.svg"
PANEL = (640, 260)
"""Width and height of what is drawn in, in pixels."""
MARGIN = (70, 56, 84, 50)
"""Left, top, right and bottom of each panel, in pixels."""
COLOURS = {"loss": "#4477aa", "judged": "#ee6677", "rate": "#999999"}
"""Of Paul Tol's bright scheme, which colour-blind people can tell apart;
https://personal.sron.nl/~pault/.
"""
LEAST = 1e-12
"""A loss nearer to 0 is drawn as 0."""
WIDE_RANGE = 12
"""Largest loss divided by the smallest from which on the scale is logarithmic."""
TICKS = 5
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
    cell = (PANEL[0] + MARGIN[0] + MARGIN[2], PANEL[1] + MARGIN[1] + MARGIN[3])
    width, height = cell[0], cell[1] * len(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, each in enumerate(found):
        parts += _panel(each, MARGIN[0], place * cell[1] + MARGIN[1])
    return "\n".join([*parts, "</svg>", ""])


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


def _panel(training: Training, left: int, top: int) -> list[str]:
    record = training.record
    losses = [each.loss for each in record.points] + [each.loss for each in record.judged]
    up, ticks = _scale(losses)
    last = max([record.points[-1].tokens, *(each.tokens for each in record.judged)])

    def across(tokens: int) -> float:
        return left + PANEL[0] * tokens / last

    def height(loss: float) -> float:
        return top + PANEL[1] * (1 - up(loss))

    parts = [_text(left, top - 34, f"{training.kind}: loss over tokens", size=14)]
    parts += _legend(record, left, top - 14)
    for tick in ticks:
        y = height(tick)
        parts.append(f'<line x1="{left}" x2="{left + PANEL[0]}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(left - 8, y + 4, f"{tick:.4g}", anchor="end"))
    for tokens in _even(0, last):
        parts.append(_text(across(round(tokens)), top + PANEL[1] + 18, _tokens(tokens, last), anchor="middle"))
    parts.append(_text(left + PANEL[0] / 2, top + PANEL[1] + 38, "tokens", anchor="middle"))
    parts += _rate(record, left, top, across)
    line = [(across(each.tokens), height(each.loss)) for each in record.points]
    parts.append(_line(line, COLOURS["loss"], 1.8))
    parts += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLOURS["loss"]}"/>' for x, y in line if len(line) <= FEW
    ]
    judged = [(across(each.tokens), height(each.loss)) for each in record.judged]
    parts.append(_line(judged, COLOURS["judged"], 1.8))
    for (x, y), each in zip(judged, record.judged, strict=True):
        title = f"<title>step {each.step:,}: {escape(record.judged_by)} {_loss(each.loss)}</title>"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS["judged"]}" stroke="white">{title}</circle>'
        )
    return parts


def _legend(record: TrainingRecord, left: int, y: int) -> list[str]:
    parts = []
    entries = [("loss", "training loss"), ("judged", record.judged_by), ("rate", "learning rate (right)")]
    for key, words in entries:
        if key == "judged" and not record.judged:
            continue
        dash = ' stroke-dasharray="5 4"' if key == "rate" else ""
        parts.append(
            f'<line x1="{left}" x2="{left + 24}" y1="{y - 4}" y2="{y - 4}" stroke="{COLOURS[key]}" '
            f'stroke-width="2"{dash}/>'
        )
        parts.append(_text(left + 30, y, words))
        left += 60 + 7 * len(words)
    return parts


def _rate(record: TrainingRecord, left: int, top: int, across: Callable[[int], float]) -> list[str]:
    """Return the learning rate from 0 to its largest, which stands at the right."""
    most = max(each.learning_rate for each in record.points)
    if most <= 0:
        return []
    line = [(across(each.tokens), top + PANEL[1] * (1 - each.learning_rate / most)) for each in record.points]
    right = left + PANEL[0] + 8
    return [
        _line(line, COLOURS["rate"], 1.2, dashes="5 4"),
        _text(right, top + 4, f"{most:.2g}", colour="#666666"),
        _text(right, top + PANEL[1] + 4, "0", colour="#666666"),
    ]


def _scale(losses: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    """Return a scale from 0 to 1 around the losses, even or logarithmic, and its lines' labels."""
    low, high = (0.0 if abs(loss) < LEAST else loss for loss in (min(losses), max(losses)))
    if low > 0 and high / low >= WIDE_RANGE:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        lines = [part * 10.0**power for power in range(first, last + 1) for part in (1, 2, 5)]
        bottom, top = (
            max(each for each in lines if each <= low * (1 + 1e-9)),
            min(each for each in lines if each >= high * (1 - 1e-9)),
        )
        span = math.log(top / bottom)
        return lambda loss: math.log(loss / bottom) / span, [each for each in lines if bottom <= each <= top]
    ticks = _even(low, high, outside=True)
    bottom, top = ticks[0], ticks[-1]
    return lambda loss: (loss - bottom) / (top - bottom), ticks


def _even(low: float, high: float, outside: bool = False) -> list[float]:
    """Return about `TICKS` round numbers between two, or around them if `outside`."""
    width = (high - low) or abs(high) or 1.0
    raw = width / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(part * power for part in (1, 2, 2.5, 5, 10) if part * power >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9) if outside else math.ceil(low / step - 1e-9)
    last = math.ceil(high / step - 1e-9) if outside else math.floor(high / step + 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _tokens(tokens: float, largest: float) -> str:
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if largest >= 2 * scale:
            return f"{tokens / scale:,.4g}{unit if tokens else ''}"
    return f"{tokens:,.0f}"


def _line(points: Sequence[tuple[float, float]], colour: str, width: float, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'stroke-linejoin="round"{dashed}/>'
    )


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, colour: str = "black") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(words)}</text>'
    )
