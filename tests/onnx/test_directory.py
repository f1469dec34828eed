"""An ONNX directory is read without its weights, and every damage is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from optkit.errors import SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.model.formats.base import Format
from optkit.model.onnx_file import BITS, OnnxFile
from optkit.model.onnx_shape import SAFETENSORS_NAMES, onnx_shape
from optkit.model.shape import DTYPE_BITS
from optkit.model.writer import copy_companions
from optkit.onnx.directory import OnnxDirectory
from optkit.source.digests import FileDigests
from optkit.source.directory import check_directory, directory_revision
from tests.support.onnx_changes import change_graph

TinyOnnx = Callable[[str, str], Path]


@pytest.fixture
def copied(tiny_onnx: TinyOnnx, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "model"))


def small_graph(path: Path, *nodes: onnx.NodeProto, **held: np.ndarray) -> Path:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in ("x", "y")]
    graph = helper.make_graph(
        list(nodes),
        "made",
        [ends[0]],
        [ends[1]],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def test_what_is_known_without_weights(tiny_onnx: TinyOnnx, tiny_model: Callable[[str], Path]) -> None:
    found = OnnxDirectory(tiny_onnx("llama", "fp32"))
    assert (found.vocabulary, found.positions, found.graph.ir_version) == (512, 512, 10)
    assert found.graph.opsets == {"ai.onnx": 21, "com.microsoft": 1}
    assert found.graph.producer == "onnxruntime-genai"
    assert found.graph.inputs["input_ids"].dtype == "int64"
    assert found.graph.outputs["logits"].shape == ("batch_size", "sequence_length", 512)
    assert [path.name for path in found.graph.files] == ["model.onnx", "model.onnx.data"]
    assert found.genai_config["model"]["type"] == "llama"
    weights = sum(each.size_bytes for each in found.graph.initializers.values())
    floats = Checkpoint(tiny_model("llama")).shape.size_bytes
    assert floats < weights < floats * 1.3  # the tables of cosines and sines


def test_the_cache_is_shared_where_attention_can_write_into_it(tiny_onnx: TinyOnnx, copied: Path) -> None:
    found = OnnxDirectory(tiny_onnx("llama", "fp32")).cache
    names = [(layer.past.name, layer.present) for layer in found]
    assert names[0] == ("past_key_values.0.key", "present.0.key")
    assert len(names) == 6
    assert all(layer.shared and layer.past.shape[1::2] == (2, 16) for layer in found)

    def rename(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.op_type = node.op_type.replace("GroupQueryAttention", "MultiHeadAttention")

    change_graph(copied, rename)
    assert not any(layer.shared for layer in OnnxDirectory(copied).cache)


def test_a_past_without_a_present_is_refused(copied: Path) -> None:
    def rename(model: onnx.ModelProto) -> None:
        model.graph.output[1].name = "other"

    change_graph(copied, rename)
    with pytest.raises(
        SourceError, match=r"the input past_key_values\.\d\.(key|value) has no output that would take its place"
    ):
        _ = OnnxDirectory(copied).cache


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "model.onnx").unlink(), "there is no model.onnx"),
        (lambda root: (root / "model.onnx").write_bytes(b""), r"not a whole ONNX file \(0 bytes\)"),
        (lambda root: (root / "model.onnx").write_bytes(b"\x08\x0a" + b"x" * 99), "not a whole ONNX file"),
        (
            lambda root: (root / "model.onnx.data").unlink(),
            r"1 of 1 files with its weights are missing: model.onnx.data",
        ),
        (lambda root: (root / "genai_config.json").write_text("{"), "genai_config.json: cannot be read as JSON"),
        (lambda root: (root / "config.json").write_text("[]"), "config.json: is not a JSON object"),
        (lambda root: shutil.rmtree(root), "no such directory"),
    ],
)
def test_damage_is_named(copied: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(copied)
    with pytest.raises(SourceError, match=message):
        OnnxDirectory(copied)


def test_a_graph_or_data_that_was_cut_off(copied: Path) -> None:
    data, graph = copied / "model.onnx.data", copied / "model.onnx"
    size = data.stat().st_size
    data.write_bytes(data.read_bytes()[: size // 2])
    with pytest.raises(
        SourceError,
        match=rf"model.onnx.data: the file has {size // 2:,} bytes and the graph asks for .* It was cut off",
    ):
        OnnxDirectory(copied)
    graph.write_bytes(graph.read_bytes()[:-1000])
    with pytest.raises(SourceError, match="not a whole ONNX file"):
        OnnxDirectory(copied)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("location", "../secret", "lies in ../secret. Data outside of the directory would not travel with it"),
        ("location", "/etc/passwd", "lies in /etc/passwd"),
        ("length", "3", "has 3 bytes in model.onnx.data, and float32"),
    ],
)
def test_external_data_that_lies_elsewhere(copied: Path, key: str, value: str, message: str) -> None:
    def change(model: onnx.ModelProto) -> None:
        next(entry for entry in model.graph.initializer[0].external_data if entry.key == key).value = value

    change_graph(copied, change)
    with pytest.raises(SourceError, match=message):
        OnnxDirectory(copied)


def test_weights_inside_of_the_file(tmp_path: Path) -> None:
    add = helper.make_node("Add", ["x", "w"], ["y"])
    path = small_graph(tmp_path / "model.onnx", add, w=np.ones((2, 2), np.float32))
    found = OnnxFile(path)
    assert found.initializers["w"].location is None
    assert found.files == (path,)
    model = onnx.load(path)
    model.graph.initializer[0].raw_data = b"123"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(SourceError, match=r"w has 3 bytes, and float32 \[2, 2\] needs 16"):
        OnnxFile(path)


def test_constants_and_inner_graphs_count(tmp_path: Path) -> None:
    held = numpy_helper.from_array(np.ones(3, np.float32), "ignored")
    inner = helper.make_graph(
        [helper.make_node("Identity", ["deep"], ["out"])],
        "then",
        [],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones((2, 2), np.float32), "deep")],
    )
    nodes = [
        helper.make_node("Constant", [], ["three"], value=held),
        helper.make_node("If", ["flag"], ["y"], then_branch=inner, else_branch=inner),
    ]
    found = OnnxFile(small_graph(tmp_path / "model.onnx", *nodes, flag=np.array(True)))
    assert {name: each.shape for name, each in found.initializers.items()} == {
        "flag": (),
        "deep": (2, 2),
        "three": (3,),
    }
    assert [node.kind for node in found.nodes] == ["Constant", "If", "Identity", "Identity"]


def test_every_dtype_has_its_size() -> None:
    assert BITS.keys() - {"complex128"} == SAFETENSORS_NAMES.keys()
    assert all(BITS[name] == DTYPE_BITS[other] for name, other in SAFETENSORS_NAMES.items())


def test_its_shape_and_digest(copied: Path, tmp_path: Path) -> None:
    assert onnx_shape(copied).positions == 512
    (copied / "config.json").unlink()
    assert onnx_shape(copied).positions == 512  # genai_config.json says it
    digests = FileDigests(tmp_path / "cache")
    before = directory_revision(copied, check_directory(copied, trust_remote_code=False), digests)
    (copied / "scorecard.md").write_text("not a part of the model")
    assert directory_revision(copied, check_directory(copied, trust_remote_code=False), digests) == before
    with (copied / "model.onnx.data").open("r+b") as file:
        file.write(b"\xff")
    assert directory_revision(copied, check_directory(copied, trust_remote_code=False), digests) != before


def test_a_directory_with_both_is_a_checkpoint(copied: Path) -> None:
    assert Format.of(copied) is Format.ONNX
    with pytest.raises(SourceError, match=r"the weights are in ONNX. .* Name the checkpoint that it was exported from"):
        Checkpoint(copied)
    (copied / "model.safetensors").write_bytes(b"")
    assert Format.of(copied) is Format.CHECKPOINT


def test_companions_hold_no_weights(copied: Path, tmp_path: Path) -> None:
    for name in ("other.onnx_data", "model.onnx_data_1", "README_onnx.md", "template.jinja"):
        (copied / name).write_text("x")
    copy_companions(copied, tmp_path / "target")
    assert json.loads((tmp_path / "target" / "genai_config.json").read_text())
    names = {path.name for path in (tmp_path / "target").iterdir()}
    assert {"README_onnx.md", "template.jinja", "genai_config.json"} <= names
    assert not any("onnx" in name for name in names - {"README_onnx.md"})
