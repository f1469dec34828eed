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

from optkit.algorithms import column_kernels
from optkit.algorithms.gptq import damped_hessian
from optkit.algorithms.hessian import Hessian
from optkit.algorithms.tensor_cores import LONGEST, add_product_, has_tensor_cores


class Mismatch(Hessian):
    """Sums what moves a weight, in float32, beside the Hessian of the quantized model's inputs."""

    def __init__(self, inputs: int, device: torch.device | str) -> None:
        super().__init__(inputs, device, equal_tokens=False, rounded=True)
        self._of_inputs = torch.zeros(inputs, inputs, device=device)
        self._of_sums: Tensor | None = None

    def add_pair(self, inputs: Tensor, wanted: Tensor, sizes: Tensor | None, lacking: Tensor | None) -> None:
        """Take what the quantized and the unmodified model give to a layer, float [tokens, in].

        sizes: what a token is divided by, float32 [tokens, 1]; None: all count the same. lacking: float
        [tokens, out], what the sum lacks behind the layer.
        """
        self.add(inputs, sizes)
        given = inputs.float()
        counted = given if sizes is None else given / sizes
        rounded = inputs.dtype == torch.bfloat16 and has_tensor_cores(inputs)
        rounded = rounded or column_kernels.multiplies_bfloat16(inputs)
        add = _add_rounded_ if rounded else _add_
        add(self._of_inputs, wanted.float() - given, counted)
        if lacking is not None:
            if self._of_sums is None:
                self._of_sums = self._of_inputs.new_zeros(lacking.shape[1], given.shape[1])
            add(self._of_sums, lacking.float(), counted)

    def moved(self, weight: Tensor, share: float, damping: float) -> Tensor:
        """Return a weight, float32 [out, in], moved by a share of the way.

        damping: as a fraction of the mean of the Hessian's diagonal. A weight whose Hessian is not
        positive definite stays.
        """
        lower, failed = torch.linalg.cholesky_ex(damped_hessian(self.matrix(), damping))
        if failed:
            return weight
        pull = weight @ self._of_inputs
        if self._of_sums is not None:
            pull += self._of_sums
        return weight + share * torch.cholesky_solve(pull.T / max(1, self.tokens), lower).T


def _add_(total: Tensor, left: Tensor, right: Tensor) -> None:
    total.addmm_(left.T, right)


def _add_rounded_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T right of matrices rounded to 8 bits: these errors cancel over many tokens."""
    for one, other in zip(*(each.bfloat16().split(LONGEST) for each in (left, right)), strict=True):
        if total.is_cuda:
            add_product_(total, one.T, other)
        else:
            total += one.T @ other
