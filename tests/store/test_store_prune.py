"""What lies in the store, and what of it `optkit store prune` deletes."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from optkit_cli.main import main

from optkit.store.contents import prune, survey
from optkit.store.store import RECORD, Store

ROOT = Path(__file__).parents[2]
DAY_S = 86_400
MODEL, ROUNDED, TUNED = "a" * 64, "b" * 64, "c" * 64


def finish(store: Store, key: str, size_bytes: int, days: float, **record: object) -> Path:
    """Put a finished step into the store that was last used so many days ago; returns its file."""
    with store.write(key) as draft:
        (draft.model / "weights").write_bytes(bytes(size_bytes))
        draft.record.update(record)
    used(store.root / "steps" / key / RECORD, days)
    return store.root / "steps" / key / "model" / "weights"


def used(path: Path, days: float) -> None:
    moment = time.time() - days * DAY_S
    os.utime(path, (moment, moment))


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder whose path is short, so that the lines which name it are not broken."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def store(place: Path) -> Store:
    """A store with a model, two steps made of it and two measurements."""
    store = Store(place / "store")
    finish(store, MODEL, 4000, 40, kind="model", fields={"name": "smol"}, source_key=None)
    finish(
        store,
        ROUNDED,
        2000,
        35,
        kind="rtn",
        fields={"bits": 4, "format": "gptq", "symmetric": False, "include": ["*"]},
        source_key=MODEL,
    )
    finish(store, TUNED, 1000, 0, kind="gptq", fields={"bits": 2}, source_key="d" * 64, model="other")
    for number, days in ((0, 0), (1, 50)):
        store.put_json(f"{number:064x}", {"metrics": [], "seconds": number})
        used(store.root / "metrics" / f"{number:064x}.json", days)
    return store


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> list[str]:
    """Return the lines of stdout, with single spaces, of a command that must end with this status;
    stderr if it fails.
    """
    capsys.readouterr()
    found = main(list(words))
    out, err = capsys.readouterr()
    assert found == status, err
    return [" ".join(line.split()) for line in (err if status else out).splitlines() if line]


def test_what_each_step_is(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    os.link(store.root / "steps" / ROUNDED / "model" / "weights", store.root.parent / "artifact")
    assert said(capsys, "store", "show", "--store", str(store.root)) == [
        f"{store.root} 7 kB in 3 steps, 2 measurements",
        "step model size last use key",
        f"gptq bits 2 other 1 kB just now {TUNED[:12]}",
        f"rtn format gptq, symmetric false smol 2 kB 35 days ago {ROUNDED[:12]}",
        f"model smol 4 kB 40 days ago {MODEL[:12]}",
        "2 kB of it are in artifacts too and take no further space",
    ]
    document = json.loads("\n".join(said(capsys, "store", "show", "--store", str(store.root), "--json")))
    assert (document["size_bytes"], len(document["metrics"])) == (7000, 2)
    assert [step["model"] for step in document["steps"]] == ["other", "smol", "smol"]


def test_an_empty_store(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "store", "show", "--store", str(place / "none")) == [
        f"{place / 'none'} 0 steps, 0 measurements"
    ]
    assert not (place / "none").exists()


def test_looking_is_no_use_and_asking_for_a_step_is(store: Store) -> None:
    before = [step.last_use for step in survey(store).steps]
    assert [step.last_use for step in survey(store).steps] == before
    assert store.get(ROUNDED)
    assert store.get_json(f"{1:064x}")
    assert survey(store).steps[0].key == ROUNDED
    assert prune(store, older_than_s=45 * DAY_S).metrics == 0


@pytest.mark.parametrize(
    "record", ["{half", '{"kind": "rtn", "fields": true}', '{"kind": "rtn", "source_key": []}', '{"a":' * 20_000]
)
def test_a_damaged_record_is_shown_and_can_go(store: Store, record: str) -> None:
    (store.root / "steps" / ROUNDED / RECORD).write_text(record, encoding="utf-8")
    damaged = survey(store).steps[0]
    assert (damaged.kind, damaged.model, damaged.size_bytes) == ("damaged", "", 2000)
    assert prune(store, everything=True).left == 0


def test_a_record_that_names_itself_as_its_source_is_shown(store: Store) -> None:
    record = {name: value for name, value in store.record(ROUNDED).items() if name != "model"}
    record["source_key"] = ROUNDED
    (store.root / "steps" / ROUNDED / RECORD).write_text(json.dumps(record), encoding="utf-8")
    assert (survey(store).steps[0].kind, survey(store).steps[0].model) == ("rtn", "")


def test_files_that_are_not_the_stores_stay(store: Store) -> None:
    (store.root / "steps" / "mine").mkdir()
    (store.root / "metrics" / "mine.json").write_text("{}", encoding="utf-8")
    prune(store, everything=True)
    assert (store.root / "steps" / "mine").is_dir()
    assert [path.name for path in (store.root / "metrics").iterdir()] == ["mine.json"]


def test_old_steps_and_measurements_go(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("store", "prune", "--older-than", "30d", "--store", str(store.root))
    table = [
        "step model size last use key",
        f"rtn format gptq, symmetric false smol 2 kB 35 days ago {ROUNDED[:12]}",
        f"model smol 4 kB 40 days ago {MODEL[:12]}",
    ]
    left = f"1 step, 1 kB, left in {store.root}"
    assert said(capsys, *words, "--dry-run") == [*table, "2 steps and 1 measurement would be deleted, 6 kB freed", left]
    assert len(survey(store).steps) == 3
    assert said(capsys, *words) == [*table, "2 steps and 1 measurement deleted, 6 kB freed", left]
    assert [step.key for step in survey(store).steps] == [TUNED]
    assert store.get(ROUNDED) is None
    assert store.get_json(f"{0:064x}") == {"metrics": [], "seconds": 0}
    assert store.get_json(f"{1:064x}") is None
    assert said(capsys, *words) == ["0 steps and 0 measurements deleted, nothing freed", left]


def test_the_steps_used_longest_ago_go_until_the_rest_fits(store: Store) -> None:
    assert prune(store, max_bytes=7000).steps == ()
    assert [step.kind for step in prune(store, max_bytes=4999, dry_run=True).steps] == ["model"]
    assert [step.kind for step in prune(store, max_bytes=2999).steps] == ["model", "rtn"]
    assert len(survey(store).metrics) == 2, "numbers never go for space"


def test_both_limits_together(store: Store) -> None:
    done = prune(store, older_than_s=38 * DAY_S, max_bytes=2500)
    assert [step.kind for step in done.steps] == ["model", "rtn"]
    assert (done.left, done.left_bytes, done.metrics) == (1, 1000, 1)


def test_all_of_it_and_artifacts_stay_whole(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = store.root.parent / "artifact"
    os.link(store.root / "steps" / ROUNDED / "model" / "weights", artifact)
    lines = said(capsys, "store", "prune", "--all", "--store", str(store.root))
    assert lines[4:] == [
        "3 steps and 2 measurements deleted, 5 kB freed",
        "2 kB of them stay on the disk, in artifacts",
    ]
    assert artifact.read_bytes() == bytes(2000)
    assert survey(store).steps == survey(store).metrics == ()
    assert list((store.root / "drafts").iterdir()) == []
    document = json.loads("\n".join(said(capsys, "store", "prune", "--all", "--store", str(store.root), "--json")))
    assert (document["freed_bytes"], document["dry_run"], document["left"]) == (0, False, 0)


HOLDING = """
import sys
from pathlib import Path
from optkit.store.store import Store
store, how, key = Store(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
with store.using([key]) if how == "using" else store.lock(key):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["using", "lock"])
def test_what_a_running_process_holds_stays(how: str, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    words = [sys.executable, "-c", HOLDING, str(store.root), how, MODEL]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"held\n"
        assert [step.kind for step in prune(store, everything=True, dry_run=True).in_use] == ["model"]
        lines = said(capsys, "store", "prune", "--all", "--store", str(store.root))
        assert "1 step in use by a running optkit, kept" in lines
        assert store.get(MODEL)
        assert lines[-1] == f"1 step, 4 kB, left in {store.root}"
        process.stdin.close()
        process.wait()
    assert [step.kind for step in prune(store, everything=True).steps] == ["model"]


def test_two_runs_use_one_step(store: Store) -> None:
    with store.using([MODEL, TUNED]), store.using([MODEL]), store.lock(MODEL):
        assert [step.key for step in prune(store, everything=True).in_use] == [TUNED, MODEL]


def test_measurements_that_a_run_needs_stay(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    with store.using([f"{1:064x}"]):
        lines = said(capsys, "store", "prune", "--all", "--dry-run", "--store", str(store.root))
        assert lines[4:6] == [
            "3 steps and 1 measurement would be deleted, 7 kB freed",
            "1 measurement needed by a running optkit, kept",
        ]
        assert (prune(store, everything=True).metrics, store.get_json(f"{1:064x}")) == (
            1,
            {"metrics": [], "seconds": 1},
        )
    assert (prune(store, everything=True).metrics, store.get_json(f"{1:064x}")) == (1, None)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_store_that_can_only_be_read_is_used_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_self: Store, _name: str) -> Path:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Store, "_directory", refuse)
    with store.using([MODEL]):
        assert store.get(MODEL)


