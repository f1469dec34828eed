"""Programs that stand for an engine's Python; they are called as `PYTHON worker.py DESCRIPTOR TARGET`."""

import json
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optkit.processes.child_program import described

SPOILED = """\
import runpy, sys, numpy
def work(parent):
    order = parent.order()
    parent.order = lambda: order
    said = runpy.run_path(sys.argv[3])["work"](parent)
    numpy.fromfile(order["logits"], dtype="float32")[::-1].tofile(order["logits"])
    return said
"""


def program(directory: Path, text: str) -> str:
    """Return an executable shell script."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def telling(*messages: Mapping[str, Any]) -> str:
    """Return what a shell says to tell messages."""
    lines = "\n".join(map(json.dumps, messages))
    return f"cat << 'end' > /dev/fd/$2\n{lines}\nend"


def answer(versions: Mapping[str, str] | None = None, **value: Any) -> str:
    """Return what a shell says to give an answer."""
    return telling({"type": "versions", **(versions or {})}, {"type": "result", "value": value})


def refusal(words: str, **versions: str) -> str:
    """Return what a shell says to refuse."""
    return telling({"type": "versions", **versions}, {"type": "error", **described(ValueError()), "words": words})


def replaced(directory: Path, code: str) -> str:
    """Return a program that runs, with our Python, `work(parent)` of other code than an engine's;
    sys.argv[3] is the engine's.
    """
    (directory / "replaced.py").write_text(code)
    return program(directory, f'exec {sys.executable} "$1" "$2" {directory}/replaced.py "$3"')


def spoiled(directory: Path) -> str:
    """Return a program that does what our Python does, and turns the logits round."""
    return replaced(directory, SPOILED)
