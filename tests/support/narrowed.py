"""Small models of two blocks, and changed copies of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[str, Tensor], Tensor]
SMALL = {"num_hidden_layers": 2}


def changed(source: Path, target: Path, change: Change) -> Path:
    """Return a copy of a model with other tensors."""
    directory = Path(shutil.copytree(source, target))
    tensors = {
        name: change(name, tensor.clone()) for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
