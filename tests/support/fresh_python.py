"""Code in a Python of its own: what it prints, and what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed(code: str) -> str:
    places = os.pathsep.join(str(ROOT / place) for place in (".", "cli", "evals"))
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": places},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def imported_by(code: str) -> set[str]:
    """Return the names of all modules that are there when the code has run."""
    return {*printed(f"{code}\nimport sys; print(*sys.modules)").splitlines()[-1].split()}
