"""The field `exporter` of the stage `onnx`: what is chosen if it is left out, and what the
exporter torch takes.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import RecipeError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape, TensorInfo
from optkit.onnx.exporters import exporter_for
from optkit.recipe.recipe import load_recipe
from optkit.stage import Context, Report
from optkit.stages.onnx import Onnx
from tests.support.encoders import save_encoder
from tests.support.running import run_stage

for package in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(package)
pytestmark = pytest.mark.usefixtures("children_here")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder("BertModel", tmp_path_factory.mktemp("encoder") / "bert")


@pytest.mark.parametrize(
    ("architecture", "exporter"),
    [("LlamaForCausalLM", "genai"), ("GPT2LMHeadModel", "torch"), ("BertModel", "torch"), (None, "torch")],
)
def test_what_is_chosen(architecture: str | None, exporter: str) -> None:
    assert exporter_for({"architectures": [architecture]} if architecture else {}) == exporter


def test_an_encoder_is_exported_by_torch(bert: Path, tmp_path: Path) -> None:
    report = run_stage(Onnx(), bert, tmp_path / "onnx")
    assert (report.details["exporter"], report.details["dtype"], report.details["opset"]) == ("torch", "float32", 21)
    assert report.details["inputs"] == ["input_ids", "attention_mask", "token_type_ids"]
    assert report.details["outputs"] == ["last_hidden_state"]
    assert report.details["cosine"] > 0.999999
    assert report.notes == ("exported by torch: the exporter genai has no BertModel",)
    assert json.loads((tmp_path / "onnx" / "config.json").read_text())["dtype"] == "float32"
    assert not (tmp_path / "onnx" / "genai_config.json").exists()
    cost, left = Onnx(exporter="torch").predict(Checkpoint(bert).shape, "cpu")
    written = (tmp_path / "onnx" / "model.onnx.data").stat().st_size
    assert cost.disk_bytes == left.size_bytes
    assert 0.8 * written < cost.disk_bytes < 1.2 * written


def test_what_was_asked_for_is_not_explained(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Onnx, "_export_by_torch", lambda *_: Report(changed=1))
    assert Onnx(exporter="torch").run(bert, tmp_path / "onnx", Context()).notes == ()


def test_another_version_of_the_exporter_is_another_key() -> None:
    genai, torch = Onnx(exporter="genai").made_with()["packages"], Onnx(exporter="torch").made_with()["packages"]
    assert [each.partition("==")[0] for each in (*genai, *torch)] == [
        "onnxruntime-genai",
        "torch",
        "transformers",
        "onnxscript",
    ]
    assert Onnx().made_with() == {"packages": [*genai, *torch]}


IDLE = [
    ({"target": "cuda"}, "target", "a graph of the exporter torch is the same for every provider. Leave it out"),
    (
        {"dtype": "float16"},
        "dtype",
        "the exporter torch writes float32. Put onnx_optimize with float16: true behind it",
    ),
    ({"lm_head": 8}, "lm_head", "the exporter torch rounds nothing. Leave it out, and put onnx_quantize behind it"),
    ({"embedding": "shared"}, "embedding", "the exporter torch rounds nothing"),
    ({"activations": "int8"}, "activations", "the exporter torch rounds nothing"),
]


@pytest.mark.parametrize(("fields", "name", "said"), IDLE)
def test_fields_that_mean_nothing_to_torch(bert: Path, fields: dict[str, Any], name: str, said: str) -> None:
    with pytest.raises(RecipeError, match=f"{name}: {said}"):
        load_recipe({"model": str(bert), "stages": [{"onnx": {"exporter": "torch", **fields}}], "evals": ["footprint"]})
    with pytest.raises(StageError, match=f"^onnx.{name}: {said}.*genai has no BertModel"):
        Onnx(**fields).predict(Checkpoint(bert).shape, "cpu")


def test_codes_are_not_for_torch(bert: Path) -> None:
    shape = Checkpoint(bert).shape
    quantized = replace(shape, config={**shape.config, "quantization_config": {"quant_method": "gptq"}})
    said = (
        r"^onnx: the exporter torch writes float weights, and the model is quantized already \(gptq\). "
        r"Put `- dequantize` before it, and"
    )
    with pytest.raises(StageError, match=said):
        Onnx().predict(quantized, "cpu")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("deepseek_v2", "^onnx: XForCausalLM cannot be written as a graph. Its code computes with complex numbers"),
        ("gemma3n_text", "^onnx: XForCausalLM cannot be written as a graph. Its code computes with quantiles"),
        ("mpt", r"^onnx.kv_cache: XForCausalLM .*branches on numbers.*Set kv_cache: false"),
        ("roc_bert", r"^onnx.kv_cache: roc_bert keeps something else .*Set kv_cache: false"),
    ],
)
def test_decoders_that_torch_does_not_export_are_refused_by_the_plan(kind: str, message: str) -> None:
    config = {"model_type": kind, "architectures": ["XForCausalLM"], "vocab_size": 8}
    shape = ModelShape(config=config, tensors={"lm_head.weight": TensorInfo("F32", (8, 8))})
    with pytest.raises(StageError, match=message):
        Onnx().predict(shape, "cpu")
    if "kv_cache" in message:
        Onnx(kv_cache=False).predict(shape, "cpu")
