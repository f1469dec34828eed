"""KV caches of fixed length for a compiled step, which is compiled anew for every other length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

CACHE_STEP = 128
"""A static cache is as long as the next multiple of this, so that requests of like lengths share
one compiled step.
"""


class StaticCaches:
    """Lends empty static caches; the last one is kept for the next request of its shape."""

    def __init__(self, config: Any, positions: int) -> None:
        self._config, self._positions = config, positions
        self._closed = False
        self.idle: tuple[tuple[int, int], StaticCache] | None = None
        """The shape, sequences and tokens, of the one that nobody uses, and itself."""

    @contextmanager
    def lend(self, batch: int, length: int) -> Iterator[StaticCache]:
        """Lend a cache for `batch` sequences of `length` tokens; no other stream gets it meanwhile."""
        shape = (batch, min(-(-length // CACHE_STEP) * CACHE_STEP, self._positions))
        idle, self.idle = self.idle, None
        cache = idle[1] if idle and idle[0] == shape else static_cache(self._config, shape[1])
        del idle
        cache.reset()
        try:
            yield cache
        finally:
            if not self._closed:
                self.idle = (shape, cache)

    def close(self) -> None:
        """Keep none any more, those that are lent included."""
        self._closed, self.idle = True, None


def static_cache(config: Any, length: int) -> StaticCache:
    """Return a static cache whose sliding layers are of full length too.

    Those of transformers count tokens in a Python integer, so the step would be compiled anew for
    every token. The mask keeps the window.
    """
    cache = StaticCache(config=config, max_cache_len=length)
    cache.layers = [
        StaticLayer(length) if isinstance(layer, StaticSlidingWindowLayer) else layer for layer in cache.layers
    ]
    return cache
