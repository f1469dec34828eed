"""`mlflow://` against MLflow's own server with SQLite."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optkit.artifact import read_artifact
from optkit.errors import MissingPackageError, PushError, ResourceError, UsageError
from optkit.progress import SilentProgress
from optkit.publishing.push import prepare_push
from optkit.publishing.targets.registry import target_of
from optkit.scorecard import to_json
from optkit.verification.artifact_checks import check_artifact
from tests.support.command_line import spoken
from tests.support.full_scorecards import full_scorecard
from tests.support.mlflow_server import Server, serving

pytest.importorskip("mlflow", reason="needs mlflow")
TOKEN = "open-sesame"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("mlflow")) as found:
        yield found


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    running.token, running.refused = "", ""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", running.url)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_USERNAME"):
        monkeypatch.delenv(name, raising=False)
    return running


@pytest.fixture
def client(server: Server) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(server.url, server.url)


@pytest.fixture
def artifact(tiny_run: Path, tmp_path: Path) -> Path:
    """Return an artifact with a scorecard of many numbers and gates, and a picture."""
    out = shutil.copytree(tiny_run / "out", tmp_path / "out")
    said = full_scorecard().model_copy(update={"name": "tiny", "recipe": read_artifact(out).record.recipe})
    (out / "scorecard.json").write_text(to_json(said), encoding="utf-8")
    read_artifact(out).replace_attachments({"loss.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>"})
    return out


def pushed(artifact: Path, address: str, allow: bool = True) -> dict[str, str]:
    return prepare_push(artifact, address, allow_failed_gates=allow).upload(SilentProgress())


def refused(artifact: Path, address: str) -> str:
    with pytest.raises(PushError) as caught:
        pushed(artifact, address)
    assert TOKEN not in str(caught.value)
    return str(caught.value)


def test_a_run_has_numbers_gates_pictures_recipe_lineage_and_files(
    client: Any, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("push", str(artifact), "mlflow://nightly/tiny", "--allow-failed-gates")
    assert "experiment nightly, registered as tiny" in " ".join(spoken(capsys, *words, "--dry-run")[0].split())
    assert client.get_experiment_by_name("nightly") is None
    said = json.loads(spoken(capsys, *words, "--json")[0])
    known, card, record = said["result"], full_scorecard(), read_artifact(artifact).record

    run = client.get_run(known["run"])
    assert run.info.status == "FINISHED"
    perplexity = card.rows[0]
    assert run.data.metrics["perplexity"] == perplexity.metric.value
    assert run.data.metrics["perplexity/baseline"] == perplexity.baseline.value
    assert run.data.metrics["perplexity_ratio/baseline"] == perplexity.ratio
    assert "decode_tokens_per_s_ratio/batch 1/prompt 128/baseline" in run.data.metrics
    assert run.data.params["stages.0.rtn.bits"] == "4"
    tags = run.data.tags
    assert tags["optkit.artifact_key"] == record.key
    assert tags["optkit.baseline_key"] == record.baseline_key
    assert [each["stage"] for each in json.loads(tags["optkit.parents"])] == [step["kind"] for step in record.steps]
    assert next(value for name, value in tags.items() if name.startswith("gate perplexity")).startswith("<= 1.1")

    there = Path(client.download_artifacts(known["run"], "model", str(tmp_path)))
    assert [check.detail for check in check_artifact(read_artifact(there)) if not check.ok] == []
    assert (there / "README.md").is_file()
    assert (there / "scorecard_files" / "loss.svg").read_bytes().startswith(b"<svg")
    assert "recipe.yaml" in {each.path for each in client.list_artifacts(known["run"])}

    version = client.get_model_version("tiny", known["version"])
    assert (version.run_id, version.source.rpartition("/")[2]) == (known["run"], "model")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_the_alias_is_the_verdict_of_the_newest(client: Any, artifact: Path) -> None:
    path = artifact / "scorecard.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    known = {}
    for verdict in ("PASS", "FAIL", "INCONCLUSIVE", ""):
        for row in said["rows"]:
            row["gates"] = []
        if verdict:
            said["rows"][0]["gates"] = [{"key": "perplexity", "limit": "<= 1.1x", "of": "baseline", "verdict": verdict}]
        path.write_text(json.dumps(said), encoding="utf-8")
        known[verdict] = pushed(artifact, "mlflow://aliases/judged")
    assert {verdict: each.get("alias") for verdict, each in known.items()} == {
        "PASS": "passed",
        "FAIL": "failed",
        "INCONCLUSIVE": "inconclusive",
        "": None,
    }
    assert client.get_model_version_by_alias("judged", "passed").version == known["PASS"]["version"]
    assert client.get_model_version_by_alias("judged", "failed").version == known["FAIL"]["version"]


def test_a_push_that_broke_off_goes_on_in_its_run(server: Server, client: Any, artifact: Path) -> None:
    server.refused = "model.safetensors"
    said = refused(artifact, "mlflow://broken")
    assert said.startswith("mlflow://broken: MLflow does not take it. ")
    assert said.endswith("Push again: the run goes on with what is missing.")
    experiment = client.get_experiment_by_name("broken").experiment_id
    (begun,) = client.search_runs([experiment])
    assert begun.info.status == "FAILED"
    assert pushed(artifact, "mlflow://broken")["run"] == begun.info.run_id
    assert client.get_run(begun.info.run_id).info.status == "FINISHED"
    assert pushed(artifact, "mlflow://broken")["run"] != begun.info.run_id


def test_a_push_that_was_killed_goes_on_in_its_run_and_registers_it_once(
    client: Any, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr("mlflow.MlflowClient.set_terminated", lambda *_: None)
        first = pushed(artifact, "mlflow://killed/once")
    assert client.get_run(first["run"]).info.status == "RUNNING"
    assert pushed(artifact, "mlflow://killed/once") == first
    assert client.get_run(first["run"]).info.status == "FINISHED"
    assert len(client.search_model_versions("name = 'once'")) == 1
    assert pushed(artifact, "mlflow://killed/once")["version"] == "2"


def test_a_full_disk_here(server: Server, artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as filled:
        filled.setattr(Path, "write_bytes", full)
        with pytest.raises(ResourceError, match="the disk is full while writing README.md.* or set XDG_CACHE_HOME to"):
            pushed(artifact, "mlflow://full")
    assert not any((tmp_path / "cache" / "optkit" / "drafts").iterdir())


def test_a_server_that_asks_for_a_token(
    server: Server, artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.token = "another"
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
    said = refused(artifact, "mlflow://secret")
    assert said.startswith(f"mlflow://secret: {server.url} does not let you in. ")
    assert said.endswith("Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN.")
    server.token = TOKEN
    out, err = spoken(capsys, "push", str(artifact), "mlflow://secret", "--allow-failed-gates")
    assert TOKEN not in out + err
    push = prepare_push(artifact, "mlflow://secret", allow_failed_gates=True)
    for file in push.files:
        content = file.source if isinstance(file.source, bytes) else file.source.read_bytes()
        assert TOKEN.encode() not in content, file.name


def test_a_server_that_is_not_there(server: Server, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{TOKEN}@127.0.0.1:9")
    assert refused(artifact, "mlflow://x").startswith("mlflow://x: http://127.0.0.1:9 cannot be reached. ")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////data/mlflow.db")
    assert prepare_push(artifact, "mlflow://x", allow_failed_gates=True).target.place.startswith("sqlite:////data/")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert refused(artifact, "mlflow://x").startswith("mlflow://x: there is no server. Set MLFLOW_TRACKING_URI, e.g.")


def test_without_mlflow(server: Server, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.publishing.targets.mlflow.find_spec", lambda _: None)
    with pytest.raises(MissingPackageError, match=r"Run: pip install 'optkit\[mlflow\]'"):
        pushed(artifact, "mlflow://x")


@pytest.mark.parametrize("address", ["mlflow://", "mlflow://a/b/c", "mlflow:///b"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(UsageError, match=r"names no experiment\. Write it as mlflow://EXPERIMENT\[/REGISTERED_NAME\]"):
        target_of(address)
