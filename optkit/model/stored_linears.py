"""The linear layers of a checkpoint's decoder blocks, packed or not, by names and shapes.

No torch is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optkit.model.linear_layers import Layer, matrices_of
from optkit.model.packed_names import CODES, FOUR_BIT_STATE
from optkit.model.shape import ModelShape, TensorInfo


def stored_linears(shape: ModelShape) -> dict[str, Layer]:
    """Return the layers by name.
    Packed ones that do not tell both sizes have sizes of the same product that are alike.
    """
    config = shape.config.get("quantization_config") or {}
    found = {name: layer for name, layer in matrices_of(shape).items() if layer.inputs > 1 or not config}
    for tensor, info in shape.tensors.items():
        name, _, leaf = tensor.rpartition(".")
        if leaf in CODES:
            found[name] = _packed(name, info, shape.tensors, config)
        elif f".{FOUR_BIT_STATE}" in tensor:
            name = tensor.partition(f".{FOUR_BIT_STATE}")[0]
            found[name] = _alike(name, 2 * shape.tensors[f"{name}.weight"].elements)
    return {name: layer for name, layer in found.items() if shape.block(f"{name}.weight")}


def _packed(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Layer:
    if info.dtype == "U8":  # two 4-bit floats a byte
        return Layer(name, info.shape[0], info.shape[1] * 2, transposed=False)
    if order := tensors.get(f"{name}.g_idx"):
        return Layer(name, info.shape[1], order.shape[0], transposed=False)
    groups = config.get("config_groups") or {}
    bits = config.get("bits") or next((group["weights"]["num_bits"] for group in groups.values()), 4)
    elements = info.elements * 32 // int(bits)
    return Layer(name, info.shape[0], elements // info.shape[0], transposed=False) if groups else _alike(name, elements)


def _alike(name: str, elements: int) -> Layer:
    side = math.isqrt(elements)
    return Layer(name, side, elements // max(1, side), transposed=False)
