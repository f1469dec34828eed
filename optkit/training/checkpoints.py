"""Checkpoints from which a training goes on: weights, optimizer, random numbers and position.
Each is written as a draft, then renamed; the last two are kept.

PLACE/step-00000120/weights.safetensors     trainable parameters
PLACE/step-00000120/best.safetensors        those with the least held-out loss, if others
PLACE/step-00000120/optimizer.safetensors   the state of the optimizer, `NUMBER.NAME`
PLACE/step-00000120/random.safetensors      the states of the random number generators
PLACE/step-00000120/state.json              everything else, written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from optkit.common.files import object_if_any
from optkit.model.writer import disk_space_for, save_tensors

KEPT = 2
STATE = "state.json"


@dataclass(frozen=True)
class Saved:
    """A training under way."""

    facts: Mapping[str, Any]
    """JSON values: step, seconds, losses so far."""
    weights: Mapping[str, Tensor]
    best: Mapping[str, Tensor] | None
    optimizer: dict[str, Any]
    """As `Optimizer.state_dict()` gives it."""
    random: Mapping[str, Tensor]


def save(place: Path, step: int, digest: str, saved: Saved) -> Path:
    """Write a checkpoint and delete all but the last two of this training.
    What another or a killed run left is deleted too.

    Raises ResourceError on a full disk; the ones before stay good.
    """
    final, draft = place / f"step-{step:08d}", place / f".draft-{step:08d}"
    tensors, others = _flat(saved.optimizer["state"])
    parts = {"weights": saved.weights, "best": saved.best, "optimizer": tensors, "random": saved.random}
    size = sum(tensor.nbytes for part in parts.values() if part for tensor in part.values())
    facts = {"digest": digest, "facts": saved.facts, "groups": saved.optimizer["param_groups"], "others": others}
    try:
        with disk_space_for(final, size):
            for left in place.glob(".draft-*"):
                shutil.rmtree(left, ignore_errors=True)
            draft.mkdir(parents=True)
            for name, part in parts.items():
                if part is not None:
                    _write(draft / f"{name}.safetensors", part)
            (draft / STATE).write_text(json.dumps(facts), encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            draft.rename(final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    found = _found(place)
    ours = [path for path in found if object_if_any(path / STATE).get("digest") == digest]
    for old in set(found) - set(ours[:KEPT]):
        shutil.rmtree(old, ignore_errors=True)
    return final


def load(place: Path, digest: str) -> Saved | None:
    """Return the newest whole checkpoint of this training (same digest), None if there is none."""
    for directory in _found(place):
        try:
            state = json.loads((directory / STATE).read_text(encoding="utf-8"))
            if state["digest"] != digest:
                continue
            parts = {path.stem: load_file(path) for path in sorted(directory.glob("*.safetensors"))}
            optimizer = {"state": _deep(parts["optimizer"], state["others"]), "param_groups": state["groups"]}
            return Saved(state["facts"], parts["weights"], parts.get("best"), optimizer, parts["random"])
        except (OSError, ValueError, KeyError, SafetensorError):
            continue
    return None


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's random number generators, the CPU's and the device's."""
    return {"cpu": torch.get_rng_state()} | (
        {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    )


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put torch's random number generators back to a state.
    Of several processes each puts its own device's to that of the first.
    """
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _found(place: Path) -> list[Path]:
    return sorted((path for path in place.glob("step-*") if (path / STATE).is_file()), reverse=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all. Raises ResourceError on a full disk."""
    draft = path.with_name(f".{path.name}.partial")
    try:
        with disk_space_for(path, sum(tensor.nbytes for tensor in tensors.values())):
            _write(draft, tensors, metadata)
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    written: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        ready = tensor.detach().to("cpu").contiguous()
        written[name] = ready.clone() if ready.data_ptr() in seen else ready
        seen.add(ready.data_ptr())
    save_tensors(path, written, metadata)


def _flat(state: Mapping[Any, Any], prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by `NUMBER.NAME`, and its other values.
    (bitsandbytes nests them deeper.)
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            deeper = _flat(value, f"{prefix}{name}.")
            tensors |= deeper[0]
            others |= deeper[1]
        else:
            (tensors if isinstance(value, Tensor) else others)[f"{prefix}{name}"] = value
    return tensors, others


def _deep(tensors: Mapping[str, Tensor], others: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for name, value in (*tensors.items(), *others.items()):
        index, *way, leaf = name.split(".")
        place = state.setdefault(int(index), {})
        for each in way:
            place = place.setdefault(each, {})
        place[leaf] = value
    return state
