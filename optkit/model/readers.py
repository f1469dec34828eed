"""The norms that read hidden states behind a decoder block."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from optkit.model.blocks import Call
from optkit.model.replaced_forward import hooked
from optkit.model.skeleton import Skeleton


def readers(skeleton: Skeleton, index: int, hidden: Tensor, call: Call) -> list[nn.Module]:
    """Return the norms by which the block behind a loaded one, and the output layer, read hidden states,
    in float32. Blocks that begin with no norm (OLMo 2) read them as they are.

    Found by running the block: its norm is given what the block is given. The next one has its own in
    the same place, and the last norm beside the blocks is that of the output layer.
    """
    block = skeleton.blocks[index]
    entering = hidden if call.added is None else hidden + call.added
    norms = {name: module for name, module in block.module.named_modules() if _is_norm(module)}
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def observe(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            given = arguments[0] if arguments else None
            if isinstance(given, Tensor) and given.shape == entering.shape and bool((given == entering).all()):
                found.append(name)

        return observe

    with hooked(module.register_forward_pre_hook(look(name)) for name, module in norms.items()):
        skeleton.run_block(index, hidden, call)
    if not found:
        return [nn.Identity()]
    first, decoder = norms[found[0]], block.name.rpartition(".")[0].rpartition(".")[0]
    beside = skeleton.model.get_submodule(decoder).named_children()
    last = [f"{decoder}.{name}".lstrip(".") for name, module in beside if type(module) is type(first)][-1:]
    places = [*(f"{each.name}.{found[0]}" for each in skeleton.blocks[index + 1 : index + 2]), *last]
    made = [_with_weights_of(first, place, skeleton) for place in places]
    return [norm for norm in made if norm] or [nn.Identity()]


def _is_norm(module: nn.Module) -> bool:
    """Say whether a module has a weight for each element of what it is given, and no part."""
    weights = list(module.parameters())
    return bool(weights) and not list(module.children()) and all(weight.dim() == 1 for weight in weights)


def _with_weights_of(norm: nn.Module, place: str, skeleton: Skeleton) -> nn.Module | None:
    """Return a copy of a norm with the weights that lie in a place of the model, if there are any."""
    copy: nn.Module = deepcopy(norm).float().requires_grad_(False)
    for leaf, parameter in copy.named_parameters():
        stored = skeleton.tensor_names.get(f"{place}.{leaf}")
        if stored is None:
            return None
        parameter.copy_(skeleton.checkpoint.read_finite(stored))
    return copy
