"""What this process holds of a model whose matrices are split over several."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

SPLIT_BY = "split_by"
"""What a layer has that holds a share without transformers' doing: BY_OUTPUTS or BY_INPUTS."""


def local_part(tensor: Tensor) -> Tensor:
    """Return the share of a tensor that this process holds, all of it if it is not split."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; every process that holds a share of it has to ask."""
    split: Any = tensor
    found: Tensor = split.full_tensor() if is_split(tensor) else tensor
    return found


def is_split(tensor: Tensor | None) -> bool:
    """Say whether other processes hold other parts of a tensor."""
    return any(not each.is_replicate() for each in getattr(tensor, "placements", ()))


def split_dimension(layer: nn.Module) -> int | None:
    """Return BY_OUTPUTS or BY_INPUTS for a layer's weight, None if it is not split."""
    weight: Any = getattr(layer, "weight", None)
    if (told := getattr(layer, SPLIT_BY, None)) is not None:
        return int(told)
    return int(weight.placements[0].dim) if is_split(weight) else None
