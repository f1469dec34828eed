import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from pydantic import ValidationError

from optkit.errors import StageError
from optkit.onnx import optimization
from optkit.stage import Context, Report
from optkit.stages.onnx_optimize import OnnxOptimize
from optkit.stages.onnx_quantize import OnnxQuantize
from tests.support.exported import constants, decoder_feeds, loaded, outputs, saved
from tests.support.near import near
from tests.support.running import run_stage

TOKENS = np.random.default_rng(5).integers(0, 512, (2, 17))


@pytest.fixture
def llama(tiny_onnx) -> Path:
    return tiny_onnx("llama", "fp32")


def optimize(source: Path, target: Path, **fields: Any) -> Report:
    return OnnxOptimize(**fields).run(source, target, Context())


@pytest.mark.parametrize(
    ("level", "gone", "new"),
    [
        ("basic", {"Transpose", "Constant"}, set()),
        ("extended", {"Sigmoid"}, {"QuickGelu"}),
        ("all", {"Sigmoid"}, {"QuickGelu"}),
    ],
)
def test_fewer_nodes_that_say_the_same(llama: Path, target: Path, level: str, gone: set[str], new: set[str]) -> None:
    report = optimize(llama, target, level=level)
    before, after = report.details["nodes_before"], report.details["nodes_after"]
    assert gone <= before.keys()
    assert not gone & after.keys()
    assert new <= after.keys() - before.keys()
    assert sum(after.values()) < sum(before.values())
    assert report.changed > 0
    feeds = decoder_feeds(loaded(llama), TOKENS)
    assert near(outputs(target, feeds), outputs(llama, feeds))
    assert report.details["difference"] < 1e-5
    assert [("this machine's CPU" in note) for note in report.notes] == {
        "basic": [],
        "extended": [False],
        "all": [True, False],
    }[level]
    assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in llama.iterdir())
    assert all(
        tensor.data_location == TensorProto.EXTERNAL
        for tensor in graph_of(target).initializer
        if np.prod(tensor.dims) > 256
    )


def test_float16(llama: Path, target: Path) -> None:
    report = optimize(llama, target, level="none", float16=True)
    model = loaded(target)
    assert {array.dtype for array in constants(model).values() if array.size > 1} <= {
        np.dtype("float16"),
        np.dtype("int64"),
    }
    assert {each.type.tensor_type.elem_type for each in (*model.graph.input, *model.graph.output)} == {
        TensorProto.FLOAT16,
        TensorProto.INT64,
    }
    assert report.details["size_bytes_after"] < 0.6 * report.details["size_bytes_before"]
    assert json.loads((target / "config.json").read_text())["dtype"] == "float16"
    feeds = decoder_feeds(loaded(llama), TOKENS)
    want = outputs(llama, feeds)
    half = {name: array.astype(np.float16) if array.dtype == np.float32 else array for name, array in feeds.items()}
    assert 0 < np.abs(outputs(target, half).astype(np.float32) - want).max() < 5e-3 * np.abs(want).max()


def test_what_is_kept_in_float32(llama: Path, target: Path) -> None:
    kept = ["SkipSimplifiedLayerNormalization", "*/o_proj/*"]
    report = optimize(llama, target, float16=True, keep_float32=kept, keep_inputs=True)
    arrays = constants(loaded(target))
    whole = {name for name, array in arrays.items() if array.dtype == np.float32 and array.size > 1}
    assert {name.split("layers.")[1] for name in whole if "o_proj" in name} == {
        f"{layer}.attn.o_proj.MatMul.weight" for layer in range(3)
    }
    assert arrays["model.layers.1.input_layernorm.weight"].dtype == np.float32
    assert arrays["model.layers.1.attn.qkv_proj.MatMul.weight"].dtype == np.float16
    assert report.details["nodes_after"]["Cast"] > report.details["nodes_before"]["Cast"]
    feeds = decoder_feeds(loaded(llama), TOKENS)
    want = outputs(llama, feeds)
    found = outputs(target, feeds)
    assert found.dtype == np.float32
    assert np.abs(found - want).max() < 5e-3 * np.abs(want).max()


def test_another_opset(llama: Path, target: Path) -> None:
    report = optimize(llama, target, level="none", opset=22)
    assert (report.details["opset_before"], report.details["opset"]) == (21, 22)
    assert report.changed == 1
    assert [(entry.domain, entry.version) for entry in graph_of(target, whole=True).opset_import] == [
        ("", 22),
        ("com.microsoft", 1),
    ]
    feeds = decoder_feeds(loaded(llama), TOKENS)
    np.testing.assert_array_equal(outputs(target, feeds), outputs(llama, feeds))


def test_after_quantization(llama: Path, target: Path, tmp_path: Path) -> None:
    run_stage(OnnxQuantize(embedding="shared"), llama, tmp_path / "int4")
    report = optimize(tmp_path / "int4", target, level="extended")
    assert report.details["nodes_after"]["MatMulNBits"] == 16
    feeds = decoder_feeds(loaded(llama), TOKENS)
    assert near(outputs(target, feeds), outputs(tmp_path / "int4", feeds))


def test_a_fusion_that_says_something_else_is_refused(
    llama: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = optimization.optimize_graph

    def broken(*arguments: Any) -> Any:
        model = honest(*arguments)
        model.proto.graph.initializer.append(helper.make_tensor("two", 1, [], [2.0]))
        node = next(node for node in model.proto.graph.node if node.name == "/lm_head/MatMul")
        node.output[0] = "half"
        model.proto.graph.node.append(helper.make_node("Mul", ["half", "two"], ["logits"]))
        return model

    monkeypatch.setattr(optimization, "optimize_graph", broken)
    with pytest.raises(
        StageError, match="the result differs from its source by 1 of the largest value, and 0.001 is the limit"
    ):
        optimize(llama, target)


def test_weights_that_float16_does_not_hold(tmp_path: Path, target: Path) -> None:
    weights = {"w": np.full((48, 24), 1e6, np.float32)}
    source = saved(tmp_path / "source", [helper.make_node("MatMul", ["x", "w"], ["logits"])], weights, 48)
    with pytest.raises(StageError, match="^w: weights of up to 1,000,000 do not fit float16"):
        optimize(source, target, float16=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"float16": True, "keep_float32": ["LayerNorm"]},
            "onnx_optimize.keep_float32: `LayerNorm` matches none of 42 nodes.",
        ),
        ({"opset": 99}, "onnx_optimize.opset: onnx "),
        ({"opset": 13, "level": "none"}, "cannot write it in opset 13"),
    ],
)
def test_what_cannot_be_done_is_told(llama: Path, target: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError) as caught:
        optimize(llama, target, **fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep_float32": ["Softmax"]}, "keep_float32 means nothing without float16: true"),
        ({"level": "none"}, "nothing would change"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OnnxOptimize(**fields)


def graph_of(directory: Path, whole: bool = False) -> Any:
    import onnx

    model = onnx.load(directory / "model.onnx", load_external_data=False)
    return model if whole else model.graph
