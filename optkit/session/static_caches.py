"""KV caches of fixed length for a compiled step, which is compiled anew for every other length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from optkit.kernels.cuda.padded_prompts import PaddedPrompts
from optkit.model.carried_state import CarriedState, keeps_logits

CACHE_STEP = 128
"""A static cache is as long as the next multiple of this, so that requests of like lengths share
one compiled step.
"""


class StaticCaches:
    """Lends empty static caches; the last one is kept for the next request of its shape."""

    def __init__(self, config: Any, positions: int) -> None:
        self._config, self._positions = config, positions
        self._closed = False
        self.idle: tuple[tuple[int, int], StaticCache, PaddedPrompts] | None = None
        """The shape, sequences and tokens, of the one that nobody uses, itself, and what reads prompts into it."""

    @contextmanager
    def lend(self, model: Any, batch: int, length: int) -> Iterator[StaticState]:
        """Lend a cache for `batch` sequences of `length` tokens; no other stream gets it meanwhile."""
        shape = (batch, min(-(-length // CACHE_STEP) * CACHE_STEP, self._positions))
        idle, self.idle = self.idle, None
        if not idle or idle[0] != shape:
            idle = shape, static_cache(self._config, shape[1]), PaddedPrompts(shape[1])
        idle[1].reset()
        try:
            yield StaticState(model, *idle[1:])
        finally:
            if not self._closed:
                self.idle = idle

    def close(self) -> None:
        """Keep none any more, those that are lent included."""
        self._closed, self.idle = True, None


class StaticState(CarriedState):
    """Tokens in a static cache. On a GPU prompts of few tokens are a CUDA graph when they come again."""

    def __init__(self, model: Any, cache: StaticCache, prompts: PaddedPrompts) -> None:
        super().__init__(model, cache)
        self._prompts = prompts if takes_graphs(model, cache) else None

    def prompt(self, tokens: Tensor) -> Tensor:
        if self._prompts is None or not self._prompts.takes(tokens):
            return super().prompt(tokens)
        found = self._prompts.read(tokens, self._padded)
        self.seen = tokens.shape[1]
        return found

    def _padded(self, tokens: Tensor, last: Tensor) -> Tensor:
        """Return the logits at `last`, int64 [1], and forget the tokens behind it."""
        self.seen = 0
        for layer in self.layers:
            layer.begin()
        try:
            return self.step(tokens, at=last)
        finally:
            for layer in self.layers:
                layer.end(last[0] + 1)


def takes_graphs(model: Any, cache: StaticCache) -> bool:
    """Say whether prompts that a model reads into a cache can be CUDA graphs; those of split models are not tried."""
    alone = model.device.type == "cuda" and not torch.distributed.is_initialized()
    return alone and keeps_logits(model) and all(type(layer) is PromptedLayer for layer in cache.layers)


class PromptedLayer(StaticLayer):
    """A layer whose first tokens are known to be the first, without asking the GPU."""

    first = False

    def begin(self) -> None:
        self.first = True
        self.cumulative_length.zero_()

    def end(self, seen: Tensor) -> None:
        """Let it have seen so many tokens, int64 []."""
        self.first = False
        self.cumulative_length.copy_(seen)

    def get_seq_length(self) -> Any:
        return 0 if self.first else super().get_seq_length()


def static_cache(config: Any, length: int) -> StaticCache:
    """Return a static cache whose sliding layers are of full length too.

    Those of transformers count tokens in a Python integer, so the step would be compiled anew for
    every token. The mask keeps the window.
    """
    cache = StaticCache(config=config, max_cache_len=length)
    cache.layers = [
        PromptedLayer(length) if type(layer) in (StaticLayer, StaticSlidingWindowLayer) else layer
        for layer in cache.layers
    ]
    return cache
