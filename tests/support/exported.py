"""What tests of the ONNX stages share: tiny exported models, graphs made by hand, and ten lines
that undo MatMulNBits.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from optkit.onnx.quiet import quiet_tools

Arrays = Mapping[str, NDArray[Any]]


def exported(source: Path, target: Path, precision: str = "fp32") -> Path:
    """Return `target` with a decoder as ONNX Runtime GenAI's model builder exports it for the CPU,
    and config.json.

    `precision` is `fp32` or `int4`; what the builder makes of `fp16` does not decode on the CPU.
    """
    with quiet_tools():
        from onnxruntime_genai.models.builder import create_model

        create_model("", str(source), str(target), precision, "cpu", str(target.parent / "cache"), hf_remote=False)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def saved(
    directory: Path, nodes: list[Any], weights: Arrays, width: int, output: str = "logits", rank: int = 2
) -> Path:
    """Return a directory with a graph from `x`, float [rows, width], to `output`; weights lie in
    the data file.
    """
    directory.mkdir()
    held = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", width])]
    graph = helper.make_graph(
        nodes,
        "made",
        ends,
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [f"size_{axis}" for axis in range(rank)])],
        held,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, directory / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    return directory


def loaded(directory: Path) -> Any:
    return onnx.load(directory / "model.onnx")


def constants(model: Any) -> dict[str, NDArray[Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def attributes(node: Any) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def unpacked(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    return codes if bits == 8 else np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)


def dequantized(node: Any, arrays: Arrays) -> NDArray[np.float32]:
    """Return the matrix [inputs, outputs] of a MatMulNBits."""
    fields = attributes(node)
    codes, scales, *zeros = [arrays[name] for name in node.input[1:]]
    rows, blocks = codes.shape[:2]
    middle = np.full((rows, blocks), 2.0 ** (fields["bits"] - 1))
    if zeros:
        middle = zeros[0].reshape(rows, -1)
        middle = (unpacked(middle, fields["bits"]) if middle.dtype == np.uint8 else middle)[:, :blocks]
    steps = unpacked(codes, fields["bits"]).astype(np.float32) - middle[..., None]
    return (steps * scales.reshape(rows, blocks, 1)).reshape(rows, -1)[:, : fields["K"]].T.astype(np.float32)


def with_float_matrices(model: Any) -> Any:
    """Return a copy of a graph whose MatMulNBits are MatMuls with dequantized weights."""
    plain, arrays = onnx.ModelProto(), constants(model)
    plain.CopyFrom(model)
    for node in plain.graph.node:
        if node.op_type == "MatMulNBits":
            plain.graph.initializer.append(numpy_helper.from_array(dequantized(node, arrays), f"{node.name}/float"))
            node.CopyFrom(
                helper.make_node("MatMul", [node.input[0], f"{node.name}/float"], list(node.output), name=node.name)
            )
    return plain


def outputs(model: Any, feeds: Arrays) -> NDArray[np.float32]:
    """Return the first output of a graph, given in memory or as a directory."""
    given = str(model / "model.onnx") if isinstance(model, Path) else model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return np.asarray(
        onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"]).run(None, dict(feeds))[0]
    )


def decoder_feeds(model: Any, tokens: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return what a decoder wants for a prompt: tokens, mask and an empty cache."""
    feeds: dict[str, NDArray[Any]] = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    for each in model.graph.input:
        if each.name.startswith("past_key_values"):
            _, heads, _, size = each.type.tensor_type.shape.dim
            feeds[each.name] = np.zeros((len(tokens), heads.dim_value, 0, size.dim_value), np.float32)
    return feeds
