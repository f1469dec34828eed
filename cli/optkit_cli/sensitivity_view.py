"""The sensitivity of layers on the terminal: sums, kinds, and the layers that suffer most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optkit.reports.sensitivity import SensitivityReport
from optkit.reports.sensitivity.page import nats_text
from optkit_cli.tables import heading, plain_table

SHOWN = 20
"""Layers in the table; the files hold all of them."""


def sensitivity_view(report: SensitivityReport, directory: Path | None) -> list[RenderableType]:
    """Return what to print, top to bottom; `directory` is where the files were written."""
    shown = report.layers[:SHOWN]
    parts: list[RenderableType] = [
        Text(
            f"{report.model}: predicted KL divergence of quantizing one layer alone ({report.rounding}), nats per token"
        ),
        Text(report.protocol, style="dim"),
        heading("All layers"),
        _forms(report),
        heading("By kind of layer, sums"),
        _table(report.choices, report.by_kind().items()),
        heading(f"The {len(shown)} layers that suffer most, of {len(report.layers):,}"),
        _table(report.choices, ((row.name, row.divergence) for row in shown)),
    ]
    if report.skipped:
        name, reason = next(iter(report.skipped.items()))
        parts.append(Text(f"\nnot measured: {len(report.skipped):,} ({name}: {reason})", style="dim"))
    if directory is not None:
        parts.append(Text(f"\n{directory}: sensitivity.json, sensitivity.md, sensitivity.svg"))
    return parts


def _forms(report: SensitivityReport) -> Table:
    """Return what each form is, what it stores and what it costs over all layers."""
    bits = [f"{each:.3f}" for each in report.bits_per_weight]
    rows = zip(report.choices, report.labels, bits, map(nats_text, report.totals), strict=True)
    return plain_table("", "form", ">bits per weight", ">sum", rows=rows)


def _table(choices: Sequence[str], rows: Iterable[tuple[str, Sequence[float]]]) -> Table:
    shown = ((name, *map(nats_text, nats)) for name, nats in rows)
    return plain_table("", *(f">{choice}" for choice in choices), rows=shown)