def test_a_prune_that_was_killed_is_finished_by_the_next(store: Store) -> None:
    (store.root / "steps" / TUNED / "alive").touch()
    (store.root / "steps" / TUNED).rename(store.root / "drafts" / f"{TUNED}-1234")
    prune(store, older_than_s=1000 * DAY_S)
    assert list((store.root / "drafts").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: nothing says what to delete. Give --older-than 30d, --max-size 20GB or --all."),
        (["--all", "--max-size", "1GB"], "error: --all deletes everything. Leave out --older-than and --max-size."),
        (["--older-than", "30"], "error: Invalid value for '--older-than': '30' is no age. Write 45m, 12h, 30d or 2w."),
        (
            ["--max-size", "20"],
            "error: Invalid value for '--max-size': '20' is no size. "
            "Write 20 GiB, 500 MB, or a number of bytes from 1000 to 1e+15.",
        ),
    ],
)
def test_what_cannot_be_followed(
    words: list[str], message: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "store", "prune", "--store", str(store.root), *words, status=2)[0] == message
    assert len(survey(store).steps) == 3


@pytest.mark.parametrize(("age", "seconds"), [("90m", 5400), ("1.5h", 5400), ("2 d", 2 * DAY_S), ("1w", 7 * DAY_S)])
def test_ages(age: str, seconds: float) -> None:
    from optkit_cli import store

    assert store.age(age) == seconds


