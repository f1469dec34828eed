"""The sensitivity of a model's layers on the terminal: sums, kinds of layers, and the layers that suffer most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optkit.sensitivity import SensitivityReport
from optkit_cli.tables import heading, plain_table

SHOWN = 20
"""Layers in the table; the files hold all of them."""


def sensitivity_view(report: SensitivityReport, directory: Path | None) -> list[RenderableType]:
    """Return what to print, top to bottom; `directory` is where the files were written."""
    shown = report.layers[:SHOWN]
    parts: list[RenderableType] = [
        Text(f"{report.model}: predicted KL divergence of quantizing one layer alone ({report.rounding}), nats per token"),
        Text(report.protocol, style="dim"),
        heading("All layers"),
        _table(
            report.choices,
            [("sum", _nats(report.totals)), ("bits per weight", [f"{bits:.3f}" for bits in report.bits_per_weight])],
        ),
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


def _nats(values: Sequence[float]) -> list[str]:
    return [f"{nats:.3g}" for nats in values]


def _table(choices: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> Table:
    table = plain_table(("", "left"), *((choice, "right") for choice in choices))
    for name, cells in rows:
        table.add_row(Text(name), *cells)
    return table
