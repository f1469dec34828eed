"""The installed torch, found once and linked into other environments, so that none of them downloads gigabytes.

Linked are torch and the binary packages that only torch needs (CUDA's libraries, triton), each with its metadata, so that pip and uv see
them as installed. What torch needs besides (sympy, networkx, filelock, ...) is small and installed anew: an environment may well ask for
another version of it.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from optkit.errors import MissingPackageError

ONLY_FOR_TORCH = ("nvidia-", "cuda-", "triton", "pytorch-triton")
"""How the names of binary packages begin that torch brings with it."""


class SharedTorch:
    """The installed torch and the binary packages that it brings."""

    def __init__(self) -> None:
        """Find them by their metadata; torch is not imported. Raises MissingPackageError where there is none."""
        try:
            torch = metadata.distribution("torch")
        except metadata.PackageNotFoundError as error:
            raise MissingPackageError("torch", where="optkit env") from error
        self.version = torch.version
        self.place = Path(str(torch.locate_file(""))).resolve()
        self._distributions = {"torch": torch, **_brought_by(torch)}

    @property
    def constraints(self) -> tuple[str, ...]:
        """The exact versions that stay as they are, as pip and uv take them."""
        return tuple(f"{name}=={found.version}" for name, found in self._distributions.items())

    @property
    def needs(self) -> tuple[str, ...]:
        """What torch needs and is not shared, as requirements."""
        return tuple(str(need) for need in _needs(self._distributions["torch"]) if canonicalize_name(need.name) not in self._distributions)

    def link_into(self, packages: Path) -> bool:
        """Link everything into a site-packages directory; False, and nothing linked, where the installation does not list its files."""
        links = {part for found in self._distributions.values() for part in _parts(found)}
        if not all(_parts(found) for found in self._distributions.values()):
            return False
        for part in sorted(links):
            link = packages / part
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(self.place / part)
        return True


def _needs(distribution: metadata.Distribution) -> list[Requirement]:
    stated = [Requirement(text) for text in distribution.requires or ()]
    return [need for need in stated if need.marker is None or need.marker.evaluate({"extra": ""})]


def _brought_by(torch: metadata.Distribution) -> dict[str, metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    waiting = [torch]
    while waiting:
        for need in _needs(waiting.pop()):
            name = canonicalize_name(need.name)
            if name.startswith(ONLY_FOR_TORCH) and name not in found:
                found[name] = metadata.distribution(name)
                waiting.append(found[name])
    return found


def _parts(distribution: metadata.Distribution) -> set[Path]:
    """Return what of site-packages belongs to a distribution: its top-level entries, and the second level of namespace packages."""
    parts = set()
    for file in distribution.files or ():
        path = Path(str(file))
        if path.parts[0] in ("..", "__pycache__") or path.is_absolute():
            continue
        top = Path(str(distribution.locate_file(path.parts[0])))
        is_namespace = top.is_dir() and top.suffix != ".dist-info" and not (top / "__init__.py").exists() and len(path.parts) > 2
        parts.add(Path(*path.parts[: 2 if is_namespace else 1]))
    return parts
