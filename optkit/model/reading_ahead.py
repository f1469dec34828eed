"""Read the weights of the next block while a GPU works on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor


class ReadAhead:
    """Tensors that a thread reads into memory from which a GPU copies by itself."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "read ahead")
        self._found: dict[str, Future[Tensor]] = {}

    def begin(self, reads: Mapping[str, Callable[[], Tensor]]) -> None:
        """Begin to read tensors; what was read before and not taken is forgotten."""
        for future in self._found.values():
            future.cancel()
        self._found = {name: self._thread.submit(_pinned, read) for name, read in reads.items()}

    def take(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that was read ahead, else read it now; raises what reading raises."""
        future = self._found.pop(name, None)
        return read() if future is None else future.result()


def _pinned(read: Callable[[], Tensor]) -> Tensor:
    return read().pin_memory()
