"""A reproduction on the terminal: what was another machine's, each step, and the verdict."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from optkit.reports.reproduction import Reproduction
from optkit.reports.reproduction.reproduce import StepAgain
from optkit_cli.tables import indented, plain_table, spaced, verdict_text

MOST = 5
"""Tensors that are told."""


def reproduce_view(found: Reproduction) -> list[RenderableType]:
    """Return what to print, top to bottom."""
    differ = [(each.what, str(each.then), str(each.now), ", ".join(each.steps)) for each in found.circumstances]
    steps = [(step.kind, _files(step)) for step in found.steps]
    return spaced(
        plain_table("differs here", "then", "now", "steps", rows=differ) if differ else None,
        plain_table("step", "its files", rows=steps) if steps else None,
        _tensors(found) if found.tensors else None,
        indented([("note", note) for note in found.notes]),
        _closing(found),
    )


def _files(step: StepAgain) -> str:
    if step.identical is None:
        return "not recorded"
    return f"{step.files} identical" if step.identical else f"{', '.join(step.differing)} of {step.files} differ"


def _tensors(found: Reproduction) -> RenderableType:
    rows = [
        (
            each.name,
            f"{each.differing:,} of {each.elements:,}",
            "-" if each.largest is None else f"{each.largest:.3g}",
            f"{each.relative:.2%}",
        )
        for each in found.tensors[:MOST]
    ]
    return plain_table("tensor", ">elements that differ", ">largest", ">of its largest value", rows=rows)


def _closing(found: Reproduction) -> Text:
    same = len(found.files) - len([name for name in found.differing if name in found.files])
    said = f"  {same} of {len(found.files)} files have the same SHA-256"
    if found.differing:
        since = f", since the step {found.since}" if found.since else ""
        said += f"; others: {', '.join(found.differing)}{since}"
    return Text.assemble(verdict_text("FAIL" if found.differing else "PASS"), said, f"  {found.artifact}")
