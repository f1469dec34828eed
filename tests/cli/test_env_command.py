"""`optkit env` shows what is built, builds and removes; doctor tells it too."""

import json

import pytest
from optkit_cli.main import main

from optkit.backends.environments import Environments
from optkit.reports.doctor import doctor
from tests.support.fake_library import toys

__all__ = ["toys"]


def test_list_build_remove(
    toys: Environments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["env", "list"]) == 0
    assert capsys.readouterr().out == "toy  not built: quantizes toys\n"
    assert main(["env", "build", "toy"]) == 0
    out, err = capsys.readouterr()
    assert "toy: building its environment in" in err
    built = toys.list()[0]
    shown = " ".join(out.split())
    assert shown.startswith(f"toy ready: torch {built.torch}, toy-quantizer 1.0, transformers 4.51.3; 1 kB in ")
    assert main(["env", "list", "--json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["toy"]
    monkeypatch.setattr("optkit.backends.environments._key", lambda *_: "another")
    assert main(["env", "list"]) == 0
    assert "toy of another installation (Python, torch or set of" in " ".join(capsys.readouterr().out.split())
    assert main(["env", "remove", "toy"]) == 0
    assert f"removed {built.directory}, 1 kB" in capsys.readouterr().out.replace("\n", " ").replace("- ", "-")
    assert toys.list() == []


def test_errors(toys: Environments, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "build", "tyo"]) == 2
    assert capsys.readouterr().err == "error: there is no backend 'tyo'. Did you mean 'toy'?\n"
    assert main(["env", "remove", "toy"]) == 1
    assert (
        capsys.readouterr().err
        == f"error: {toys.root}: no environment of 'toy' is built. See which are: optkit env list.\n"
    )
    assert main(["env", "biuld", "toy"]) == 2
    assert "Did you mean 'build'?" in capsys.readouterr().err


def test_doctor_says_what_is_built(toys: Environments, capsys: pytest.CaptureFixture[str]) -> None:
    (part,) = (part for part in doctor.diagnose().parts if part.role == "backend")
    assert (part.works, part.note, part.remedy) == (False, "quantizes toys", "optkit env build toy")
    assert main(["env", "build", "toy", "--quiet"]) == 0
    (part,) = (part for part in doctor.diagnose().parts if part.role == "backend")
    assert (part.works, part.note) == (True, "1.0 with transformers 4.51.3: quantizes toys")
