"""What the inputs of a layer are like.
The largest of each channel, a sample of them, and their Hessian say it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.algorithms.few_tokens import FEW_TOKENS
from optkit.algorithms.hessian import Hessian
from optkit.algorithms.scaled_gptq import left_variances
from optkit.model.linear_layers import EXPERTS
from optkit.model.together import Together
from optkit.stages.quantizing.job import QuantizationJob


def tell_few_tokens(job: QuantizationJob, stage: str) -> None:
    """Warn of the layers that saw too few tokens, and say it in the scorecard."""
    if few := job.details.get("rounded_to_nearest"):
        job.notes.append(few_tokens_note(few, "rounded to nearest", "GPTQ", stage))
        job.context.progress.warn(job.notes[-1])


def few_tokens_note(few: Mapping[str, int], done: str, needing: str, stage: str) -> str:
    """Say what is done to layers that saw fewer tokens than something needs."""
    name, tokens = next(iter(few.items()))
    return (
        f"{len(few):,} layers are {done}: they saw fewer than the {FEW_TOKENS} calibration tokens that {needing} needs"
        f" ({name}: {tokens}); raise {stage}.calibration.samples"
        + (f", or set {stage}.calibration.experts: all" if EXPERTS in name else "")
    )


class InputRange:
    """Sums up the inputs of a layer."""

    def __init__(self, inputs: int, device: torch.device | str, rows_of_a_call: int = 0, hessian: bool = False) -> None:
        self.amax = torch.zeros(inputs, device=device)
        """float32 [in]: the largest magnitude of each channel; NaN or Inf if an input was."""
        self.tokens = 0
        self._rows: list[Tensor] = []
        self._rows_of_a_call = rows_of_a_call
        self._hessian = Hessian(inputs, device) if hessian else None
        self._scales: Tensor | None = None

    def add(self, inputs: Tensor) -> None:
        """Take in float [..., in]."""
        rows = inputs.flatten(0, -2)
        if not len(rows):
            return
        self.tokens += len(rows)
        self.amax = torch.maximum(self.amax, rows.abs().amax(0).float())
        if self._hessian is not None:
            self._hessian.add(rows)
        if self._rows_of_a_call:
            step = max(1, len(rows) // self._rows_of_a_call)
            self._rows.append(rows[step // 2 :: step][: self._rows_of_a_call].to(torch.float32, copy=True))

    def add_up_(self, together: Together, tokens: int) -> None:
        """Become what all processes took, so many tokens; the first process's rows are the first."""
        self.tokens = tokens
        together.most_(self.amax)
        if self._hessian is not None:
            self._hessian.add_up_(together, tokens)
        if self._rows_of_a_call:
            self._rows = [together.joined(self.rows)]

    @property
    def rows(self) -> Tensor:
        """The inputs that were kept, evenly spread over each call: float32 [rows, in].
        They are as they came, not divided by scales.
        """
        return torch.cat(self._rows) if self._rows else self.amax.new_zeros(0, len(self.amax))

    def divide_(self, scales: Tensor) -> None:
        """Take the inputs for divided by scales, float32 [in]."""
        self.amax = self.amax / scales
        self._scales = scales

    def hessian(self) -> Tensor | None:
        """Return the mean of x x^T, float32 [in, in], every token of the same weight.
        None if it was not summed.
        """
        if self._hessian is None:
            return None
        matrix = self._hessian.matrix()
        return matrix if self._scales is None else (matrix / self._scales).div_(self._scales[:, None])

    def variances(self) -> Tensor:
        """Return what an error of 1 in each input's weight adds to the squared error of an output.
        It is float32 [in], of undivided inputs.

        With a Hessian, what the inputs rounded after it cannot compensate for. Raises ValueError
        for a Hessian that is none.
        """
        if self._hessian is None or self.tokens < FEW_TOKENS:
            return self.rows.square().div_(self.rows.square().mean(1, keepdim=True).clamp(min=1e-30)).mean(0)
        return left_variances(self._hessian.matrix())
