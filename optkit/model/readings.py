"""How later parts of a model read the hidden states that a block leaves.

Elements that no norm reads much may be off: Gemma's differ a thousandfold, and its largest are hardly
read. One norm alone does not tell: the next one may have gains of 0 where later ones read.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from optkit.model.blocks import Call
from optkit.model.replaced_forward import hooked
from optkit.model.skeleton import Skeleton

Reading = Callable[[Tensor], Tensor]


def readings(skeleton: Skeleton, index: int, hidden: Tensor, call: Call) -> list[Reading]:
    """Return how hidden states behind a loaded block are read, in float32: as the next block's norm reads
    them, and by the mean gains of all later norms, which blocks in between have added to by then.
    Blocks that begin with no norm (OLMo 2) read them as they are.

    Found by running the block: its norm is given what the block is given, and later blocks have theirs
    in the same place. The last norm beside the blocks is that of the output layer.
    """
    block = skeleton.blocks[index]
    entering = hidden if call.added is None else hidden + call.added
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def observe(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            given = arguments[0] if arguments else None
            if isinstance(given, Tensor) and given.shape == entering.shape and bool((given == entering).all()):
                found.append(name)

        return observe

    norms = {name: module for name, module in block.module.named_modules() if _is_norm(module)}
    with hooked(module.register_forward_pre_hook(look(name)) for name, module in norms.items()):
        skeleton.run_block(index, hidden, call)
    if not found:
        return [nn.Identity()]
    norm, decoder = norms[found[0]], block.name.rpartition(".")[0].rpartition(".")[0]
    beside = skeleton.model.get_submodule(decoder).named_children()
    last = [f"{decoder}.{name}".lstrip(".") for name, module in beside if type(module) is type(norm)][-1:]
    places = [*(f"{each.name}.{found[0]}" for each in skeleton.blocks[index + 1 :]), *last]
    later = [made for place in places if (made := _with_weights_of(norm, place, skeleton))]
    if not later:
        return [nn.Identity()]
    squares = torch.stack([_gains(each, hidden.shape[-1]).square() for each in later])
    means = squares.mean(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)  # 0: it reads nothing
    gains = (squares / means).mean(0).sqrt()
    return [later[0], lambda states: states * gains]


def _is_norm(module: nn.Module) -> bool:
    """Say whether a module has a weight for each element of what it is given, and no part."""
    weights = list(module.parameters())
    return bool(weights) and not list(module.children()) and all(weight.dim() == 1 for weight in weights)


def _with_weights_of(norm: nn.Module, place: str, skeleton: Skeleton) -> nn.Module | None:
    """Return a float32 copy of a norm with the weights that lie in a place of the model, if there are any."""
    made: nn.Module = deepcopy(norm).float().requires_grad_(False)
    for leaf, parameter in made.named_parameters():
        stored = skeleton.tensor_names.get(f"{place}.{leaf}")
        if stored is None:
            return None
        parameter.copy_(skeleton.checkpoint.read_finite(stored))
    return made


def _gains(norm: nn.Module, width: int) -> Tensor:
    """Return what a norm multiplies each element with where it neither shifts nor shrinks them."""
    signs = torch.ones(width, device=next(norm.parameters()).device)
    signs[::2] = -1
    gains: Tensor = signs * (norm(signs) - norm(-signs)) / 2
    return gains
