"""How many bytes of tensors are alive, on a CPU, as torch counts them on a GPU."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """Within it, counts the memory of tensors that are made; not what is used inside of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in tree_leaves(made) if isinstance(each, Tensor)):
            place = storage._cdata
            if place not in self._sizes:
                self._sizes[place] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, place)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return made
