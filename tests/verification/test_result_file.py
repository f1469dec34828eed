"""What an artifact remembers of its verifications, and of which files."""

import json
from pathlib import Path

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.scorecard import Loading
from optkit.verification.result_file import keep_loading, read_loading
from tests.support.changes import change_json


def of(engine: str, **facts: object) -> Loading:
    return Loading.model_validate({"engine": engine, "verdict": "agrees", "packages": {engine: "1.0"}, **facts})


def test_results_of_another_artifact_are_never_shown(artifact: Path) -> None:
    keep_loading(read_artifact(artifact), [of("transformers")])
    change_json(artifact / "optkit.json", key="0" * 64)
    assert read_loading(read_artifact(artifact)) == ()
    assert pipeline.read_scorecard(artifact).loading == ()
    keep_loading(read_artifact(artifact), [of("vllm")])
    assert [each.engine for each in pipeline.read_scorecard(artifact).loading] == ["vllm"]


def test_results_of_other_files_under_the_same_key_are_never_shown(artifact: Path) -> None:
    keep_loading(read_artifact(artifact), [of("transformers")])
    record = json.loads((artifact / "optkit.json").read_text())
    record["files"]["model.safetensors"]["mtime_ns"] += 1
    (artifact / "optkit.json").write_text(json.dumps(record))
    assert [each.engine for each in read_loading(read_artifact(artifact))] == ["transformers"]
    record["files"]["model.safetensors"]["sha256"] = "0" * 64
    (artifact / "optkit.json").write_text(json.dumps(record))
    assert read_loading(read_artifact(artifact)) == ()


def test_results_that_do_not_say_of_which_files_are_not_shown(artifact: Path) -> None:
    keep_loading(read_artifact(artifact), [of("transformers")])
    change_json(artifact / "verification.json", lambda kept: kept.pop("files"))
    assert read_loading(read_artifact(artifact)) == ()


def test_another_version_stands_beside_and_the_same_one_is_replaced(artifact: Path) -> None:
    found = read_artifact(artifact)
    keep_loading(
        found, [of("vllm", mean_kl=0.1), of("transformers"), of("onnxruntime", verdict="skipped", packages={})]
    )
    keep_loading(
        found, [of("vllm", mean_kl=0.2), of("vllm", packages={"vllm": "2.0"}), of("transformers", verdict="skipped")]
    )
    assert [(each.engine, each.verdict, each.packages.get("vllm"), each.mean_kl) for each in read_loading(found)] == [
        ("transformers", "agrees", None, None),
        ("vllm", "agrees", "1.0", 0.2),
        ("vllm", "agrees", "2.0", None),
        ("onnxruntime", "skipped", None, None),
    ]
