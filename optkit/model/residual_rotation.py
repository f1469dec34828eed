"""Rotate the layers that touch the residual stream, and show that the model computes the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from optkit.algorithms.hadamard import Rotation
from optkit.errors import StageError
from optkit.model.attention import head_sizes
from optkit.model.residual_stream import StreamParts
from optkit.model.skeleton_layers import weight_of

TOLERANCE = 1e-3
"""Largest difference of a token's vector, relative to what the part makes of it. Sound rotations of
real models stay below 1e-4.
"""


@dataclass(frozen=True)
class Heads:
    """The layers around the attention of a block whose head dimension can be rotated."""

    values: nn.Linear
    """v_proj: its outputs are the heads of the values."""
    outputs: nn.Linear
    """o_proj: its inputs are the heads of the attention's results."""
    size: int


def fold_norms_(parts: StreamParts) -> list[str]:
    """Fold the norms' weights into the layers that read them; return the names that changed."""
    changed = []
    for norm in parts.norms:
        weight = weight_of(norm.module)
        for name, reader in norm.readers.items():
            weight_of(reader).mul_(weight + norm.offset)
            changed.append(f"{name}.weight")
        weight.fill_(1 - norm.offset)
        changed.append(f"{norm.name}.weight")
    return changed


def rotate_stream_(parts: StreamParts, rotation: Rotation) -> list[str]:
    """Rotate what readers take and writers give; return the names of the changed parameters."""
    changed = []
    for name, reader in parts.readers.items():
        weight = weight_of(reader)
        weight.copy_(rotation.apply(weight))
        changed.append(f"{name}.weight")
    for name, writer in parts.writers.items():
        writer.weight.copy_(rotation.apply(writer.weight.T).T)
        changed.append(f"{name}.weight")
        if writer.bias is not None:
            writer.bias.copy_(rotation.apply(writer.bias))
            changed.append(f"{name}.bias")
    return changed


def rotate_heads_(heads: Heads, rotation: Rotation) -> None:
    """Rotate each head of the values and, back, the inputs of the output projection.
    Values: weight [heads * size, in] and bias.
    """
    values, outputs, size = heads.values, heads.outputs, heads.size
    by_input = values.weight.T.reshape(values.in_features, -1, size)
    values.weight.copy_(rotation.apply(by_input).flatten(1).T)
    if values.bias is not None:
        values.bias.copy_(rotation.apply(values.bias.view(-1, size)).flatten())
    outputs.weight.copy_(rotation.apply(outputs.weight.view(len(outputs.weight), -1, size)).flatten(1))


def find_heads(block: nn.Module, config: Any, index: int) -> Heads | str:
    """Return the projections around the attention of block `index`, or why its heads cannot be rotated."""
    named = {
        leaf: [module for name, module in block.named_modules() if name.rpartition(".")[2] == leaf]
        for leaf in ("q_proj", "v_proj", "o_proj")
    }
    queries = named.pop("q_proj")
    missing = [leaf for leaf, modules in named.items() if len(modules) != 1 or not isinstance(modules[0], nn.Linear)]
    if missing:
        return f"no {' and no '.join(missing)}"
    values, outputs = (cast(nn.Linear, named[leaf][0]) for leaf in ("v_proj", "o_proj"))
    if len(queries) == 1 and getattr(queries[0], "out_features", 0) == 2 * outputs.in_features:
        return "q_proj makes a gate too, which multiplies what leaves them"
    size = head_sizes(config)[index]
    if values.out_features % size or outputs.in_features % size:
        return f"v_proj and o_proj are not made of heads of {size}"
    return Heads(values, outputs, size)


def refuse_difference(where: str, before: Tensor, after: Tensor, scale: Tensor, remedy: str = "") -> float:
    """Return the largest difference of a token, float [..., features], relative to `scale`.

    Raises StageError if it is above the tolerance: the rotated part computes something else.
    """
    lengths = scale.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    difference = float(((after - before).double().norm(dim=-1) / lengths).max())
    if not difference <= TOLERANCE:
        raise StageError(
            f"rotated, it computes something else: tokens differ by up to {difference:.2g} of what it makes of them",
            where=f"rotate: {where}",
            why=f"The architecture has a part that does not commute with the rotation; {TOLERANCE:g} "
            "is the limit, in float32",
            remedy=remedy or "Set rotate.residual to false for this architecture",
        )
    return difference
