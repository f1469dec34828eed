"""`optkit store push`, `pull` and `show --remote`, and URLs that cannot be used."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from optkit.store.remote import Remote
from optkit.store.store import Store
from tests.conftest import RUN, TinyModel
from tests.support.command_line import spoken

MODEL, ROUNDED, NUMBER = "a" * 64, "b" * 64, "c" * 64
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with a model, a step made of it, and a number."""
    store = Store(tmp_path / "one")
    for key, kind, source in ((MODEL, "model", None), (ROUNDED, "rtn", MODEL)):
        with store.write(key) as draft:
            (draft.model / "weights").write_bytes(key.encode() * 100)
            created = (datetime.now(UTC) - timedelta(hours=30)).isoformat(timespec="seconds")
            draft.record.update(
                kind=kind, seconds=1.0, report={}, fields={"name": "smol"}, source_key=source, created=created
            )
    store.put_json(NUMBER, {"metrics": []})
    return store


@pytest.fixture
def shared(tmp_path: Path) -> str:
    (tmp_path / "shared").mkdir()
    return f"file://{tmp_path}/shared"


def test_push_show_and_pull(store: Store, bucket: str, tmp_path: Path, capsys: Captured) -> None:
    here, there = ("--store", str(store.root)), ("--store", str(tmp_path / "two"))
    told, _ = spoken(capsys, "store", "push", "--remote", bucket, *here, "--quiet")
    assert told.splitlines()[0] == f"2 steps and 1 measurement pushed to {bucket}"
    told, _ = spoken(capsys, "store", "push", "--remote", bucket, *here, "--json", "--quiet")
    assert json.loads(told)["metrics"] == [], "a number that is there is not pushed again"
    told, _ = spoken(capsys, "store", "show", "--remote", bucket)
    assert [line.split() for line in told.splitlines() if line][:3] == [
        [bucket, "12.8", "kB", "in", "2", "steps,", "1", "measurement"],
        ["step", "model", "size", "made", "key"],
        ["model", "smol", "6.4", "kB", "1", "day", "ago", MODEL[:12]],
    ]
    told, _ = spoken(capsys, "store", "pull", "b", "c", "--remote", bucket, *there, "--json", "--quiet")
    assert json.loads(told) == {"url": bucket, "steps": [ROUNDED], "metrics": [NUMBER]}
    two = Store(tmp_path / "two")
    assert (two.get(ROUNDED) / "weights").read_bytes() == (store.get(ROUNDED) / "weights").read_bytes()
    assert two.get(MODEL) is None
    assert two.get_json(NUMBER) == {"metrics": []}


def test_what_a_recipe_needs_is_pulled(
    tiny_model: TinyModel, shared: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RUN.format(model=tiny_model("llama")), encoding="utf-8")
    planned = ("plan", "tiny.yaml", "--store", "two", "--device", "cpu", "--json")
    plan = json.loads(spoken(capsys, *planned)[0])
    one = Store(Path("one"))
    with one.write(plan["steps"][1]["key"]) as draft:
        (draft.model / "weights").write_text("rounded")
        draft.record.update(kind="rtn", seconds=1.0, report={})
    for each in plan["evals"]:
        one.put_json(each["key"], {"metrics": []})
    spoken(capsys, "store", "push", "--remote", shared, "--store", "one", "--quiet")
    told, _ = spoken(capsys, "plan", "tiny.yaml", "--store", "three", "--remote", shared)
    assert "remote" in told
    assert "to fetch from the shared store" in told
    told, _ = spoken(capsys, "store", "pull", "--recipe", "tiny.yaml", "--store", "two", "--remote", shared, "--quiet")
    assert told.startswith("1 step and 1 measurement pulled from")
    plan = json.loads(spoken(capsys, *planned)[0])
    assert [step["hit"] for step in plan["steps"]] == [True, True]
    assert not plan["steps"][1]["remote"]
    assert plan["evals"][0]["hit"]


