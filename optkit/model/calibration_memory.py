"""What running a calibration text through the decoder blocks, one at a time, takes. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from optkit.errors import StageError
from optkit.model.attention_choice import eager_bytes
from optkit.model.expected_tensors import FLOATS
from optkit.model.linear_layers import Layer
from optkit.model.shape import DTYPE_BITS, ModelShape
from optkit.model.task import architectures_of
from optkit.model.text_config import text_config


def calibration_bytes(
    shape: ModelShape, layers: Mapping[str, Layer], tokens: int, batch: tuple[int, int]
) -> tuple[int, int]:
    """Return the bytes of a text's hidden states, as in the file, and of a block's activations.
    `batch`: sequences that run at once, tokens of each.

    Raises StageError as `refuse_unreached` does.
    """
    refuse_unreached(shape, "calibration")
    width = shape.width or min(layer.inputs for layer in layers.values())
    element = max(DTYPE_BITS[info.dtype] // 8 for info in shape.tensors.values() if info.dtype in FLOATS)
    widest = max(layer.inputs for layer in layers.values())
    sequences, length = batch
    if frames := shape.config.get("max_source_positions"):  # an encoder that hears has as many, whatever it hears
        tokens, length = tokens * max(frames, length) // length, max(frames, length)
    running = 4 * sequences * length * (6 * width + 3 * widest) + eager_bytes(shape.config, sequences, length)
    return tokens * width * element, running


def refuse_unreached(shape: ModelShape, where: str) -> None:
    """Raise StageError if a text does not run through all blocks of the model."""
    if blocks := text_config(shape.config).get("cross_attention_layers"):
        raise StageError(
            f"{len(blocks):,} of {shape.block_count:,} blocks of {architectures_of(shape.config)} run for images alone",
            where=where,
            why="Text does not reach them",
            remedy="Take a stage without calibration: rtn, fp8, mx, nf4, or prune by magnitude",
        )
