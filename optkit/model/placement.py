"""Which parts of a model lie on the GPU, in main memory and on disk, decided from sizes alone.

Plans and openings decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from optkit.common.byte_sizes import size_text
from optkit.errors import StageError
from optkit.model.shape import ModelShape

Place = Literal["gpu", "cpu", "disk"]


@dataclass(frozen=True)
class Unit:
    """What is placed as a whole: a decoder block, or a module outside of them."""

    name: str
    size_bytes: int
    largest_bytes: int
    """Of its largest tensor: what has to be on the GPU at once while it is used."""
    is_block: bool = False


@dataclass(frozen=True)
class Room:
    """Bytes that weights may take."""

    gpu: int
    """Of the device that computes, which may be the CPU."""
    cpu: int
    """Of main memory beside it; 0 if the CPU computes."""


def stored_units(shape: ModelShape) -> tuple[Unit, ...]:
    """Return the units of a checkpoint, in the order of the blocks, named as its tensors are."""
    found: dict[tuple[str, int], list[int]] = {}
    for name, info in shape.tensors.items():
        block = shape.block(name)
        key = (f"{block[0]}.{block[1]}".lstrip("."), block[1]) if block else (name.rpartition(".")[0] or name, -1)
        found.setdefault(key, []).append(info.size_bytes)
    ordered = sorted(found.items(), key=lambda item: item[0][1])
    return tuple(Unit(name, sum(sizes), max(sizes), index >= 0) for (name, index), sizes in ordered)


def place_by_room(units: Sequence[Unit], room: Room) -> dict[str, Place]:
    """Return each unit's place: what is outside the blocks first, then the blocks in order.
    What does not fit goes to the next place.

    If not everything fits, room for the largest tensor that lies elsewhere is left on the device
    that computes. Raises StageError without even that.
    """
    total = sum(unit.size_bytes for unit in units)
    if total <= room.gpu:
        return {unit.name: "gpu" for unit in units}
    largest = max(units, key=lambda unit: unit.largest_bytes)
    left = {"gpu": room.gpu - largest.largest_bytes, "cpu": room.cpu}
    if left["gpu"] < 0:
        raise StageError(
            f"{size_text(room.gpu)} cannot hold the largest tensor, {size_text(largest.largest_bytes)} "
            f"in {largest.name}",
            where="offload",
            why="Wherever a weight lies, it has to be on the device that computes while it is used",
            remedy=f"Allow {size_text(largest.largest_bytes)} at the least",
        )
    chosen: dict[str, Place] = {}
    for blocks in (False, True):
        places: list[Place] = ["gpu", "cpu"]
        for unit in units:
            if unit.is_block is blocks:
                while places and unit.size_bytes > left[places[0]]:
                    places.pop(0)
                chosen[unit.name] = place = places[0] if places else "disk"
                if place != "disk":
                    left[place] -= unit.size_bytes
    return chosen


def place_by_name(units: Sequence[Unit], wanted: Mapping[str, Place]) -> dict[str, Place]:
    """Return where each unit goes by the first pattern for its name, on the GPU without one.
    Raises StageError for a pattern that matches none.

    Names may lack the prefix of the base model, as they do in some checkpoints.
    """
    for pattern in wanted:
        if not any(_matches(unit.name, pattern) for unit in units):
            raise StageError(
                f"'{pattern}' matches no decoder block and no module outside of them",
                where="offload",
                why=f"There are {_some(unit.name for unit in units)}",
                remedy="Write one of these names, with * and ? for several",
            )
    return {
        unit.name: next((place for pattern, place in wanted.items() if _matches(unit.name, pattern)), "gpu")
        for unit in units
    }


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(f"{pattern.partition('.')[0]}.{name}", pattern)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every if len(every) < 8 else [*every[:4], "...", *every[-2:]])


def placement_text(units: Iterable[Unit], places: Mapping[str, Place], device: str) -> str:
    """Return e.g. `18 modules (9.1 GB) on cuda, 16 (7.0 GB) in main memory, 0 on disk`."""
    named = {"gpu": f"on {device}", "cpu": "in main memory", "disk": "on disk"}
    parts = []
    for place, text in named.items():
        sizes = [unit.size_bytes for unit in units if places[unit.name] == place]
        if place == "cpu" and device == "cpu" and not sizes:
            continue
        parts.append(f"{len(sizes)} modules ({size_text(sum(sizes))}) {text}" if sizes else f"nothing {text}")
    return ", ".join(parts)
