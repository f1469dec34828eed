"""Change a graph as a whole: ONNX Runtime's fusions, another opset, float16 in place of float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from optkit.errors import StageError, first_line
from optkit.model.onnx_file import MODEL
from optkit.onnx.checker import RUNTIME_DOMAIN
from optkit.onnx.model_file import DATA, INLINE_BYTES, ModelFile, all_tensors
from optkit.onnx.opening import SILENT, import_runtime, runtime_errors
from optkit.onnx.quiet import quiet_tools

Level = Literal["none", "basic", "extended", "all"]
FLOAT = 1
LARGEST = 65504.0
"""The largest number of float16."""


def optimize_graph(model: Path, target: Path, level: Level) -> ModelFile:
    """Let ONNX Runtime fold constants and fuse nodes for its CPU provider.
    The graph is left in the directory `target` and returned.

    Raises what `optkit.onnx.opening.runtime_errors` tells of.
    """
    runtime = import_runtime(str(model))
    levels = runtime.GraphOptimizationLevel
    options = runtime.SessionOptions()
    name = "ORT_DISABLE_ALL" if level == "none" else f"ORT_ENABLE_{level.upper()}"
    options.graph_optimization_level = getattr(levels, name)
    options.log_severity_level = SILENT
    options.optimized_model_filepath = str(target / MODEL)
    for key, value in {
        "session.optimized_model_external_initializers_file_name": DATA,
        "session.optimized_model_external_initializers_min_size_in_bytes": str(INLINE_BYTES + 1),
        "session.disable_prepacking": "1",
    }.items():
        options.add_session_config_entry(key, value)
    target.mkdir()
    with runtime_errors("while it was optimized", str(model)):
        runtime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return ModelFile(target)


def convert_opset_(model: ModelFile, opset: int) -> None:
    """Write the graph in another version of ONNX's own operators; those of ONNX Runtime stay.
    Raises StageError if onnx cannot.
    """
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        raise StageError(
            f"onnx {onnx.__version__} knows opsets up to {newest}",
            where="onnx_optimize.opset",
            remedy="Take a lower one",
        )
    foreign = {node.name for node in model.proto.graph.node if not node.domain and not onnx.defs.has(node.op_type)}
    _set_domain_(model.proto.graph, foreign, RUNTIME_DOMAIN)
    try:
        converted = onnx.version_converter.convert_version(model.proto, opset)
    except Exception as error:
        raise StageError(
            f"onnx {onnx.__version__} cannot write it in opset {opset}",
            where="onnx_optimize.opset",
            why=first_line(error),
            remedy="Take an opset nearer to the present one, or export it again",
        ) from error
    _set_domain_(converted.graph, foreign, "")
    for entry in model.proto.opset_import:
        if entry.domain not in {each.domain for each in converted.opset_import}:
            converted.opset_import.append(entry)
    model.replace_graph(converted)


def to_float16_(model: ModelFile, kept_kinds: Sequence[str], kept_nodes: Sequence[str], keep_ends: bool) -> int:
    """Turn weights and activations into float16 and return how many tensors changed.
    Nodes of `kept_kinds` and `kept_nodes` compute in float32, between casts. `keep_ends`: the
    inputs and outputs of the graph stay float32.

    Raises StageError for weights that float16 does not hold; a single number (what masks are filled
    with) becomes its largest.
    """
    for tensor in all_tensors(model.proto.graph):
        if tensor.data_type == FLOAT and tensor.name in model.initializers and math.prod(tensor.dims) > 1:
            _refuse_large(tensor.name, model.array(tensor.name))
    before = _float_tensors(model)
    with quiet_tools():
        from onnxruntime.transformers.float16 import convert_float_to_float16
        from onnxruntime.transformers.onnx_model import OnnxModel

        typed = _with_types(model)
        model.fill(typed)
        converted = convert_float_to_float16(
            typed,
            keep_io_types=keep_ends,
            disable_shape_infer=True,
            op_block_list=list(kept_kinds),
            node_block_list=list(kept_nodes),
        )
        OnnxModel.graph_topological_sort(converted.graph)
    model.replace_graph(converted)
    return before - _float_tensors(model)


def _with_types(model: ModelFile) -> Any:
    """Return a copy that names the dtype of every value that onnx or ONNX Runtime can infer."""
    import onnx

    try:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

        found = SymbolicShapeInference.infer_shapes(model.proto, auto_merge=True)
    except Exception:  # it knows some graphs only in part, and then raises whatever it stumbled over
        found = None
    return found or onnx.shape_inference.infer_shapes(model.proto)


def _refuse_large(name: str, array: Any) -> None:
    largest = float(np.abs(array).max(initial=0))
    if largest > LARGEST:
        raise StageError(
            f"weights of up to {largest:,.0f} do not fit float16",
            where=name,
            why=f"Its largest number is {LARGEST:,.0f}",
            remedy="Keep float32",
        )


def _float_tensors(model: ModelFile) -> int:
    return sum(tensor.data_type == FLOAT for tensor in all_tensors(model.proto.graph))


def _set_domain_(graph: Any, names: set[str], domain: str) -> None:
    for node in graph.node:
        if node.name in names:
            node.domain = domain
