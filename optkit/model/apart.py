"""Experts that lie joined in a checkpoint, and one by one in a packed one (Llama 4).

transformers puts a list of experts in the place of joined ones as soon as a layer is packed, and
vLLM reads the same names. So a stage that packs is given each expert as linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.model.checkpoint import Checkpoint
from optkit.model.read_weights import Read, reads_of
from optkit.model.shape import ModelShape, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Where the weight of an expert, [out, in], lies in a tensor [experts, in, outs]."""

    stored: str
    expert: int
    first: int
    info: TensorInfo


def parts_of(shape: ModelShape) -> dict[str, Part]:
    """Return the weights of experts that a packed model has one by one, by their names there."""
    if Read.REPLACED not in reads_of(shape.config)(""):
        return {}
    found = {}
    for name, info in shape.tensors.items():
        holder, _, leaf = name.rpartition(".")
        if len(info.shape) == 3 and holder.endswith(".experts"):
            leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            outputs = info.shape[2] // len(leaves)
            for expert in range(info.shape[0]):
                for place, each in enumerate(leaves):
                    part = TensorInfo(info.dtype, (outputs, info.shape[1]))
                    found[f"{holder}.{expert}.{each}.weight"] = Part(name, expert, place * outputs, part)
    return found


def with_experts_apart(shape: ModelShape) -> ModelShape:
    """Return the shape with each of those experts by itself."""
    parts = parts_of(shape)
    joined = {part.stored for part in parts.values()}
    tensors = {name: info for name, info in shape.tensors.items() if name not in joined}
    return replace(shape, tensors=tensors | {name: part.info for name, part in parts.items()}) if parts else shape


class CheckpointApart(Checkpoint):
    """A model directory, read as if each of those experts lay there by itself."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._joined = Checkpoint(directory)
        self._parts = parts_of(self._joined.shape)
        self.tensors = dict(with_experts_apart(self._joined.shape).tensors)
        for name, part in self._parts.items():
            self.files[name] = self.files[part.stored]

    def read(self, name: str, pinned: bool = False) -> Tensor:
        """Return one tensor as `Checkpoint.read` does; of a joined one the bytes of an expert are read."""
        if (part := self._parts.get(name)) is None:
            return super().read(name, pinned)
        outputs = part.info.shape[0]
        return self._joined.read_member(part.stored, part.expert)[:, part.first : part.first + outputs].T.contiguous()
