"""Fill an environment with the installed torch and the packages of a library's lock.

Torch is linked in; the packages are checked against their hashes. uv is used if it is installed,
else pip.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from optkit.backends.libraries import Library
from optkit.backends.lock import locked_for, other_ways, this_place
from optkit.backends.shared_torch import SharedTorch, requirements_of
from optkit.errors import OptkitError
from optkit.processes.commands import foreign_environment, python_command, run
from optkit.progress import Progress

SHOWN_LINES = 3
"""Last lines of a failed installer that go into the error."""
_WRONG_HASH = re.compile(
    r"(?:DO NOT MATCH THE HASHES[^\n]*\n\s+(\S+)|Hash mismatch for `([^`]+)`).*?(?:Got|Computed:)\s+(?:sha256:)?(\w+)",
    re.DOTALL,
)
_NOT_THERE = re.compile(r"No matching distribution found for|Because \S+ has no .*wheels|there is no version of")
_VERSIONS = """
import json, torch
from importlib import metadata
names = {found.metadata["Name"]: found.version for found in metadata.distributions()}
print(json.dumps(dict(sorted(names.items(), key=lambda item: item[0].lower()))))
"""


def install(library: Library, directory: Path, torch: SharedTorch, progress: Progress) -> dict[str, str]:
    """Build the environment of a library in an empty directory from its lock.
    Returns the version of each package in it.

    Raises OptkitError if a package cannot be had or is not the locked one.
    """
    uv, directory = shutil.which("uv"), directory.absolute()
    where = f"optkit env build {library.name}"
    locked = locked_for(library, torch)
    create = [uv, "venv", "--quiet", "--python", sys.executable] if uv else python_command("-m", "venv")
    _run([*create, str(directory)], where, "the virtual environment cannot be made")
    python = python_of(directory)
    if not torch.link_into(site_packages_of(directory)):
        what = f"the installed torch {torch.version} does not say which files it has, and cannot be shared"
        why = "Another copy of it would be installed unchecked: it is in no lock"
        raise OptkitError(what, where=where, why=why, remedy="Install torch from a wheel, e.g. with pip")
    pip = [uv, "pip"] if uv else python_command("-m", "pip", python=python)
    pip += ["install", *(["--python", str(python)] if uv else []), "--quiet", "--no-deps", "--require-hashes"]
    sources = [each for each in locked if each.name in library.sources]
    wheels = [each for each in locked if each not in sources]
    for name, some, how in (
        ("wheels.txt", wheels, ("--only-binary", ":all:")),
        ("sources.txt", sources, ("--no-build-isolation",)),  # built with what the lock has
    ):
        if some:
            (directory / name).write_text("".join(f"{each.line}\n" for each in some), encoding="utf-8")
            command = [*pip, *how, "-r", str(directory / name)]
            _run(command, where, "its packages cannot be installed", python.parent)
    _check_requirements(directory, library, torch, where)
    printed = _run(python_command("-c", _VERSIONS, python=python), where, "the packages do not work together")
    versions: dict[str, str] = json.loads(printed)
    return versions


def _check_requirements(directory: Path, library: Library, torch: SharedTorch, where: str) -> None:
    """Raise OptkitError if a package asks for what is missing, e.g. a newer torch.
    No installer was asked to look.
    """
    found = {
        canonicalize_name(each.metadata["Name"]): each
        for each in metadata.distributions(path=[str(site_packages_of(directory))])
    }
    ignored = {*torch.shared, *(canonicalize_name(Requirement(each).name) for each in library.bare)}
    lock = f"python -m optkit.backends.lock {library.name}"
    for name, distribution in found.items():
        for need in requirements_of(distribution) if name not in ignored else ():
            has = found.get(canonicalize_name(need.name))
            if has is None or not need.specifier.contains(has.version, prereleases=True):
                asks = f"{name} {distribution.version} asks for {need.name}{need.specifier}"
                remedy = f"Install another {need.name}, or make another lock: {lock}"
                there = has.version if has else "none"
                raise OptkitError(f"{asks}, and there is {there}", where=where, remedy=remedy)


def python_of(directory: Path) -> Path:
    """Return the interpreter of an environment."""
    return directory / "bin" / "python"


def site_packages_of(directory: Path) -> Path:
    """Return where an environment's packages lie."""
    return directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _run(command: Sequence[str], where: str, what: str, path: Path | None = None) -> str:
    """Return what a command prints; `path` has programs that it may start. Raises OptkitError with
    its last lines if it fails.
    """
    places = os.pathsep.join([*([str(path)] if path else []), os.environ.get("PATH", os.defpath)])
    try:
        # uv reads settings where it runs, and builds import from there
        with tempfile.TemporaryDirectory(prefix="optkit-") as empty:
            done = run(command, env=foreign_environment(PATH=places), cwd=empty)
    except OSError as error:
        raise OptkitError(what, where=where, why=f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise _failure(done.stderr or done.stdout, Path(command[0]).name, where, what)
    return done.stdout


def _failure(text: str, program: str, where: str, what: str) -> OptkitError:
    """Return what an installer's words mean."""
    if wrong := _WRONG_HASH.search(text):
        package, seen = wrong[1] or wrong[2], wrong[3]
        return OptkitError(
            f"{package} is not the file that optkit's lock names: its SHA-256 is {seen}",
            where=where,
            why="The index, a cache or the way to them gave other bytes; nothing of them was installed or run",
            remedy="See which index it takes, empty its cache (pip cache purge, uv cache clean), and run it again",
        )
    remedy = "See that the network and the disk are there, and run it again"
    if _NOT_THERE.search(text):
        name = where.rpartition(" ")[2]
        remedy = f"See that the index can be reached. If so, it has no such file for {this_place()}: {other_ways(name)}"
    return OptkitError(what, where=where, why=f"{program} says: {_last_words(text)}", remedy=remedy)


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return " / ".join(lines[-SHOWN_LINES:]) or "nothing"
