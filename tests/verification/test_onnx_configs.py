"""What config.json and genai_config.json say of an ONNX model is held against its graph."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.verification.onnx_checks import check_onnx
from tests.support.changes import change_json
from tests.support.onnx_changes import change_graph

pytest.importorskip("onnx")

Words = dict[str, Any]


@pytest.fixture
def model(tiny_onnx: Callable[[str, str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "model")


def broken(directory: Path) -> dict[str, str]:
    return {check.name: check.detail for check in check_onnx(directory) if not check.ok}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda words: words.update(num_hidden_layers=4), "config.json says num_hidden_layers 4, and the graph has 3"),
        (
            lambda words: words.update(num_key_value_heads=4),
            "config.json says num_key_value_heads 4, and the graph has 2",
        ),
        (lambda words: words.update(vocab_size=500), "config.json says vocab_size 500, and the graph has 512"),
        (
            lambda words: words.update(quantization_config={"quant_method": "gptq"}),
            "config.json has a quantization_config, and other programs would look for packed safetensors",
        ),
    ],
)
def test_config_json(change: Callable[[Words], None], said: str, model: Path) -> None:
    change_json(model / "config.json", change)
    assert broken(model) == {"config": said}


def test_a_config_json_that_is_lost_or_no_json(model: Path) -> None:
    (model / "config.json").unlink()
    assert broken(model) == {"config": "there is no config.json, which tokenizers and other programs ask for"}
    (model / "config.json").write_text("{")
    assert "config.json: cannot be read as JSON" in broken(model)["weights"]


def decoder(**words: object) -> Callable[[Words], None]:
    return lambda config: config["model"]["decoder"].update(words)


def inputs(**names: object) -> Callable[[Words], None]:
    return lambda config: config["model"]["decoder"]["inputs"].update(names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            decoder(num_hidden_layers=4),
            "genai_config.json says num_hidden_layers 4, and the graph has the KV cache of 3",
        ),
        (decoder(num_key_value_heads=4), "genai_config.json says num_key_value_heads 4, and the graph has 2"),
        (decoder(num_attention_heads=2), "genai_config.json says num_attention_heads 2, and the graph has 4"),
        (decoder(head_size=64), "genai_config.json says head_size 64, and the graph has 16"),
        (
            decoder(filename="decoder.onnx"),
            "genai_config.json names the file decoder.onnx, and the model is model.onnx",
        ),
        (
            lambda config: config["model"].update(vocab_size=500),
            "genai_config.json says vocab_size 500, and the graph has 512",
        ),
        (
            lambda config: config["model"].update(context_length=4096),
            "genai_config.json says context_length 4096, and the graph has a rotary table of 512 positions",
        ),
        (
            lambda config: config["search"].update(max_length=4096),
            "genai_config.json says max_length 4096, more than its context_length 512",
        ),
        (
            inputs(input_ids="tokens"),
            "genai_config.json names the input tokens (input_ids), which the graph does not have; the graph asks for",
        ),
        (
            inputs(past_key_names="past.%d.key"),
            "genai_config.json names the input past.0.key (past_key_names), which the graph does not have",
        ),
        (
            lambda config: config["model"]["decoder"].update(outputs={"logits": "scores"}),
            "genai_config.json names the output scores (logits), which the graph does not have",
        ),
        (lambda config: config["model"].pop("decoder"), "genai_config.json has no model.decoder"),
        (lambda config: config.update(model=[1]), "genai_config.json has no model.decoder"),
        (decoder(inputs=None), "the graph asks for the input input_ids, which genai_config.json does not name"),
    ],
)
def test_genai_config_json(change: Callable[[Words], None], said: str, model: Path) -> None:
    change_json(model / "genai_config.json", change)
    (found,) = broken(model).items()
    assert found[0] == "genai_config"
    assert found[1].startswith(said)


def test_inputs_that_genai_fills_in_by_itself_need_no_name(model: Path) -> None:
    change_json(model / "genai_config.json", lambda config: config["model"]["decoder"]["inputs"].pop("attention_mask"))
    change_json(model / "genai_config.json", inputs(position_ids="position_ids"))
    assert broken(model) == {}


def test_without_genai_config_json_that_is_said(model: Path) -> None:
    (model / "genai_config.json").unlink()
    checks = {check.name: check.detail for check in check_onnx(model) if check.ok}
    assert checks["genai_config"] == "there is none, so ONNX Runtime GenAI does not open it"


def test_a_cache_that_nothing_takes_the_place_of(model: Path) -> None:
    def rename(model: Any) -> None:
        port = next(each for each in model.graph.input if each.name == "past_key_values.1.key")
        port.name = "past_key_values.9.key"

    change_graph(model, rename)
    assert "the input past_key_values.9.key has no output that would take its place" in broken(model)["weights"]
