"""`optkit store prune --remote`: old steps and numbers go, and with them the files that no step has."""

import json
import os
import time
from pathlib import Path

import pytest

from optkit.store.remote import Remote
from optkit.store.store import Store
from tests.support.command_line import spoken

Captured = pytest.CaptureFixture[str]
OLD, NEW, NUMBER = "a" * 64, "b" * 64, "c" * 64
DAY_S = 86_400


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store with an old step, a new one that has one of its files, and a number."""
    if request.param == "s3":
        found = str(request.getfixturevalue("bucket"))
    else:
        (tmp_path / "shared").mkdir()
        found = f"file://{tmp_path}/shared"
    store = Store(tmp_path / "store")
    for key, created in (
        (OLD, "2026-01-01T00:00:00+00:00"),
        (NEW, f"{time.gmtime().tm_year + 1}-01-01T00:00:00+00:00"),
    ):
        with store.write(key) as draft:
            (draft.model / "own").write_bytes(key.encode() * 10)
            (draft.model / "shared").write_bytes(b"x" * 100)
            draft.record.update(kind="rtn", created=created)
    store.put_json(NUMBER, {"metrics": []})
    remote = Remote(found)
    for key in (OLD, NEW):
        from optkit.progress import SilentProgress
        from optkit.store.remote import push_step

        push_step(store, remote, key, SilentProgress())
    remote.write("metrics", NUMBER, {"metrics": []})
    return found


def pruned(capsys: Captured, url: str, *words: str) -> dict[str, object]:
    said: dict[str, object] = json.loads(spoken(capsys, "store", "prune", "--remote", url, *words, "--json")[0])
    return said


def left(url: str) -> tuple[list[str], int, list[str]]:
    remote = Remote(url)
    return remote.keys("steps"), len(remote.there("files")), remote.keys("metrics")


def test_old_steps_go_with_the_files_that_no_other_has(url: str, capsys: Captured) -> None:
    seen = pruned(capsys, url, "--older-than", "30d", "--dry-run")
    assert left(url) == ([OLD, NEW], 3, [NUMBER])
    told = spoken(capsys, "store", "prune", "--remote", url, "--older-than", "30d", "--dry-run")[0]
    assert "1 step and 0 measurements would be deleted, 640 B freed" in told
    assert "1 step, 740 B, left in" in told
    done = pruned(capsys, url, "--older-than", "30d")
    assert left(url) == ([NEW], 2, [NUMBER])
    assert {**seen, "dry_run": False} == done
    assert done["freed_bytes"] == 640
    assert pruned(capsys, url, "--older-than", "30d")["steps"] == []


def test_the_oldest_go_until_the_rest_fits(url: str, capsys: Captured) -> None:
    assert pruned(capsys, url, "--max-size", "1380B")["steps"] == []
    pruned(capsys, url, "--max-size", "1379B")
    assert left(url) == ([NEW], 2, [NUMBER])


def test_everything_goes(url: str, capsys: Captured) -> None:
    done = pruned(capsys, url, "--all")
    assert (len(done["steps"]), done["metrics"], done["freed_bytes"]) == (2, 1, 1380)  # type: ignore[arg-type]
    assert left(url) == ([], 0, [])


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_uploads_that_broke_off_and_damaged_records_go_by_age(url: str, capsys: Captured) -> None:
    place = Path(url.removeprefix("file://"))
    for path in (
        place / "files" / ("d" * 64),
        place / "files" / ("e" * 64),
        place / "drafts" / ("f" * 16),
        place / "drafts" / ("0" * 16),
    ):
        path.write_text("part")
    (place / "steps" / f"{'9' * 64}.json").write_text("{")
    for path in (place / "files" / ("d" * 64), place / "drafts" / ("f" * 16), place / "steps" / f"{'9' * 64}.json"):
        os.utime(path, (time.time() - 2 * DAY_S,) * 2)
    told = spoken(capsys, "store", "prune", "--remote", url, "--older-than", "1d")[0]
    assert "2 files that no step has deleted" in told
    assert "damaged" in told
    assert {path.name for path in (place / "drafts").iterdir()} == {"0" * 16}
    assert not (place / "files" / ("d" * 64)).exists()
    assert (place / "files" / ("e" * 64)).exists()
    assert left(url)[0] == [NEW]


@pytest.mark.parametrize("url", ["file"], indirect=True)
def test_files_that_others_put_there_stay(url: str, capsys: Captured) -> None:
    place = Path(url.removeprefix("file://"))
    theirs = [place / "metrics" / "results.json", place / "files" / "LICENSE", place / "drafts" / "novel"]
    for path in theirs:
        path.write_text("{}")
        os.utime(path, (time.time() - 2 * DAY_S,) * 2)
    assert pruned(capsys, url, "--all")["metrics"] == 1
    assert left(url) == ([], 0, [])
    assert [path.read_text() for path in theirs] == ["{}"] * 3


def test_a_store_that_does_not_let_you_in_says_what_to_check(tmp_path: Path, capsys: Captured) -> None:
    said = spoken(capsys, "store", "prune", "--remote", f"file://{tmp_path}/none", "--all", status=1)[1]
    assert "there is no bucket or directory" in said
