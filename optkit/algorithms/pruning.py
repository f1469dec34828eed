"""Which weights of a linear layer become 0: a score for each, and masks of the highest.
Masks are unstructured or n of every m.

A mask is bool, True for a weight that stays. Magnitude: |w|. Wanda (Sun et al. 2023,
arXiv:2306.11695): |w| times the norm of its input. Wanda compares the weights of one output;
magnitude those of the whole layer, as that paper's baseline does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optkit.algorithms.sparsity_pattern import Pattern

if TYPE_CHECKING:
    from optkit.model.together import Together

PRUNED = 0.2
"""The least share of zeros that is taken for the work of pruning."""


class InputSquares:
    """Sums the squares of a layer's inputs, in float32 on their device.
    That is the diagonal of its Hessian, all that Wanda needs.
    """

    def __init__(self, inputs: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self._sum = torch.zeros(inputs, device=device)

    def add(self, inputs: Tensor) -> None:
        """Take float [..., in]."""
        rows = inputs.flatten(0, -2).float()
        self.tokens += len(rows)
        self._sum += rows.square().sum(0)

    def add_up_(self, together: Together, tokens: int) -> None:
        """Become the sum over what all processes took, so many tokens."""
        self.tokens = tokens
        together.sum_(self._sum)

    def mean(self) -> Tensor:
        """Return the mean square of each input, float32 [in]; NaN or Inf if an input was."""
        return self._sum / max(1, self.tokens)

    def norms(self) -> Tensor:
        """Return its root."""
        return self.mean().sqrt()


def wanda_scores(weight: Tensor, norms: Tensor) -> Tensor:
    """Return |w| times the norm of its input, for weights float [out, in] and norms float [in]."""
    return weight.abs() * norms


def kept(scores: Tensor, sparsity: float, pattern: Pattern | None, by_output: bool) -> Tensor:
    """Return the mask of the highest scores, float [out, in]; ties drop the first inputs.

    `by_output`: the share `sparsity` of every output is 0, else that of the whole layer. A pattern
    takes their place.
    """
    if pattern is not None:
        return kept_by_pattern(scores, pattern)
    rows = scores if by_output else scores.reshape(1, -1)
    return _without_lowest(rows, round(sparsity * rows.shape[1])).view_as(scores)


def kept_by_pattern(scores: Tensor, pattern: Pattern) -> Tensor:
    """Return the mask without the lowest `zeros` of every `of` neighbours; float [out, in]."""
    return _without_lowest(scores.reshape(-1, pattern.of), pattern.zeros).view_as(scores)


def follows(weight: Tensor, pattern: Pattern) -> bool:
    """Say whether every group of a weight, float [out, in], has its zeros."""
    if weight.shape[1] % pattern.of:
        return False
    return bool(((weight.reshape(-1, pattern.of) == 0).sum(1) >= pattern.zeros).all())


def zeros_of_pruning(weight: Tensor) -> Tensor | None:
    """Return where a weight, float [out, in], is 0, None if that is less than PRUNED of it:
    chance or rounding, not pruning.
    """
    zeros = weight == 0
    return zeros if int(zeros.sum()) >= PRUNED * weight.numel() else None


def _without_lowest(rows: Tensor, count: int) -> Tensor:
    """Return the mask of each row without its `count` lowest."""
    mask = torch.ones_like(rows, dtype=torch.bool)
    return mask.scatter_(1, rows.argsort(dim=1, stable=True)[:, :count], False)
