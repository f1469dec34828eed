"""Code in a Python of its own: what it prints, and what it imports."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a Python that imports this tree."""
    places = os.pathsep.join(str(ROOT / place) for place in (".", "cli", "evals"))
    return {**os.environ, "PYTHONPATH": places, **variables}


def python(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in a process of its own."""
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=240, check=False
    )


def printed(code: str) -> str:
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(code: str) -> set[str]:
    """Return the names of all modules that are there when the code has run."""
    return {*printed(f"{code}\nimport sys; print(*sys.modules)").splitlines()[-1].split()}
