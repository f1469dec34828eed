"""A profile on the terminal: each phase's time by kind, its longest kernels, and what to try."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optkit.reports.profiling import KINDS, Phase, ProfileReport
from optkit.scorecard.numbers import format_value
from optkit_cli.tables import heading, plain_table

SHOWN = 8
"""Kernels in the table; the JSON has more."""
LONGEST_NAME = 60


def profile_view(report: ProfileReport, directory: Path) -> list[RenderableType]:
    """Return what to print, top to bottom; `directory` is where the traces were written."""
    asked = f"batch {report.batch}, prompt {report.prompt:,}, {report.new_tokens:,} new tokens"
    parts: list[RenderableType] = [Text(f"{report.model} on {report.device_name}: {asked}")]
    parts += [Text(line, style="dim") for line in (*report.settings, *report.notes)]
    for phase in report.phases:
        parts += _phase(phase, report)
    if not report.phases:
        parts.append(Text("\nranges were marked and nothing was traced here: Nsight has the timeline"))
    parts += [Text(f"\n{directory}: {', '.join(report.files)}")] if report.files else []
    return parts


def _phase(phase: Phase, report: ProfileReport) -> Iterator[RenderableType]:
    each = f", {_time(phase.seconds / phase.steps)} a step" if phase.steps > 1 else ""
    yield heading(f"{phase.name}: {_time(phase.seconds)}{each}")
    shares = [(kind, phase.share(kind)) for kind in KINDS]
    idle = _idle(phase, report)
    yield Text(", ".join(f"{name} {share:.0%}" for name, share in [*shares, (idle, phase.idle)] if share >= 0.005))
    yield _lines(phase, "operation" if report.device == "cpu" else "kernel")
    yield Text(phase.advice, style="bold")


def _idle(phase: Phase, report: ProfileReport) -> str:
    """Return what the time in which no operation runs is called."""
    if report.engine != "torch":
        return "between nodes"
    if report.device != "cpu":
        return "waiting"
    return "not seen by torch" if phase.hidden else "Python"


def _lines(phase: Phase, what: str) -> Table:
    rows = []
    for line in phase.top[:SHOWN]:
        name = line.name if len(line.name) <= LONGEST_NAME else f"{line.name[: LONGEST_NAME - 3]}..."
        share = line.seconds / phase.whole_s if phase.whole_s else 0.0
        rows.append((name, line.kind, _time(line.seconds), f"{share:.0%}", f"{line.calls:,}"))
    return plain_table(what, "kind", ">time", ">share", ">calls", rows=rows)


def _time(seconds: float) -> str:
    return format_value(seconds, "s")
