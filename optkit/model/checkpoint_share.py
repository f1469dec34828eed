"""The share that one of several processes has of a checkpoint whose weights are packed.
transformers splits float weights itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import TensorInfo
from optkit.model.split_plan import BY_INPUTS, BY_OUTPUTS, plan_of, split_dimension_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPE, ORDER, BIAS = "weight_shape", "weight_g_idx", "bias"


class CheckpointShare(Checkpoint):
    """A checkpoint of compressed-tensors as if its split layers had their share of heads and columns alone."""

    def __init__(self, whole: Checkpoint, index: int, count: int) -> None:
        """Raises StageError if a layer cannot be split so."""
        super().__init__(whole.directory)
        self.index, self.count = index, count
        self.plan = plan_of(whole.shape) or {}
        self._whole = dict(self.tensors)
        for name, info in self._whole.items():
            self.tensors[name] = self._share_of(name, info)

    def read(self, name: str, pinned: bool = False) -> Tensor:
        """Return this process's share of a tensor, see `Checkpoint.read`."""
        tensor, dimension = self._read(name, self._whole[name], pinned=pinned), self.dimension_of(name)
        if name.endswith(f".{SHAPE}") and dimension is not None:
            tensor[dimension] //= self.count
        if name.endswith(f".{BIAS}") and dimension == BY_INPUTS and self.index:
            return torch.zeros_like(tensor)  # it is added once
        if self.tensors[name].shape == self._whole[name].shape or dimension is None:
            return tensor
        size = tensor.shape[dimension] // self.count
        return tensor.narrow(dimension, self.index * size, size).clone()

    def shrink_(self, model: PreTrainedModel) -> None:
        """Give the layers of an empty model the shapes of the shares."""
        for name, module in model.named_modules():
            dimension = self.dimension_of(f"{name}.weight")
            if dimension is None or not isinstance(module, nn.Linear):
                continue
            sizes = [module.out_features, module.in_features]
            sizes[dimension] //= self.count
            module.out_features, module.in_features = sizes
            module.weight = nn.Parameter(module.weight.new_empty(sizes), requires_grad=False)
            if module.bias is not None and dimension == BY_OUTPUTS:
                module.bias = nn.Parameter(torch.empty_like(module.bias[: sizes[0]]), requires_grad=False)

    def dimension_of(self, name: str) -> int | None:
        """Return along what a tensor is split, None if it is whole."""
        return split_dimension_of(name, self.plan)

    def _share_of(self, name: str, info: TensorInfo) -> TensorInfo:
        dimension, leaf = self.dimension_of(name), name.rpartition(".")[2]
        if leaf == ORDER and dimension == BY_INPUTS:
            raise StageError(
                f"{name} says that inputs are grouped in another order",
                where="tensor_parallel",
                why="Each device has consecutive inputs of a layer, and whole groups of them",
                remedy="Quantize it with groups in order, as optkit does, or take tensor_parallel out of the recipe",
            )
        if dimension is None or leaf in (SHAPE, ORDER) or dimension >= len(info.shape) or info.shape[dimension] == 1:
            return info
        if info.shape[dimension] % self.count:
            raise StageError(
                f"{info.shape[dimension]:,} {'inputs or groups' if dimension else 'outputs'} of {name} "
                f"are no multiple of {self.count} devices",
                where="tensor_parallel",
                why="Each device gets an equal share, and whole groups of a scale",
                remedy="Use a number of devices that divides them, or another group_size",
            )
        sizes = list(info.shape)
        sizes[dimension] //= self.count
        return replace(info, shape=tuple(sizes))
