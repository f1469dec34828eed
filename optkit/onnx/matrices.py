"""The matrix products of a graph: which have weights, which is lm_head, and MatMulNBits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from optkit.errors import StageError
from optkit.onnx.checker import RUNTIME_DOMAIN, import_runtime_domain_
from optkit.onnx.model_file import ModelFile, ModelWriter
from optkit.onnx.weight_only import BlockForm, quantize_matrix
from optkit.progress import Task

FLOATS = (1, 10, 16)
"""FLOAT, FLOAT16 and BFLOAT16 in TensorProto."""
PRODUCTS = ("MatMul", "Gemm")
QUANTIZED = ("MatMulNBits", "MatMulInteger", "QLinearMatMul", "GatherBlockQuantized", "DynamicQuantizeMatMul")
TRANSPARENT = ("Cast", "Mul", "Div", "Tanh", "Add", "Identity")
"""What may stand between lm_head and the logits."""


@dataclass(frozen=True)
class Matrix:
    """A MatMul with a weight."""

    node: str
    weight: str
    """The initializer."""
    shape: tuple[int, int]
    """[inputs, outputs]."""
    transposed: bool = False
    """The initializer is [outputs, inputs], and a Transpose stands between."""


@dataclass(frozen=True)
class Matrices:
    """What a graph has to quantize."""

    found: Mapping[str, Matrix]
    """By the names of their nodes, in the order of the graph."""
    refused: Mapping[str, str]
    """Other products of matrices -> why they cannot be."""
    head: str | None
    """The one of `found` that makes the logits."""


def find_matrices(model: ModelFile) -> Matrices:
    """Return the MatMuls whose second input is a float weight, as it is stored or transposed."""
    makers = {name: node for node in model.proto.graph.node for name in node.output}
    found, refused = {}, {}
    for node in model.proto.graph.node:
        if node.op_type in QUANTIZED:
            refused[node.name] = "quantized already"
        elif node.op_type in PRODUCTS:
            matrix = _matrix(model, node, makers)
            if isinstance(matrix, Matrix):
                found[node.name] = matrix
            else:
                refused[node.name] = matrix
    return Matrices(found, refused, _head(model, makers, found))


def replace_matrices_(
    model: ModelFile, writer: ModelWriter, matrices: Mapping[str, Matrix], forms: Mapping[str, BlockForm], task: Task
) -> None:
    """Put a MatMulNBits in the place of each MatMul that `forms` names.
    A weight that several read is quantized once.
    """
    from onnx import helper

    made: dict[tuple[str, bool, BlockForm], list[str]] = {}
    for node in model.proto.graph.node:
        form = forms.get(node.name)
        if form is None:
            continue
        matrix = matrices[node.name]
        key = (matrix.weight, matrix.transposed, form)
        if key not in made:
            made[key] = _store(model, writer, matrix, form)
        fields = {"K": matrix.shape[0], "N": matrix.shape[1], "bits": form.bits, "block_size": form.block_size}
        level = {"accuracy_level": form.accuracy_level} if form.accuracy_level else {}
        inputs = [node.input[0], *made[key]]
        node.CopyFrom(
            helper.make_node(
                "MatMulNBits", inputs, list(node.output), name=node.name, domain=RUNTIME_DOMAIN, **fields, **level
            )
        )
        task.advance(note=node.name)
    import_runtime_domain_(model.proto)


def share_codes_(model: ModelFile, head: Matrix, form: BlockForm) -> str:
    """Let the embedding tied to lm_head read the quantized codes of lm_head; return its node.

    Raises StageError if nothing reads the weight of lm_head as an embedding.
    """
    from onnx import helper, numpy_helper

    graph = model.proto.graph
    makers = {name: node for node in graph.node for name in node.output}
    gathers = [
        node for node in graph.node if node.op_type == "Gather" and _source(node.input[0], makers) == head.weight
    ]
    if not gathers:
        raise StageError(
            "no embedding reads the weights of lm_head",
            where="onnx_quantize.embedding",
            why="Only one that is tied to lm_head can share its codes",
            remedy="Set embedding: keep",
        )
    gather = gathers[0]
    product = next(node for node in graph.node if node.name == head.node)
    rows, flat = head.shape[1], head.shape[0] * form.bits // 8
    size = numpy_helper.from_array(np.array([rows, flat], dtype=np.int64), f"{gather.name}/size")
    graph.initializer.append(size)
    reshaped = f"{gather.name}/codes"
    index = next(index for index, node in enumerate(graph.node) if node.name == gather.name)
    fields = {"bits": form.bits, "block_size": form.block_size, "gather_axis": 0, "quantize_axis": 1}
    inputs = [reshaped, gather.input[1], *product.input[2:]]
    gather.CopyFrom(
        helper.make_node(
            "GatherBlockQuantized", inputs, list(gather.output), name=gather.name, domain=RUNTIME_DOMAIN, **fields
        )
    )
    graph.node.insert(
        index, helper.make_node("Reshape", [product.input[1], size.name], [reshaped], name=f"{gather.name}/Reshape")
    )
    drop_unread_nodes_(model)
    return str(gather.name)


def fold_transposes_(model: ModelFile, writer: ModelWriter, shared: bool = False) -> None:
    """Store weights as they are read if nothing but a Transpose reads them.
    ONNX Runtime would transpose them at every start.

    `shared`: those that others read as well, too, which then lie there twice.
    """
    uses = model.uses()
    graph = model.proto.graph
    for node in list(graph.node):
        name = node.input[0] if node.op_type == "Transpose" else ""
        if name not in model.initializers or (uses[name] > 1 and not shared):
            continue
        order = next((list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), None)
        writer.add(node.output[0], model.array(name).transpose(order))
        graph.node.remove(node)


def drop_unread_nodes_(model: ModelFile) -> None:
    """Remove the nodes whose outputs nobody reads, and those that only they read."""
    graph = model.proto.graph
    while unread := [
        node for uses in [model.uses()] for node in graph.node if not any(uses[name] for name in node.output)
    ]:
        for node in unread:
            graph.node.remove(node)


def _store(model: ModelFile, writer: ModelWriter, matrix: Matrix, form: BlockForm) -> list[str]:
    weight = model.array(matrix.weight)
    codes = quantize_matrix(weight.T if matrix.transposed else weight, form)
    name = f"{matrix.weight}_Q{form.bits}"
    zeros = [] if codes.zeros is None else [writer.add(f"{name}_zeros", codes.zeros)]
    return [writer.add(name, codes.codes), writer.add(f"{name}_scales", codes.scales), *zeros]


def _matrix(model: ModelFile, node: Any, makers: Mapping[str, Any]) -> Matrix | str:
    """Return the weight of a MatMul, or why it has none that can be quantized."""
    if node.op_type == "Gemm":
        return "a Gemm, which MatMulNBits cannot replace"
    name = _source(node.input[1], makers)
    tensor = model.initializers.get(name)
    if tensor is None:
        return "no weight: both inputs are computed"
    if len(tensor.dims) != 2 or tensor.data_type not in FLOATS:
        return f"its weight is no float matrix: {list(tensor.dims)}"
    transposed = name != node.input[1]
    inputs, outputs = reversed(tensor.dims) if transposed else tensor.dims
    return Matrix(node.name, name, (inputs, outputs), transposed)


def _source(name: str, makers: Mapping[str, Any]) -> str:
    """Return what a value is the transposed matrix of; itself if it is none."""
    maker = makers.get(name)
    return str(maker.input[0]) if maker is not None and maker.op_type == "Transpose" else name


def _head(model: ModelFile, makers: Mapping[str, Any], found: Mapping[str, Matrix]) -> str | None:
    """Return the MatMul behind the output `logits`, looking through what may scale or cap it."""
    waiting = [value.name for value in model.proto.graph.output if value.name == "logits"]
    while waiting:
        node = makers.get(waiting.pop())
        if node is None:
            continue
        if node.op_type in PRODUCTS:
            return node.name if node.name in found else None
        if node.op_type in TRANSPARENT:
            waiting += node.input
    return None
