"""Small models of two blocks, and changed copies of them."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from tests.support.changes import changed_copy

Change = Callable[[str, Tensor], Tensor]
SMALL = {"num_hidden_layers": 2}


def changed(source: Path, target: Path, change: Change) -> Path:
    """Return a copy of a model with other tensors."""
    return changed_copy(source, target, lambda held: {name: change(name, tensor) for name, tensor in held.items()})
