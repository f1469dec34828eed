"""Hidden states that wait in main memory come to a GPU, and go back, while it works on others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Passage:
    """Copies hidden states one behind the other, beside the work of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device)

    def begin(self, waiting: Tensor) -> Callable[[], Tensor]:
        """Begin to bring a tensor, and return what gives it to the work that comes next."""
        brought = torch.empty(waiting.shape, dtype=waiting.dtype, device=self.device)
        with self._behind_work():  # which may have used this memory before
            brought.copy_(waiting, non_blocking=True)
            event = self._copies.record_event()

        def given() -> Tensor:
            torch.cuda.current_stream(self.device).wait_event(event)
            return brought

        return given

    def put_(self, waiting: Tensor, made: Tensor) -> None:
        """Begin to bring what was made back into a tensor of main memory."""
        with self._behind_work():
            waiting.copy_(made, non_blocking=True)
        made.record_stream(self._copies)

    def end(self) -> None:
        """Wait until all that was made is in main memory."""
        self._copies.synchronize()

    def _behind_work(self) -> torch.cuda.StreamContext:
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._copies)
