"""Fill an environment: the installed torch linked in, and a library's pinned requirements, with uv
if it is there, else pip.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from optkit.backends.libraries import Library
from optkit.backends.shared_torch import SharedTorch
from optkit.errors import OptkitError
from optkit.processes.start import foreign_environment, python_command, run
from optkit.progress import Progress

SHOWN_LINES = 3
"""Last lines of a failed installer that go into the error."""
_VERSIONS = """
import json, torch
from importlib import metadata
names = {found.metadata["Name"]: found.version for found in metadata.distributions()}
ordered = dict(sorted(names.items(), key=lambda item: item[0].lower()))
print(json.dumps({"torch": torch.__version__, "versions": ordered}))
"""


def install(library: Library, directory: Path, torch: SharedTorch, progress: Progress) -> dict[str, str]:
    """Build the environment of a library in an empty directory; returns the version of each package
    in it.

    Raises OptkitError with the installer's last words where a package cannot be had.
    """
    uv, directory = shutil.which("uv"), directory.absolute()
    where = f"optkit env build {library.name}"
    create = [uv, "venv", "--quiet", "--python", sys.executable] if uv else python_command("-m", "venv")
    _run([*create, str(directory)], where, "the virtual environment cannot be made")
    python = python_of(directory)
    linked = torch.link_into(site_packages_of(directory))
    needs: tuple[str, ...] = torch.needs
    constraints = list(torch.constraints)
    if not linked:
        progress.warn(
            f"{where}: the installed torch does not say which files it has; another copy of "
            f"{torch.version} is installed"
        )
        needs, constraints = (f"torch=={torch.version.partition('+')[0]}",), []
    (directory / "constraints.txt").write_text("\n".join(constraints) + "\n", encoding="utf-8")
    pip = [uv, "pip"] if uv else python_command("-m", "pip", python=python)
    pip += [
        "install",
        "--quiet",
        *(["--python", str(python)] if uv else []),
        "--constraint",
        str(directory / "constraints.txt"),
    ]
    what = "its packages cannot be installed"
    _run([*pip, *needs, *library.requirements, *library.build_packages], where, what)
    if library.bare:
        _run([*pip, "--no-deps", "--no-build-isolation", *library.bare], where, what)
    seen = json.loads(_run(python_command("-c", _VERSIONS, python=python), where, "the packages do not work together"))
    if seen["torch"].partition("+")[0] != torch.version.partition("+")[0]:
        raise OptkitError(
            f"torch {seen['torch']} came with it and {torch.version} is installed here",
            where=where,
            why="The environment would quantize with another torch",
            remedy="Report the requirement that brought it",
        )
    versions: dict[str, str] = seen["versions"]
    return versions


def python_of(directory: Path) -> Path:
    """Return the interpreter of an environment."""
    return directory / "bin" / "python"


def site_packages_of(directory: Path) -> Path:
    """Return where an environment's packages lie."""
    return directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _run(command: Sequence[str], where: str, what: str) -> str:
    """Return what a command prints. Raises OptkitError with its last lines where it fails."""
    try:
        # uv reads settings where it runs, and builds import from there
        with tempfile.TemporaryDirectory(prefix="optkit-") as empty:
            done = run(command, env=foreign_environment(), cwd=empty)
    except OSError as error:
        raise OptkitError(what, where=where, why=f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise OptkitError(
            what,
            where=where,
            why=f"{Path(command[0]).name} says: {_last_words(done.stderr or done.stdout)}",
            remedy="See that the network and the disk are there, and run it again",
        )
    return done.stdout


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return " / ".join(lines[-SHOWN_LINES:]) or "nothing"
