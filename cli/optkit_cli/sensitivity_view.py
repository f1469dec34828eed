"""The sensitivity of layers on the terminal: sums, kinds, and the layers that suffer most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optkit.reports.sensitivity import SensitivityReport
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
        _table(report.choices, ((kind, _nats(sums)) for kind, sums in report.by_kind().items())),
        heading(f"The {len(shown)} layers that suffer most, of {len(report.layers):,}"),
        _table(report.choices, ((row.name, _nats(row.divergence)) for row in shown)),
    ]
    if report.skipped:
        name, reason = next(iter(report.skipped.items()))
        parts.append(Text(f"\nnot measured: {len(report.skipped):,} ({name}: {reason})", style="dim"))
    if directory is not None:
        parts.append(Text(f"\n{directory}: sensitivity.json, sensitivity.md, sensitivity.svg"))
    return parts


def _forms(report: SensitivityReport) -> Table:
    """Return what each form is, what it stores and what it costs over all layers."""
    table = plain_table(("", "left"), ("form", "left"), ("bits per weight", "right"), ("sum", "right"))
    for row in zip(report.choices, report.labels, report.bits_per_weight, _nats(report.totals), strict=True):
        word, label, bits, nats = row
        table.add_row(word, Text(label), f"{bits:.3f}", nats)
    return table


def _nats(values: Sequence[float]) -> list[str]:
    return [f"{nats:.3g}" for nats in values]


def _table(choices: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> Table:
    table = plain_table(("", "left"), *((choice, "right") for choice in choices))
    for name, cells in rows:
        table.add_row(Text(name), *cells)
    return table
