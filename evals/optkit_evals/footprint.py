"""Bytes on disk, and bits per weight recounted from the headers of the safetensors files, or from
the graph of an ONNX model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from optkit.errors import EvalError
from optkit.measure import Eval, EvalContext, Metric, Opened
from optkit.model.adapter import read_adapter
from optkit.model.checkpoint import Checkpoint
from optkit.model.onnx_file import MODEL, OnnxFile, is_onnx
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.task import EVERY_TASK, Task
from optkit_evals.onnx_layers import onnx_layers
from optkit_evals.stored_layers import StoredLayer, bits_per_weight, deployed_bytes
from optkit_evals.zeros import PLACES, ROWS, share_of_zeros

PACKED = ("weight_packed", "qweight")
"""Names of packed tensors, in compressed-tensors and in gptq and awq."""
BESIDE = frozenset({
    "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "input_scale",
    "input_zero_point",
    "scales", "qzeros", "g_idx", "SCB", "weight_format",
})  # fmt: skip
"""Tensors that a packed one needs: they cost bits and stand for no weight."""
MARKS = frozenset({"weight_scale", "qweight", "SCB"})
"""Tensors that only a quantized layer has."""
PRUNED = 0.2
"""The least share of zeros that is worth a row."""
FOUR_BIT_STATE = "weight.quant_state."
"""How the name of bitsandbytes' JSON about 4-bit weights begins."""


class Footprint(Eval):
    """What the model takes on disk: bytes of all files and of weights, bits per weight overall and
    of the quantized layers.

    Of a pruned float checkpoint also the share of zeros, which saves no bytes.
    """

    kind: ClassVar[str] = "footprint"
    version: ClassVar[int] = 4
    draws: ClassVar[bool] = False
    tasks: ClassVar[frozenset[Task]] = EVERY_TASK
    metrics: ClassVar[Mapping[str, str]] = {
        "size_bytes": "bytes",
        "weights_bytes": "bytes",
        "bits_per_weight": "bits",
        "bits_per_quantized_weight": "bits",
        "zeros": "fraction",
    }

    def foresee(self, shape: ModelShape) -> Mapping[str, float]:
        """Return the bytes of the weights, which are nearly those of all files."""
        return {"weights_bytes": shape.size_bytes, "size_bytes": shape.size_bytes}

    def run(self, session: Opened, context: EvalContext) -> list[Metric]:
        """Count; raises EvalError where the layout of quantized weights is not known, SourceError
        where a file is damaged.
        """
        files, layers = _stored(session.directory)
        quantized = [layer for layer in layers if layer.quantized]
        found = [
            _metric(
                "size_bytes",
                deployed_bytes(session.directory, files),
                "bytes",
                "weights and every file beside them that deploys",
            ),
            _metric("weights_bytes", sum(path.stat().st_size for path in files), "bytes", "files that hold weights"),
            _metric(
                "bits_per_weight",
                bits_per_weight(layers),
                "bits",
                "all tensors (scales, zero points, embeddings), per weight",
            ),
        ]
        if quantized:
            protocol = "tensors of the quantized layers (scales, zero points), per weight of theirs"
            found.append(_metric("bits_per_quantized_weight", bits_per_weight(quantized), "bits", protocol))
        zeros = None if quantized or is_onnx(session.directory) else share_of_zeros(Checkpoint(session.directory))
        if zeros is not None and zeros >= PRUNED:
            protocol = f"weights of the blocks' linear layers that are 0, in {ROWS} rows of each, {PLACES} runs"
            found.append(Metric(name="zeros", value=zeros, unit="fraction", higher_is_better=True, protocol=protocol))
        return found


def _stored(directory: Path) -> tuple[set[Path], list[StoredLayer]]:
    """Return the files that hold weights, and what the layers in them take."""
    if is_onnx(directory):
        graph = OnnxFile(directory / MODEL)
        return set(graph.files), list(onnx_layers(graph).values())
    checkpoint = Checkpoint(directory)
    files, layers = set(checkpoint.files.values()), list(stored_layers(checkpoint).values())
    if checkpoint.quantization and (adapter := read_adapter(directory)):  # it stands for no weight of its own
        return files | {adapter.weights}, [*layers, StoredLayer(8 * adapter.size_bytes, 0, quantized=False)]
    return files, layers


def stored_layers(checkpoint: Checkpoint) -> dict[str, StoredLayer]:
    """Return module -> what it takes; raises EvalError for a quantized checkpoint whose layout is
    not known.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        module, below_weight, kind = name.partition(".weight.")
        if below_weight:
            kind = f"weight.{kind}"
        else:
            module, _, kind = name.rpartition(".")
        modules.setdefault(module, {})[kind] = info
    layers = {module: _stored_layer(checkpoint, module, tensors) for module, tensors in modules.items()}
    if checkpoint.quantization is not None and not any(layer.quantized for layer in layers.values()):
        raise EvalError(
            "no quantized layer is recognised in a checkpoint of quant_method "
            f"{checkpoint.quantization.get('quant_method')}",
            where=str(checkpoint.directory),
            why="Bits per weight can be recounted for the layouts of compressed-tensors, gptq, awq and bitsandbytes",
            remedy="Take footprint out of the evals",
        )
    return layers


def _stored_layer(checkpoint: Checkpoint, module: str, tensors: dict[str, TensorInfo]) -> StoredLayer:
    bits = 8 * sum(info.size_bytes for info in tensors.values())
    if state := next((kind for kind in tensors if kind.startswith(FOUR_BIT_STATE)), None):
        shape = json.loads(bytes(checkpoint.read(f"{module}.{state}").tolist()))["shape"]
        return StoredLayer(
            bits, math.prod(shape) + (tensors["bias"].elements if "bias" in tensors else 0), quantized=True
        )
    if not MARKS & tensors.keys():
        return StoredLayer(bits, sum(info.elements for info in tensors.values()), quantized=False)
    plain = sum(info.elements for kind, info in tensors.items() if kind not in BESIDE and kind not in PACKED)
    return StoredLayer(bits, plain + _packed_weights(checkpoint, module, tensors), quantized=True)


def _packed_weights(checkpoint: Checkpoint, module: str, tensors: dict[str, TensorInfo]) -> int:
    where = f"{checkpoint.directory}: {module}"
    if "weight_packed" in tensors:
        if tensors["weight_packed"].dtype == "U8":  # two 4-bit floats a byte
            return tensors["weight_packed"].elements * 2
        if "weight_shape" not in tensors:
            raise EvalError("there is no weight_shape beside weight_packed", where=where)
        return math.prod(checkpoint.read(f"{module}.weight_shape").tolist())
    if "qweight" not in tensors:
        return 0
    qweight = tensors["qweight"]  # int32 [in * bits / 32, out]
    if "g_idx" in tensors:
        return tensors["g_idx"].elements * qweight.shape[1]
    bits = (checkpoint.quantization or {}).get("bits")
    if not bits:
        raise EvalError("neither g_idx nor the bits of quantization_config say how many weights there are", where=where)
    return qweight.elements * 32 // int(bits)


def _metric(name: str, value: float, unit: str, protocol: str) -> Metric:
    return Metric(name=name, value=value, unit=unit, higher_is_better=False, protocol=protocol)
