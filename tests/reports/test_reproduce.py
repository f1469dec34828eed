"""`optkit reproduce`: the same bytes again from an artifact's record alone, or what differs and since when."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optkit import pipeline
from optkit.common.held_files import ALIVE
from optkit.common.own_files import RECORD
from optkit.errors import ArtifactError, SourceError
from optkit.reports.reproduction import reproduce
from optkit.reports.reproduction.reproduce import differing_tensors
from optkit.stages.rtn import Rtn
from tests.support.changes import change_json, changing
from tests.support.command_line import spoken

TEXT = "{{dataset: {text}, samples: 8, sequence_length: 16}}"
TRAINING = "{{tokens: 256, sequence_length: 16, batch_size: 4, texts: [{{dataset: {text}}}]}}"
PRUNE = "prune: {{sparsity: 0.5, calibration: " + TEXT + "}}"
STAGES = {
    "rtn": ["rtn: {{group_size: 32}}"],
    "gptq": ["gptq: {{group_size: 32, calibration: " + TEXT + "}}"],
    "awq": ["awq: {{group_size: 32, include: ['*.layers.0.mlp.*'], calibration: " + TEXT + "}}"],
    "prune": [PRUNE],
    "distill": [PRUNE, f"distill: {TRAINING}"],
    "gguf": ["rtn: {{group_size: 32, symmetric: true}}", "gguf"],
}
SLOW = {
    "lora_recover": ["rtn: {{group_size: 32}}", f"lora_recover: {TRAINING}"],
    "mx": ["bf16", "mx: {{type: mxfp4}}"],
    "qat": ["qat: {{group_size: 32, calibration: " + TEXT + ", training: " + TRAINING + "}}"],
    "onnx": ["rtn: {{group_size: 32}}", "onnx: {{target: cpu}}"],
}


@pytest.fixture
def home(tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a model and a text, and a cache of its own."""
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "cache"))
    shutil.copytree(tiny_model("llama"), tmp_path / "mine")
    (tmp_path / "some.txt").write_text("Many words stand in a row, and no two of them rhyme. " * 120, encoding="utf-8")
    return tmp_path


def make(home: Path, *stages: str, name: str = "out") -> Path:
    """Return an artifact that these stages make of the model."""
    lines = "".join(f"  - {stage.format(text=home / 'some.txt')}\n" for stage in stages)
    pipeline.run(f"name: tiny\nmodel: {home / 'mine'}\nstages:\n{lines}", out=home / name, device="cpu")
    return home / name


@pytest.mark.parametrize(
    "stages",
    [*STAGES.values(), *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW.values())],
    ids=[*STAGES, *SLOW],
)
def test_the_same_bytes_again(home: Path, stages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if stages[-1] == "gguf":
        pytest.importorskip("gguf", reason="needs gguf, of the extra `gguf`")
    artifact = make(home, *stages)
    (home / ".tiny.reproduce-killed" / "store").mkdir(parents=True)
    (home / ".tiny.reproduce-killed" / ALIVE).touch()
    monkeypatch.setenv("OPTKIT_STORE_REMOTE", "/no/such/place")  # it would have the steps of the first
    monkeypatch.chdir(home.parent)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(2, threads))
    found = reproduce(artifact)
    torch.set_num_threads(threads)
    assert found.exit_status == 0
    assert (found.differing, found.tensors, found.circumstances, found.notes) == ({}, (), (), ())
    assert [(step.kind, step.identical) for step in found.steps] == [
        (stage.partition(":")[0], True) for stage in stages
    ]
    assert {"model.safetensors", "model.gguf", "model.onnx"} & found.files.keys()
    assert sorted(path.name for path in home.iterdir()) == ["cache", "mine", "out", "some.txt"]


