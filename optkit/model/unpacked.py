"""The tensors of a packed checkpoint as floats: each weight is unpacked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from optkit.common.files import read_object
from optkit.model.formats.registry import resolve
from optkit.model.packed_floats import float_dtype, float_shape, packed_floats
from optkit.model.safetensors_file import SHARD_BYTES
from optkit.model.shape import DTYPE_BITS, TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from optkit.model.checkpoint import Checkpoint

PREFIX = "optkit-floats-"
"""How the directory's name begins. In others the file of that name means nothing: a model that was
downloaded must not lead to files beside it."""
PLACE = "packed.json"
"""Says where the packed checkpoint lies."""
READER = "optkit.kernels.float_weights:float_weights"


def packed_place(directory: Path) -> tuple[Path, str] | None:
    """Return the packed checkpoint that a directory of `as_floats` stands for, and the device that
    unpacks it; None for any other."""
    if not directory.name.startswith(PREFIX) or not (directory / PLACE).is_file():
        return None
    said = read_object(directory / PLACE)
    return Path(str(said["directory"])), str(said["device"])


class Unpacked:
    """The tensors of the float checkpoint that a packed one stands for."""

    def __init__(self, packed: Checkpoint, device: str) -> None:
        self.packed, self._device = packed, device
        self._one_at_a_time = Lock()
        """Threads would take memory of a GPU for a weight each."""
        floats, left = packed_floats(packed.shape), float_shape(packed.shape).tensors
        stands_for = {part: name for name, each in floats.items() for part in each.parts}
        names = dict.fromkeys(stands_for.get(name, name) for name in packed.tensors)
        self.tensors = _as_written({name: left[name] for name in names if name in left})
        self.files = {name: packed.files[floats[name].parts[0] if name in floats else name] for name in self.tensors}

    @property
    def _dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, float_dtype(self.packed.shape))
        return found

    @cached_property
    def _weights(self) -> dict[str, Any]:
        found: dict[str, Any] = resolve(READER)(self.packed)
        return found

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the CPU. Raises SourceError for parts that do not fit each other."""
        if (weight := self._weights.get(name)) is None:
            return self.packed.read(name)
        with self._one_at_a_time:
            floats = weight.dequantize(self._dtype, self._device).contiguous()
        return floats.cpu()  # type: ignore[no-any-return]

    def read_member(self, name: str, index: int) -> Tensor:
        """Return one of the tensors that are stacked in one; else as `read`."""
        experts = self._weights.get(name)
        return (
            experts.expert(index, self._dtype, self._device).cpu() if experts else self.packed.read_member(name, index)
        )


def _as_written(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return tensors in the order that a checkpoint has them in which is written of them, so that files
    behind it are the same: safetensors puts those of more bits first, by name, in each shard.
    """
    places, shard, size = {}, 0, 0
    for name, info in tensors.items():
        if size and size + info.size_bytes > SHARD_BYTES:
            shard, size = shard + 1, 0
        size += info.size_bytes
        places[name] = shard, -DTYPE_BITS[info.dtype], name
    return {name: tensors[name] for name in sorted(tensors, key=lambda name: places[name])}
