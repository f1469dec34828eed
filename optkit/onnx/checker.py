"""onnx.checker for graphs as ONNX Runtime's tools write them, whatever lies beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optkit.model.onnx_file import all_graphs

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

RUNTIMES_OWN = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Operators that ONNX Runtime has in ONNX's own domain, in versions in which ONNX has none of that
name.
"""
RUNTIME_DOMAIN = "com.microsoft"


def problem_of_graph(model: ModelProto) -> str:
    """Return what onnx.checker has against a model, in one line; empty if nothing.

    The graph alone is checked, with weights that lie elsewhere as inputs: the checker refuses data
    files with several hard links, which a user's may have. `model` is left as it is.
    """
    import onnx

    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for graph in all_graphs(bare.graph):
        _take_weights_out(graph)
    _rename_own(bare)
    try:
        onnx.checker.check_model(bare)
    except onnx.checker.ValidationError as error:
        return " ".join(str(error).split())
    return ""


def own_nodes(model: ModelProto) -> int:
    """Return how many of ONNX Runtime's own nodes are in ONNX's domain: onnx.checker refuses them."""
    return sum(
        _is_own(node.op_type, node.domain, _opset(model)) for graph in all_graphs(model.graph) for node in graph.node
    )


def _take_weights_out(graph: GraphProto) -> None:
    from onnx import helper

    known = {port.name for port in graph.input}
    elsewhere = [tensor for tensor in graph.initializer if tensor.data_location == tensor.EXTERNAL]
    graph.input.extend(
        helper.make_tensor_value_info(each.name, each.data_type, list(each.dims))
        for each in elsewhere
        if each.name not in known
    )
    kept = [tensor for tensor in graph.initializer if tensor.data_location != tensor.EXTERNAL]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def import_runtime_domain_(model: ModelProto) -> None:
    """Let a graph have operators of ONNX Runtime's own."""
    from onnx import helper

    if all(each.domain != RUNTIME_DOMAIN for each in model.opset_import):
        model.opset_import.append(helper.make_opsetid(RUNTIME_DOMAIN, 1))


def _rename_own(model: ModelProto) -> None:
    opset = _opset(model)
    for graph in all_graphs(model.graph):
        for node in graph.node:
            if _is_own(node.op_type, node.domain, opset):
                node.domain = RUNTIME_DOMAIN
    import_runtime_domain_(model)


def _is_own(kind: str, domain: str, opset: int) -> bool:
    from onnx import defs

    return not domain and kind in RUNTIMES_OWN and not defs.has(kind, opset)


def _opset(model: ModelProto) -> int:
    return next((each.version for each in model.opset_import if not each.domain), 1)
