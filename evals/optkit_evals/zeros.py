"""How much of a float checkpoint is 0, from some rows of each linear layer.
Reading all weights of a large model would take minutes.
"""

from __future__ import annotations

from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import layers_of

ROWS = 64
"""Rows of a stored weight that are looked at, in PLACES runs that lie evenly spread over it."""
PLACES = 4


def share_of_zeros(checkpoint: Checkpoint) -> float | None:
    """Return the share of weights of the decoder blocks' linear layers that are 0.
    None if none of them is stored as floats.
    """
    from safetensors import safe_open

    zeros = weights = 0
    for layer in layers_of(checkpoint.shape):
        name = f"{layer}.weight"
        with safe_open(checkpoint.files[name], framework="pt") as file:
            stored = file.get_slice(name)
            rows = checkpoint.tensors[name].shape[0]
            for start, end in _runs(rows):
                part = stored[start:end]
                if not part.is_floating_point():
                    break
                zeros += part.numel() - int(part.float().count_nonzero())
                weights += part.numel()
    return zeros / weights if weights else None


def _runs(rows: int) -> list[tuple[int, int]]:
    if rows <= ROWS:
        return [(0, rows)]
    length = ROWS // PLACES
    return [(start, start + length) for start in (place * (rows - length) // (PLACES - 1) for place in range(PLACES))]
