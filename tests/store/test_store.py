import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from optkit.common.atomic import write_text_atomically
from optkit.common.cache import default_store
from optkit.errors import ResourceError, StoreError
from optkit.store.contents import prune
from optkit.store.files import is_unchanged
from optkit.store.store import Store, explain_os_error


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def fill(store, key="k", text="weights"):
    with store.write(key) as draft:
        (draft.model / "a.txt").write_text(text)
        (draft.model / "sub").mkdir()
        (draft.model / "sub" / "b.txt").write_text("b")
        draft.record["kind"] = "test"


def test_an_entry_is_found_only_when_it_is_whole(store):
    assert store.get("k") is None
    with store.write("k") as draft:
        (draft.model / "a.txt").write_text("x")
        assert store.get("k") is None
    assert (store.get("k") / "a.txt").read_text() == "x"


def test_the_record_lists_every_file_with_its_digest(store):
    fill(store)
    record = store.record("k")
    assert record["kind"] == "test"
    assert sorted(record["files"]) == ["a.txt", "sub/b.txt"]
    assert record["files"]["a.txt"]["size_bytes"] == 7
    assert record["files"]["a.txt"]["sha256"] == hashlib.sha256(b"weights").hexdigest()


def test_others_may_read_what_the_umask_lets_them_read(store):
    before = os.umask(0o022)
    try:
        with store.write("k") as draft:
            (draft.model / "a").touch(mode=0o600)
        assert (store.get("k") / "a").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_a_failure_leaves_nothing(store):
    with pytest.raises(ZeroDivisionError), store.write("k") as draft:
        (draft.model / "a.txt").write_text("x")
        raise ZeroDivisionError
    assert store.get("k") is None
    assert list((store.root / "drafts").iterdir()) == []
    with pytest.raises(StoreError, match="no such entry"):
        store.record("k")


def test_a_damaged_entry_is_not_found_and_can_be_made_again(store):
    fill(store)
    (store.get("k") / "a.txt").write_text("WEIGHTS")
    assert store.get("k") is None
    fill(store, text="again")
    assert (store.get("k") / "a.txt").read_text() == "again"


def test_a_lost_file_is_damage(store):
    fill(store)
    (store.get("k") / "sub" / "b.txt").unlink()
    assert store.get("k") is None


def test_a_file_that_was_only_touched_is_unchanged(store):
    fill(store)
    path = store.get("k") / "a.txt"
    os.utime(path, (1, 1))
    assert is_unchanged(path, store.record("k")["files"]["a.txt"])
    assert store.get("k") is not None


KILLED = """
import sys, time
from pathlib import Path
from optkit.store.store import Store
with Store(Path(sys.argv[1])).write("k") as draft:
    (draft.model / "half").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def test_kill_9_leaves_a_draft_that_the_next_run_deletes(store):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(store.root)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout.readline() == b"writing\n"
    assert len(list((store.root / "drafts").iterdir())) == 1
    fill(store, "other")
    assert len(list((store.root / "drafts").iterdir())) == 1, "a draft whose process lives is kept"
    process.kill()
    process.wait()
    process.stdout.close()
    assert store.get("k") is None
    fill(store, "third")
    assert list((store.root / "drafts").iterdir()) == []


KILLED_METRIC = """
import os, sys
from pathlib import Path
from optkit.store.store import Store
Path.replace = lambda *arguments: os._exit(9)
Store(Path(sys.argv[1])).put_json("0" * 64, {"metrics": []})
"""


def test_a_kill_while_a_number_is_kept_leaves_nothing_either(store):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_METRIC, str(store.root)], cwd=Path(__file__).parents[2], check=False
    )
    assert killed.returncode == 9
    assert list((store.root / "metrics").iterdir()) == []
    store.put_json("1" * 64, {"metrics": []})
    assert [path.name for path in (store.root / "metrics").iterdir()] == [f"{'1' * 64}.json"]
    assert list((store.root / "drafts").iterdir()) == []


def sweep_before(store, monkeypatch, owner, name, times=5):
    """Let another process delete abandoned drafts right before the first calls of a function."""
    plain = getattr(owner, name)
    sweeps = iter(range(times))

    def swept(*arguments, **options):
        if next(sweeps, None) is not None:
            with pytest.MonkeyPatch.context() as unpatched:
                unpatched.setattr(owner, name, plain)
                Store(store.root).delete_abandoned_drafts()
        return plain(*arguments, **options)

    monkeypatch.setattr(owner, name, swept)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Path, "mkdir"), (Path, "open"), (fcntl, "flock"), (Path, "write_text"), (Path, "rename"), (Path, "unlink")],
)
def test_a_sweep_at_any_moment_leaves_the_draft_of_a_living_process(store, monkeypatch, owner, name):
    fill(store)
    (store.get("k") / "a.txt").write_text("damage!")
    with monkeypatch.context() as patched:
        sweep_before(store, patched, owner, name)
        fill(store)
    assert (store.get("k") / "a.txt").read_text() == "weights"
    assert sorted(path.name for path in (store.root / "steps" / "k").iterdir()) == ["model", "record.json"]
    assert list((store.root / "drafts").iterdir()) == []


WRITES = """
import sys
from pathlib import Path
from optkit.store.store import Store
store = Store(Path(sys.argv[1]))
for index in range(400):
    with store.write(str(index)) as draft:
        (draft.model / "a.txt").write_text(str(index))
