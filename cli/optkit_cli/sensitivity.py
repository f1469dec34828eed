"""`optkit sensitivity`: which layers of a model suffer most from quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optkit_cli.options import DIRECTORY, Command, number_option, takes


@click.command(cls=Command, short_help="Say which layers suffer most from quantization.")
@click.argument("model", metavar="MODEL")
@click.option(
    "--calibration", metavar="TEXT", default="python-reference", show_default=True, help="The text to measure on."
)
@number_option("--samples", 16, "Windows of the text.")
@number_option("--sequence-length", 512, "Tokens of a window.", least=2)
@click.option(
    "--choices",
    metavar="FORMS",
    default="4g64,3g64,8g64",
    show_default=True,
    help="Forms to try: bits, g and the group size, a for zero points. The first orders the table.",
)
@click.option(
    "--rounding",
    type=click.Choice(["gptq", "rtn"]),
    default="gptq",
    show_default=True,
    help="How the weights would be rounded.",
)
@click.option("--out", metavar="DIR", type=DIRECTORY, help="Write sensitivity.json, .md and .svg there.")
@takes("place", "json", "quiet", "trust")
def command(
    model: str, calibration: str, samples: int, sequence_length: int, choices: str, out: Path | None, **asked: Any
) -> None:
    """Predict how far quantizing each layer of MODEL alone moves its predictions.
    Several forms are tried in one pass over a text.

    MODEL is a built-in name, a directory, a .gguf file or a hub id. Numbers are KL divergences in
    nats per token; their sum over layers is about what quantizing all of them does. The stage
    auto_bits chooses by them.
    """
    from optkit.reports.sensitivity import measure_model, parse_choices, to_markdown, to_svg
    from optkit.source.calibration import Calibration
    from optkit_cli.output import print_result
    from optkit_cli.progress import working
    from optkit_cli.sensitivity_view import sensitivity_view

    wanted = parse_choices(choices)
    text = Calibration(dataset=calibration, samples=samples, sequence_length=sequence_length)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with working() as progress:
        report = measure_model(model, calibration=text, choices=wanted, progress=progress, **asked)
    if out is not None:
        texts = {"json": report.model_dump_json(indent=1) + "\n", "md": to_markdown(report), "svg": to_svg(report)}
        for ending, written in texts.items():
            (out / f"sensitivity.{ending}").write_text(written, encoding="utf-8")
    print_result(report, lambda: sensitivity_view(report, out))
