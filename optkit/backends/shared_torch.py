"""The installed torch, found once and linked into other environments.
So none of them downloads gigabytes.

Linked are torch and the binary packages that only torch needs (CUDA's libraries, triton). Each has
metadata of its own there, so that pip and uv see it as installed; these list no file of ours, so
that neither of them can ever delete one. What torch needs besides (sympy, networkx, filelock, ...)
is small and installed anew: an environment may well ask for another version of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from optkit.errors import MissingPackageError

ONLY_FOR_TORCH = ("nvidia-", "cuda-", "triton", "pytorch-triton")
"""How the names of binary packages begin that torch brings with it."""

METADATA = ".dist-info"


class SharedTorch:
    """The installed torch and the binary packages that it brings."""

    def __init__(self) -> None:
        """Find them by their metadata; torch is not imported. Raises MissingPackageError without
        it.
        """
        try:
            torch = metadata.distribution("torch")
        except metadata.PackageNotFoundError as error:
            raise MissingPackageError("torch", where="optkit env") from error
        self.version = torch.version
        self.place = Path(str(torch.locate_file(""))).resolve()
        self._distributions = {"torch": torch, **_brought_by(torch)}

    @property
    def shared(self) -> Mapping[str, str]:
        """Distribution -> version, of torch and what it brings."""
        return {name: found.version for name, found in self._distributions.items()}

    @property
    def needs(self) -> tuple[str, ...]:
        """What torch needs and is not shared, as requirements."""
        return tuple(
            str(need)
            for need in requirements_of(self._distributions["torch"])
            if canonicalize_name(need.name) not in self._distributions
        )

    def link_into(self, packages: Path) -> bool:
        """Link everything into a site-packages directory.
        False, and nothing linked, if the installation does not list its files.
        """
        parts = {name: _parts(found) for name, found in self._distributions.items()}
        if not all(parts.values()):
            return False
        for part in sorted(set().union(*parts.values())):
            link = packages / part
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(self.place / part)
        for found in self._distributions.values():
            _write_metadata(found, packages)
        return True


def requirements_of(distribution: metadata.Distribution) -> list[Requirement]:
    """Return what a distribution asks for here, without its extras."""
    stated = [Requirement(text) for text in distribution.requires or ()]
    return [need for need in stated if need.marker is None or need.marker.evaluate({"extra": ""})]


def _brought_by(torch: metadata.Distribution) -> dict[str, metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    waiting = [torch]
    while waiting:
        for need in requirements_of(waiting.pop()):
            name = canonicalize_name(need.name)
            if name.startswith(ONLY_FOR_TORCH) and name not in found:
                found[name] = metadata.distribution(name)
                waiting.append(found[name])
    return found


def _parts(distribution: metadata.Distribution) -> set[Path]:
    """Return what of site-packages is a distribution's.
    That is its top-level entries but the metadata, and the second level of namespaces.
    """
    parts = set()
    for file in distribution.files or ():
        path = Path(str(file))
        if path.parts[0] in ("..", "__pycache__") or path.is_absolute() or path.parts[0].endswith(METADATA):
            continue
        top = Path(str(distribution.locate_file(path.parts[0])))
        is_namespace = top.is_dir() and not (top / "__init__.py").exists() and len(path.parts) > 2
        parts.add(Path(*path.parts[: 2 if is_namespace else 1]))
    return parts


def _write_metadata(distribution: metadata.Distribution, packages: Path) -> None:
    """Write the metadata of a linked distribution, whose RECORD names nothing but these files."""
    directory = packages / f"{distribution.metadata['Name'].replace('-', '_')}-{distribution.version}{METADATA}"
    directory.mkdir()
    kept = {name: distribution.read_text(name) for name in ("METADATA", "WHEEL", "entry_points.txt")} | {
        "INSTALLER": "optkit\n"
    }
    texts = {name: text for name, text in kept.items() if text}
    texts["RECORD"] = "".join(f"{directory.name}/{name},,\n" for name in (*texts, "RECORD"))
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