"""
SWEEPS = """
import sys
from pathlib import Path
from optkit.store.store import Store
store = Store(Path(sys.argv[1]))
while not (store.root / "done").exists():
    store.delete_abandoned_drafts()
"""


def test_one_process_writes_while_another_sweeps(store):
    store.root.mkdir()
    command = [sys.executable, "-c"]
    sweeper = subprocess.Popen([*command, SWEEPS, str(store.root)], cwd=Path(__file__).parents[2])
    try:
        subprocess.run([*command, WRITES, str(store.root)], cwd=Path(__file__).parents[2], check=True)
    finally:
        (store.root / "done").touch()
        assert sweeper.wait() == 0
    assert [index for index in range(400) if store.get(str(index)) is None] == []


def test_what_a_kill_leaves_before_a_draft_is_held_is_deleted(store):
    (store.root / "drafts" / "k-1").mkdir(parents=True)
    fill(store)
    assert list((store.root / "drafts").iterdir()) == []


def test_what_others_made_in_a_directory_that_is_named_as_a_store_stays(store):
    """A project may have a folder `drafts`, and `--store .` is soon written."""
    files = [store.root / "drafts" / "novel" / "first.txt", store.root / "work" / "thesis" / "chapter.tex"]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("words")
    fill(store)
    assert prune(store, everything=True).work == ()
    assert [file.read_text() for file in files] == ["words", "words"]


def test_two_processes_take_turns_on_one_key(store):
    order = []

    def second():
        with Store(store.root).lock("k", waiting=lambda: order.append("waits")):
            order.append("second")

    with store.lock("k"):
        thread = threading.Thread(target=second)
        thread.start()
        while "waits" not in order:
            time.sleep(0.01)
        order.append("first ends")
    thread.join()
    assert order == ["waits", "first ends", "second"]


def test_metrics_are_kept_by_key(store):
    assert store.get_json("m") is None
    store.put_json("m", {"metrics": [], "seconds": 1.5})
    assert store.get_json("m") == store.take_json("m") == {"metrics": [], "seconds": 1.5}
    (store.root / "metrics" / "m.json").write_text("{half")
    assert store.get_json("m") is None
    with pytest.raises(StoreError, match="the entry is gone"):
        store.take_json("m")


def test_metrics_that_are_not_numbers_are_refused(store):
    with pytest.raises(ValueError, match="JSON compliant"):
        store.put_json("m", {"value": float("nan")})


def test_a_full_disk_says_so_and_what_to_do(store, monkeypatch):
    with (
        pytest.raises(ResourceError, match=r"disk is full while writing the step k.*bytes are free.*--store"),
        store.write("k"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert store.get("k") is None


def test_a_store_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file: cannot write the step k\. Not a directory\. Name another place"):
        fill(Store(tmp_path / "file"))


def test_other_os_errors_are_not_called_a_full_disk(tmp_path):
    assert isinstance(explain_os_error(PermissionError(errno.EACCES, "Permission denied"), "x", tmp_path), StoreError)


def test_the_default_store_follows_the_environment(monkeypatch):
    monkeypatch.setenv("OPTKIT_STORE", "/somewhere")
    assert default_store() == Path("/somewhere")
    monkeypatch.delenv("OPTKIT_STORE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_store() == Path("/cache/optkit")


def test_a_text_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "x.json"
    write_text_atomically(path, json.dumps([1]))
    with pytest.raises(IsADirectoryError) as error:
        write_text_atomically(path.parent, "")
    assert error.value.filename == str(path.parent)
    assert [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*"))] == ["new", "new/x.json"]


@pytest.mark.parametrize(
    "record",
    [
        "{}",
        '{"files": 5}',
        '{"files": ["x"]}',
        '{"files": {"config.json": 5}}',
        '{"files": {"a\\u0000b": {}}}',
        '{"a":' * 20_000,
    ],
)
def test_a_record_that_lists_no_files_is_damage(store, record):
    fill(store)
    (store.root / "steps" / "k" / "record.json").write_text(record)
    assert store.get("k") is None
    fill(store)
    assert store.get("k") is not None


def test_a_store_that_keeps_nothing_is_known_before_the_work(store, tmp_path):
    store.check_writable()
    assert list((store.root / "metrics").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file: cannot write the metrics\. Not a directory\. Name another place"):
        Store(tmp_path / "file").check_writable()
