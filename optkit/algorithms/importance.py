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


def channel_energy(weight: Tensor, matrix: Tensor) -> Tensor:
    """Return what each input adds to the mean square of a linear layer's outputs if it stood alone, float32 [in].

    weight: float [out, in]; matrix: mean of x x^T of the inputs, float32 [in, in]. Minitron (arXiv:2407.14679) ranks by activations alone;
    here what reads them counts too.
    """
    return matrix.diagonal() * weight.float().square().sum(0)


def head_energy(weight: Tensor, matrix: Tensor, size: int) -> Tensor:
    """Return what each head of `size` inputs adds to the mean square of a linear layer's outputs if it stood alone, float32 [heads]."""
    heads = weight.shape[1] // size
    blocks = matrix.unflatten(0, (heads, size)).unflatten(2, (heads, size)).diagonal(dim1=0, dim2=2)  # [size, size, heads]
    columns = weight.float().unflatten(1, (heads, size))
    energy: Tensor = torch.einsum("ohi,ijh,ohj->h", columns, blocks, columns)
    return energy


def highest(values: Tensor, count: int) -> Tensor:
    """Return the places of the highest values, int64 [count], in order of place."""
    return values.argsort(descending=True, stable=True)[:count].sort().values


def compensated(weight: Tensor, kept: Tensor, cross: Tensor, inner: Tensor, damping: float = 0.01) -> Tensor:
    """Return the columns that are kept, float32 [out, kept], changed so that the outputs stay as they were, by least squares.

    weight: float [out, in]; kept: int64 [kept]; cross: mean of x y^T, float32 [in, kept], of the inputs x as they were and y as they are
    now; inner: mean of y y^T. `damping` of the diagonal of `inner`, as a fraction of its mean, keeps the columns near what they were.
    """
    left = weight[:, kept].double()
    solvable = inner.double().clone()
    solvable.diagonal().add_(damping * solvable.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    missing = weight.double() @ cross.double() - left @ inner.double()
    made: Tensor = left + torch.linalg.solve(solvable, missing.T).T
    return made.float()


def paired_moments(before: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of x y^T and y y^T over tokens, float32, for inputs that were x, float [..., in], and are y, float [..., kept].

    Both are divided by the root mean square of x, token by token, so that every token counts the same.
    """
    old, new = before.flatten(0, -2).float(), now.flatten(0, -2).float()
    scale = old.square().mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
    old, new = old * scale, new * scale
    return old.T @ new, new.T @ new
