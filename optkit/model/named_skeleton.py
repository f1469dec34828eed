"""A model whose code nobody knows, by the names and shapes of its tensors alone.

Stages that compute with weights and run no model need no more: every matrix in the lists of blocks
is taken for a linear layer, as `linear_layers.layers_of` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optkit.model.blocks import Block
from optkit.model.checkpoint import Checkpoint
from optkit.model.empty_model import stored_dtype
from optkit.model.linear_layers import Layer, matrices_of
from optkit.model.output_layer import head_of, tied_embedding
from optkit.model.skeleton import Skeleton
from optkit.model.task import Task


def open_skeleton(checkpoint: Checkpoint, trust_remote_code: bool = False) -> Skeleton:
    """Return the model of a checkpoint on the meta device; of an unknown architecture its names."""
    if checkpoint.shape.task is Task.UNKNOWN:
        return NamedSkeleton(checkpoint)
    return Skeleton(checkpoint, trust_remote_code=trust_remote_code)


class NamedSkeleton(Skeleton):
    """Linear layers on the meta device, each where its name says; nothing of it can be run."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        shape = checkpoint.shape
        self.checkpoint = checkpoint
        self.dtype = stored_dtype(checkpoint)
        self.model: Any = nn.Module()
        for layer in (matrices_of(shape) | head_of(shape)).values():
            _add_(self.model, layer, self.dtype)
        self.tensor_names = {name: name for name in checkpoint.tensors}
        if table := tied_embedding(shape):
            self.tensor_names = {"lm_head.weight": table, **self.tensor_names}
        places = dict.fromkeys(place for name in checkpoint.tensors if (place := shape.block(name)))
        names = [f"{parent}.{index}".lstrip(".") for parent, index in sorted(places)]
        self.blocks = tuple(Block(name, nn.Module()) for name in names)
        joined = [name for name, info in checkpoint.tensors.items() if len(info.shape) > 2 and shape.block(name)]
        self.fused = dict.fromkeys(joined, "not a matrix, and nobody knows the code that reads it")

    def linears(self, block: Block) -> dict[str, Any]:
        inside = f"{block.name}."
        named = ((name, module) for name, module in self.model.named_modules() if name.startswith(inside))
        return {name: module for name, module in named if isinstance(module, nn.Linear)}


def _add_(model: nn.Module, layer: Layer, dtype: torch.dtype) -> None:
    *path, last = layer.name.split(".")
    for part in path:
        model = model._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    model._modules[last] = nn.Linear(layer.inputs, layer.outputs, bias=False, device="meta", dtype=dtype)
