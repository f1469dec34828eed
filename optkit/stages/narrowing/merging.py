"""Add the experts that go to those that stay and make most nearly the same.

After HC-SMoE (Chen et al. 2024, arXiv:2410.08589): near are experts whose mean outputs on the text are. Each
weight becomes the mean of those of its group, each expert counting by its tokens (M-SMoE, Li et al. 2023,
arXiv:2310.01334). Their channels are not put in another order first, as M-SMoE does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from optkit.model.checkpoint import Checkpoint
from optkit.model.fewer_experts import Mixture

Groups = Mapping[int, Sequence[int]]
"""Expert that stays -> those whose mean it becomes, itself among them."""


def groups_of(outputs: Tensor, kept: Sequence[int]) -> dict[int, list[int]]:
    """Return which experts become which: that with the nearest mean output, float [experts, width]."""
    nearest = torch.cdist(outputs, outputs[list(kept)]).argmin(1).tolist()
    found = {expert: [expert] for expert in kept}
    for expert, place in enumerate(nearest):
        if expert not in found:
            found[kept[place]].append(expert)
    return found


def merged(checkpoint: Checkpoint, name: str, mixture: Mixture, groups: Groups, tokens: Tensor) -> Tensor:
    """Return a tensor of experts that stay, each weight the mean of its group's. Raises SourceError for NaN or Inf."""
    place = mixture.places[name]
    if place.index is None:
        stored = checkpoint.read_finite(name)
        return torch.stack([_mean([stored[each] for each in group], tokens[group]) for group in groups.values()])
    group, rest = groups[place.index], name.removeprefix(f"{place.experts}.{place.index}")
    return _mean([checkpoint.read_finite(f"{place.experts}.{each}{rest}") for each in group], tokens[group])


def _mean(weights: Sequence[Tensor], tokens: Tensor) -> Tensor:
    shares = (tokens.clamp(min=1) / tokens.clamp(min=1).sum()).tolist()
    total = torch.zeros_like(weights[0], dtype=torch.float32)
    for weight, share in zip(weights, shares, strict=True):
        total += share * weight.float()
    return total.to(weights[0].dtype) if len(weights) > 1 else weights[0]
