"""What a graph wants for a prompt: masks, positions, token types, an empty KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optkit.errors import SourceError
from optkit.model.onnx_file import Port

TOKENS = "input_ids"


def prompt_feeds(inputs: Mapping[str, Port], tokens: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return a graph's inputs for whole sequences, int64 [batch, sequence], that nothing precedes.

    Raises SourceError for an input that no language model has.
    """
    batch, sequence = tokens.shape
    known = {
        TOKENS: tokens,
        "attention_mask": np.ones_like(tokens),
        "position_ids": np.broadcast_to(np.arange(sequence), tokens.shape),
        "token_type_ids": np.zeros_like(tokens),
    }
    feeds: dict[str, NDArray[Any]] = {}
    for name, port in inputs.items():
        if name in known:
            feeds[name] = np.ascontiguousarray(known[name]).astype(port.dtype)
        elif "past" in name and len(port.shape) == 4:
            feeds[name] = np.zeros((batch, int(port.shape[1]), 0, int(port.shape[3])), dtype=_dtype(port.dtype))
        else:
            raise SourceError(
                f"optkit does not know what to give to its input {name}",
                where="model.onnx",
                why=f"It knows {', '.join(known)}",
            )
    return feeds


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    half: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return half
