"""`optkit push` before any server is asked: what may leave, what goes where, what is never said."""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from optkit.errors import MissingPackageError, PushError, SourceError, UnsoundError, UsageError
from optkit.progress import Progress, SilentProgress
from optkit.publishing.push import prepare_push, without_secrets
from optkit.publishing.targets.base import Shipment, Target, Upload
from optkit.publishing.targets.registry import TARGETS, target_of
from optkit.scorecard import read_json
from tests.support.changes import change_json
from tests.support.command_line import spoken

README = Path(__file__).parents[2] / "optkit" / "publishing" / "targets" / "README.md"


@pytest.fixture
def artifact(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the artifact; the targets are `directory`, of the README, and `wall`."""
    example = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[0]
    module = ModuleType("example_target")
    exec(compile(example, "example_target.py", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "example_target", module)
    monkeypatch.setitem(TARGETS, "directory", "example_target:Directory")
    monkeypatch.setitem(TARGETS, "wall", f"{__name__}:Wall")
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(tiny_run / "out", tmp_path / "out")


class Wall(Target):
    """Says its secret to whoever asks for anything."""

    scheme: ClassVar[str] = "wall"
    form: ClassVar[str] = "NAME"
    secret_variables: ClassVar[tuple[str, ...]] = ("WALL_TOKEN",)

    def __init__(self, address: str) -> None:
        super().__init__(address)
        if "/" in address:
            raise self.refusal("a wall has one name")

    @property
    def place(self) -> str:
        return "a wall"

    def upload(self, shipment: Shipment, files: tuple[Upload, ...], progress: Progress) -> dict[str, str]:
        raise ConnectionError(f"401 for Bearer {self.secrets()[0]}")


def gated(artifact: Path, verdict: str) -> Path:
    """Give the first number of a scorecard a gate."""

    first = read_json(artifact / "scorecard.json").rows[0]
    gate = {"key": first.metric.name, "limit": "<= 1000", "verdict": verdict}
    change_json(artifact / "scorecard.json", lambda card: card["rows"][0].update(gates=[gate]))
    return artifact


def test_a_dry_run_says_what_goes_where_and_a_push_puts_it_there(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    address = "directory://there"
    out, _ = spoken(capsys, "push", "out", address, "--dry-run")
    assert " ".join(out.split()).startswith(f"{address} {there} ")
    assert out.splitlines()[-1] == "dry run: nothing was uploaded"
    assert not there.exists()
    planned = json.loads(spoken(capsys, "push", str(artifact), address, "--dry-run", "--json")[0])
    assert planned["result"] is None

    out, err = spoken(capsys, "push", str(artifact), address)
    assert f"pushed to {address}" in out
    assert f"url  {there.as_uri()}" in "".join(out.split("\n"))
    assert "push to" in err
    there_now = {path.relative_to(there).as_posix(): path for path in there.rglob("*") if path.is_file()}
    assert {file["name"]: file["sha256"] for file in planned["files"]} == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there_now.items()
    }
    assert all(file["size_bytes"] == there_now[file["name"]].stat().st_size for file in planned["files"])
    assert {"model.safetensors", "config.json", "tokenizer.json", "optkit.json", "scorecard.html"} <= there_now.keys()


def test_what_optkit_did_not_write_stays_here(artifact: Path) -> None:
    (artifact / "notes.txt").write_text("mine", encoding="utf-8")
    names = {file.name for file in prepare_push(artifact, "directory://x").files}
    assert "notes.txt" not in names


def test_an_artifact_that_is_not_whole_stays_here(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (artifact / "tokenizer_config.json").unlink()
    _, err = spoken(capsys, "push", str(artifact), "directory://x", "--dry-run", status=3)
    assert err == (
        f"error: {artifact}: it is not whole: digests: tokenizer_config.json is missing. Run its recipe again.\n"
    )


def test_a_record_that_is_a_link_to_elsewhere_stays_here(artifact: Path, tmp_path: Path) -> None:
    shutil.move(artifact / "scorecard.md", tmp_path / "elsewhere.md")
    (artifact / "scorecard.md").symlink_to(tmp_path / "elsewhere.md")
    with pytest.raises(SourceError, match=r"scorecard\.md leads out of the directory"):
        prepare_push(artifact, "directory://x")


def test_a_failed_gate_stays_here_unless_told(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsoundError, match=r"a gate failed: .* <= 1000 FAIL: .*\. .*: --allow-failed-gates\.$"):
        prepare_push(gated(artifact, "FAIL"), "directory://x")
    words = ("push", str(artifact), "directory://x", "--dry-run")
    spoken(capsys, *words, status=3)
    _, err = spoken(capsys, *words, "--allow-failed-gates")
    assert "<= 1000 FAIL" in err


def test_an_inconclusive_gate_is_said(artifact: Path) -> None:
    (said,) = prepare_push(gated(artifact, "INCONCLUSIVE"), "directory://x").warnings
    assert "<= 1000 INCONCLUSIVE: " in said


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("artifacts/out", "'artifacts/out' is no address of a target. Write it as SCHEME://PLACE; schemes: "),
        ("wal://x", "wal://: there is no target 'wal'. Did you mean 'wall'?"),
        ("wall://me:pass@host/x", "wall://: the address has a user or a password before its @. Addresses are printed"),
        ("wall://a/b", "wall://a/b: a wall has one name. Write it as wall://NAME."),
    ],
)
def test_addresses_that_name_no_place(address: str, said: str, artifact: Path) -> None:
    with pytest.raises(UsageError) as caught:
        target_of(address)
    assert str(caught.value).startswith(said)
    assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("words", [(), ("--debug",), ("--json",)])
def test_a_secret_is_in_no_error(
    words: tuple[str, ...], artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WALL_TOKEN", "open-sesame")
    out, err = spoken(capsys, "push", str(artifact), "wall://x", *words, status=1)
    assert "ConnectionError: 401 for Bearer [hidden]" in err
    assert "open-sesame" not in out + err


def test_a_secret_of_what_caused_an_error_is_hidden_too() -> None:
    with pytest.raises(PushError, match=r"^there: no\.$") as caught, without_secrets(["open-sesame"]):
        try:
            raise ConnectionError("open-sesame")
        except ConnectionError as error:
            raise PushError("no", where="there") from error
    assert caught.value.__cause__ is None
    with pytest.raises(MissingPackageError), without_secrets(["open-sesame"]):
        raise MissingPackageError("mlflow", where="mlflow://")


def test_a_target_without_network_is_silent(artifact: Path, tmp_path: Path) -> None:
    known = prepare_push(artifact, f"directory://{tmp_path / 'there'}").upload(SilentProgress())
    assert known == {"url": (tmp_path / "there").as_uri()}


def test_a_token_of_the_environment_reaches_no_file_and_no_line(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")
    for name in names:
        monkeypatch.setenv(name, "open-sesame")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:open-sesame@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    out, store = str(tmp_path / "out"), ("--store", str(tmp_path / "store"), "--device", "cpu")
    said = [*spoken(capsys, "run", str(tiny_run / "tiny.yaml"), "--out", out, *store)]
    said += spoken(capsys, "card", out)
    said += spoken(capsys, "show", out, "--verbose")
    said += spoken(capsys, "push", out, "mlflow://x/y", "--dry-run", "--json")
    said += spoken(capsys, "push", out, "hf://me/x", "--debug", status=1)
    said += spoken(capsys, "push", out, "mlflow://x/y", "--debug", status=1)
    assert "open-sesame" not in "".join(said)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (tmp_path / "out" / "README.md") in files
    assert [path for path in files if b"open-sesame" in path.read_bytes()] == []
