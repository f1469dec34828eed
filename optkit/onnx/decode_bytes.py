"""What one decode step of an ONNX model has to read: weights and KV cache, in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optkit.common.grouping import by_key
from optkit.model.onnx_file import BITS, Initializer, Node
from optkit.onnx.directory import CacheLayer, OnnxDirectory

TABLES = {"Gather": (0,), "GatherBlockQuantized": (0, 2, 3), "GroupQueryAttention": (7, 8), "RotaryEmbedding": (2, 3)}
"""Operation -> the inputs of which a token reads single rows: embeddings, cosines and sines."""
EXPERTS = frozenset({"MoE", "QMoE"})


def decode_bytes(directory: OnnxDirectory, batch: int, context: int) -> int:
    """Return the fewest bytes that a step of `batch` sequences with `context` tokens reads.

    Of a table only `batch` rows are read, unless a matrix product uses it too; of experts as many
    as a token is sent to.
    """
    nodes = directory.graph.nodes
    readers = by_key((name, (node, index)) for node in nodes for index, name in enumerate(node.inputs))
    weights = sum(
        _weight_bytes(each, readers.get(each.name, ()), readers, batch)
        for each in directory.graph.initializers.values()
    )
    cache = sum(_cache_bytes(layer, context, nodes) for layer in directory.cache)
    return weights + batch * cache


def _weight_bytes(
    tensor: Initializer,
    readers: Sequence[tuple[Node, int]],
    all_readers: Mapping[str, list[tuple[Node, int]]],
    batch: int,
) -> int:
    if not readers or not tensor.shape:
        return 0
    if all(_reads_rows(node, index, all_readers) for node, index in readers):
        return min(batch, max(tensor.shape)) * tensor.size_bytes // max(tensor.shape)
    shares = [_share(node, tensor) for node, _ in readers]
    return round(tensor.size_bytes * max(shares))


def _reads_rows(node: Node, index: int, readers: Mapping[str, list[tuple[Node, int]]]) -> bool:
    """Say whether a node reads single rows of its input.
    The nodes behind it may do so for it (an embedding that is lm_head's transposed).
    """
    if node.kind == "Transpose":
        behind = readers.get(node.outputs[0], [])
        return bool(behind) and all(_reads_rows(each, place, readers) for each, place in behind)
    return index in TABLES.get(node.kind, ())


def _share(node: Node, tensor: Initializer) -> float:
    chosen = node.attributes.get("k", 1)
    return (
        min(1.0, int(chosen) / tensor.shape[0])
        if node.kind in EXPERTS and isinstance(chosen, int) and len(tensor.shape) > 1
        else 1.0
    )


def _cache_bytes(layer: CacheLayer, context: int, nodes: Sequence[Node]) -> int:
    reader = next((node for node in nodes if layer.past.name in node.inputs), None)
    window = reader.attributes.get("local_window_size", -1) if reader else -1
    seen = min(context, window) if isinstance(window, int) and window > 0 else context
    return int(layer.past.shape[1]) * int(layer.past.shape[3]) * seen * BITS[layer.past.dtype] // 8
