"""Move a weight so that it makes up for what was rounded in front of it, before it is rounded itself.

    minimize the mean over tokens of c (|Q x - (W y + e)|^2 + damping |Q - W|^2)
    Q = W + (W E[c (y - x) x^T] + E[c e x^T]) (E[c x x^T] + damping)^-1

x is what the quantized model gives to the layer, and y what the unmodified one gives it. e is what
the sum lacks that the layer's outputs are added to; 0 for outputs that are added to nothing. c is
what a token counts. GPTAQ (arXiv:2504.02692) and Qronos (arXiv:2505.11695) have the first term.
Rounding Q against E[c x x^T] gives the least error of the same objective.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.algorithms.hessian import Hessian


class Mismatch(Hessian):
    """Sums what moves a weight, in float32, beside the Hessian of the quantized model's inputs."""

    def __init__(self, inputs: int, device: torch.device | str) -> None:
        super().__init__(inputs, device, equal_tokens=False)
        self._of_inputs = torch.zeros(inputs, inputs, device=device)
        self._of_sums: Tensor | None = None

    def add_pair(self, inputs: Tensor, wanted: Tensor, counts: Tensor, lacking: Tensor | None) -> None:
        """Take what the quantized and the unmodified model give to a layer, float [tokens, in].

        counts: float32 [tokens, 1]; lacking: float [tokens, out], what the sum lacks behind the layer.
        """
        given = inputs.float()
        counted = given * counts
        self.tokens += len(given)
        self._sum.addmm_(counted.T, given)
        self._of_inputs.addmm_((wanted.float() - given).T, counted)
        if lacking is not None:
            summed = lacking.float().T @ counted
            self._of_sums = summed if self._of_sums is None else self._of_sums.add_(summed)

    def moved(self, weight: Tensor, share: float, damping: float) -> Tensor:
        """Return a weight, float32 [out, in], moved by a share of the way.

        damping: as a fraction of the mean of the Hessian's diagonal. A weight whose Hessian is not
        positive definite stays.
        """
        damped = self.matrix()
        damped.diagonal().add_(damping * damped.diagonal().mean())
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            return weight
        pull = weight @ self._of_inputs
        if self._of_sums is not None:
            pull += self._of_sums
        return weight + share * torch.cholesky_solve(pull.T / max(1, self.tokens), lower).T


def equal_counts(rows: Tensor) -> Tensor:
    """Return what tokens count if each is divided by its root mean square: float32 [tokens, 1]."""
    return rows.float().square().mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
