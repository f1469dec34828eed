"""What others may have put into a store, here or where machines share it, and URLs that a user may give."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import MissingPackageError, StoreError, UsageError
from optkit.store.contents import survey, survey_remote
from optkit.store.remote import Remote
from optkit.store.store import Store
from tests.store.conftest import Opened
from tests.store.test_remote import KEY, make, said
from tests.support.command_line import spoken

CHANGES: list[dict[str, Any]] = [
    {"files": {}},
    {"files": {".": {"size_bytes": 1, "sha256": "0" * 64}}},
    {"files": {"a": {"size_bytes": -1, "sha256": "0" * 64}}},
    {"report": "x"},
    {"report": {"skipped": 5}},
    {"seconds": "x"},
    {"memory": 5},
    {"fields": 5},
    {"earlier": [{"kind": "rtn"}]},
    {"created": "yesterday"},
    {"environment": {"cpu_threads": "many"}},
]
NUMBERS: list[Any] = [None, 5, [], {}, {"metrics": [5]}, {"metrics": [], "notes": 5}, {"metrics": [], "memory": [1]}]


@pytest.mark.parametrize("changes", CHANGES)
def test_a_record_of_another_form_stops_neither_runs_nor_lists(
    bucket: str, machine: Opened, changes: dict[str, Any]
) -> None:
    one, two = machine("one", bucket), machine("two", bucket)
    make(one)
    one.remote.write("steps", KEY, {**one.remote.record(KEY), **changes})
    assert not two.is_remote(KEY)
    assert two.fetch(KEY) is None
    assert survey_remote(two.remote).steps == ()


@pytest.mark.parametrize("changes", CHANGES)
def test_a_record_of_another_form_here_is_made_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    store = Store(tmp_path)
    make(store)
    (path := tmp_path / "steps" / KEY / "record.json").write_text(json.dumps({**store.record(KEY), **changes}))
    assert store.get(KEY) is None
    assert store.is_damaged(KEY)
    with pytest.raises(StoreError, match="there is no such entry"):
        store.record(KEY)
    assert [step.kind for step in survey(store).steps] == ["damaged"]
    path.unlink()
    path.mkdir()
    assert store.get(KEY) is None
    assert [step.kind for step in survey(store).steps] == ["damaged"]
    make(store)
    assert store.get(KEY)


@pytest.mark.parametrize("found", NUMBERS)
def test_numbers_of_another_form_are_measured_again(tmp_path: Path, machine: Opened, found: Any) -> None:
    (tmp_path / "shared").mkdir()
    one, two = (machine(name, f"file://{tmp_path}/shared") for name in ("one", "two"))
    one.put_json(KEY, found)
    for store in (one, two):
        assert store.get_json(KEY) is None
    assert one.is_damaged_json(KEY)
    with pytest.raises(StoreError, match="the entry is gone"):
        one.take_json(KEY)


def test_work_that_says_nonsense_of_itself_is_listed(tmp_path: Path) -> None:
    for name, about in {"a": [], "b": {"what": [], "teacher": 5}, "c": {"what": "answers", "top_k": {}}}.items():
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "about.json").write_text(json.dumps(about))
    found = {work.name: work.what for work in survey(Store(tmp_path)).work}
    assert found == {"a": "unknown work", "b": "unknown work 5", "c": "answers of a teacher"}


def test_the_package_that_an_address_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, scheme, install in (("paramiko", "ssh", "paramiko"), ("s3fs", "s3", "optkit[remote]")):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
        with pytest.raises(MissingPackageError) as error:
            Remote(f"{scheme}://host/place")
        said = f"{scheme}://host/place: the package `{name}` is not installed. Run: pip install '{install}'."
        assert str(error.value) == said


def test_a_file_of_another_size_is_not_downloaded(bucket: str, machine: Opened) -> None:
    one, two = machine("one", bucket), machine("two", bucket)
    make(one)
    record = one.remote.record(KEY)
    record["files"]["a.bin"]["size_bytes"] = 10**12
    one.remote.write("steps", KEY, record)
    assert two.fetch(KEY) is None
    assert said(two) == [f"{bucket}: its file a.bin is gone or not 1,000,000,000,000 bytes. It is made again."]


@pytest.mark.parametrize("url", ["s3://name:a/b@bucket", "simplecache::s3://name:secret@bucket", "http://u:p@h/x"])
def test_a_url_with_a_password_is_refused_without_it(url: str) -> None:
    with pytest.raises(UsageError, match="^--remote: the URL holds a password") as error:
        Remote(url)
    assert url not in str(error.value)


@pytest.mark.parametrize("url", ["github://x", "reference://", "tar://x::http://[", "zip::/dev/null"])
def test_a_url_that_no_file_system_takes(url: str) -> None:
    with pytest.raises(UsageError, match="is no place of a store") as error:
        Remote(url)
    assert "Write s3://bucket/prefix" in str(error.value)


@pytest.mark.parametrize("command", ["show", "push", "pull"])
def test_an_empty_url_is_not_the_working_directory(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    key = ["aa"] if command == "pull" else []
    err = spoken(capsys, "store", command, *key, "--remote", "", status=2)[1]
    assert "error: --remote: the URL is empty. Write s3://bucket/prefix" in err
    assert not any(tmp_path.iterdir())
