"""Files that appear whole or not at all, whatever ends their writer."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from optkit.common.atomic import draft_of, drafted, write_bytes_atomically
from optkit.common.held_files import ALIVE, clear, held_directory


def killed(do: object) -> None:
    """Let a child of this process do it, and kill itself inside."""
    if not (child := os.fork()):
        with do:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_what_a_kill_leaves_goes_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "card"
    path.write_text("old")
    killed(drafted(path))
    assert (path.read_text(), draft_of(path).exists()) == ("old", True)
    draft_of(path).write_text("a longer text than the next one")
    write_bytes_atomically(path, b"new")
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"card": "new"}


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "card"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), drafted(path) as draft:
        draft.write_text("half")
        raise KeyboardInterrupt
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"card": "old"}


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    contents = [bytes([65 + number]) * 10_000 for number in range(8)]
    writers = [
        threading.Thread(target=lambda text=text: [write_bytes_atomically(tmp_path / "card", text) for _ in range(25)])
        for text in contents
    ]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    assert (tmp_path / "card").read_bytes() in contents
    assert [each.name for each in tmp_path.iterdir()] == ["card"]


def test_a_draft_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    draft_of(tmp_path / "card").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        write_bytes_atomically(tmp_path / "card", b"theirs")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_directory_that_a_kill_left_goes_with_the_next(tmp_path: Path) -> None:
    killed(held_directory(tmp_path, ".a.work-"))
    (left,) = tmp_path.iterdir()
    (left / "deep" / "er").mkdir(parents=True)
    with held_directory(tmp_path, ".b.work-"):
        assert left.exists()
    with held_directory(tmp_path, ".a.work-") as first, held_directory(tmp_path, ".a.work-") as second:
        assert not left.exists()
        assert first.exists()
        assert second.exists()
    assert list(tmp_path.iterdir()) == []


def test_the_file_that_a_directory_is_held_by_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "below")
    for name in ("a", ALIVE, "z", "below/file"):
        (tmp_path / name).touch()
    delete = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda place, **options: place == tmp_path or delete(place, **options))
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [ALIVE]
