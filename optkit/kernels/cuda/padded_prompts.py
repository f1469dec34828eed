"""Prompts of few tokens as CUDA graphs.

Python needs about 20 ms to launch the kernels of a prompt, and a few hundred tokens take the GPU
less. So prompts of such a length are padded and captured when they come again: in causal attention
what stands behind a token does not change it, and steps write over what padding left in the cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from optkit.kernels.cuda.graph_capture import captured

MOST_CAPTURED = 1024
"""Tokens of prompts, padded, that a graph reads: more keep the GPU busy while Python launches."""
LENGTH_STEP = 64
"""Prompts are padded to a multiple of this."""
Read = Callable[[Tensor, Tensor], Tensor]
"""Returns the logits of tokens, int64 [batch, padded], behind those at a place, int64 [1]."""


class PaddedPrompts:
    """Those that are read into one cache of so many positions."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._padded: dict[int, PaddedPrompt] = {}

    def takes(self, tokens: Tensor) -> bool:
        """Say whether prompts, int64 [batch, prompt], are few enough."""
        return tokens.shape[0] * self._length(tokens) <= MOST_CAPTURED

    def read(self, tokens: Tensor, read: Read) -> Tensor:
        """Return the logits behind prompts, int64 [batch, prompt]."""
        padded = self._length(tokens)
        if padded not in self._padded:
            self._padded[padded] = PaddedPrompt(tokens.new_zeros(tokens.shape[0], padded))
        return self._padded[padded].read(tokens, read)

    def _length(self, tokens: Tensor) -> int:
        return min(-(-tokens.shape[1] // LENGTH_STEP) * LENGTH_STEP, self._capacity)


class PaddedPrompt:
    """Prompts of about one length: the first are launched, those behind them are a graph."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens, self._uses = tokens, 0
        self._last, self._logits = tokens.new_zeros(1), tokens.new_zeros(0)
        self._graph: torch.cuda.CUDAGraph | None = None

    def read(self, tokens: Tensor, read: Read) -> Tensor:
        """Return the logits behind prompts, int64 [batch, prompt]."""

        def launch() -> None:
            self._logits = read(self._tokens, self._last)

        length = tokens.shape[1]
        self._tokens[:, :length] = tokens
        self._last.fill_(length - 1)
        if self._uses == 1 and not waits(launch):
            self._graph = captured(launch)
        self._uses += 1
        if self._graph is None:
            launch()
        else:
            self._graph.replay()
        return self._logits


def waits(launch: Callable[[], object]) -> bool:
    """Say whether Python waits for the GPU in it, or copies to it at once: no graph can hold that."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False
