"""Refuse, before anything runs, models whose parts optkit does not find under the names of their tensors. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.errors import SourceError
from optkit.model.conversions import rewritten_tensor
from optkit.model.shape import ModelShape
from optkit.model.task import ENCODER_DECODERS, Task, architectures_of


def refuse_unfound(shape: ModelShape, where: str) -> None:
    """Raise SourceError for a model whose parts optkit cannot name; `where` is the stage that finds them, if any.
    Of one that brings its own code nothing is known before that runs.
    """
    if not where or shape.task is Task.UNKNOWN or "auto_map" in shape.config:
        return
    if tensor := rewritten_tensor(shape.config, shape.tensors):
        raise rewritten(shape.config, tensor, where)
    refuse_without_blocks(shape, where)


def refuse_without_blocks(shape: ModelShape, where: str) -> None:
    """Raise SourceError for a model whose blocks are not as many as config.json says; `where` is what needs them."""
    counted, lists = shape.block_count, shape.lists
    if (
        "auto_map" not in shape.config
        and counted
        and lists
        and shape.decoder is None
        and shape.task not in ENCODER_DECODERS
    ):
        seen = ", ".join(f"{name} with {len(indices)}" for name, (indices, *_) in list(lists.items())[:3])
        raise SourceError(
            f"unsupported architecture {architectures_of(shape.config)}: no list of {counted} decoder blocks",
            where=where,
            why=f"A list as long as config.json says was looked for; there is {seen}",
            remedy="Take a stage that reads tensors and no blocks, such as cast",
        )


def rewritten(config: Mapping[str, Any], tensor: str, where: str) -> SourceError:
    """Return the error of a model whose weights are other tensors than those of its files."""
    return SourceError(
        f"{config.get('model_type')} is not supported: transformers rewrites {tensor} while it loads it",
        where=where,
        why="It joins or splits what is there, and optkit reads weights as they are in the file",
        remedy="Take a stage that reads tensors and no model, such as cast",
    )
