"""A roofline on the terminal: the device, its limits, and where each form stops paying."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optkit.reports.roofline import FormLimits, RooflineReport, rates_text
from optkit.reports.roofline.report import Cell
from optkit_cli.tables import heading, plain_table, size_text

SIDES = {"weights": "w", "KV cache": "k", "compute": "c"}
LEGEND = (
    "w: reading weights binds, k: reading the KV cache, c: arithmetic; (): weights and cache do not fit in its memory"
)


def roofline_view(report: RooflineReport, picture: Path | None) -> list[RenderableType]:
    """Return what to print, top to bottom; `picture` is where a plot was written."""
    parts: list[RenderableType] = [
        Text(f"{report.model}: {_weights(report.weights)} weights on {report.device}"),
        Text(f"memory {size_text(round(report.bandwidth))}/s; {rates_text(report.rates)}", style="dim"),
        Text(f"source: {report.source}", style="dim"),
        heading(f"Decoding, at most, tokens/s of all sequences, each with {report.prompt:,} tokens"),
        _limits(report, lambda form: form.decode),
        heading(f"Prompts of {report.prompt:,} tokens, at most, tokens/s"),
        _limits(report, lambda form: form.prefill),
        Text(LEGEND, style="dim"),
        heading("What each form costs, and from which batch on it stops paying"),
        _forms(report),
    ]
    parts += [Text(f"\nnote: {note}") for note in report.notes]
    if picture is not None:
        parts.append(Text(f"\n{picture}"))
    return parts


def _weights(count: int) -> str:
    return f"{count / 1e9:,.3g} billion" if count >= 1e9 else f"{count / 1e6:,.3g} million"


def _limits(report: RooflineReport, cells: Callable[[FormLimits], tuple[Cell, ...]]) -> Table:
    """Return a line for each batch, up to the first from which on nothing changes any more."""
    table = plain_table(">batch", *(f">{form.label}" for form in report.forms))
    before: list[float] = []
    for place, first in enumerate(cells(report.forms[0])):
        now = [cells(form)[place].tokens_per_s for form in report.forms]
        if all(math.isclose(old, new, rel_tol=1e-3) for old, new in zip(before, now, strict=False)) and before:
            table.add_row(f"{first.batch:,}+", *("the same" for _ in now))
            break
        table.add_row(f"{first.batch:,}", *(_cell(form, cells(form)[place]) for form in report.forms))
        before = now
    return table


def _cell(form: FormLimits, cell: Cell) -> str:
    text = f"{cell.tokens_per_s:,.{1 if cell.tokens_per_s < 100 else 0}f} {SIDES[cell.bound_by]}"
    return text if cell.batch <= form.most_sequences else f"({text})"


def _forms(report: RooflineReport) -> Table:
    below = f">below 1.1x {report.reference} from"
    rows = []
    for form in report.forms:
        held, pays = size_text(round(form.size_bytes)), _batch(form.pays_until) if form.compared else ""
        binds = _batch(form.compute_binds_from)
        rows.append((form.label, held, form.arithmetic, f"{form.most_sequences:,}", binds, pays))
    return plain_table("", ">weights", "products in", ">fits until batch", ">arithmetic binds from", below, rows=rows)


def _batch(batch: int | None) -> str:
    return "never" if batch is None else f"{batch:,}"
