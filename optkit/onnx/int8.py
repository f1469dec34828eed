"""Weights and activations in int8 by onnxruntime's own quantizer, which works in files.

It gets a copy: it writes beside what it reads, and it refuses data with several hard links. Weights
get one scale per output channel or per tensor, symmetric (int8); activations one scale and zero
point per tensor (uint8), found at each call (`dynamic`) or beforehand (`static`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from optkit.errors import StageError
from optkit.model.onnx_file import MODEL, OnnxFile
from optkit.onnx.feeds import TOKENS, prompt_feeds
from optkit.onnx.matrices import fold_transposes_
from optkit.onnx.model_file import ModelFile, ModelWriter
from optkit.onnx.opening import runtime_errors
from optkit.onnx.quiet import quiet_tools
from optkit.progress import Task

WEIGHT_PLACES = {"Gather": (0,), "EmbedLayerNormalization": (2, 3, 4)}
"""Inputs that hold the weights; elsewhere the second one."""
Ranges = Literal["min-max", "entropy", "percentile"]


@dataclass(frozen=True)
class Int8Form:
    """What is quantized, and how."""

    kinds: Sequence[str]
    """Operators, as ONNX names them."""
    nodes: Collection[str]
    """Names of the nodes."""
    per_channel: bool
    """One scale for each output channel of a weight; else one for all of it."""
    reduce_range: bool
    """Weights in 7 bits: without VNNI, CPUs add pairs of products in 16 bits, which 8 bits
    overflow.
    """


@dataclass
class Prompts:
    """Calibration texts as onnxruntime's tool takes them, a sequence at a time.
    So it never holds the activations of several.
    """

    inputs: Mapping[str, Any]
    """Of the graph, by name."""
    tokens: NDArray[np.int64]
    """[samples, sequence]"""
    task: Task
    _left: Iterator[NDArray[np.int64]] = field(default=iter(()), init=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Begin again with these samples."""
        self._left = iter(self.tokens[start_index:end_index])

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        """Return the inputs for the next sample, None behind the last one."""
        row = next(self._left, None)
        if row is None:
            return None
        self.task.advance()
        return prompt_feeds(self.inputs, row[None])


def int8_candidates(model: ModelFile, kinds: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the nodes of the given kinds with a float weight; and the others -> why not.
    Each has its own name and that of its weight.
    """
    found, refused = {}, {}
    for node in model.proto.graph.node:
        if node.op_type not in kinds:
            continue
        places = WEIGHT_PLACES.get(node.op_type, (1,))
        names = [
            node.input[place]
            for place in places
            if place < len(node.input) and _is_float_weight(model, node.input[place])
        ]
        if names:
            found[node.name] = (node.name, *names)
        else:
            refused[node.name] = f"{node.op_type} without a float weight"
    return found, refused


def settle_weights(model: ModelFile, directory: Path) -> ModelFile:
    """Write the model into a new directory, every node named and every weight as it is read.
    None is transposed on the way. Returns the directory.
    """
    directory.mkdir()
    writer = ModelWriter(model, directory)
    fold_transposes_(model, writer, shared=True)
    writer.finish()
    return ModelFile(directory, model.name)


def quantize_dynamic(model: ModelFile, target: Path, form: Int8Form) -> None:
    """Leave the model in `target` with int8 weights and activations.
    Scales of activations are found at each call.
    """
    path = str(model.directory / model.name)
    with runtime_errors("while it was quantized", path), quiet_tools():
        from onnxruntime.quantization import quantize_dynamic

        quantize_dynamic(path, str(target / model.name), extra_options=_options(), **_arguments(form))


def quantize_static(
    model: ModelFile,
    target: Path,
    form: Int8Form,
    tokens: NDArray[np.int64],
    ranges: Ranges,
    percentile: float,
    task: Task,
) -> None:
    """Leave the model in `target` as QDQ.
    Values are quantized and dequantized before each product, which ONNX Runtime fuses.

    `tokens`: int64 [samples, sequence]. Products stay float, so that only what enters them is
    rounded. Raises StageError for a graph that takes no tokens.
    """
    prompts = Prompts(OnnxFile(model.directory / MODEL).inputs, tokens, task)
    if TOKENS not in prompts.inputs:
        raise StageError(
            f"the graph has no input {TOKENS}",
            where="onnx_quantize",
            why="Calibration runs text",
            remedy="Take method: dynamic",
        )
    with runtime_errors("while it was quantized", str(model.directory / MODEL)), quiet_tools():
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

        method = getattr(CalibrationMethod, ranges.title().replace("-", ""))
        percentiles = {"CalibPercentile": percentile} if ranges == "percentile" else {}
        quantize_static(
            str(model.directory / MODEL),
            str(target / MODEL),
            prompts,
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            calibrate_method=method,
            extra_options=_options()
            | percentiles
            | {
                "CalibStridedMinMax": 1,
                "OpTypesToExcludeOutputQuantization": list(form.kinds),
                "QDQKeepRemovableActivations": True,
            },
            **_arguments(form),
        )


def _arguments(form: Int8Form) -> dict[str, Any]:
    """Return what both of the tool's functions are told alike."""
    from onnxruntime.quantization import QuantType

    return {
        "op_types_to_quantize": list(form.kinds),
        "per_channel": form.per_channel,
        "reduce_range": form.reduce_range,
        "weight_type": QuantType.QInt8,
        "nodes_to_quantize": sorted(form.nodes),
        "use_external_data_format": True,
    }


def _options() -> dict[str, Any]:
    from onnx import TensorProto

    return {"DefaultTensorType": TensorProto.FLOAT, "MatMulConstBOnly": True}


def _is_float_weight(model: ModelFile, name: str) -> bool:
    tensor = model.initializers.get(name)
    return tensor is not None and tensor.data_type in (1, 10) and len(tensor.dims) > 1
