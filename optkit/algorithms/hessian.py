"""The Hessian of a linear layer's squared output error: the sum of x x^T over its inputs x."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 384
"""Columns computed at a time: the matrix is symmetric, so what lies above its diagonal blocks is
left out and mirrored at the end.
"""


class Hessian:
    """Sums x x^T in float32, on the device of the inputs."""

    def __init__(self, inputs: int, device: torch.device | str = "cpu", equal_tokens: bool = True) -> None:
        """`equal_tokens` divides each x by its root mean square, so that all tokens count the same.

        Without it a few tokens with enormous activations (the first of a sequence, as a rule)
        outweigh all others in some layers.
        """
        self.equal_tokens = equal_tokens
        self.tokens = 0
        self._sum = torch.zeros(inputs, inputs, device=device)

    def add(self, inputs: Tensor) -> None:
        """Take float [..., in]."""
        rows = inputs.flatten(0, -2).float()
        if self.equal_tokens:
            square = rows.square().mean(-1, keepdim=True)
            rows = rows * square.clamp(min=torch.finfo(torch.float32).tiny).rsqrt()
        self.tokens += len(rows)
        for start in range(0, rows.shape[1], BLOCK):
            end = start + BLOCK
            self._sum[start:end, :end].addmm_(rows[:, start:end].T, rows[:, :end])

    def matrix(self) -> Tensor:
        """Return the mean of x x^T, float32 [in, in]; NaN or Inf if an input was."""
        lower = self._sum.tril()
        return (lower + lower.tril(-1).T) / max(1, self.tokens)
