"""Setting `offload`: weights that the GPU has no room for wait in main memory or on disk.
They are copied when they are used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from optkit.common.byte_sizes import size_bytes
from optkit.common.field_types import Name
from optkit.environment import gpu_memory_bytes, memory
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.placement import Place, Room, Unit, place_by_name, place_by_room, placement_text, stored_units
from optkit.model.shape import ModelShape
from optkit.model.unfound import refuse_without_blocks
from optkit.settings.compile import Compile
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.source.quiet import only_errors_of
from optkit.stage import Format, Loading, Opening, Setting

SHARE = 0.9
"""Of the memory that is free, if no limit is given: the rest is for the KV cache and
activations.
"""


class Offload(Setting):
    """Run a model that is larger than the GPU.
    Weights that do not fit wait in main memory, then on disk, until they are used.

    Decoder blocks are moved as a whole, by accelerate's hooks; the results are the same. A decode
    step takes at least as long as copying what is elsewhere. On the CPU, weights beyond
    `cpu_memory` stay on disk.
    """

    kind: ClassVar[str] = "offload"
    example: ClassVar[str] = "- offload: {gpu_memory: 20 GiB}"
    version: ClassVar[int] = 2
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})
    places_weights: ClassVar[bool] = True

    device_map: Literal["auto"] | Mapping[Name, Place] = "auto"
    """`auto`: what fits is on the GPU, what is outside the decoder blocks first, then block after
    block; then main memory, then disk. Or patterns of names (`model.layers.1?`, `lm_head`) with
    `gpu`, `cpu` or `disk`, the first that matches; everything else is on the GPU."""
    gpu_memory: int | Name | None = None
    """For `auto`: bytes of weights on the GPU at most, e.g. `20 GiB`; the KV cache and activations
    come on top. null: 90% of what is free when the model is opened. If the CPU computes, this
    does not count."""
    cpu_memory: int | Name | None = None
    """For `auto`: bytes of weights in main memory at most. null: 90% of what is free when the model
    is opened.
    """
    folder: Name | None = None
    """Where weights on disk lie that the model's files do not hold as it computes with them (fused
    experts); the others are read from these files. null: the system's folder for temporary files.
    What is written there goes when the model is closed."""

    @field_validator("gpu_memory", "cpu_memory")
    @classmethod
    def _sizes(cls, written: int | str | None) -> int | str | None:
        if written is not None:
            size_bytes(written)
        return written

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        if self.device_map != "auto" and (self.gpu_memory is not None or self.cpu_memory is not None):
            raise ValueError(
                "gpu_memory and cpu_memory are for device_map: auto; a mapping says itself where everything lies"
            )
        return self

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        """Raise StageError for packed weights, or a device map that matches nothing.
        Blocks that cannot be told apart, too little room and a folder that cannot be written to are refused too.
        """
        if shape.config.get("quantization_config"):
            raise _packed_weights_error()
        refuse_without_blocks(shape, "offload")
        self.place(stored_units(shape), self.room(device, gpu_memory_bytes(device)))
        self.check_folder()

    def excludes(self, other: Setting, device: str) -> str:
        """Return why what holds the addresses of weights cannot be used beside it."""
        if isinstance(other, CudaGraphs) or (isinstance(other, Compile) and other.applies(device)):
            return "What is compiled or recorded holds the addresses of the weights, and these come and go"
        return ""

    def loading(self, opening: Opening, checkpoint: Checkpoint, packed: bool) -> Loading:
        """Return where accelerate puts each part. Raises StageError as `check` does."""
        if packed:
            raise _packed_weights_error()
        from optkit.session.offloading import Offloading

        only_errors_of("accelerate.big_modeling")
        self.check_folder()
        offloading = Offloading(
            opening, checkpoint, lambda units, free: self.place(units, self.room(opening.device, free)), self.folder
        )
        return Loading(offloading.load_kwargs(), offloading.finish_)

    def room(self, device: str, free_gpu_bytes: int | None) -> Room:
        """Return the bytes that weights may take.
        Without limits and without a driver, it is as if the GPU had room for everything.
        """
        main = int(SHARE * memory().available_bytes) if self.cpu_memory is None else size_bytes(self.cpu_memory)
        if device == "cpu":
            return Room(gpu=main, cpu=0)
        if self.gpu_memory is not None:
            return Room(gpu=size_bytes(self.gpu_memory), cpu=main)
        return Room(gpu=1 << 62 if free_gpu_bytes is None else int(SHARE * free_gpu_bytes), cpu=main)

    def place(self, units: Sequence[Unit], room: Room) -> dict[str, Place]:
        """Return where each unit goes; raises StageError for a pattern in vain, or too little room."""
        places = (
            place_by_room(units, room) if isinstance(self.device_map, str) else place_by_name(units, self.device_map)
        )
        if "gpu" not in places.values():
            # accelerate computes on the first device of its map that is not the CPU, and on the CPU
            # if there is none.
            places[min((unit for unit in units if unit.size_bytes), key=lambda unit: unit.size_bytes).name] = "gpu"
        return places

    def check_folder(self) -> None:
        """Raise StageError if nothing can be written to the folder."""
        if self.folder is None:
            return
        named = Path(self.folder).expanduser().absolute()
        there = next(path for path in (named, *named.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise StageError(
                f"nothing can be written to {self.folder}",
                where="offload",
                why=f"{there} is {'not writable' if there.is_dir() else 'a file'}",
                remedy="Name another folder, or leave it out",
            )

    def forecast(self, shape: ModelShape, device: str) -> str:
        """Return what will lie where, by the sizes on disk."""
        units = stored_units(shape)
        return (
            f"offload: {placement_text(units, self.place(units, self.room(device, gpu_memory_bytes(device))), device)}"
        )

    def describe(self, device: str) -> str:
        """Return e.g. `offload: at most 20 GiB of weights on cuda, then main memory, then disk`.
        The notes say what lies where.
        """
        if not isinstance(self.device_map, str):
            return "offload: " + ", ".join(f"{pattern} on {place}" for pattern, place in self.device_map.items())
        main = f"main memory (at most {self.cpu_memory})" if self.cpu_memory else "main memory"
        if device == "cpu":
            return f"offload: weights in {main}, then on disk"
        limit = f"at most {self.gpu_memory} of weights" if self.gpu_memory else "what fits of the weights"
        return f"offload: {limit} on {device}, then {main}, then disk"


def _packed_weights_error() -> StageError:
    """Return the error for a model whose layers hold codes."""
    return StageError(
        "packed weights cannot be offloaded",
        where="offload",
        why="Their layers keep them in the layout of their kernels, which accelerate cannot take away and bring back",
        remedy="Take offload out of the recipe, or leave the weights in floats",
    )
