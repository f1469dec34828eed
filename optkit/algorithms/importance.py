"""How much of a model's work its parts do: decoder blocks by how far they turn the hidden states."""

from __future__ import annotations

import torch
from torch import Tensor


def block_influence(entering: Tensor, leaving: Tensor) -> float:
    """Return the sum over tokens of 1 - cos(entering, leaving), for states float [..., hidden].

    Its mean is the block influence of ShortGPT (arXiv:2403.03853), formula 1; over several blocks
    in a row, that of all of them together.
    """
    before, after = entering.double(), leaving.double()
    lengths = (before.norm(dim=-1) * after.norm(dim=-1)).clamp_min(torch.finfo(torch.float32).tiny)
    return float((1 - (before * after).sum(-1) / lengths).sum())


def channel_energy(weight: Tensor, matrix: Tensor) -> Tensor:
    """Return what each input alone adds to the mean square of the outputs, float32 [in].

    weight: float [out, in]; matrix: mean of x x^T of the inputs, float32 [in, in]. Minitron
    (arXiv:2407.14679) ranks by activations alone;
    here what reads them counts too.
    """
    return matrix.diagonal() * weight.float().square().sum(0)


def head_energy(weight: Tensor, matrix: Tensor, size: int) -> Tensor:
    """Return what each head alone adds to the mean square of the outputs, float32 [heads]."""
    heads = weight.shape[1] // size
    # [size, size, heads]
    blocks = matrix.unflatten(0, (heads, size)).unflatten(2, (heads, size)).diagonal(dim1=0, dim2=2)
    columns = weight.float().unflatten(1, (heads, size))
    energy: Tensor = torch.einsum("ohi,ijh,ohj->h", columns, blocks, columns)
    return energy


def highest(values: Tensor, count: int) -> Tensor:
    """Return the places of the highest values, int64 [count], in order of place."""
    return values.argsort(descending=True, stable=True)[:count].sort().values


def compensated(weight: Tensor, matrix: Tensor, kept: Tensor, damping: float = 0.01) -> Tensor:
    """Return the kept columns, float32 [out, kept], compensated for the others by least squares.

    weight: float [out, in]; matrix: mean of x x^T of the inputs, float32 [in, in]; kept: int64
    [kept]. What the kept inputs tell of the
    removed ones is read off the matrix; `damping` is added to its diagonal, as a fraction of its
    mean.
    """
    gone = (
        torch.ones(len(matrix), dtype=torch.bool, device=matrix.device).index_fill_(0, kept, False).nonzero().squeeze(1)
    )
    inner = matrix[kept][:, kept].double()
    inner.diagonal().add_(damping * inner.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    told = torch.cholesky_solve(matrix[kept][:, gone].double(), torch.linalg.cholesky(inner))  # [kept, gone]
    made: Tensor = weight[:, kept].double() + weight[:, gone].double() @ told.T
    return made.float()
