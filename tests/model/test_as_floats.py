"""Packed checkpoints that stages read as floats: what is left of the directories that stand for them."""

from pathlib import Path

import pytest

from optkit.common.held_files import ALIVE, held_directory
from optkit.model.as_floats import as_floats
from tests.conftest import TinyModel
from tests.support.packed_models import save_packed


def test_the_next_one_deletes_what_killed_processes_left(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (left := tmp_path / "optkit-floats-0123").mkdir()
    (left / "tokenizer.json").touch()
    (left / ALIVE).touch()
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    save_packed(tiny_model("llama"), packed, plain)
    with as_floats(packed) as first:
        with as_floats(packed) as second:  # of a process that runs beside it
            assert {*tmp_path.glob("optkit-*")} == {first.parent, second.parent}
        assert first.is_dir()
    assert not [*tmp_path.glob("optkit-*")]


def test_what_a_link_in_the_temporary_directory_leads_to_stays(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "file").touch()
    (temporary := tmp_path / "temporary").mkdir()
    (temporary / "optkit-floats-0123").symlink_to(elsewhere)
    with held_directory(temporary, "optkit-floats-"):
        assert [each.name for each in elsewhere.iterdir()] == ["file"]
