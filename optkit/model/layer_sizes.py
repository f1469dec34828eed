"""What the layers of a model take on disk, and how many weights they stand for.

Those of a checkpoint are counted from the headers of its safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from optkit.errors import EvalError
from optkit.model.checkpoint import Checkpoint
from optkit.model.config_file import of_weights
from optkit.model.packed_floats import BLOCKS, METHODS, SCALES
from optkit.model.packed_names import BESIDE, CODED, CODES, FOUR_BIT_STATE, by_module
from optkit.model.shape import TensorInfo


@dataclass(frozen=True)
class LayerSize:
    """What one module's tensors take, and how many weights they stand for; its bias belongs to it."""

    stored_bits: int
    weights: int
    quantized: bool


def bits_per_weight(layers: Sequence[LayerSize]) -> float:
    """Return the bits stored over the weights that they stand for."""
    return sum(layer.stored_bits for layer in layers) / sum(layer.weights for layer in layers)


def module_sizes(checkpoint: Checkpoint) -> dict[str, LayerSize]:
    """Return module -> what it takes.
    Raises EvalError for a quantized checkpoint whose layout is not known.
    """
    modules = by_module(checkpoint.tensors).items()
    layers = {module: _module_size(checkpoint, module, tensors) for module, tensors in modules}
    said = checkpoint.quantization or {}
    if of_weights(said) and not any(layer.quantized for layer in layers.values()):
        raise EvalError(
            f"no quantized layer is recognised in a checkpoint of quant_method {said.get('quant_method')}",
            where=str(checkpoint.directory),
            why=f"Bits per weight can be recounted for the layouts of {', '.join(METHODS)}",
            remedy="Take footprint out of the evals",
        )
    return layers


def _module_size(checkpoint: Checkpoint, module: str, tensors: dict[str, TensorInfo]) -> LayerSize:
    bits = 8 * sum(info.size_bytes for info in tensors.values())
    if state := next((kind for kind in tensors if kind.startswith(FOUR_BIT_STATE)), None):
        shape = json.loads(bytes(checkpoint.read(f"{module}.{state}").tolist()))["shape"]
        return LayerSize(
            bits, math.prod(shape) + (tensors["bias"].elements if "bias" in tensors else 0), quantized=True
        )
    if blocks := sum(info.elements for kind, info in tensors.items() if kind.endswith(BLOCKS)):
        plain = sum(info.elements for kind, info in tensors.items() if not kind.endswith((BLOCKS, SCALES)))
        return LayerSize(bits, 2 * blocks + plain, quantized=True)
    if not CODED & tensors.keys():
        return LayerSize(bits, sum(info.elements for info in tensors.values()), quantized=False)
    plain = sum(info.elements for kind, info in tensors.items() if kind not in BESIDE and kind not in CODES)
    return LayerSize(bits, plain + _packed_weights(checkpoint, module, tensors), quantized=True)


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
