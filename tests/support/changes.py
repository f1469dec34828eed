"""Changes to the files of a model, in place or of a copy."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def change_json(path: Path, change: Callable[[dict[str, Any]], object] | None = None, /, **values: object) -> None:
    """Let a function change what a file says, and set values."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if change:
        change(data)
    path.write_text(json.dumps(data | values), encoding="utf-8")


@contextmanager
def changing(directory: Path) -> Iterator[dict[str, Tensor]]:
    """Give the tensors of a checkpoint to be changed, and write them again."""
    tensors = load_file(directory / "model.safetensors")
    yield tensors
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def changed_copy(source: Path, parent: Path, change: Change = dict, **config: object) -> Path:
    """Return a copy of a model with changed tensors and changed keys in config.json."""
    target = Path(shutil.copytree(source, parent / "changed"))
    tensors = change(load_file(source / "model.safetensors"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    change_json(target / "config.json", **config)
    return target


def replacing(name: str, value: float) -> Change:
    return lambda tensors: tensors | {name: torch.full_like(tensors[name], value)}


def without(name: str) -> Change:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}
