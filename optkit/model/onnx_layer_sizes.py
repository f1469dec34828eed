"""What the weights of an ONNX graph take, and how many weights they stand for.
Both are counted from its initializers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from optkit.errors import EvalError
from optkit.model.layer_sizes import LayerSize
from optkit.model.onnx_file import BITS, Initializer, Node, OnnxFile

FEWEST = 4096
"""Elements from which on a narrow tensor that no known operation reads is weights in a layout that
is not known.
"""


@dataclass(frozen=True)
class Reader:
    """How an operation reads quantized weights.
    It names the inputs that are packed, those beside them, and the weights in a packed tensor.
    """

    packed: tuple[int, ...]
    beside: tuple[int, ...]
    weights: Callable[[Node, Initializer], int] = lambda node, tensor: tensor.elements


def _matrix(node: Node, tensor: Initializer) -> int:
    return _integer(node, "K") * _integer(node, "N")


def _codes(name: str) -> Callable[[Node, Initializer], int]:
    """Return how many codes a tensor holds, of the attribute's bits if they lie in bytes."""

    def weights(node: Node, tensor: Initializer) -> int:
        narrow = _integer(node, name, 4) if BITS[tensor.dtype] == 8 else BITS[tensor.dtype]
        return tensor.elements * BITS[tensor.dtype] // narrow

    return weights


def _integer(node: Node, name: str, otherwise: int = 0) -> int:
    value = node.attributes.get(name, otherwise)
    return value if isinstance(value, int) else otherwise


READERS = {
    "MatMulNBits": Reader((1,), (2, 3, 4, 5), _matrix),
    "MatMulBnb4": Reader((1,), (2,), _matrix),
    "MatMulFpQ4": Reader((1,), (2,), _matrix),
    "GatherBlockQuantized": Reader((0,), (2, 3), _codes("bits")),
    "QMoE": Reader((2, 5, 8), (3, 4, 6, 7, 9, 10), _codes("expert_weight_bits")),
    "DequantizeLinear": Reader((0,), (1, 2)),
    "MatMulInteger": Reader((1,), (3,)),
    "ConvInteger": Reader((1,), (3,)),
    "MatMulIntegerToFloat": Reader((1,), (3, 5, 6)),
    "DynamicQuantizeMatMul": Reader((1,), (2, 3, 4)),
    "QLinearMatMul": Reader((3,), (4, 5)),
    "QLinearConv": Reader((3,), (4, 5, 8)),
    "QGemm": Reader((3,), (4, 5, 6)),
    "QAttention": Reader((1,), (2, 4, 7)),
    "Gather": Reader((0,), ()),
}
"""https://onnx.ai/onnx/operators and
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""
TABLES = {
    "GroupQueryAttention": (7, 8),
    "RotaryEmbedding": (2, 3),
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
}
"""Operation -> inputs that cost bits and stand for no weight: cosines and sines, scales of
activations.
"""


def onnx_layer_sizes(graph: OnnxFile) -> dict[str, LayerSize]:
    """Return tensor -> what it takes with what belongs to it.
    Each initializer counts once, whoever reads it.

    Raises EvalError if quantized weights lie in a layout that is not known.
    """
    tensors = graph.initializers
    found: dict[str, LayerSize] = {}
    counted: set[str] = set()
    for node, name, reader in _quantized(graph.nodes, tensors):
        if name in counted:
            continue
        beside = {node.inputs[index] for index in reader.beside if index < len(node.inputs)} | _scales_by_name(name)
        own = [name, *(each for each in beside if each in tensors and each not in counted)]
        counted.update(own)
        found[name] = LayerSize(
            8 * sum(tensors[each].size_bytes for each in own), reader.weights(node, tensors[name]), quantized=True
        )
    tables = {
        node.inputs[index] for node in graph.nodes for index in TABLES.get(node.kind, ()) if index < len(node.inputs)
    }
    for name, tensor in tensors.items():
        if name not in counted:
            _refuse_unknown(tensor, name in tables, graph)
            weights = tensor.elements if "float" in tensor.dtype and tensor.shape and name not in tables else 0
            found[name] = LayerSize(8 * tensor.size_bytes, weights, quantized=False)
    return found


def _quantized(nodes: Sequence[Node], tensors: Mapping[str, Initializer]) -> Iterator[tuple[Node, str, Reader]]:
    """Yield the nodes with each packed initializer that they read."""
    for node in nodes:
        if reader := READERS.get(node.kind):
            read = [node.inputs[index] for index in reader.packed if index < len(node.inputs)]
            yield from ((node, name, reader) for name in read if name in tensors and not _is_plain(node, tensors[name]))


def _is_plain(node: Node, tensor: Initializer) -> bool:
    """Whether a table is read as it is: only narrow ones are quantized."""
    return node.kind == "Gather" and BITS.get(tensor.dtype, 64) > 8


def _scales_by_name(name: str) -> set[str]:
    """Return what ONNX Runtime's quantizer calls the scale and zero of a MatMulInteger's weights."""
    base = name.removesuffix("_quantized")
    return {f"{base}_scale", f"{base}_zero_point"} if base != name else set()


def _refuse_unknown(tensor: Initializer, is_table: bool, graph: OnnxFile) -> None:
    if is_table or tensor.elements < FEWEST or BITS.get(tensor.dtype, 64) > 8 or tensor.dtype == "bool":
        return
    readers = sorted({node.kind for node in graph.nodes if tensor.name in node.inputs})
    raise EvalError(
        f"{tensor.name}, {tensor.dtype} {list(tensor.shape)}, is read by {', '.join(readers) or 'no operation'}",
        where=str(graph.path),
        why=f"Bits per weight can be recounted for {', '.join(READERS)}",
        remedy="Take footprint out of the evals",
    )
