"""What the environment of a library is made of, to the last package and its SHA-256:
locks/NAME.txt, as pip and uv take requirements.

    python -m optkit.backends.lock [NAME ...]

makes the named ones anew, else all. Do it after each change of libraries.py, and build the
environments before you commit the files. It needs uv and the index. The installed torch says which
packages of its own a lock must have; torch and the binary packages that it brings are in none, for
they are linked (shared_torch.py).
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from optkit.backends.libraries import LIBRARIES, Library, find_library
from optkit.backends.shared_torch import SharedTorch
from optkit.errors import OptkitError
from optkit.processes.commands import run

LOCKS = Path(__file__).parent / "locks"
PLATFORMS = ("linux", "darwin")
FIRST_MINOR, LAST_MINOR = 11, 13
"""Of the Pythons 3.x that a lock is made for; those that pin numpy 2.2 have no wheels of it after
these.
"""
FOR_OLDER_TORCHES = ("setuptools<82",)
"""What releases of torch other than the installed one ask for."""
_PROJECT = """[project]
name = "lock"
version = "0"
requires-python = ">=3.{first}"
[tool.uv]
environments = {environments}
override-dependencies = ["torch ; sys_platform == 'never'"]
"""


@dataclass(frozen=True)
class Locked:
    """One package of a lock."""

    requirement: Requirement
    """`name==version`, with the platforms that it is for as marker."""
    hashes: tuple[str, ...]
    """`sha256:...` of each file that may be installed."""

    @property
    def name(self) -> str:
        """The canonical name."""
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        """The only version that it allows."""
        return next(iter(self.requirement.specifier)).version

    @property
    def line(self) -> str:
        """As in a file of requirements, without the marker."""
        return " ".join((f"{self.name}=={self.version}", *(f"--hash={each}" for each in self.hashes)))


def lock_digest(library: Library) -> str:
    """Return the SHA-256 of a library's lock, nothing if it has none."""
    path = _path(library.name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def locked_for(library: Library, torch: SharedTorch) -> tuple[Locked, ...]:
    """Return what to install beside the shared torch for this Python on this platform.

    Raises OptkitError if the lock has not all that the library or torch asks for.
    """
    path = _path(library.name)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    here = {each.name: each for each in parse(text) if _is_for_here(each) and each.name not in torch.shared}
    wanted = {library.name: (*library.requirements, *library.bare, *library.build_packages), "torch": torch.needs}
    for asking, texts in wanted.items():
        for need in map(Requirement, texts):
            found = here.get(canonicalize_name(need.name))
            if found is None or not need.specifier.contains(found.version, prereleases=True):
                has = found.line.partition(" ")[0] if found else "nothing for it"
                what = f"{asking} asks for {need.name}{need.specifier}, and the lock has {has} on {this_place()}"
                where, why = f"optkit env build {library.name}", "What no hash is known of is not installed"
                raise OptkitError(what, where=where, why=why, remedy=other_ways(library.name))
    return tuple(here.values())


def parse(text: str) -> tuple[Locked, ...]:
    """Return the packages of a file of requirements with hashes."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^\s*#.*\n", "", text)).splitlines()
    parted = [line.split("--hash=") for line in lines if line.strip()]
    return tuple(Locked(Requirement(first), tuple(each.strip() for each in hashes)) for first, *hashes in parted)


def this_place() -> str:
    """Return this Python and platform, for messages."""
    return f"Python {platform.python_version()} on {sys.platform} {platform.machine()}"


def other_ways(name: str) -> str:
    """Return how to go on if a lock has nothing for this place."""
    return (
        f"Use Python 3.{FIRST_MINOR} to 3.{LAST_MINOR} on {' or '.join(PLATFORMS)}, or make a lock for this place,"
        f" which needs uv: python -m optkit.backends.lock {name}"
    )


def make(name: str) -> Path:
    """Write the lock of a library anew, from the index that uv is told to use; returns its place.

    Raises OptkitError if uv is not there or finds no set of packages.
    """
    library = find_library(name)
    needs = (*SharedTorch().needs, *FOR_OLDER_TORCHES)
    parts = [_compile(name, (*library.requirements, *library.build_packages, *needs), library.sources)]
    if library.bare:
        parts.append(_compile(name, library.bare, library.sources, "--no-deps"))
    made_by = f"# {name} with all that it needs but torch. Made by: python -m optkit.backends.lock {name}\n"
    path = _path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(made_by + "".join(parts), encoding="utf-8")
    return path


def _compile(name: str, requirements: Sequence[str], sources: Sequence[str], *options: str) -> str:
    uv = shutil.which("uv")
    if uv is None:
        raise OptkitError("uv is not installed", where=f"the lock of {name}", remedy="pip install uv")
    minor = max(LAST_MINOR, sys.version_info.minor) + 1
    environments = [
        f"sys_platform == '{each}' and python_full_version < '3.{minor}'"
        for each in sorted({*PLATFORMS, sys.platform}, reverse=True)
    ]
    command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version", f"3.{FIRST_MINOR}"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--only-binary", ":all:"]
    command += [*(word for each in sources for word in ("--no-binary", each)), *options, "-"]
    with tempfile.TemporaryDirectory(prefix="optkit-") as place:
        project = _PROJECT.format(first=FIRST_MINOR, environments=environments)
        (Path(place) / "pyproject.toml").write_text(project, encoding="utf-8")
        done = run(command, cwd=place, text="\n".join(requirements).encode())
    if done.returncode:
        raise OptkitError("no set of packages fits", where=f"the lock of {name}", why=f"uv says: {done.stderr.strip()}")
    return done.stdout


def _is_for_here(each: Locked) -> bool:
    return each.requirement.marker is None or each.requirement.marker.evaluate()


def _path(name: str) -> Path:
    return LOCKS / f"{name}.txt"


if __name__ == "__main__":
    for each in sys.argv[1:] or LIBRARIES:
        print(make(each))  # noqa: T201
