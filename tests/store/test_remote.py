"""The store that machines share: real S3 requests to a real server, and directories."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import ResourceError
from optkit.store.remote import Remote
from optkit.store.shared import SharedStore
from optkit.store.store import Store
from tests.conftest import RUN, TinyModel, Warnings
from tests.store.conftest import Opened, lead_to
from tests.support.command_line import spoken
from tests.support.object_store import SECRET, Way, refusing

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"
KEY, OTHER = "a" * 64, "b" * 64
NUMBERS = {"metrics": [], "seconds": 1.5}
CHECK = "Check its address and the connection, and that you may {} there."


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("bucket"))
    (tmp_path / "shared").mkdir()
    return f"file://{tmp_path}/shared"


def said(store: SharedStore) -> list[str]:
    """Return the warnings of a store that `machine` opened."""
    assert isinstance(store._progress, Warnings)
    return store._progress.lines


def make(store: Store, key: str = KEY, text: str = "weights") -> None:
    with store.lock(key):
        with store.write(key) as draft:
            (draft.model / "a.bin").write_text(text)
            (draft.model / "sub").mkdir()
            (draft.model / "sub" / "b.bin").write_text(f"other {text}")
            draft.record.update(kind="rtn", seconds=1.0, report={})
        store.push(key)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def objects(url: str, folder: str) -> list[str]:
    remote = Remote(url)
    return sorted(remote._files.find(remote._path(folder, "")))


def test_what_one_machine_makes_another_takes(url: str, machine: Opened) -> None:
    one, two = machine("one", url), machine("two", url)
    assert not two.is_remote(KEY)
    assert two.fetch(KEY) is None
    make(one)
    one.put_json(OTHER, NUMBERS)
    assert two.is_remote(KEY)
    assert two.get(KEY) is None, "nothing is fetched by looking"
    assert contents(two.fetch(KEY)) == contents(one.get(KEY))
    assert two.record(KEY)["kind"] == "rtn"
    assert two.get_json(OTHER) == NUMBERS
    assert Store(two.root).get_json(OTHER) == NUMBERS, "it is kept here too"
    assert said(one) == said(two) == []


def test_files_that_several_steps_have_lie_there_once(url: str, machine: Opened) -> None:
    one = machine("one", url)
    make(one, KEY)
    make(one, OTHER)
    assert len(objects(url, "files")) == 2
    assert len(objects(url, "steps")) == 2


WRITER = """
import sys
from pathlib import Path
from optkit.store.shared import open_store
store, key = open_store(Path(sys.argv[1])), "a" * 64
sys.stdin.readline()
with store.write(key) as draft:
    for number in range(3):
        (draft.model / str(number)).write_text(sys.argv[2] * (number + 1) * 1000)
    draft.record.update(kind="rtn", seconds=1.0, report={})
