"""How large the inputs of a layer are, channel by channel, and a sample of them."""

from __future__ import annotations

import torch
from torch import Tensor


class InputRange:
    """The largest inputs of a layer, and a few of its inputs."""

    def __init__(self, inputs: int, device: torch.device | str, rows_of_a_call: int = 0) -> None:
        self.amax = torch.zeros(inputs, device=device)
        """float32 [in]: the largest magnitude of each channel; NaN or Inf where an input was."""
        self.tokens = 0
        self._rows: list[Tensor] = []
        self._rows_of_a_call = rows_of_a_call

    def add(self, inputs: Tensor) -> None:
        """Take float [..., in]."""
        rows = inputs.flatten(0, -2)
        if not len(rows):
            return
        self.tokens += len(rows)
        self.amax = torch.maximum(self.amax, rows.abs().amax(0).float())
        if self._rows_of_a_call:
            step = max(1, len(rows) // self._rows_of_a_call)
            self._rows.append(rows[step // 2 :: step][: self._rows_of_a_call].float())

    @property
    def rows(self) -> Tensor:
        """The inputs that were kept, evenly spread over each call: float32 [rows, in]."""
        return torch.cat(self._rows) if self._rows else self.amax.new_zeros(0, len(self.amax))
