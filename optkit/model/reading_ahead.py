"""Read weights that come next while a GPU works on others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

AHEAD_BYTES = 1 << 29
"""Most bytes that are read ahead of what is made tensor by tensor, if they are more than one tensor."""


class ReadAhead:
    """Tensors that threads read."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(threads, "read ahead")
        self._found: dict[str, Future[Tensor]] = {}
        self._waiting: dict[str, Callable[[], Tensor]] = {}
        self._sizes: Mapping[str, int] = {}

    def begin(self, reads: Mapping[str, Callable[[], Tensor]], sizes: Mapping[str, int] | None = None) -> None:
        """Begin to read tensors; what was read before and not taken is forgotten.
        `sizes` in bytes: no more than AHEAD_BYTES of them are there at a time; None: all are read.
        """
        for future in self._found.values():
            future.cancel()
        self._found, self._waiting, self._sizes = {}, dict(reads), sizes or dict.fromkeys(reads, 0)
        self._fill()

    def take(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that was read ahead, else read it now; raises what reading raises."""
        self._waiting.pop(name, None)
        future = self._found.pop(name, None)
        if future is None:
            return read()
        self._fill()
        return future.result()

    def _fill(self) -> None:
        held = sum(self._sizes[name] for name in self._found)
        while self._waiting:
            name = next(iter(self._waiting))
            held += self._sizes[name]
            if self._found and held > AHEAD_BYTES:
                return
            self._found[name] = self._threads.submit(self._waiting.pop(name))
