"""How much of a model's work its parts do: decoder blocks by how far they turn the hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def block_influence(entering: Tensor, leaving: Tensor) -> float:
    """Return the sum over tokens of 1 - cos(entering, leaving), for hidden states float [..., hidden].

    Its mean is the block influence of ShortGPT (arXiv:2403.03853), formula 1; over several blocks in a row, that of all of them together.
    """
    before, after = entering.double(), leaving.double()
    lengths = (before.norm(dim=-1) * after.norm(dim=-1)).clamp_min(torch.finfo(torch.float32).tiny)
    return float((1 - (before * after).sum(-1) / lengths).sum())


def lowest(values: Sequence[float], count: int) -> list[int]:
    """Return the places of the lowest values, in order of place; of equal ones the first."""
    return sorted(sorted(range(len(values)), key=lambda place: values[place])[:count])
