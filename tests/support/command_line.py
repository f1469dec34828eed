"""Commands as a user calls them, in this process."""

from pathlib import Path

import pytest
from optkit_cli.main import main


def spoken(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    """Return stdout and stderr of a command that must end with this status."""
    capsys.readouterr()
    found = main(list(words))
    out, err = capsys.readouterr()
    assert found == status, out + err
    return out, err


def desk_with(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, recipe: str) -> Path:
    """Make the directory the working directory, with a recipe and a store of its own; return it."""
    (directory / name).write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(directory)
    monkeypatch.setenv("OPTKIT_STORE", str(directory / "store"))
    return directory
