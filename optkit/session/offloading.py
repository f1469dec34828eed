"""Open a model with its weights spread over a GPU, main memory and disk, and say what lies where."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from optkit.common.byte_sizes import size_text
from optkit.environment import memory
from optkit.errors import StageError
from optkit.model.blocks import find_blocks
from optkit.model.checkpoint import Checkpoint
from optkit.model.empty_model import empty_model
from optkit.model.placement import Place, Unit, placement_text
from optkit.stage import Opening


class Offloading:
    """The place of each part of an opened model, and the folder for what its files do not hold."""

    def __init__(
        self,
        opening: Opening,
        checkpoint: Checkpoint,
        place: Callable[[Sequence[Unit], int | None], dict[str, Place]],
        folder: str | None,
    ) -> None:
        """Decide: `place` says it of units, given the free bytes of a GPU.

        Raises what `place` raises, and StageError if nothing can be written to the folder.
        """
        dtype = getattr(torch, str(opening.dtype))
        model = empty_model(checkpoint, dtype, opening.trust_remote_code, **opening.load_kwargs)
        self.device = opening.device
        self.units = tuple(_units(model))
        self.places = place(self.units, None if self.device == "cpu" else memory(self.device).available_bytes)
        for tied, source in getattr(model, "all_tied_weights_keys", {}).items():
            self.places[self._unit_of(tied)] = self.places[self._unit_of(source)]
        self._folder = self._make_folder(folder)
        self._delete = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def _unit_of(self, parameter: str) -> str:
        return next(unit.name for unit in self.units if f"{parameter}.".startswith(f"{unit.name}."))

    def load_kwargs(self) -> dict[str, Any]:
        """Return what `from_pretrained` needs to know."""
        here: dict[Place, str] = {"gpu": self.device, "cpu": "cpu", "disk": "disk"}
        return {
            "device_map": {name: here[place] for name, place in self.places.items()},
            "offload_folder": self._folder,
        }

    def finish_(self, model: PreTrainedModel) -> list[str]:
        """Make copies to the GPU fast, and tie the folder's life to the model's.
        Return what the notes say.
        """
        self._delete.detach()
        model.optkit_delete_offloaded = weakref.finalize(model, shutil.rmtree, self._folder, ignore_errors=True)
        notes = [f"offload: {placement_text(self.units, self.places, self.device)}"]
        moved = sum(unit.size_bytes for unit in self.units if self.places[unit.name] != "gpu")
        away = {place for place in self.places.values() if place != "gpu"}
        if moved and not (self.device == "cpu" and away == {"cpu"}):
            pinned = " (pinned)" if "cpu" in away and self.device != "cpu" and _pin_(model) else ""
            notes.append(f"offload: every forward pass copies {size_text(moved)} of weights{pinned} to {self.device}")
        return notes

    @staticmethod
    def _make_folder(named: str | None) -> str:
        place = Path(named).expanduser() if named else None
        try:
            if place:
                place.mkdir(parents=True, exist_ok=True)
            return tempfile.mkdtemp(prefix="optkit-offload-", dir=place)
        except OSError as error:
            raise StageError(
                f"nothing can be written to {named or tempfile.gettempdir()}",
                where="offload",
                why=str(error),
                remedy="Name another folder",
            ) from error


def delete_offloaded(model: PreTrainedModel | None) -> None:
    """Delete what was written to the folder for a model; nothing happens if there is none."""
    delete: Callable[[], object] | None = getattr(model, "optkit_delete_offloaded", None)
    if delete is not None:
        delete()


def _units(model: PreTrainedModel) -> Iterator[Unit]:
    """Yield the decoder blocks and every module, or parameter, outside of them.
    Tensors that two share count for their owner.
    """
    blocks = {block.name for block in find_blocks(model)}
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})

    def within(prefix: str, module: nn.Module) -> Iterator[Unit]:
        for name, parameter in module.named_parameters(recurse=False):
            yield _unit(f"{prefix}{name}", {f"{prefix}{name}": parameter}, tied)
        for name, child in module.named_children():
            full = f"{prefix}{name}"
            if any(block.startswith(f"{full}.") for block in blocks):
                yield from within(f"{full}.", child)
            else:
                tensors = {f"{full}.{leaf}": tensor for leaf, tensor in child.state_dict().items()}
                if tensors:
                    yield _unit(full, tensors, tied, is_block=full in blocks)

    yield from within("", model)


def _unit(name: str, tensors: dict[str, torch.Tensor], tied: dict[str, str], is_block: bool = False) -> Unit:
    sizes = {leaf: tensor.numel() * tensor.element_size() for leaf, tensor in tensors.items() if leaf not in tied}
    return Unit(name, sum(sizes.values()), max(sizes.values(), default=0), is_block)


def _pin_(model: PreTrainedModel) -> bool:
    """Move the weights that wait in main memory to pages from which a GPU copies at full speed.
    False if there are none.
    """
    outer = [found for module in model.modules() if (found := getattr(module, "_hf_hook", None))]
    maps = [getattr(hook, "weights_map", None) for each in outer for hook in getattr(each, "hooks", [each])]
    loaders = {id(each.dataset): each.dataset for each in maps if each is not None and hasattr(each, "dataset")}
    made: dict[int, torch.Tensor] = {}
    try:
        for loader in loaders.values():
            for name, tensor in loader.state_dict.items():
                key = tensor.data_ptr()
                if key not in made:
                    made[key] = tensor.pin_memory()
                loader.state_dict[name] = made[key]
    except RuntimeError:  # the system gives no more such pages
        return False
    return bool(made)
