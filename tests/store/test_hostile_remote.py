"""What others may have put into a store that machines share, and URLs that a user may give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optkit.errors import UsageError
from optkit.store.contents import survey_remote
from optkit.store.remote import Remote
from tests.store.conftest import Opened
from tests.store.test_remote import KEY, make, said
from tests.support.command_line import spoken


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {}},
        {"files": {".": {"size_bytes": 1, "sha256": "0" * 64}}},
        {"files": {"a": {"size_bytes": -1, "sha256": "0" * 64}}},
        {"report": "x"},
        {"report": {"skipped": 5}},
        {"seconds": "x"},
        {"memory": 5},
        {"fields": 5},
        {"earlier": [{"kind": "rtn"}]},
    ],
)
def test_a_record_of_another_form_stops_neither_runs_nor_lists(
    bucket: str, machine: Opened, changes: dict[str, Any]
) -> None:
    one, two = machine("one", bucket), machine("two", bucket)
    make(one)
    one.remote.write("steps", KEY, {**one.remote.record(KEY), **changes})
    assert not two.is_remote(KEY)
    assert two.fetch(KEY) is None
    assert survey_remote(two.remote).steps == ()


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