def test_another_stage_than_before_is_found_and_told(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = make(home, "rotate", "rtn: {{group_size: 32}}")
    monkeypatch.setattr(Rtn, "run", _shifted(Rtn.run))
    change_json(artifact / RECORD, lambda record: record["steps"][1]["environment"].update(torch="1.0", cpu="Z80"))
    out, _ = spoken(capsys, "reproduce", str(artifact), "--out", str(home / "again"), "--quiet", status=3)
    for said in ("rotate  5 identical", "FAIL", "others: model.safetensors, since the step rtn", "Z80", "1.0"):
        assert said in out
    found = json.loads(spoken(capsys, "reproduce", str(artifact), "--json", status=3)[0])
    assert [step["identical"] for step in found["steps"]] == [True, False]
    (tensor,) = found["tensors"]
    assert (tensor["name"], tensor["differing"]) == ("model.norm.weight", 1)
    assert tensor["largest"] == pytest.approx(0.25)
    assert found["since"] == "rtn"
    assert (home / "again" / "optkit.json").is_file()
    for there in (artifact, home / "again"):
        err = spoken(capsys, "reproduce", str(artifact), "--out", str(there), status=2)[1]
        assert f"--out: {there} is there already. Name a directory that is not." in err
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=10))
    err = spoken(capsys, "reproduce", str(artifact), status=1)[1]
    assert "10 B are free. Free some space, or make it on another disk with --out." in err


def _shifted(run: Callable[..., Any]) -> Callable[..., Any]:
    def shifted(stage: Rtn, source: Path, target: Path, context: Any) -> Any:
        report = run(stage, source, target, context)
        with changing(target) as tensors:
            tensors["model.norm.weight"][3] += 0.25
        return report

    return shifted


def test_packed_codes_are_counted(home: Path) -> None:
    from safetensors.torch import save_file

    for name, value, more in (("a", 1, {}), ("b", 2, {"other": torch.ones(2)})):
        (home / name).mkdir()
        codes = torch.zeros(8, dtype=torch.int32)
        codes[0] = value
        save_file({"codes": codes, "same": torch.ones(3), **more}, home / name / "x.safetensors")
    other, packed = differing_tensors(home / "a", home / "b", ["x.safetensors"])
    assert (other.name, other.relative) == ("other", 1.0)
    assert (packed.name, packed.differing, packed.largest, packed.relative) == ("codes", 1, None, 0.125)


def test_what_moved_is_looked_for(home: Path, tmp_path: Path) -> None:
    artifact = make(home, PRUNE)
    (home / "cache" / "places.json").unlink()
    with pytest.raises(SourceError, match=r"the model mine that the artifact .* --model PATH\."):
        shutil.move(home / "mine", home / "elsewhere")
        reproduce(artifact)
    shutil.move(home / "some.txt", home / "hidden.txt")
    with pytest.raises(SourceError, match=r"the text some\.txt that the artifact was made from is not found\."):
        reproduce(artifact, model=str(home / "elsewhere"))
    shutil.move(home / "hidden.txt", home / "some.txt")
    assert reproduce(artifact, model=str(home / "elsewhere")).exit_status == 0


def test_a_changed_artifact_is_not_compared(home: Path) -> None:
    artifact = make(home, "cast: {{dtype: bfloat16}}")
    change_json(artifact / RECORD, lambda record: record["steps"][0].update(kind="rtn"))
    with pytest.raises(ArtifactError, match=r"optkit\.json: its steps are rtn, and its recipe has cast\. One of them"):
        reproduce(artifact)
    change_json(artifact / RECORD, lambda record: record["steps"][0].update(kind="cast"))
    change_json(artifact / RECORD, lambda record: record["recipe"]["stages"][0]["cast"].update(dtype="float16"))
    found = reproduce(artifact)
    assert found.exit_status == 3
    assert found.notes == (
        "cast: its key is not the recorded one, so its version or what optkit.json says of it was changed",
    )
    content = bytearray((artifact / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (artifact / "model.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.safetensors was changed\. What is to be compared is not what"):
        reproduce(artifact)


def test_an_older_record_says_less(home: Path) -> None:
    artifact = make(home, "cast: {{dtype: bfloat16}}")
    change_json(artifact / RECORD, lambda record: [record["steps"][0].pop(name) for name in ("environment", "sha256")])
    found = reproduce(artifact)
    assert found.exit_status == 0
    assert found.notes == ("cast: an earlier optkit made it, and recorded neither its machine nor its digests",)
    assert [step.identical for step in found.steps] == [None]


def test_code_of_others_is_not_run_unasked(home: Path) -> None:
    artifact = make(home, "cast: {{dtype: bfloat16}}")
    change_json(artifact / RECORD, lambda record: record["recipe"]["model"].update(trust_remote_code=True))
    with pytest.raises(SourceError, match=r"making it again runs code of others: that of mine\. .*--trust-remote-code"):
        reproduce(artifact)
