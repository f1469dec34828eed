"""Count the bytes of the tensors that are alive while something runs, on the CPU."""

import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak` is the most bytes of tensors made inside that were alive at once; what an operation
    holds within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}

    def __torch_dispatch__(
        self, operation: Any, _types: Any, given: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        made = operation(*given, **(options or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage())
        return made

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._sizes.clear()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _count(self, storage: torch.UntypedStorage) -> None:
        reference = weakref.ref(storage, self._forget)
        if reference not in self._sizes:
            self._sizes[reference] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _forget(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.now -= self._sizes.pop(reference, 0)
