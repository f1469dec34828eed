"""The output layer, and what else is linear outside the decoder blocks.
Names, shapes and config.json tell. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.errors import SourceError
from optkit.model.linear_layers import Layer, matrices_of
from optkit.model.read_weights import reads_of
from optkit.model.shape import ModelShape
from optkit.model.task import Task
from optkit.model.text_config import text_config

HEAD = "lm_head"
"""Name of the output layer."""


def tied_embedding(shape: ModelShape) -> str:
    """Return the tensor that a tied lm_head shares.
    It is the matrix outside the blocks with a row for each token (GPT-2's wpe has one for each
    position).
    """
    rows = text_config(shape.config).get("vocab_size")
    outside = {name: info for name, info in shape.tensors.items() if shape.block(name) is None and len(info.shape) == 2}
    return next(
        (name for name, info in outside.items() if info.shape[0] == rows and not name.endswith("wpe.weight")), ""
    )


def head_of(shape: ModelShape) -> dict[str, Layer]:
    """Return the output layer by its name, by names and shapes; nothing if there is none, or if
    other parts of the model than the embedding of its decoder may share it. Raises SourceError if
    it is no matrix.
    """
    if shape.task not in (None, Task.GENERATION, Task.UNKNOWN):
        return {}
    name = (
        f"{HEAD}.weight" if f"{HEAD}.weight" in shape.tensors else tied_embedding(shape) if tied(shape.config) else ""
    )
    if not name:
        return {}
    if len(size := shape.tensors[name].shape) != 2:
        raise SourceError(
            f"{name} has the shape {[*size]}",
            why="The output layer is a matrix",
            remedy="Take the checkpoint from its source again",
        )
    outputs, inputs = size
    return {HEAD: Layer(HEAD, outputs, inputs, transposed=False, reads=reads_of(shape.config)(HEAD))}


def outside_of(shape: ModelShape) -> dict[str, Layer]:
    """Return the linear layers outside the decoder blocks as far as names tell.
    They are the output layer, those of other lists of blocks, and what stands between.
    """
    every = matrices_of(shape).items()
    return {name: layer for name, layer in every if not shape.block(f"{name}.weight")} | head_of(shape)


def tied(config: Mapping[str, Any]) -> bool:
    """Say whether lm_head is the embedding, which transformers assumes if config.json is silent."""
    return bool(text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings", True)))


def with_own_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with an lm_head of its own, in nested configs too."""
    nested = {
        key: with_own_head(value) for key, value in config.items() if isinstance(value, dict) and "vocab_size" in value
    }
    return {**config, **nested, "tie_word_embeddings": False}
