"""Bytes and bits per weight of ONNX models, counted from their initializers."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from optkit.errors import EvalError, SourceError
from optkit.model.onnx_file import OnnxFile
from optkit.model.onnx_layer_sizes import onnx_layer_sizes
from tests.evals.test_footprint import measure


def write(directory: Path, nodes: list[onnx.NodeProto], held: dict[str, np.ndarray | onnx.TensorProto]) -> Path:
    directory.mkdir()
    tensors = [
        each if isinstance(each, onnx.TensorProto) else numpy_helper.from_array(each, name)
        for name, each in held.items()
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "made", [ends[0]], [ends[1]], tensors)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), directory / "model.onnx"
    )
    return directory


def zeros(dtype: type, *shape: int) -> np.ndarray:
    return np.zeros(shape, dtype)


def test_a_float_graph(tiny_onnx: Callable[[str, str], Path]) -> None:
    directory = tiny_onnx("qwen2", "fp32")
    found = measure(directory)
    tables = 2 * 512 * 8 * 32  # cosines and sines stand for no weight
    layers = onnx_layer_sizes(OnnxFile(directory / "model.onnx")).values()
    weights = sum(layer.weights for layer in layers)
    assert found["bits_per_weight"] == pytest.approx(32 + tables / weights, rel=2e-3)
    assert "bits_per_quantized_weight" not in found


def test_matrices_of_4_bits(tiny_onnx: Callable[[str, str], Path]) -> None:
    directory = tiny_onnx("qwen2", "int4")
    graph = OnnxFile(directory / "model.onnx")
    matrices = [node for node in graph.nodes if node.kind == "MatMulNBits"]
    weights = sum(int(node.attributes["K"]) * int(node.attributes["N"]) for node in matrices)
    own = {name for node in matrices for name in node.inputs[1:] if name}
    stored = 8 * sum(graph.initializers[name].size_bytes for name in own)
    found = measure(directory)
    assert found["bits_per_quantized_weight"] == pytest.approx(stored / weights)
    assert 4.5 < found["bits_per_quantized_weight"] < 6
    assert found["bits_per_quantized_weight"] < found["bits_per_weight"] < 32


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_matrix_of_few_bits_that_do_not_fill_their_block(tmp_path: Path, bits: int) -> None:
    node = helper.make_node(
        "MatMulNBits", ["x", "b", "scales", "zeros"], ["y"], domain="com.microsoft", K=40, N=6, bits=bits, block_size=32
    )
    held = {
        "b": zeros(np.uint8, 6, 2, 4 * bits),
        "scales": zeros(np.float16, 12),
        "zeros": zeros(np.uint8, 6 * 2 * bits // 8),
    }
    stored = 8 * (6 * 2 * 4 * bits + 12 * 2 + 6 * 2 * bits // 8)
    assert measure(write(tmp_path / "m", [node], held))["bits_per_quantized_weight"] == pytest.approx(stored / 240)


def test_dynamic_int8(tmp_path: Path) -> None:
    plain = write(
        tmp_path / "plain", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": np.ones((64, 80), np.float32)}
    )
    model = onnx.load(plain / "model.onnx")
    model.graph.input[0].type.tensor_type.shape.CopyFrom(
        helper.make_tensor_value_info("x", 1, [2, 64]).type.tensor_type.shape
    )
    onnx.save(model, plain / "model.onnx")
    (tmp_path / "m").mkdir()
    quantize_dynamic(plain / "model.onnx", tmp_path / "m" / "model.onnx", weight_type=QuantType.QInt8, per_channel=True)
    graph = OnnxFile(tmp_path / "m" / "model.onnx")
    assert "MatMulInteger" in {node.kind for node in graph.nodes}
    stored = 8 * sum(graph.initializers[name].size_bytes for name in graph.initializers if name.startswith("w_"))
    assert stored >= 8 * (64 * 80 + 80 * 4)
    assert measure(tmp_path / "m")["bits_per_quantized_weight"] == pytest.approx(stored / (64 * 80))


def test_weights_that_are_dequantized_count_once_and_scales_of_activations_for_none(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "x_scale", "x_zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale"], ["f"]),
        helper.make_node("DequantizeLinear", ["w", "w_scale"], ["g"]),
        helper.make_node("MatMul", ["d", "f"], ["h"]),
        helper.make_node("MatMul", ["h", "g"], ["y"]),
    ]
    held = {
        "x_scale": np.float32(1),
        "x_zero": np.uint8(0),
        "w": zeros(np.int8, 64, 64),
        "w_scale": zeros(np.float32, 64),
    }
    held = {name: np.asarray(array) for name, array in held.items()}
    found = measure(write(tmp_path / "m", nodes, held))
    assert found["bits_per_quantized_weight"] == pytest.approx((64 * 64 * 8 + 64 * 32) / 4096)
    assert found["bits_per_weight"] == pytest.approx((64 * 64 * 8 + 64 * 32 + 32 + 8) / 4096)


def test_an_embedding_in_8_bits_counts_with_its_scale(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["words_quantized", "x"], ["rows"]),
        helper.make_node("DequantizeLinear", ["rows", "words_scale", "words_zero_point"], ["y"]),
        helper.make_node("Gather", ["positions", "x"], ["z"]),
    ]
    scale, zero = np.asarray(np.float32(1)), np.asarray(np.uint8(3))
    held = {
        "words_quantized": zeros(np.uint8, 128, 64),
        "words_scale": scale,
        "words_zero_point": zero,
        "positions": zeros(np.float32, 8, 64),
    }
    found = measure(write(tmp_path / "m", nodes, held))
    assert found["bits_per_quantized_weight"] == pytest.approx((128 * 64 * 8 + 32 + 8) / (128 * 64))
    assert found["bits_per_weight"] == pytest.approx((128 * 64 * 8 + 40 + 8 * 64 * 32) / (128 * 64 + 8 * 64))


def test_int4_tensors_and_embeddings_in_blocks(tmp_path: Path) -> None:
    codes = helper.make_tensor("w", TensorProto.INT4, [64, 64], np.zeros(2048, np.uint8).tobytes(), raw=True)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["f"], block_size=32),
        helper.make_node("GatherBlockQuantized", ["e", "x", "t"], ["g"], domain="com.microsoft", bits=4, block_size=32),
        helper.make_node("MatMul", ["g", "f"], ["y"]),
    ]
    held = {"w": codes, "s": zeros(np.float32, 2, 64), "e": zeros(np.uint8, 100, 32), "t": zeros(np.float32, 100, 2)}
    layers = onnx_layer_sizes(OnnxFile(write(tmp_path / "m", nodes, held) / "model.onnx"))
    assert {name: (layer.stored_bits, layer.weights) for name, layer in layers.items()} == {
        "w": (2048 * 8 + 2 * 64 * 32, 4096),
        "e": (100 * 32 * 8 + 200 * 32, 6400),
    }


def test_an_embedding_that_shares_the_codes_of_lm_head(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("GatherBlockQuantized", ["e", "x", "s"], ["g"], domain="com.microsoft", bits=4, block_size=32),
        helper.make_node(
            "MatMulNBits", ["g", "e", "s"], ["y"], domain="com.microsoft", K=64, N=100, bits=4, block_size=32
        ),
    ]
    found = measure(write(tmp_path / "m", nodes, {"e": zeros(np.uint8, 100, 32), "s": zeros(np.float32, 100, 2)}))
    assert found["bits_per_weight"] == pytest.approx(4 + 1)


def test_a_layout_that_is_not_known(tmp_path: Path) -> None:
    node = helper.make_node("MatMulSecret", ["x", "w"], ["y"], domain="com.secret")
    directory = write(tmp_path / "m", [node], {"w": zeros(np.uint8, 64, 64)})
    with pytest.raises(
        EvalError,
        match=r"w, uint8 \[64, 64\], is read by MatMulSecret. Bits per weight can be recounted for MatMulNBits",
    ):
        measure(directory)


def test_data_that_was_cut_off(tiny_onnx: Callable[[str, str], Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "m"))
    data = directory / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-10])
    with pytest.raises(SourceError, match="It was cut off"):
        measure(directory)
