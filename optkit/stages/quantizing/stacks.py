"""Which layers GPTQ rounds at a time, and what memory that takes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from optkit.common.grouping import grouped
from optkit.model.linear_layers import EXPERTS, Layer
from optkit.model.output_layer import HEAD
from optkit.packed_tensors.base import LayerFormat

HEAD_ROWS = 1 << 14
"""Rows of lm_head that are quantized at a time."""
EXPERTS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Weights of experts of one shape that are quantized at a time."""
HELD = {"cpu": ((4.0, 1.5), (2.0, 8.5)), "cuda": ((4.0, 1.5), (2.6, 8.2))}
"""Matrices of the Hessian's size, and of the weight's, that are held at once beside the sum: while it is factored,
and while codes improve.
"""


def together(
    stacks: Sequence[list[str]],
    layers: Mapping[str, Layer],
    formats: Mapping[str, LayerFormat],
    compensated: Callable[[str], bool],
    device: str,
) -> Iterator[list[list[str]]]:
    """Yield stacks of layers with one input, alone; experts of one shape and form together.
    `compensated` says of a layer whether its Hessian decides.
    """

    def key(stack: list[str]) -> tuple[object, ...] | str:
        if EXPERTS not in stack[0] or not compensated(stack[0]):
            return stack[0]
        return formats[stack[0]], *((layers[name].outputs, layers[name].inputs) for name in stack)

    for same in grouped(stacks, key).values():
        weights = sum(layers[name].outputs * layers[name].inputs for name in same[0])
        count = max(1, EXPERTS_AT_ONCE[device.partition(":")[0]] // weights)
        yield from (same[start : start + count] for start in range(0, len(same), count))


def parts_of(layers: Mapping[str, Layer]) -> list[list[str]]:
    """Return layers in parts of few enough weights; experts that see all tokens are many."""
    parts: list[list[str]] = []
    room = 0
    for name, layer in layers.items():
        room -= layer.outputs * layer.inputs
        if not parts or (room < 0 and EXPERTS in name):
            parts.append([])
            room = EXPERTS_AT_ONCE["cuda"] - layer.outputs * layer.inputs
        parts[-1].append(name)
    return parts


def work_bytes(stack: Sequence[Layer], stacks: int, device: str, room: int) -> int:
    """Return the bytes that GPTQ works with on layers that share their input, of a block with so many
    `stacks` of their shapes; experts come together up to `room` weights.
    """
    outputs, inputs = sum(layer.outputs for layer in stack), stack[0].inputs
    if stack[0].name == HEAD:
        outputs = min(outputs, HEAD_ROWS)
    most = room // (outputs * inputs) if EXPERTS in stack[0].name else 1
    held = max(hessians * inputs**2 + weights * outputs * inputs for hessians, weights in HELD[device])
    return int(4 * held) * max(1, min(stacks, most))