def test_a_key_that_is_named_mends_a_flipped_byte(store: Store, shared: str, tmp_path: Path, capsys: Captured) -> None:
    spoken(capsys, "store", "push", "--remote", shared, "--store", str(store.root), "--quiet")
    remote, path = Remote(shared), next((tmp_path / "shared" / "files").iterdir())
    path.write_bytes(b"x" + path.read_bytes()[1:])
    key = next(key for key, record in remote.records().items() if path.name in str(record))
    pull = ("store", "pull", key, "--remote", shared, "--store", str(tmp_path / "two"), "--quiet")
    _, told = spoken(capsys, *pull, status=1)
    remedy = f"Push it again from where it was made: optkit store push {key[:12]} --remote {shared}"
    assert f"{key[:12]} is damaged. {remedy}" in " ".join(told.split())
    spoken(capsys, "store", "push", key[:12], "--remote", shared, "--store", str(store.root), "--quiet")
    spoken(capsys, *pull)


def test_a_number_that_was_cut_off_is_not_pulled(store: Store, shared: str, tmp_path: Path, capsys: Captured) -> None:
    spoken(capsys, "store", "push", "--remote", shared, "--store", str(store.root), "--quiet")
    (tmp_path / "shared" / "metrics" / f"{NUMBER}.json").write_text("{")
    _, told = spoken(
        capsys, "store", "pull", "c", "--remote", shared, "--store", str(tmp_path / "two"), "--quiet", status=1
    )
    assert f"{NUMBER[:12]} is damaged" in told


def test_a_step_that_was_changed_here_is_not_pushed(store: Store, shared: str, capsys: Captured) -> None:
    (store.get(MODEL) / "weights").write_text("changed")
    push = ("store", "push", "--remote", shared, "--store", str(store.root), "--quiet")
    out, err = spoken(capsys, *push)
    assert out.startswith("1 step and")
    assert f"{MODEL[:12]}: not pushed, for their files were changed or lost" in " ".join(err.split())
    _, err = spoken(capsys, *push, "a", status=1)
    assert f"the step {MODEL[:12]}: its files were changed or lost. Make it again." in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pull", "d"), "there is no key d"),
        (("push", "d"), "there is no key d"),
        (("push", ""), "3 keys begin with"),
        (("pull",), "nothing says what to pull. Name keys, or give --recipe RECIPE."),
    ],
)
def test_keys_that_are_not_there(
    store: Store, shared: str, capsys: Captured, words: tuple[str, ...], message: str
) -> None:
    _, told = spoken(capsys, "store", *words, "--remote", shared, "--store", str(store.root), status=2)
    assert message in " ".join(told.split())


@pytest.mark.parametrize(
    ("url", "status", "message"),
    [
        ("s4://bucket", 2, "--remote: 's4://bucket' is no place of a store. Protocol not known: s4."),
        ("gs://bucket", 1, "gs://bucket: the package `gcsfs` is not installed. Run: pip install 'gcsfs'."),
        ("s3://me:word@bucket", 2, "--remote: the URL holds a password. It would be printed and recorded."),
        ("s3://no-such-bucket", 1, "s3://no-such-bucket: there is no bucket or directory no-such-bucket."),
        ("/no/such/directory", 1, "/no/such/directory: there is no bucket or directory /no/such/directory."),
    ],
)
def test_a_url_that_cannot_be_used_ends_a_run_before_it_begins(
    bucket: str, tiny_model: TinyModel, tmp_path: Path, capsys: Captured, url: str, status: int, message: str
) -> None:
    (tmp_path / "tiny.yaml").write_text(RUN.format(model=tiny_model("llama")), encoding="utf-8")
    place = ("--store", str(tmp_path / "store"), "--remote", url, "--device", "cpu")
    for command in (("plan",), ("run", "--out", str(tmp_path / "out"))):
        _, told = spoken(capsys, command[0], str(tmp_path / "tiny.yaml"), *command[1:], *place, status=status)
        assert message in " ".join(told.split())
        assert "word@" not in told
    assert not (tmp_path / "out").exists()


def test_missing_credentials_end_it_too(
    bucket: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    _, told = spoken(capsys, "store", "show", "--remote", bucket, status=1)
    assert f"{bucket}: there are no credentials for it. Set those of your provider, e.g. AWS_ACCESS_KEY_ID" in told


def test_without_fsspec_the_extra_is_named(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    _, told = spoken(capsys, "store", "show", "--remote", "s3://bucket", status=1)
    assert "the package `fsspec` is not installed. Run: pip install 'optkit[remote]'." in told
