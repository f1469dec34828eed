"""`optkit roofline`: the most that a model can do on a device, here or not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from optkit.errors import MissingPackageError
from optkit_cli.options import FILE, Command, number_option, takes

if TYPE_CHECKING:
    from optkit.reports.roofline import Device

PICTURES = (".svg", ".png")


def counts(value: str) -> tuple[int, ...]:
    """Return whole numbers above 0, with commas between them, sorted and each once."""
    words = [word.strip() for word in value.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(f"'{value}' is no list of numbers above 0. Write it as 1,8,32.")
    return tuple(sorted({int(word) for word in words}))


def picture(_context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the file of a picture; its ending says which kind of picture is wanted."""
    if path and path.suffix.lower() not in PICTURES:
        raise click.BadParameter(f"'{path}' does not end in {' or '.join(PICTURES)}.")
    return path


@click.command(cls=Command, short_help="Say how fast a model can be at most on a device.")
@click.argument("model", metavar="MODEL")
@click.option(
    "--device",
    metavar="DEVICE",
    help="cpu, cuda or cuda:N, which are measured (the best here by default), or a name from "
    "a table: h200, a100, l4, ...",
)
@click.option(
    "--batch",
    "batches",
    metavar="N,...",
    type=counts,
    default="1,2,4,8,16,32,64,128,256,512",
    show_default=True,
    help="Sequences at once.",
)
@number_option("--prompt", 512, "Tokens of a prompt, and of the cache while decoding.")
@click.option(
    "--forms",
    metavar="FORM,...",
    help="Forms of the weights: fp32, tf32, bf16, fp16, int8, fp8, int4gN (groups of N), stored.",
)
@click.option(
    "--bandwidth",
    metavar="TB/s",
    type=click.FloatRange(min=0, min_open=True),
    help="Take this memory bandwidth instead of the device's.",
)
@click.option(
    "--plot", metavar="FILE", type=FILE, callback=picture, help="Draw the limits over the batch, as .svg or .png."
)
@click.option("--remeasure", is_flag=True, help="Measure cpu or cuda again, whatever is kept of it.")
@takes("json", "quiet")
def command(
    model: str,
    device: str | None,
    batches: tuple[int, ...],
    prompt: int,
    forms: str | None,
    bandwidth: float | None,
    plot: Path | None,
    remeasure: bool,
) -> None:
    """Print the most tokens per second that MODEL can decode and prefill, and what binds.
    Several forms of its weights are compared.

    MODEL is a built-in name, a directory, a .gguf file or a hub id; its headers are read and
    nothing else. Limits follow from memory bandwidth and matrix rates alone: the site's
    page on the roofline has the formulas and the datasheets.
    """
    from optkit.environment import best_device
    from optkit.reports.roofline import build_report, datasheet, parse_form, to_svg, work_of_model
    from optkit_cli.output import print_result
    from optkit_cli.roofline_view import roofline_view

    wanted = device or best_device()
    work = work_of_model(model)
    chosen = tuple(word.strip() for word in forms.split(",")) if forms else ()
    for form in chosen:  # before seconds of measuring
        parse_form(form, work.dtype)
    notes: tuple[str, ...] = ()
    if re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        roof, notes = _measured(wanted, remeasure)
    else:
        roof = datasheet(wanted)
    if bandwidth is not None:
        roof = replace(roof, bandwidth=bandwidth * 1e12, source=f"{roof.source}; bandwidth as given")
    report = build_report(model, work, roof, batches=batches, prompt=prompt, forms=chosen, notes=notes)
    if plot is not None:
        _draw(to_svg(report), plot)
    print_result(report, lambda: roofline_view(report, plot))


def _measured(device: str, again: bool) -> tuple[Device, tuple[str, ...]]:
    """Return the roof of a device that is here, and what to say of it."""
    from optkit.reports.roofline import measured_device
    from optkit_cli.progress import working

    with working() as progress:
        found, roof = measured_device(device, progress=progress, again=again)
    note = f"the device was not quiet while it was measured (repeats spread: {roof.unsteady}): use --remeasure"
    return found, (note,) if roof.unsteady else ()


def _draw(svg: str, path: Path) -> None:
    if path.suffix.lower() == ".svg":
        path.write_text(svg, encoding="utf-8")
        return
    try:
        import cairosvg
    except (ImportError, OSError) as error:
        raise MissingPackageError("cairosvg", where=f"--plot {path}") from error
    cairosvg.svg2png(bytestring=svg.encode(), write_to=str(path), scale=2)
