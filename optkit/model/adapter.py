"""A LoRA adapter beside the weights that it was trained on, in `adapter/`, as peft writes it.

No torch is needed to describe it.

    adapter/adapter_config.json         rank and scale, with exceptions for single layers
    adapter/adapter_model.safetensors   base_model.model.LAYER.lora_A.weight [rank, in],
                                        base_model.model.LAYER.lora_B.weight [out, rank]

LAYER is the name in the model of transformers. The layer computes `W x + scale * B (A x)`, with the
scale alpha / rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optkit.common.files import read_object, reading, shown
from optkit.errors import SourceError
from optkit.model.checkpoint import all_finite
from optkit.model.safetensors_file import read_header
from optkit.model.shape import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER = "adapter"
"""Its directory."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
UNKNOWN = (
    "use_dora", "lora_bias", "modules_to_save", "layer_replication", "alora_invocation_tokens", "use_bdlora",
    "use_qalora",
)  # fmt: skip
"""What an adapter can ask for beside two matrices a layer; optkit applies none of it, and vLLM
neither.
"""
FEW_BITS = "Adapters learn beside codes of a few bits whose layers do not round their inputs"
LEARNABLE = "Quantize with nf4, rtn, gptq or awq, or train before the stage that quantizes"
"""Why something is no base for an adapter, and what is."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class LowRank:
    """What stands beside one layer."""

    rank: int
    outputs: int
    inputs: int
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An adapter; its weights are read when they are asked for."""

    directory: Path
    tensors: Mapping[str, TensorInfo]
    layers: Mapping[str, LowRank]
    """By the names that transformers gives them."""

    @property
    def weights(self) -> Path:
        """The file with its weights."""
        return self.directory / WEIGHTS

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(info.size_bytes for info in self.tensors.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of its layers, each once, the smallest first."""
        return tuple(sorted({layer.rank for layer in self.layers.values()}))

    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return layer -> A, float [rank, in], and B, float [out, rank]. Raises SourceError for NaN
        and Inf.
        """
        from safetensors.torch import load_file

        held = load_file(self.weights)
        bad = next((name for name, tensor in held.items() if not all_finite(tensor)), None)
        if bad:
            raise SourceError(
                "weights of the adapter are NaN or Inf",
                where=f"{self.weights}: {bad}",
                remedy="Make the artifact again",
            )
        return {name: (held[f"{PREFIX}{name}{DOWN}"], held[f"{PREFIX}{name}{UP}"]) for name in self.layers}


def has_adapter(directory: Path) -> bool:
    """Say whether an adapter lies beside the weights of a model."""
    return (Path(directory) / ADAPTER / CONFIG).is_file()


def read_adapter(directory: Path) -> Adapter | None:
    """Return the adapter of a model directory, None if there is none.

    Raises SourceError for one that is damaged, or that is more than two matrices a layer.
    """
    if not has_adapter(directory):
        return None
    place = Path(directory) / ADAPTER
    config = read_object(place / CONFIG, remedy="Make the artifact again")
    with reading(place / CONFIG, "is no configuration of peft", "Make the artifact again"):
        kind = config["peft_type"]
        _check_patterns(config)
    asked = [f"peft_type {kind}"] * (kind != "LORA") + [name for name in UNKNOWN if config.get(name)]
    if asked:
        raise SourceError(
            f"the adapter asks for {', '.join(asked)}",
            where=str(place),
            why="optkit applies plain LoRA alone",
            remedy="Merge it with peft",
        )
    if not (place / WEIGHTS).is_file():
        raise SourceError(f"there is no {WEIGHTS}", where=str(place), remedy="Make the artifact again")
    tensors = read_header(place / WEIGHTS)
    return Adapter(place, tensors, _layers(place, config, tensors))


def _check_patterns(config: Mapping[str, Any]) -> None:
    """Raise ValueError or re.error unless rank and alpha are numbers, for layers by patterns."""
    for key, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        single = config.get(patterns) or {}
        if not isinstance(single, dict):
            raise ValueError(f"{patterns} is {shown(single)}")
        for pattern, value in {**single, "": config.get(key)}.items():
            re.compile(pattern)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{pattern or key} is {shown(value)}")


def pattern_value(patterns: Mapping[str, Value], name: str, usual: Value) -> Value:
    """Return peft's value for a layer, by the first pattern that ends its name, else the usual."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)), usual)


def _layers(place: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, LowRank]:
    halves: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        half = next((end for end in (DOWN, UP) if name.endswith(end)), None)
        if half is None or not name.startswith(PREFIX) or len(info.shape) != 2:
            raise SourceError(
                f"{name} is no half of a LoRA", where=str(place / WEIGHTS), why="optkit applies plain LoRA alone"
            )
        halves.setdefault(name.removeprefix(PREFIX).removesuffix(half), {})[half] = info
    layers = {}
    for name, found in halves.items():
        if set(found) != {DOWN, UP} or found[DOWN].shape[0] != found[UP].shape[1]:
            said = ", ".join(f"{half[1:]} {list(info.shape)}" for half, info in found.items())
            raise SourceError(
                f"{said} are no product", where=f"{place / WEIGHTS}: {name}", remedy="Make the artifact again"
            )
        rank, inputs = found[DOWN].shape
        told = pattern_value(config.get("rank_pattern") or {}, name, config.get("r"))
        alpha = pattern_value(config.get("alpha_pattern") or {}, name, config.get("lora_alpha"))
        if told != rank or not isinstance(alpha, int | float):
            raise SourceError(
                f"{CONFIG} says rank {told} and alpha {alpha}, and its weights have rank {rank}",
                where=f"{place}: {name}",
                remedy="See that both files belong together",
            )
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        layers[name] = LowRank(rank, found[UP].shape[0], inputs, scale)
    return layers
