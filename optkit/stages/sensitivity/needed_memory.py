"""What measuring the sensitivity of a model's layers takes in memory, from shapes alone.

No torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from optkit.common.grouping import grouped
from optkit.model.linear_layers import Layer
from optkit.model.shape import ModelShape

PROBES = 2
"""Random probes of the predictions for each sequence: the bands of a layer's outputs make many
samples of each.
"""
COPIES = 6
"""Matrices of the size of a layer's weight that are held beside those of its forms: its Hessian,
GPTQ's work.
"""
FLOAT_BYTES = 4


def sensitivity_memory(
    shape: ModelShape, layers: Mapping[str, Layer], tokens: int, forms: int, device: str
) -> tuple[int, int]:
    """Return the bytes of RAM and of GPU memory for a pass over so many tokens.
    Each layer has at most `forms`; all is float32.
    """
    by_block = grouped(layers.values(), lambda layer: shape.block(f"{layer.name}.weight"))
    elements = shape.block_elements
    width = shape.width or min(layer.inputs for layer in layers.values())
    entering = (len(by_block) + 1) * tokens * width
    behind = (PROBES + 1) * tokens * width
    seen = max(tokens * sum(layer.inputs + PROBES * layer.outputs for layer in block) for block in by_block.values())
    largest = max(layer.inputs * layer.outputs for layer in layers.values())
    block = max(elements[place] for place in by_block) + seen + (2 * forms + COPIES) * largest
    work = FLOAT_BYTES * (behind + max(block, elements[None]))
    return (FLOAT_BYTES * entering, work) if device.startswith("cuda") else (FLOAT_BYTES * entering + work, 0)
