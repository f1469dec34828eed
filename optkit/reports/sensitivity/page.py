"""The report as Markdown, and as a picture (SVG): a panel for each choice, a point for each layer.
Blocks go across, and divergence goes up in powers of 10.
"""

from __future__ import annotations

from collections.abc import Mapping

from optkit.common.markdown import markdown_table
from optkit.common.plot import COLOURS, Axis, Key, Line, Panel, Point, picture, powers_axis
from optkit.reports.sensitivity.report import SensitivityReport


def to_markdown(report: SensitivityReport) -> str:
    """Return the page: totals, sums by kind of layer, and every layer, the worst first."""
    head = ["", *report.labels]
    lines = [
        f"# What quantizing each layer of {report.model} costs",
        "",
        f"KL divergence from the model, in nats per token, that quantizing one layer alone ({report.rounding}) "
        "is predicted to cause."
        f" {report.protocol}. The prediction is of second order: it holds for small numbers, well below 0.1.",
        "",
        "![sensitivity](sensitivity.svg)",
        "",
        "## All layers",
        "",
        markdown_table(
            head,
            [
                ["sum", *map(nats_text, report.totals)],
                ["bits per weight", *(f"{bits:.3f}" for bits in report.bits_per_weight)],
            ],
            numbers=True,
        ),
        "",
        "## By kind of layer",
        "",
        markdown_table(head, ([kind, *map(nats_text, sums)] for kind, sums in report.by_kind().items()), numbers=True),
        "",
        "## By layer",
        "",
        markdown_table(head, ([row.name, *map(nats_text, row.divergence)] for row in report.layers), numbers=True),
        "",
    ]
    if report.skipped:
        lines += ["## Not measured", "", *(f"- {name}: {reason}" for name, reason in report.skipped.items()), ""]
    return "\n".join(lines)


def nats_text(nats: float) -> str:
    """Return a divergence with three digits, e.g. `0.000412` or `1.3e-07`."""
    return f"{nats:.3g}"


LEAST_DECADES = 2


def to_svg(report: SensitivityReport) -> str:
    """Return the picture."""
    colours = {kind: COLOURS[place % len(COLOURS)] for place, kind in enumerate(report.by_kind())}
    last = max(row.block for row in report.layers)
    blocks = range(0, last + 1, max(1, -(-(last + 1) // 8)))
    across = Axis((-0.5, last + 0.5), [(block, str(block)) for block in blocks], "decoder block")
    nats = [nats for row in report.layers for nats in row.divergence if nats > 0] or [1.0]
    up = powers_axis(nats, 10, "1e{}".format, LEAST_DECADES)
    return picture(
        [
            Panel(_title(report, place), across, up, _lines(report, place, colours))
            for place in range(len(report.choices))
        ],
        heading=[f"{report.model}: KL divergence of quantizing one layer alone ({report.rounding}), nats per token"],
        legend=[Key(kind, colour, dot=True) for kind, colour in colours.items()],
    )


def _title(report: SensitivityReport, place: int) -> str:
    stored, total = report.bits_per_weight[place], report.totals[place]
    return f"{report.labels[place]}: {stored:.2f} bits per weight, sum {total:.3g}"


def _lines(report: SensitivityReport, place: int, colours: Mapping[str, str]) -> list[Line]:
    """Return the points of one panel, joined by a thin line if a block has one layer of the kind."""
    lines = []
    for kind, colour in colours.items():
        rows = [row for row in report.layers if row.kind == kind and row.divergence[place] > 0]
        rows.sort(key=lambda row: row.block)
        points = [
            Point(row.block, row.divergence[place], "dot", f"{row.name}: {row.divergence[place]:.3g}") for row in rows
        ]
        single = len({row.block for row in rows}) == len(rows)
        lines.append(Line(points, colour, 1 if single else 0, opacity=0.4, radius=3.5))
    return lines
