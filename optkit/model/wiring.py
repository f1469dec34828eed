"""Producers that can absorb the scales of input channels.
Running the layers shows which norm or linear layer makes the input of which.

A linear layer computes the same from `x / s` with the columns of its weight multiplied by `s`. What
made x takes the division: a norm in its weight, a linear layer in its output rows. Neither names
nor architectures are looked at, see `wiring_probe`.

wiring = fold_groups(skeleton, index, hidden, call)
for group in wiring.groups:
    fold_(skeleton, group, scales)  # the block computes what it did
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from optkit.model.blocks import Call
from optkit.model.residual_stream import OFFSETS
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import inputs_of, weight_of
from optkit.model.wiring_probe import Found, Scope, close, every_expert_called, probe, scopes


@dataclass(frozen=True, eq=False)
class FoldGroup:
    """Layers that get the same input, and what makes it."""

    producer: str
    """The norm or linear layer, by its name in the checkpoint without `.weight`, e.g.
    `model.layers.0.input_layernorm`.
    """
    kind: Literal["norm", "linear"]
    consumers: tuple[str, ...]
    """All whose weights read the input, by their names in the checkpoint: linear layers, and
    routers of experts.
    """
    rows: Tensor | None
    """int64 [in]: the producer's output that each input channel is made of. Channels with the same
    one have to share their scale (v_proj with grouped-query attention). None if input i is output
    i.
    """
    offset: float
    """What the norm adds to its weight before it multiplies by it."""
    places: Mapping[str, str]
    """Name in the checkpoint -> name of the module in the model."""


@dataclass(frozen=True)
class Wiring:
    """What can be folded in a block."""

    groups: tuple[FoldGroup, ...]
    """In the order in which their producers run."""
    refused: Mapping[str, str]
    """Linear layers of the block whose input scales cannot be folded: name in the checkpoint -> the
    reason.
    """


def fold_groups(skeleton: Skeleton, index: int, hidden: Tensor, call: Call) -> Wiring:
    """Find what can be folded in a loaded block.
    hidden: float [batch, sequence, hidden], a few dozen tokens suffice, with their call.

    The weights are as before when it returns. Raises StageError if there are too few tokens for
    every expert to get one.
    """
    block = skeleton.blocks[index]
    places = _places(skeleton, block.name)
    names = {skeleton.model.get_submodule(place): name for name, place in places.items()}
    groups: list[FoldGroup] = []
    reasons: dict[str, str] = {}
    with every_expert_called(block), torch.no_grad():
        for scope in scopes(block.module, lambda: skeleton.run_block(index, hidden, call)):
            for producer in scope.producers:
                if producer not in names:
                    continue
                found = probe(scope, producer)
                if isinstance(found, Found):
                    groups += _checked(skeleton, scope, producer, found, names, places, reasons)
                else:
                    reached = (names[reader] for reader in found.readers if reader in names)
                    reasons |= dict.fromkeys(reached, f"the output of {names[producer]} reaches it {found.reason}")
    foldable = {name for group in groups for name in group.consumers}
    alone = "no norm or linear layer with weights of its own makes its input"
    return Wiring(
        tuple(groups), {name: reasons.get(name, alone) for name in skeleton.linears(block) if name not in foldable}
    )


def fold_(skeleton: Skeleton, group: FoldGroup, scales: Tensor) -> tuple[str, ...]:
    """Divide the producer's output by the scales, float [in], and multiply its consumers' columns.

    Returns the tensors of the checkpoint that are no longer what the file holds. If the weight of a
    norm is stored too coarsely for its quotient (bfloat16), the consumers get the scale that it
    came to. Raises ValueError for scales that are not positive and finite, and for channels of one
    row of the producer with different scales.
    """
    place = group.places[group.producer]
    producer = skeleton.model.get_submodule(place)
    weight = weight_of(producer)
    by_input = scales.to(weight.device, torch.float32)
    if not bool((by_input.isfinite() & (by_input > 0)).all()):
        raise ValueError(f"{group.producer}: a scale is not a positive, finite number")
    outputs = weight.shape[-1] if weight.dim() == 1 or isinstance(producer, Conv1D) else weight.shape[0]
    by_output = (
        by_input
        if group.rows is None
        else by_input.new_ones(outputs).scatter_(0, group.rows.to(weight.device), by_input)
    )
    if group.rows is not None and not torch.equal(by_output[group.rows.to(weight.device)], by_input):
        raise ValueError(f"{group.producer}: channels of one row have different scales")
    changed = [f"{place}.weight"]
    with torch.no_grad():
        if group.kind == "norm":
            before = weight.float() + group.offset
            weight.copy_(before / by_output - group.offset)
            reached = before / (weight.float() + group.offset)
            by_output = torch.where(reached.isfinite() & (reached > 0), reached, by_output)
            by_input = by_output if group.rows is None else by_output[group.rows.to(weight.device)]
        else:
            weight.copy_(weight.float() / (by_output if isinstance(producer, Conv1D) else by_output[:, None]))
        if isinstance(bias := getattr(producer, "bias", None), Tensor):
            bias.copy_(bias.float() / by_output)
            changed.append(f"{place}.bias")
        for name in group.consumers:
            module = skeleton.model.get_submodule(group.places[name])
            columns = weight_of(module)
            columns.copy_(columns.float() * (by_input[:, None] if isinstance(module, Conv1D) else by_input))
            changed.append(f"{group.places[name]}.weight")
    return tuple(skeleton.tensor_name(parameter) for parameter in changed)


def _places(skeleton: Skeleton, block: str) -> dict[str, str]:
    """Return name in the checkpoint -> module, of those with a weight that nothing else uses."""
    uses = Counter(skeleton.tensor_names.values())
    own = {
        name: tensor
        for name, tensor in skeleton.tensor_names.items()
        if name.startswith(f"{block}.") and uses[tensor] == 1
    }
    return {
        tensor.removesuffix(".weight"): name.removesuffix(".weight")
        for name, tensor in own.items()
        if name.endswith(".weight") and tensor.endswith(".weight")
    }


def _checked(
    skeleton: Skeleton,
    scope: Scope,
    producer: nn.Module,
    found: Found,
    names: Mapping[nn.Module, str],
    places: Mapping[str, str],
    reasons: dict[str, str],
) -> Iterator[FoldGroup]:
    """Yield the group if real folding keeps the outputs; else say why not in `reasons`."""
    weight = weight_of(producer)
    kind: Literal["norm", "linear"] = "norm" if weight.dim() == 1 else "linear"
    offset = next((offset for offset in OFFSETS if _vanishes(scope, producer, offset)), None) if kind == "norm" else 0.0
    known = tuple(names[module] for module in found.consumers if module in names)
    reason = ""
    if len(known) < len(found.consumers):
        reason = f"{names[producer]}, which makes its input, feeds a layer whose weight is used elsewhere too"
    elif offset is None:
        reason = f"{names[producer]}, which makes its input, does not multiply by its weight"
    else:
        group = FoldGroup(
            names[producer], kind, known, found.rows, offset, {name: places[name] for name in (names[producer], *known)}
        )
        if _keeps_outputs(skeleton, scope, group):
            yield group
            return
        reason = f"folding into {names[producer]}, which makes its input, would change the block's output"
    reasons |= dict.fromkeys(known, reason)


def _vanishes(scope: Scope, norm: nn.Module, offset: float) -> bool:
    """Whether a norm returns its bias alone when its weight is `-offset`."""
    weight = weight_of(norm)
    before = weight.clone()
    weight.fill_(-offset)
    output = scope.output_of(norm)
    weight.copy_(before)
    bias = getattr(norm, "bias", None)
    return not bool((output - (0 if bias is None else bias)).any())


def _keeps_outputs(skeleton: Skeleton, scope: Scope, group: FoldGroup) -> bool:
    """Whether the outputs stay with scales of 1/2, 1 and 2 folded in; the weights are put back."""
    modules = [skeleton.model.get_submodule(place) for place in group.places.values()]
    held = [(parameter, parameter.clone()) for module in modules for parameter in module.parameters(recurse=False)]
    consumer = skeleton.model.get_submodule(group.places[group.consumers[0]])
    channel = torch.arange(inputs_of(consumer), device=weight_of(consumer).device)
    exponents = (channel if group.rows is None else group.rows.to(channel.device)) % 3 - 1
    before = scope.run()
    fold_(skeleton, group, torch.exp2(exponents.float()))
    after = scope.run()
    for parameter, value in held:
        parameter.copy_(value)
    return all(close(new, old) for new, old in zip(after, before, strict=True))
