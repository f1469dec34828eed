"""What can be said of an ONNX artifact without running it.
Whole files, a valid graph, versions, finite numbers and configs are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.environment import package_version
from optkit.errors import MissingPackageError, OptkitError
from optkit.model.onnx_file import Initializer, OnnxFile, all_initializers, graph_names, read_proto
from optkit.model.task import Task, task_of
from optkit.onnx.checker import own_nodes, problem_of_graph
from optkit.onnx.directory import OnnxDirectory
from optkit.verification.model_files import Check, ModelFiles, Weights, check_of
from optkit.verification.onnx_configs import problems_of_config, problems_of_genai
from optkit.verification.onnx_numbers import problems_of_numbers

if TYPE_CHECKING:
    from onnx import ModelProto

ROUNDING = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QuantizeLinear"})
"""Operators that round activations; QuantizeLinear of weights is folded into them when they are
written.
"""
INSIDE = 4
"""`accuracy_level` of a MatMulNBits that rounds its input to int8."""
ALIGNMENT = 1 << 16
"""Bytes that may follow the last tensor of a data file: writers align to the largest page that some
system has.
"""
PLAIN_WORDS = re.compile(r"Unsupported model IR version.*|Current official support for .*")
"""What onnxruntime says of a version, without the place in its source."""


class OnnxFiles(ModelFiles):
    """An ONNX directory."""

    def checks(self) -> tuple[Check, ...]:
        return check_onnx(self.directory)

    def weights(self) -> Weights:
        found = OnnxDirectory(self.directory)
        task = task_of(found.config) or Task.GENERATION
        return Weights(self.format, found.config, task, activation_bits=8 * rounds_inputs(found.graph))


def check_onnx(directory: Path) -> tuple[Check, ...]:
    """Check an ONNX directory; if its files are not whole, what stands on them is not checked.

    Raises MissingPackageError without the package `onnx`.
    """
    try:
        parts = [OnnxDirectory(directory, name) for name in graph_names(directory)]
        models = [(read_proto(part.path), len(part.cache) // 2) for part in parts]
    except MissingPackageError:
        raise
    except OptkitError as error:
        return (Check(name="weights", ok=False, detail=str(error)),)
    found = parts[0]
    tensors = all_initializers([part.graph for part in parts])
    files = " and ".join(dict.fromkeys(path.name for part in parts for path in part.graph.files))
    count, floats, broken = problems_of_numbers([model for model, _ in models], directory)
    return (
        check_of("weights", list(_left_over(directory, tensors)), f"{len(tensors):,} tensors, whole, in {files}"),
        check_of("numbers", broken, f"{floats:,} float numbers in {count:,} tensors, all finite"),
        *(_check_graph(part.path.name, *each) for part, each in zip(parts, models, strict=True)),
        _check_versions(found),
        check_of("config", problems_of_config(found), "config.json agrees with the graph and names no quantization"),
        _check_genai(found),
    )


def rounds_inputs(graph: OnnxFile) -> bool:
    """Say whether operations round their inputs to 8 bits.
    They do so in the graph or, if it allows that, inside MatMulNBits.
    """
    return any(node.kind in ROUNDING or node.attributes.get("accuracy_level") == INSIDE for node in graph.nodes)


def _left_over(directory: Path, tensors: Mapping[str, Initializer]) -> Iterator[str]:
    """A data file that is much longer than the graphs ask for is that of another model."""
    ends: dict[str, int] = {}
    for each in tensors.values():
        if each.location:
            ends[each.location] = max(ends.get(each.location, 0), each.offset + each.size_bytes)
    for name, end in ends.items():
        size = (directory / name).stat().st_size
        if size - end > ALIGNMENT:
            yield f"{name} has {size:,} bytes and the graph asks for {end:,}: it belongs to another model"


def _check_graph(name: str, model: ModelProto, layers: int) -> Check:
    if problem := problem_of_graph(model):
        return Check(name="graph", ok=False, detail=f"onnx.checker says of {name}: {problem}")
    own = own_nodes(model)
    cache = f", the KV cache of {layers} layers" if layers else ""
    beside = f", but for {own} of ONNX Runtime's own in ONNX's domain" if own else ""
    detail = f"{name}: {len(model.graph.node):,} nodes{cache}; onnx.checker finds nothing wrong{beside}"
    return check_of("graph", [], detail)


def _check_versions(found: OnnxDirectory) -> Check:
    opsets = ", ".join(f"{domain} {version}" for domain, version in sorted(found.graph.opsets.items()))
    said = f"IR version {found.graph.ir_version}, opsets {opsets}"
    try:
        refusal = _refusal(found.graph.ir_version, found.graph.opsets.get("ai.onnx", 1))
    except ImportError:
        return check_of("versions", [], f"{said}; no onnxruntime is installed here to say whether it reads them")
    version = package_version("onnxruntime") or package_version("onnxruntime-gpu") or ""
    runtime = f"onnxruntime {version}".strip()
    problem = f"{said}: {runtime} does not read that. {refusal}. Upgrade it, or export with an older opset"
    return check_of("versions", [problem] if refusal else [], f"{said}, which {runtime} reads")


def _refusal(ir_version: int, opset: int) -> str:
    """Return what onnxruntime says against a one-node model of these versions; else empty."""
    import onnxruntime
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "one", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own, one for each status
        words = str(error).strip()
        return (found[0] if (found := PLAIN_WORDS.search(words)) else words.splitlines()[0]).rstrip(".")
    return ""


def _check_genai(found: OnnxDirectory) -> Check:
    if not found.genai_config:
        return Check(name="genai_config", ok=True, detail="there is none, so ONNX Runtime GenAI does not open it")
    return check_of("genai_config", problems_of_genai(found), "genai_config.json agrees with the graph")
