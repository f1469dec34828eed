"""A library that nobody has, and what stands in for installing it: a directory with this Python,
without packages.
"""

import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from optkit.backends import environments, libraries
from optkit.backends.environments import Environment, Environments
from optkit.backends.libraries import Library
from optkit.backends.shared_torch import SharedTorch
from optkit.progress import Progress, SilentProgress
from tests.support.remembered import Lines

TOY = Library("toy", "toy-quantizer", "quantizes toys", ("toy-quantizer==1.0",), variables={"TOY": "yes"})


class Heard(Lines):
    """Calls `at_step` at every step of a bar."""

    def __init__(self, at_step: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.at_step = at_step

    def advance(self, steps: int = 1, note: str = "") -> None:
        super().advance(steps, note)
        self.at_step()


def fake_install(library: Library, directory: Path, torch: SharedTorch, progress: Progress) -> dict[str, str]:
    """Link this Python into a directory that has no packages; the bytes are those of one file."""
    (directory / "bin").mkdir(parents=True)
    (directory / "bin" / "python").symlink_to(
        Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    )
    (directory / "weight").write_bytes(b"x" * 1000)
    return {"toy_quantizer": "1.0", "transformers": "4.51.3", "torch": torch.version}


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environments]:
    """Return an empty place for environments whose only library is `toy`."""
    monkeypatch.setattr(environments, "install", fake_install)
    monkeypatch.setenv("OPTKIT_ENVS", str(tmp_path / "envs"))
    with patch.dict(libraries.LIBRARIES, {"toy": TOY}, clear=True):  # the one that all modules have, also a new one
        yield Environments()


def environment_at(directory: Path, name: str = "toy", versions: Mapping[str, str] | None = None) -> Environment:
    """Return an environment that runs this Python without packages."""
    fake_install(TOY, directory, SharedTorch(), SilentProgress())
    known: dict[str, Any] = {
        "state": "ready",
        "python": platform.python_version(),
        "torch": "2",
        "size_bytes": 0,
        "created": "",
    }
    return Environment(name=name, directory=directory, versions=versions or {}, **known)
