"""`hf://` against a hub on this machine: real HTTP, huggingface_hub's own client."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from optkit.artifact import read_artifact
from optkit.errors import PushError, UsageError
from optkit.progress import SilentProgress
from optkit.publishing.push import prepare_push
from optkit.publishing.targets.registry import target_of
from optkit.verification.artifact_checks import check_artifact
from tests.support.command_line import spoken
from tests.support.hub_server import Hub, serving

TOKEN = "hf_mine"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def pushed(artifact: Path, address: str = "hf://me/tiny") -> dict[str, str]:
    return prepare_push(artifact, address).upload(SilentProgress())


def refused(artifact: Path, address: str = "hf://me/tiny") -> str:
    with pytest.raises(PushError) as caught:
        pushed(artifact, address)
    assert TOKEN not in str(caught.value)
    return str(caught.value)


def test_what_arrives_is_the_whole_artifact_with_its_card(
    hub: Hub, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = spoken(capsys, "push", str(artifact), "hf://me/tiny", "--dry-run")
    assert f"{hub.url}/me/tiny, branch main" in " ".join(out.split())
    assert hub.repositories == {}

    out, err = spoken(capsys, "push", str(artifact), "hf://me/tiny", "--json")
    said = json.loads(out)
    assert said["result"]["url"] == f"{hub.url}/me/tiny/tree/{said['result']['commit']}"
    branch = hub.repositories["me/tiny"]["main"]
    assert {file["name"] for file in said["files"]} == branch.keys()
    assert hub.private == {"me/tiny": True}
    assert hub.messages == [f"tiny, artifact {read_artifact(artifact).record.key[:12]}"]
    for name, content in branch.items():
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_bytes(content)
    assert [check.detail for check in check_artifact(read_artifact(tmp_path / "there")) if not check.ok] == []
    assert branch["README.md"].startswith(b"---\nlibrary_name: transformers\n")
    assert not any(TOKEN.encode() in content for content in branch.values())
    assert TOKEN not in out + err


def test_a_branch_of_its_own_and_a_second_push_that_sends_nothing_twice(hub: Hub, artifact: Path) -> None:
    first = pushed(artifact)
    sent = len(hub.uploaded)
    assert pushed(artifact, "hf://me/tiny@v2")["commit"] == first["commit"]
    assert hub.repositories["me/tiny"]["v2"] == hub.repositories["me/tiny"]["main"]
    assert len(hub.uploaded) == sent > 0


def test_a_push_that_broke_off_goes_on(hub: Hub, artifact: Path) -> None:
    weights = read_artifact(artifact).record.files["model.safetensors"]["sha256"]
    hub.refuse_upload.add(weights)
    said = refused(artifact)
    assert said.startswith("hf://me/tiny: the hub refused with status 400. It said: ")
    assert said.endswith("Push again: what arrived is not sent twice.")
    assert hub.repositories["me/tiny"]["main"] == {}
    before = list(hub.uploaded)
    assert before
    pushed(artifact)
    assert weights in hub.uploaded[len(before) :]
    assert len(set(hub.uploaded)) == len(hub.uploaded)


def test_weights_that_an_earlier_push_left_go_with_the_same_commit(hub: Hub, artifact: Path) -> None:
    stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter/adapter_model.safetensors")
    kept = ("images/cat.png", ".gitattributes", "onnx/model.onnx", "NOTES.md")
    left = dict.fromkeys([*stale, *kept, "scorecard_files/loss.svg"], b"x")
    hub.repositories["me/tiny"] = {"main": left}
    pushed(artifact)
    there = hub.repositories["me/tiny"]["main"].keys()
    assert {*kept} <= there
    assert not {*stale, "scorecard_files/loss.svg"} & there
    assert {file.name for file in prepare_push(artifact, "hf://me/tiny").files} <= there


def test_no_token(hub: Hub, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert refused(artifact).startswith("hf://me/tiny: there is no token for the hub. Set HF_TOKEN to one that may")


def test_a_token_that_nobody_knows(hub: Hub, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_nobodys")
    said = refused(artifact)
    assert said.startswith("hf://me/tiny: the hub does not know the token. It said: ")
    assert "hf_nobodys" not in said


@pytest.mark.parametrize("there", [True, False])
def test_a_repository_of_somebody_else(there: bool, hub: Hub, artifact: Path) -> None:
    if there:
        hub.repositories["you/tiny"] = {"main": {}}
    said = refused(artifact, "hf://you/tiny")
    assert said.startswith("hf://you/tiny: the token may not write to you. It said: ")


def test_a_hub_that_is_not_there(hub: Hub, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    said = refused(artifact)
    assert said.startswith("hf://me/tiny: the upload broke off. http://127.0.0.1:9 cannot be reached (")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused(artifact) == (
        "hf://me/tiny: nothing was uploaded. The hub is switched off (HF_HUB_OFFLINE). Unset HF_HUB_OFFLINE."
    )


def test_a_card_that_the_hub_does_not_take(hub: Hub, artifact: Path) -> None:
    (artifact / "README.md").write_text("---\ntags: 7\n---\n", encoding="utf-8")
    assert '"tags" must be an array' in refused(artifact)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hf://tiny", "hf://tiny: 'tiny' is no repository of the hub. Write it as hf://OWNER/NAME[@REVISION]."),
        ("hf://me/tiny@", "'me/tiny@' is no repository of the hub"),
        ("hf://me/a..b", "Write it as hf://OWNER/NAME"),
    ],
)
def test_addresses_that_are_none(address: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        target_of(address)
    assert said in str(caught.value)


def test_a_full_disk_is_said(
    hub: Hub, artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import HfApi

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/cache/xet")

    monkeypatch.setattr(HfApi, "preupload_lfs_files", full)
    _, err = spoken(capsys, "push", str(artifact), "hf://me/tiny", "--quiet", status=1)
    assert err == "error: /cache/xet: the disk is full. Free some space, or use another disk.\n"
