"""The model card: metadata that huggingface_hub reads back, and text that says what was proved."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.publishing.card import card_of
from optkit.publishing.push import prepare_push
from optkit.publishing.targets.registry import TARGETS
from optkit.scorecard import Loading
from optkit.source.models import BUILT_IN
from optkit.verification.artifact_checks import check_artifact
from optkit.verification.result_file import keep_loading, read_scorecard
from tests.support.changes import change_json
from tests.support.command_line import spoken
from tests.support.full_scorecards import full_scorecard
from tests.support.publishing import published

SOURCE = "---\nlicense: llama3\nlicense_link: https://example.org/l\nlanguage: [en, fr]\n---\n# Of the source\n"


def parsed(text: str) -> Any:
    return ModelCard(text)


def card(artifact: Path, place: str = "") -> Any:
    return parsed(card_of(read_artifact(artifact), read_scorecard(artifact), place))


def recorded(artifact: Path, **model: Any) -> None:
    change_json(artifact / "optkit.json", lambda record: record["recipe"]["model"].update(model))


def test_the_metadata_of_a_quantized_model_of_the_hub(artifact: Path) -> None:
    recorded(artifact, name="meta/llama", revision="0" * 40)
    found = card(artifact).data.to_dict()
    assert found == {
        "base_model": "meta/llama",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["optkit", "rtn", "compressed-tensors"],
        "model_name": "tiny",
    }


def test_a_built_in_model_has_its_origin_and_licence(artifact: Path) -> None:
    recorded(artifact, name="smollm2-135m")
    known = BUILT_IN["smollm2-135m"]
    found = card(artifact)
    assert (found.data.base_model, found.data.license) == (known.origin, known.licence)
    assert "That of the unmodified model: apache-2.0." in found.text


def test_a_directory_has_no_base_model_and_its_card_and_licence_travel(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_model("llama"), tmp_path / "source")
    (source / "README.md").write_text(SOURCE, encoding="utf-8")
    (source / "LICENSE").write_text("all yours", encoding="utf-8")
    artifact = published(source, tmp_path / "out")
    assert (artifact.directory / "README.base.md").read_text(encoding="utf-8") == SOURCE
    assert not (artifact.directory / "README.md").exists()
    found = parsed(card_of(artifact, full_scorecard()))
    assert found.data.to_dict()["language"] == ["en", "fr"]
    assert (found.data.base_model, found.data.license, found.data.license_link) == (
        None,
        "llama3",
        "https://example.org/l",
    )
    (artifact.directory / "README.base.md").write_text("---\n[\n---\n", encoding="utf-8")
    found = parsed(card_of(artifact, full_scorecard()))
    assert (found.data.license, found.data.license_link) == ("other", "LICENSE")
    assert "see [LICENSE](LICENSE)" in found.text


def test_numbers_on_texts_are_a_model_index(artifact: Path) -> None:
    scorecard = full_scorecard().model_copy(
        update={"recipe": {"evals": [{"perplexity": {"dataset": "wikitext-2", "split": "test"}}, {"footprint": {}}]}}
    )
    found = parsed(card_of(read_artifact(artifact), scorecard))
    (result,) = found.data.eval_results or []
    assert (result.dataset_type, result.dataset_split, result.metric_type) == ("wikitext-2", "test", "perplexity")
    assert result.metric_value == scorecard.rows[0].metric.value
    assert found.data.model_name == scorecard.name


def test_only_programs_that_agree_are_shown(artifact: Path) -> None:
    assert "No program beside optkit was asked to open it" in card(artifact).text
    said = {"device": "cpu", "dtype": "float32", "packages": {"vllm": "0.32"}, "compared": "logits"}
    keep_loading(
        read_artifact(artifact),
        [
            Loading(engine="vllm", verdict="agrees", **said),
            Loading(engine="transformers", verdict="disagrees", **{**said, "packages": {"transformers": "5"}}),
        ],
    )
    text = card(artifact, "me/tiny").text
    assert "$ vllm serve me/tiny\n" in text
    assert "Checked on cpu in float32, with vllm 0.32: logits." in text
    assert "hf download me/tiny --local-dir tiny" in text
    assert "AutoModelForCausalLM" not in text
    assert "| transformers 5" not in text.partition("## Numbers")[0]


def test_a_name_that_no_repository_has(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = spoken(capsys, "card", str(artifact), "--print", "--repo", 'me/x"; rm -r ~', status=2)
    assert "is no repository of the hub. Write it as hf://OWNER/NAME" in err


def test_a_gate_that_is_not_kept_is_said_first(artifact: Path) -> None:
    path = artifact / "scorecard.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    name = said["rows"][0]["metric"]["name"]
    said["rows"][0]["gates"] = [{"key": name, "limit": "<= 1000", "verdict": "FAIL"}]
    path.write_text(json.dumps(said), encoding="utf-8")
    assert f"Gates that it does not keep:\n\n- {name} <= 1000: FAIL, " in card(artifact).text.partition("## ")[0]


def test_an_encoder(tiny_encoder_source: Callable[[str], Path], tmp_path: Path) -> None:
    artifact = published(tiny_encoder_source("BertModel"), tmp_path / "out")
    found = parsed(card_of(artifact, full_scorecard().model_copy(update={"loading": (agreeing("transformers"),)})))
    assert found.data.pipeline_tag == "feature-extraction"
    assert "from transformers import AutoModel, AutoTokenizer" in found.text


def agreeing(engine: str) -> Loading:
    return Loading(engine=engine, verdict="agrees", packages={engine: "1"}, device="cpu", dtype="float32", compared="x")


def test_an_onnx_model(tiny_onnx: Callable[[str, str], Path], tmp_path: Path) -> None:
    artifact = published(tiny_onnx("llama", "int4"), tmp_path / "out")
    loading = tuple(map(agreeing, ("onnxruntime", "onnxruntime-genai", "optimum", "of-a-plug-in")))
    found = parsed(card_of(artifact, full_scorecard().model_copy(update={"loading": loading}), "me/tiny-onnx"))
    assert found.data.library_name == "onnx"
    assert 'InferenceSession("tiny-onnx/model.onnx")' in found.text
    assert 'ORTModelForCausalLM.from_pretrained("me/tiny-onnx")' in found.text
    assert "### of-a-plug-in\n\nChecked on cpu" in found.text


def test_the_command_writes_and_a_push_takes_what_was_edited(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "wall", "tests.publishing.test_push:Wall")
    out, _ = spoken(capsys, "card", str(artifact), "--print")
    assert not (artifact / "README.md").exists()
    assert prepare_push(artifact, "wall://x").files[0].source == out.encode()
    said = json.loads(spoken(capsys, "card", str(artifact), "--json")[0])
    assert said == {"card": out, "file": str(artifact / "README.md")}
    assert (artifact / "README.md").read_text(encoding="utf-8") == out
    assert check_artifact(read_artifact(artifact))[0].detail.endswith("are those of optkit.json")

    (artifact / "README.md").write_text(f"{out}\nFor cats.\n", encoding="utf-8")
    push = prepare_push(artifact, "wall://x")
    assert (push.files[0].name, push.files[0].source, push.warnings) == ("README.md", artifact / "README.md", ())
    (artifact / "README.md").write_text("For cats.\n", encoding="utf-8")
    (warning,) = prepare_push(artifact, "wall://x").warnings
    assert warning.endswith("`optkit card` writes it again")


def test_a_model_with_a_card_is_measured_under_the_key_of_the_store(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from optkit.artifact import measured_weights
    from optkit.store.store import Store

    source = shutil.copytree(tiny_model("llama"), tmp_path / "source")
    (source / "README.md").write_text(SOURCE, encoding="utf-8")
    recipe = {"model": str(source), "name": "x", "stages": [{"rtn": {"group_size": 32}}], "evals": ["footprint"]}
    (tmp_path / "x.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    pipeline.run(tmp_path / "x.yaml", out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    artifact = read_artifact(tmp_path / "out")
    assert measured_weights(artifact, Store(tmp_path / "store")) == artifact.record.weights_key


def test_a_run_replaces_a_card_that_nobody_edited(
    artifact: Path, tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--out", str(artifact), "--store", str(tiny_run / "store"), "--device", "cpu", "--quiet")
    spoken(capsys, "card", str(artifact))
    spoken(capsys, "run", str(tiny_run / "tiny.yaml"), *place, "--set", "stages.0.rtn.bits=8")
    assert not (artifact / "README.md").exists()
    spoken(capsys, "card", str(artifact))
    with (artifact / "README.md").open("a", encoding="utf-8") as file:
        file.write("For cats.\n")
    _, err = spoken(capsys, "run", str(tiny_run / "tiny.yaml"), *place, status=1)
    assert "files that optkit did not write: README.md" in err


def test_a_card_changes_nothing_that_is_signed(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (artifact / "optkit.json").read_bytes()
    spoken(capsys, "card", str(artifact))
    assert (artifact / "optkit.json").read_bytes() == before
