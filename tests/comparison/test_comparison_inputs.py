"""What is compared: directories, files and artifacts, and what cannot be read or is no number."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optkit.comparison import compare
from optkit.errors import ArtifactError
from optkit.scorecard import Scorecard, to_json
from tests.support.candidates import FAST, GOOD, SMALL, WASTE


def written(folder: Path, scorecard: Scorecard) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scorecard.json").write_text(to_json(scorecard), encoding="utf-8")
    return folder


def test_directories_files_and_artifacts_are_mixed_and_nothing_is_taken_twice(tmp_path: Path) -> None:
    written(tmp_path / "sweep" / "good", GOOD)
    written(tmp_path / "sweep" / "deeper" / "small", SMALL)
    written(tmp_path / "sweep" / ".draft", FAST)
    copy = written(tmp_path / "copy", GOOD)
    bare = written(tmp_path / "waste", WASTE) / "scorecard.json"
    found = compare([tmp_path / "sweep", tmp_path / "sweep" / "good", bare, copy])
    assert {entry.label for entry in found.entries} == {"good", "small", "waste"}
    assert found.notes == (f"{copy} holds the scorecard of {tmp_path / 'sweep' / 'good'}, and is left out",)


def test_what_cannot_be_read_below_a_directory_is_left_out_by_name(tmp_path: Path) -> None:
    written(tmp_path / "good", GOOD)
    later = written(tmp_path / "later", SMALL) / "scorecard.json"
    later.write_text(later.read_text(encoding="utf-8").replace('"schema": 1', '"schema": 7', 1), encoding="utf-8")
    found = compare([tmp_path])
    (left,) = found.left_out
    assert left.place == str(tmp_path / "later")
    assert "the scorecard has schema 7, and this optkit reads schema 1" in left.why
    with pytest.raises(ArtifactError, match="has schema 7"):
        compare([tmp_path, later])
    (tmp_path / "good" / "scorecard.json").unlink()
    with pytest.raises(ArtifactError, match="none of the 1 scorecards can be read"):
        compare([tmp_path])


def test_a_folder_that_cannot_be_searched_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "good", GOOD)
    walk = os.walk

    def refused(top: Path, onerror: Callable[[OSError], None]) -> Iterator[Any]:
        onerror(PermissionError(13, "Permission denied", str(tmp_path / "locked")))
        yield from walk(top)

    monkeypatch.setattr(os, "walk", refused)
    (left,) = compare([tmp_path]).left_out
    assert (left.place, left.why) == (str(tmp_path / "locked"), "cannot be searched: Permission denied")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_what_is_no_number_is_refused(number: str, tmp_path: Path) -> None:
    path = written(tmp_path, GOOD) / "scorecard.json"
    path.write_text(path.read_text(encoding="utf-8").replace("250000000.0", number), encoding="utf-8")
    with pytest.raises(ArtifactError, match="the scorecard is damaged"):
        compare([path])


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no scorecard is here or below"):
        compare([tmp_path])
    with pytest.raises(ArtifactError, match="no such file or directory"):
        compare([tmp_path / "nowhere"])
