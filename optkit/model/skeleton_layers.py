"""The linear layers of an opened skeleton by their names in the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from optkit.model.blocks import BlockInputs
from optkit.model.experts import Experts
from optkit.model.linear_layers import Layer, layers_of, matrices_of
from optkit.model.read_weights import reads_of
from optkit.model.skeleton import Skeleton


def layers_of_skeleton(skeleton: Skeleton) -> tuple[dict[str, Layer], dict[str, Layer]]:
    """Return the linear layers of the decoder blocks, and those outside."""
    told, reads = layers_of(skeleton.checkpoint.shape), reads_of(skeleton.checkpoint.config)
    matrices = matrices_of(skeleton.checkpoint.shape)
    layers, blocks = {}, []
    for block in skeleton.blocks:
        blocks.append(f"{block.name}.")
        for name, module in skeleton.linears(block).items():
            transposed = isinstance(module, Conv1D)
            outputs, inputs = reversed(module.weight.shape) if transposed else module.weight.shape
            layers[name] = told.get(name) or Layer(name, outputs, inputs, transposed, reads=reads(name))
    layers |= {name: layer for name, layer in told.items() if layer.router}
    outside = {
        stored: matrices.get(stored)
        or Layer(stored, module.out_features, module.in_features, transposed=False, reads=reads(stored))
        for name, stored in stored_names(skeleton).items()
        if not name.startswith(tuple(blocks)) and isinstance(module := skeleton.model.get_submodule(name), nn.Linear)
    }
    read = set(skeleton.tensor_names.values())
    unread = {name: layer for name, layer in matrices.items() if f"{name}.weight" not in read}
    return layers, {**outside, **unread}


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a layer or norm as it lies in the module."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


def inputs_of(module: nn.Module) -> int:
    """Return how many inputs a Linear or Conv1D has."""
    return weight_of(module).shape[0 if isinstance(module, Conv1D) else -1]


def float_weight(module: nn.Module) -> Tensor:
    """Return the weight of a Linear or Conv1D as float32 [out, in]."""
    stored = weight_of(module).detach()
    return (stored.T.contiguous() if isinstance(module, Conv1D) else stored).float()


def put_weight_(module: nn.Module, weight: Tensor) -> None:
    """Set the weight of a Linear or Conv1D to float [out, in]."""
    weight_of(module).copy_(weight.T if isinstance(module, Conv1D) else weight)


def put_tensors_(skeleton: Skeleton, index: int, tensors: Mapping[str, Tensor]) -> None:
    """Set parameters of a loaded block to the tensors of the checkpoint that are given for them."""
    block = skeleton.blocks[index]
    for name, parameter in block.module.named_parameters(prefix=block.name):
        if (stored := tensors.get(skeleton.tensor_name(name))) is not None:
            parameter.copy_(stored)


def advance_with(
    skeleton: Skeleton, inputs: BlockInputs, device: str, less_memory: str, index: int, tensors: Mapping[str, Tensor]
) -> None:
    """Bring inputs behind a block in which tensors of the checkpoint have these values."""
    with skeleton.loaded(skeleton.blocks[index], device, less_memory):
        put_tensors_(skeleton, index, tensors)
        skeleton.advance_(index, inputs)


def stored_names(skeleton: Skeleton) -> dict[str, str]:
    """Return linear layer of transformers' model -> its name in the checkpoint.
    A tied lm_head keeps its own.
    """
    uses = Counter(skeleton.tensor_names.values())
    modules = dict(skeleton.model.named_modules())
    unfused = tuple(f"{name}." for name, module in modules.items() if isinstance(module, Experts))
    found = {}
    for name, module in modules.items():
        if isinstance(module, (nn.Linear, Conv1D)) and not name.startswith(unfused):
            tensor = skeleton.tensor_names.get(f"{name}.weight", name)
            found[name] = name if uses[tensor] > 1 else tensor.removesuffix(".weight")
    return found
