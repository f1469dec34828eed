"""A diagnosis on the terminal: the machine, the packages, and what can run."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optkit.common.grouping import by_key
from optkit.reports.doctor.doctor import Diagnosis, Part
from optkit.scorecard.numbers import format_value
from optkit_cli.tables import heading, indented, size_text

COMMANDS = ("pip ", "optkit ", "apt ")
"""How a remedy begins that can be copied."""
ROLES = ("stage", "eval", "engine", "backend", "kernel")


def diagnosis_view(diagnosis: Diagnosis) -> list[RenderableType]:
    """Return what to print, top to bottom."""
    sections: list[tuple[str, Table | None]] = [
        ("machine", indented(_machine(diagnosis))),
        ("packages", indented(_packages(diagnosis))),
        *((f"{role}s", indented([_line(part) for part in diagnosis.parts if part.role == role])) for role in ROLES),
        (f"shapes of {diagnosis.model}", indented(_shapes(diagnosis)) if diagnosis.model else None),
        ("all-reduce of all GPUs", indented(_links(diagnosis))),
        ("to install what is missing", indented(_commands(diagnosis))),
        ("problems", indented([(Text("!!", style="bold red"), problem) for problem in diagnosis.problems])),
    ]
    return [part for title, section in sections if section is not None for part in (heading(title), section)]


def _machine(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    lines = [("system", diagnosis.platform)]
    for device in diagnosis.devices:
        about = f"{device.name}, " + (f"{diagnosis.cpu_cores} cores, " if device.device == "cpu" else "")
        free = f"{size_text(device.available_bytes)} of {size_text(device.total_bytes)} free"
        lines.append((device.device, f"{about}{free}"))
    features = " ".join(diagnosis.cpu_features)
    return [
        *lines,
        *([("cpu features", features)] if features else []),
        ("cuda", f"{diagnosis.cuda or 'torch was built without it'}, driver {diagnosis.driver or 'none'}"),
        ("c++ compiler", diagnosis.compiler or "none; `compile` needs one on a CPU: apt install g++"),
        ("store", f"{diagnosis.store}, {size_text(diagnosis.store_free_bytes)} free"),
        ("hub cache", f"{diagnosis.hub_cache}, {'offline (HF_HUB_OFFLINE)' if diagnosis.hub_offline else 'online'}"),
        ("data", str(diagnosis.data or "none; --data or $OPTKIT_DATA names a directory with local data sets")),
    ]


def _shapes(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    if not diagnosis.shapes:
        return [("ok", "every matrix is a multiple of 64 each way, and groups of 128 fit")]
    return [
        (f"{each.layers} {each.outputs:,} x {each.inputs:,}", f"{each.problem} ({each.count:,} of them)")
        for each in diagnosis.shapes
    ]


def _links(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    rates = {each: f"{each.bus_bytes_per_s / 1e9:,.3g} GB/s on the bus" for each in diagnosis.links}
    return [(size_text(each.size_bytes), f"{format_value(each.seconds, 's')}, {rate}") for each, rate in rates.items()]


def _packages(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    here = {"optkit": diagnosis.optkit, "python": diagnosis.python, **diagnosis.packages}
    return [(name, version or "not installed") for name, version in here.items()]


def _commands(diagnosis: Diagnosis) -> list[tuple[Text, str]]:
    """Return each command that makes something run here, and what."""
    missing = (part for part in diagnosis.parts if not part.works and part.remedy.startswith(COMMANDS))
    found = by_key((part.remedy, part.name) for part in missing)
    return [(Text(command, style="cyan"), f"# {', '.join(names)}") for command, names in found.items()]


def _line(part: Part) -> tuple[Text, Text]:
    mark = Text("ok ", style="green") if part.works else Text("-- ", style="dim")
    meaning = Text(part.note)
    if part.remedy:
        meaning.append(f"{': ' if part.note else ''}{part.remedy}", style="cyan")
    return mark + Text(part.name), meaning