store.push(key)
"""


def writer(root: Path, text: str, program: str = WRITER) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", program, str(root), text]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)


@pytest.mark.parametrize(("url", "texts"), [("file", "xx"), ("s3", "wxyz")], indirect=["url"])
def test_several_writers_of_one_key_do_not_mix(url: str, machine: Opened, tmp_path: Path, texts: str) -> None:
    store = machine("reader", url)
    writers = [writer(tmp_path / f"{number}", text) for number, text in enumerate(texts)]
    for each in writers:
        each.stdin.write(b"\n")
        each.stdin.flush()
    assert [each.communicate()[1] for each in writers] == [b""] * len(texts)
    found = contents(store.fetch(KEY))
    assert found in [{str(number): text.encode() * (number + 1) * 1000 for number in range(3)} for text in texts]
    assert said(store) == []


def test_a_killed_upload_is_not_found_and_can_be_completed(
    bucket: str, server: str, machine: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Way(server, 30_000, ends=False) as way:
        lead_to(way.address, monkeypatch)
        monkeypatch.setenv("OPTKIT_STORE_REMOTE", bucket)
        process = writer(tmp_path / "one", "kilobyte")
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert way.broken.wait(60)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    lead_to(server, monkeypatch)
    one, two = machine("one", bucket), machine("two", bucket)
    assert len(objects(bucket, "files")) < 3
    assert two.fetch(KEY) is None
    assert one.get(KEY), "it is whole where it was made"
    one.push(KEY)
    assert contents(two.fetch(KEY)) == contents(one.get(KEY))
    assert said(one) == said(two) == []


def _cut(remote: Remote, path: str) -> None:
    remote._files.pipe_file(path, remote._files.cat_file(path)[:-1])


def _flip(remote: Remote, path: str) -> None:
    content = remote._files.cat_file(path)
    remote._files.pipe_file(path, bytes([content[0] ^ 1]) + content[1:])


def _lose(remote: Remote, path: str) -> None:
    remote._files.rm_file(path)


@pytest.mark.parametrize(
    ("url", "damage"), [("s3", _cut), ("s3", _flip), ("s3", _lose), ("file", _cut), ("file", _lose)], indirect=["url"]
)
def test_a_damaged_file_is_not_taken_and_the_next_push_mends_it(
    url: str, machine: Opened, damage: Callable[[Remote, str], None]
) -> None:
    one, two, three = (machine(name, url) for name in ("one", "two", "three"))
    make(one)
    damage(one.remote, objects(url, "files")[0])
    assert two.fetch(KEY) is None
    assert two.get(KEY) is None
    (line,) = said(two)
    assert line.startswith("the step aaaaaaaaaaaa: ") or " is gone" in line
    assert line.endswith("It is made again.")
    assert not any((two.root / "drafts").iterdir())
    make(two)
    assert contents(three.fetch(KEY)) == contents(one.get(KEY))


@pytest.mark.parametrize("damage", [_cut, _flip])
def test_a_damaged_record_or_number_is_not_there(
    bucket: str, machine: Opened, damage: Callable[[Remote, str], None]
) -> None:
    one, two = machine("one", bucket), machine("two", bucket)
    make(one)
    one.put_json(OTHER, NUMBERS)
    for folder in ("steps", "metrics"):
        damage(one.remote, objects(bucket, folder)[0])
    assert not two.is_remote(KEY)
    assert two.fetch(KEY) is None
    assert two.get_json(OTHER) is None
    assert said(two) == []


@pytest.mark.parametrize("name", ["../outside", "/outside"])
def test_a_record_that_leads_out_of_the_step_is_not_followed(bucket: str, machine: Opened, name: str) -> None:
    one, two = machine("one", bucket), machine("two", bucket)
    make(one)
    record = one.remote.record(KEY)
    record["files"][name] = record["files"].pop("a.bin")
    one.remote.write("steps", KEY, record)
    assert two.fetch(KEY) is None
    assert not (two.root / "drafts" / "outside").exists()


def test_a_full_disk_while_fetching_is_said_and_leaves_nothing(bucket: str, machine: Opened) -> None:
    one, two = machine("one", bucket), machine("two", bucket)
    make(one, text="x" * 2_000_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(ResourceError, match="larger than this process may write .* while writing the step aaaa"):
            two.fetch(KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert two.get(KEY) is None
    assert not any((two.root / "drafts").iterdir())
    assert contents(two.fetch(KEY)) == contents(one.get(KEY))


def test_a_key_that_is_refused_stops_no_run(
    bucket: str, server: str, machine: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    with refusing(server):
        one = machine("one", bucket)
        make(one)
        make(one, OTHER)
        one.put_json(KEY, NUMBERS)
        assert one.get_json(OTHER) is None
    fetching, pushing = said(one)
    assert fetching.startswith(f"{bucket}: it cannot be read. ")
    assert fetching.endswith("What is not here is made here.")
    assert pushing.startswith(f"{bucket}: it cannot be written. ")
    assert pushing.endswith(f"What is made stays here; give it later by `optkit store push --remote {bucket}`.")
    assert SECRET not in "".join([*said(one), *capsys.readouterr()])
    assert Store(one.root).get(KEY)


def test_a_server_that_dies_in_the_middle_stops_no_run(
    bucket: str, server: str, machine: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Way(server, 40_000, ends=True) as way:
        lead_to(way.address, monkeypatch)
        one = machine("one", bucket)
        make(one, KEY, "k" * 30_000)
        make(one, OTHER)
    assert one.get(KEY)
    assert one.get(OTHER)
    (line,) = said(one)
    assert line.startswith(f"{bucket}: it cannot be written. ")
    lead_to(server, monkeypatch)
    assert machine("two", bucket).remote.keys("steps") == []


def test_a_server_that_does_not_answer_stops_no_run(
    bucket: str, server: str, machine: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.store.remote.ANSWER_S", 0.3)
    with Way(server, 0, ends=False) as way:
        lead_to(way.address, monkeypatch)
        one = machine("one", bucket)
        make(one)
    assert [line.split(" What ")[0] for line in said(one)] == [
        f"{bucket}: it cannot be read. There was no answer for 0.3 s. {CHECK.format('read')}",
        f"{bucket}: it cannot be written. There was no answer for 0.3 s. {CHECK.format('write')}",
    ]


def test_a_machine_that_can_only_read_its_own_store_still_sees_what_is_shared(bucket: str, machine: Opened) -> None:
    machine("one", bucket).put_json(OTHER, NUMBERS)
    two = machine("two", bucket)
    two.root.write_text("no directory")
    assert two.get_json(OTHER) == NUMBERS


def test_a_step_that_was_changed_meanwhile_is_not_pushed(bucket: str, machine: Opened) -> None:
    one = machine("one", bucket)
    with one.write(KEY) as draft:
        (draft.model / "a").write_text("a")
    (one.get(KEY) / "a").write_text("b!")
    one.push(KEY)
    assert said(one) == ["the step aaaaaaaaaaaa: its files were changed or lost. Make it again. It is not pushed."]
    assert one.remote.keys("steps") == []


def test_a_server_that_is_not_there_stops_no_run(bucket: str, machine: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    lead_to("http://127.0.0.1:9", monkeypatch)
    one = machine("one", bucket)
    make(one)
    assert one.get(KEY)
    assert len(said(one)) == 2
    assert "Could not connect to the endpoint URL" in said(one)[0]


def test_a_full_shared_disk_stops_no_run(tmp_path: Path, machine: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    one = machine("one", str(tmp_path / "shared"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(one.remote._files, "put_file", full)
    make(one)
    assert one.get(KEY)
    (line,) = said(one)
    assert (
        f"it cannot be written. [Errno 28] No space left on device. {CHECK.format('write')} What is made stays" in line
    )


def test_a_second_machine_makes_nothing_again(
    bucket: str, tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RUN.format(model=tiny_model("llama")).replace("stages:\n", "stages:\n  - bf16\n")
    (tmp_path / "tiny.yaml").write_text(recipe)

    def on(machine: str, command: str, *words: str) -> tuple[dict[str, Any], str]:
        place = ["--store", str(tmp_path / machine), "--remote", bucket, "--device", "cpu", "--json"]
        out, err = spoken(capsys, command, str(tmp_path / "tiny.yaml"), *place, *words)
        return json.loads(out), err

    on("one", "run", "--out", str(tmp_path / "here"))
    planned, _ = on("two", "plan")
    assert [step["remote"] for step in planned["steps"]] == [False, True, True]
    assert [each["hit"] for each in planned["evals"]] == [True]
    first, last = (step["key"] for step in planned["steps"][1:])
    assert not Store(tmp_path / "two").get(last), "a plan fetches no weights"
    made, told = on("two", "run", "--out", str(tmp_path / "there"))
    assert [step["cached"] for step in made["steps"]] == [True, True]
    assert "rtn from s3://" in told
    assert Store(tmp_path / "two").get(last)
    assert not Store(tmp_path / "two").get(first), "nothing is fetched that the run does not begin with"
    assert (tmp_path / "here" / WEIGHTS).read_bytes() == (tmp_path / "there" / WEIGHTS).read_bytes()
    assert "OPTKIT_STORE_REMOTE" not in os.environ
    assert SECRET not in "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
