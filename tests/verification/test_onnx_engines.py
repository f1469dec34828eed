"""What plain onnxruntime and ONNX Runtime GenAI, each in a process of its own, make of an ONNX
directory.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optkit.model.formats.base import Format
from optkit.verification.agreement import compare_logits, read_logits
from optkit.verification.engines import ONNXRUNTIME, ONNXRUNTIME_GENAI, TRANSFORMERS, VLLM, Answer, Engine, ask
from optkit.verification.registry import engine_names, engine_of
from optkit.verification.workers import open_in_onnxruntime, open_in_onnxruntime_genai
from tests.support.changes import change_json
from tests.support.exported import saved
from tests.support.onnx_changes import change_graph

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxruntime_genai")

TOKENS = list(range(40, 60))
BOTH = [ONNXRUNTIME, ONNXRUNTIME_GENAI]


@pytest.fixture
def model(tiny_onnx: Callable[[str, str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "model")


def asked(engine: Engine, directory: Path, folder: Path, **request: Any) -> Answer:
    usual = {
        "directory": str(directory),
        "tokens": TOKENS,
        "loader": "AutoModelForCausalLM",
        "new_tokens": 6,
        "device": "cpu",
        "logits": str(folder / "logits.f32"),
    }
    return ask(engine, sys.executable, usual | request, folder, 60)


@pytest.mark.parametrize("engine", BOTH, ids=lambda engine: engine.name)
def test_logits_and_tokens_are_those_of_the_model(
    engine: Engine, tiny_onnx: Callable[[str, str], Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    answer = asked(engine, tiny_onnx("qwen2", "fp32"), tmp_path)
    assert answer.problem == ""
    assert (answer.said["dtype"], answer.said["device"], answer.said["logits_shape"]) == (
        "float32",
        "cpu",
        [len(TOKENS), 512],
    )
    assert engine.name in answer.said["versions"]
    assert "torch" not in answer.said["versions"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"))
    with torch.no_grad():
        ours = model(torch.tensor([TOKENS])).logits[0]
        going_on = model.generate(
            torch.tensor([TOKENS]), do_sample=False, min_new_tokens=6, max_new_tokens=6, pad_token_id=1
        )
    theirs = read_logits(tmp_path / "logits.f32", answer.said["logits_shape"])
    assert compare_logits(ours, theirs).max_logit_difference < 1e-4
    assert answer.said["generated"] == going_on[0, len(TOKENS) :].tolist()


@pytest.mark.parametrize("others", [[], [3]])
def test_both_go_on_after_the_token_that_ends_a_text(others: list[int], model: Path, tmp_path: Path) -> None:
    first = asked(ONNXRUNTIME, model, tmp_path).said["generated"]
    ends = [first[0], *others] if others else first[0]
    change_json(model / "genai_config.json", lambda config: config["model"].update(eos_token_id=ends))
    assert asked(ONNXRUNTIME_GENAI, model, tmp_path).said["generated"] == first


def test_a_graph_without_genai_config_and_without_a_cache(tmp_path: Path) -> None:
    """A graph that computes nothing: what the loop feeds (length of the mask, position, type) comes
    out as logits.
    """
    names = ("attention_mask", "position_ids", "token_type_ids")
    whole = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["b", f"s{name}"])
        for name in ("input_ids", *names)
    ]
    steps = [
        onnx.helper.make_node("ReduceSum", ["attention_mask", "axis"], ["length"], keepdims=1),
        *(
            onnx.helper.make_node("Unsqueeze", [name, "last"], [f"{name}.up"])
            for name in ("input_ids", "position_ids", "token_type_ids")
        ),
        onnx.helper.make_node("Mul", ["input_ids.up", "zero"], ["nothing"]),
        onnx.helper.make_node("Unsqueeze", ["length", "last"], ["length.up"]),
        onnx.helper.make_node("Add", ["nothing", "length.up"], ["lengths"]),
        onnx.helper.make_node("Concat", ["lengths", "position_ids.up", "token_type_ids.up"], ["numbers"], axis=-1),
        onnx.helper.make_node("Cast", ["numbers"], ["logits"], to=onnx.TensorProto.FLOAT),
    ]
    constants = [
        onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value])
        for name, value in {"axis": 1, "last": -1, "zero": 0}.items()
    ]
    logits = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["b", "s", 3])
    graph = onnx.helper.make_graph(steps, "echo", whole, [logits], constants)
    (tmp_path / "echo").mkdir()
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10),
        tmp_path / "echo" / "model.onnx",
    )
    answer = asked(ONNXRUNTIME, tmp_path / "echo", tmp_path, tokens=[7, 7, 7], new_tokens=2)
    assert answer.problem == ""
    assert read_logits(tmp_path / "logits.f32", [3, 3]).tolist() == [[3, 0, 0], [3, 1, 0], [3, 2, 0]]


def test_bfloat16_is_read_without_a_package_that_knows_it() -> None:
    ends = [
        onnx.helper.make_tensor_value_info(name, kind, [1, 4])
        for name, kind in (("x", onnx.TensorProto.FLOAT), ("y", onnx.TensorProto.BFLOAT16))
    ]
    node = onnx.helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.BFLOAT16)
    graph = onnx.helper.make_graph([node], "cast", ends[:1], ends[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    given = np.array([[1.0, -2.5, 0.0, 3e38]], dtype=np.float32)
    (value,) = session.run_with_ort_values(["y"], {"x": onnxruntime.OrtValue.ortvalue_from_numpy(given)})
    found = open_in_onnxruntime._float32(value)
    assert found.dtype == np.float32
    assert np.allclose(found, given, rtol=2**-8)


@pytest.mark.parametrize("engine", BOTH, ids=lambda engine: engine.name)
def test_a_graph_that_does_not_open_is_refused_in_the_engines_words(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    change_graph(model, lambda model: setattr(model, "ir_version", 99))
    assert "Unsupported model IR version: 99" in asked(engine, model, tmp_path).problem


def test_inputs_and_outputs_that_the_loop_does_not_know(model: Path, tmp_path: Path) -> None:
    node = onnx.helper.make_node("Relu", ["x"], ["logits"])
    said = asked(ONNXRUNTIME, saved(tmp_path / "image", [node], {}, 4), tmp_path).problem
    assert said.startswith(
        "ValueError: it asks for the input `x`, and this loop knows input_ids, attention_mask, position_ids, "
    )
    node = onnx.helper.make_node("Relu", ["x"], ["scores"])
    said = asked(ONNXRUNTIME, saved(tmp_path / "scores", [node], {}, 4, "scores"), tmp_path).problem
    assert said == "ValueError: it has no output `logits`, but scores"
    change_json(model / "genai_config.json", lambda config: config["model"]["decoder"].update(num_hidden_layers=4))
    said = asked(ONNXRUNTIME, model, tmp_path).problem
    assert (
        said == "ValueError: the KV cache should have `past_key_values.3.key`, "
        "and the graph has no such input or output"
    )


@pytest.mark.parametrize(
    ("device", "versions", "lacking"),
    [
        ("cpu", {}, ["onnxruntime"]),
        ("cpu", {"numpy": "2"}, ["onnxruntime"]),
        ("cpu", {"onnxruntime-gpu": "1.31"}, []),
        ("cuda", {"onnxruntime": "1.31"}, ["onnxruntime-gpu"]),
        ("cuda", {"onnxruntime-gpu": "1.31"}, []),
    ],
)
def test_which_build_of_onnxruntime_is_missing(device: str, versions: dict[str, str], lacking: list[str]) -> None:
    assert open_in_onnxruntime.missing({"device": device}, versions) == lacking


@pytest.mark.parametrize(
    ("device", "providers", "versions", "lacking"),
    [
        ("cpu", [], {}, ["onnxruntime-genai"]),
        ("cpu", [{"cuda": {}}], {"onnxruntime-genai": "0.14"}, []),
        ("cuda", [], {"onnxruntime-genai": "0.14"}, []),
        ("cuda", [{"cuda": {}}], {"onnxruntime-genai": "0.14"}, ["onnxruntime-genai-cuda"]),
        ("cuda", [{"cuda": {}}], {"onnxruntime-genai-cuda": "0.14"}, []),
    ],
)
def test_which_build_of_genai_is_missing(
    device: str, providers: list[dict[str, Any]], versions: dict[str, str], lacking: list[str], model: Path
) -> None:
    change_json(
        model / "genai_config.json",
        lambda config: config["model"]["decoder"]["session_options"].update(provider_options=providers),
    )
    assert open_in_onnxruntime_genai.missing({"device": device, "directory": str(model)}, versions) == lacking


def test_what_is_not_installed_comes_with_a_warning(tmp_path: Path) -> None:
    answer = asked(ONNXRUNTIME, tmp_path, tmp_path, device="cuda")
    assert answer.problem == (
        "not installed: onnxruntime-gpu. Run: pip install onnxruntime-gpu; its builds overwrite each "
        "other's files, so keep one of them"
    )


def test_which_engine_opens_what() -> None:
    assert [name for name in engine_names() if engine_of(name).cannot_open(Format.ONNX)] == [
        "transformers",
        "vllm",
        "llama.cpp",
    ]
    assert (
        TRANSFORMERS.cannot_open(Format.ONNX) == VLLM.cannot_open(Format.ONNX) == "it reads safetensors, "
        "and this artifact is ONNX"
    )
    assert [name for name in engine_names() if engine_of(name).cannot_open(Format.CHECKPOINT)] == [
        "onnxruntime",
        "onnxruntime-genai",
        "llama.cpp",
        "optimum",
    ]
    assert ONNXRUNTIME.cannot_open(Format.CHECKPOINT) == "it reads ONNX, and this artifact is safetensors"
