"""The report as Markdown."""

from __future__ import annotations

from optkit.common.markdown import markdown_table
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