def test_words_below_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "store", "shwo", status=2)[0] == "error: There is no command 'shwo'. Did you mean 'show'?"
    assert said(capsys, "store", "--json", "show", status=2)[0] == (
        "error: --json belongs behind the command: optkit store show --json ..."
    )


def put_work(store: Store, name: str, size_bytes: int, days: float, **about: object) -> Path:
    """Put unfinished work into the store that was last used so many days ago."""
    place = store.root / "work" / name
    place.mkdir(parents=True)
    (place / "part").write_bytes(bytes(size_bytes))
    if about:
        (place / "about.json").write_text(json.dumps(about))
    for path in place.iterdir():
        used(path, days)
    return place


def test_unfinished_work_is_listed_and_goes_by_age(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = "e" * 64, "f" * 64
    put_work(store, old, 5000, 20)
    put_work(store, new, 3000, 1)
    put_work(store, f"answers-{old}", 1000, 30, what="answers", teacher="/models/big", top_k=64)
    put_work(store, f"generated-{new}", 1000, 2, what="generated", teacher="")
    lines = said(capsys, "store", "show", "--store", str(store.root))
    assert lines[5:10] == [
        "work size last use key",
        f"unfinished step 3 kB 1 day ago {new[:12]}",
        f"text of a teacher 1.04 kB 2 days ago {new[:12]}",
        f"unfinished step 5 kB 20 days ago {old[:12]}",
        f"answers of a teacher big, top 64 1.06 kB 30 days ago {old[:12]}",
    ]
    tried = said(capsys, "store", "prune", "--older-than", "10d", "--dry-run", "--store", str(store.root))
    assert "2 directories of unfinished work would be deleted" in tried
    assert len(survey(store).work) == 4
    assert "2 directories of unfinished work deleted" in said(
        capsys, "store", "prune", "--older-than", "10d", "--store", str(store.root)
    )
    assert [work.name for work in survey(store).work] == [new, f"generated-{new}"]


def test_work_in_use_stays(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    from optkit.training.shared_answers import shared_place

    key = "e" * 64
    place = put_work(store, key, 100, 0)
    with store.using([key]), shared_place(store.root / "work" / "answers-1", {"what": "answers"}):
        pruned = prune(store, everything=True)
    assert {work.name for work in pruned.work_in_use} == {key, "answers-1"}
    assert place.is_dir()
    assert {work.name for work in prune(store, everything=True).work} == {key, "answers-1"}
    assert not list((store.root / "work").iterdir())
