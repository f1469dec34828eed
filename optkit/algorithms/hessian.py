"""The Hessian of a linear layer's squared output error: the sum of x x^T over its inputs x."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.algorithms import column_kernels
from optkit.algorithms.tensor_cores import LONGEST, add_product_, bfloat16_parts, has_tensor_cores

if TYPE_CHECKING:
    from optkit.model.together import Together

BLOCK = {"cpu": 384, "cuda": 1024}
"""Columns computed at a time: the matrix is symmetric, so what lies above its diagonal blocks is
left out and mirrored at the end.
"""


class Hessian:
    """Sums x x^T in float32, on the device of the inputs."""

    def __init__(
        self, inputs: int, device: torch.device | str = "cpu", equal_tokens: bool = True, rounded: bool = False
    ) -> None:
        """`equal_tokens` divides each x by its root mean square, so that all tokens count the same.

        Without it a few tokens with enormous activations (the first of a sequence, as a rule)
        outweigh all others in some layers. `rounded`: what multiplies bfloat16 faster may round x
        to it.
        """
        self.equal_tokens, self.rounded = equal_tokens, rounded
        self.tokens = 0
        self._whole = False
        self._sum = torch.zeros(inputs, inputs, device=device)

    def add(self, inputs: Tensor, sizes: Tensor | None = None) -> None:
        """Take float [..., in]; `sizes`: what each x is divided by in place of its mean square,
        float32 [tokens, 1].
        """
        assert not self._whole
        rows = inputs.flatten(0, -2)
        self.tokens += len(rows)
        equal = sizes is None and self.equal_tokens
        if self.rounded and column_kernels.multiplies_bfloat16(rows):
            column_kernels.add_gram_(self._sum, float_factors(rows, sizes)[0][0], equal)
        elif self.rounded and equal and fits_tensor_cores(rows):
            self._add(F.rms_norm(rows, rows.shape[-1:], eps=torch.finfo(torch.float32).tiny), None)
        else:
            self._add(rows, mean_square(rows) if equal else sizes)

    def _add(self, rows: Tensor, sizes: Tensor | None) -> None:
        on_tensor_cores = fits_tensor_cores(rows)
        factors = (exact_factors if on_tensor_cores else float_factors)(rows, sizes)
        if on_tensor_cores:
            factors = [each for pair in factors for each in zip(*(part.split(LONGEST) for part in pair), strict=True)]
        step = BLOCK[rows.device.type]
        for start in range(0, rows.shape[1], step):
            end = start + step
            lower = self._sum[start:end, :end]
            for left, right in factors:
                if on_tensor_cores:
                    add_product_(lower, left[:, start:end].T, right[:, :end])
                else:
                    lower.addmm_(left[:, start:end].T, right[:, :end])

    def add_up_(self, together: Together, tokens: int) -> None:
        """Become the sum over what all processes took, so many tokens."""
        self.tokens = tokens
        together.sum_(self._sum)

    def matrix(self) -> Tensor:
        """Return the mean of x x^T, float32 [in, in]; NaN or Inf if an input was.
        It takes the place of the sum, so nothing can be added behind it.
        """
        if not self._whole:
            self._sum.tril_()
            self._sum += self._sum.tril(-1).T
            self._sum /= max(1, self.tokens)
            self._whole = True
        return self._sum


def fits_tensor_cores(rows: Tensor) -> bool:
    """Say whether tensor cores multiply rows as they are."""
    return rows.dtype == torch.bfloat16 and has_tensor_cores(rows)


def float_factors(rows: Tensor, sizes: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Return float32 matrices whose products left^T right add up to the sum of x x^T, divided by its size."""
    given = rows.float()
    scaled = given if sizes is None else given * sizes.rsqrt()
    return [(scaled, scaled)]


def exact_factors(rows: Tensor, sizes: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Return the same for bfloat16 rows in bfloat16, whose products tensor cores add up in float32.

    The rows are exact as they are. Divided by their sizes they are the sum of two parts to 16 bits,
    so each product is off by 2^-17 of itself at most.
    """
    if sizes is None:
        return [(rows, rows)]
    return [(rows, part) for part in bfloat16_parts(rows.float() / sizes, 2)]


def mean_square(rows: Tensor) -> Tensor:
    """Return float32 [tokens, 1] of float [tokens, in], and never 0."""
    return rows.float().square().mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
