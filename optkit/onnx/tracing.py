"""torch.onnx.export with its errors as ours, and a graph with readable names.
Nodes and weights are named after the modules that they come from.
"""

from __future__ import annotations

import ast
import linecache
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optkit.common.out_of_resources import NO_ROOM
from optkit.errors import OptkitError, StageError, first_line
from optkit.model.onnx_file import MODEL, all_graphs
from optkit.model.writer import disk_space_for
from optkit.onnx.exporters import OPSET
from optkit.onnx.model_file import ModelFile
from optkit.onnx.quiet import quiet_tools

WHERE = "onnx: exporter torch"
PREFIX = "model"
"""The attribute of a traced module that holds the model."""
LIBRARIES = ("torch", "onnxscript", "onnx_ir", "optkit")
"""Whose code is never the line that cannot be traced."""


def trace(
    module: nn.Module,
    feeds: Sequence[Any],
    shapes: Any,
    names: tuple[Sequence[str], Sequence[str]],
    target: Path,
    opset: int = OPSET,
) -> None:
    """Write the graph of a module and its weights into a directory.
    Its attribute `model` is the model itself.

    `feeds` are its arguments, `shapes` says which of their axes vary (`dynamic_shapes` of
    torch.onnx.export), `names` what inputs and outputs are called. Raises StageError with the line
    that cannot be traced, or the operator that ONNX has not; ResourceError when the disk is full.
    """
    held = sum(parameter.nbytes for parameter in module.parameters())
    try:
        with torch.no_grad(), quiet_tools(), disk_space_for(target / MODEL, held):
            program = torch.onnx.export(
                module,
                tuple(feeds),
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=list(names[0]),
                output_names=list(names[1]),
                opset_version=opset,
                verbose=False,
            )
            assert program is not None
            program.save(str(target / MODEL), external_data=True)
    except Exception as error:
        if isinstance(error, OptkitError | MemoryError) or getattr(error, "errno", None) in NO_ROOM:
            raise
        raise _untraceable(module, error) from error


def _untraceable(module: nn.Module, error: Exception) -> StageError:
    cause = _innermost(error)
    said = first_line(cause).rstrip(".")
    line, model = _line_of(cause), type(getattr(module, PREFIX)).__name__
    if isinstance(error, torch.onnx.OnnxExporterError) and "step 1/3" not in str(error):
        return StageError(
            f"torch {torch.__version__} cannot write {model} as ONNX",
            where=WHERE,
            why=said,
            remedy="ONNX has no operator for it. Deploy the checkpoint, or try another exporter if it is a decoder",
        )
    return StageError(
        f"torch {torch.__version__} cannot trace {model}{f' at {line}' if line else ''}",
        where=WHERE,
        why=f"{type(cause).__name__}: {said}",
        remedy="Its code has to do there the same for all inputs. Deploy the checkpoint, or try another exporter if it "
        "is a decoder",
    )


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _line_of(error: BaseException) -> str:
    """Return the line of the model's own code that raised an error.
    For example `modeling_x.py, line 12: if tokens.sum() > 0:`.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_of_a_library(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    text = (last.line or linecache.getline(last.filename, last.lineno or 0)).strip()
    return f"{Path(last.filename).name}, line {last.lineno}: {text}"


def _is_of_a_library(file: str) -> bool:
    parts = Path(file).parts
    return any(name in parts[:-1] for name in LIBRARIES) or file.startswith("<")


def name_by_modules_(graph: ModelFile) -> None:
    """Name nodes and weights after the modules that they come from.
    What torch noted of its own files and lines is dropped.

    A node is then `/model/layers.0/self_attn/q_proj/MatMul` and its weight
    `model.layers.0.self_attn.q_proj.weight`.
    """
    taken: Counter[str] = Counter()
    renamed: dict[str, str] = {}
    modules: dict[str, str] = {}
    for node in graph.proto.graph.node:
        # Torch does not say it of a few nodes (Split): they belong to what makes their input.
        module = _module_of(node) or next((modules[name] for name in node.input if name in modules), "")
        modules.update(dict.fromkeys(node.output, module))
        path = f"/{module}/{node.op_type}".replace("//", "/")
        taken[path] += 1
        node.name = path if taken[path] == 1 else f"{path}_{taken[path] - 1}"
        for name in node.input:
            if node.op_type == "MatMul" and name in graph.initializers and module:
                renamed.setdefault(name, f"{module.replace('/', '.')}.weight")
    names = [renamed.get(name, name.removeprefix(f"{PREFIX}.")) for name in graph.initializers]
    unique = Counter(names)
    _rename_(
        graph, {name: each if unique[each] == 1 else name for name, each in zip(graph.initializers, names, strict=True)}
    )


def _rename_(graph: ModelFile, new: Mapping[str, str]) -> None:
    for inner in all_graphs(graph.proto.graph):
        for node in inner.node:
            del node.metadata_props[:]
            node.ClearField("doc_string")
            for index, name in enumerate(node.input):
                node.input[index] = new.get(name, name)
        for value in (*inner.initializer, *inner.value_info, *inner.input, *inner.output):
            del value.metadata_props[:]
            value.name = new.get(value.name, value.name)
    del graph.proto.graph.metadata_props[:]
    graph.replace_graph(graph.proto)


def _module_of(node: Any) -> str:
    """Return the path of the module that a node comes from; empty if torch does not say.
    For example `encoder/layer.0/attention/self/query`.
    """
    noted = next((each.value for each in node.metadata_props if each.key == "pkg.torch.onnx.name_scopes"), "[]")
    scopes = [scope for scope in ast.literal_eval(noted)[:-1] if scope]
    parts = [part for part in (scopes[-1].split(".") if scopes else []) if part]
    joined: list[str] = []
    for part in parts[1:]:
        if part.isdigit() and joined:
            joined[-1] += f".{part}"
        else:
            joined.append(part)
    return "/".join(joined)
