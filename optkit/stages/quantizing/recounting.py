"""Count the bits that a quantizer left, from the headers of what it wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import Selection
from optkit.model.packed_names import split_tensor
from optkit.packed_tensors.base import LayerFormat


def recount(
    after: Checkpoint, before: Checkpoint, selection: Selection, formats: Mapping[str, LayerFormat]
) -> dict[str, Any]:
    """Return the bits per weight of the whole model and of the quantized layers.
    They are counted from the headers of the written files.
    """
    parts = ((*split_tensor(name), info) for name, info in after.tensors.items())
    packed = [info for layer, part, info in parts if layer in formats and part != "bias"]
    weights = sum(layer.outputs * layer.inputs for layer in selection.layers.values())
    packed_bits = 8 * sum(info.size_bytes for info in packed)
    return {
        "bits_per_weight": round(8 * after.shape.size_bytes / before.shape.elements, 4),
        "quantized_bits_per_weight": round(packed_bits / weights, 4),
        "formats": dict(Counter(form.label for form in formats.values())),
    }
