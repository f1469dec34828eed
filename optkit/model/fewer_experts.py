"""A mixture of experts with fewer of them in each block: its tensors' names, and its config.json.

No torch is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optkit.errors import StageError
from optkit.model.config_defaults import defaults_of
from optkit.model.inventory import extra_heads
from optkit.model.routers import experts_of, routers_of
from optkit.model.shape import PROPOSING_BLOCKS, ModelShape, TensorInfo
from optkit.model.text_config import text_config, with_text_config

WHERE = "prune_structured.experts"
COUNTS = re.compile(r"(moe_)?(n|num)_(local_|routed_)?experts")
"""Keys of config.json that say how many experts a block has."""
CHOSEN = re.compile(r"num_experts_per_tok(en)?|top_k_experts|moe_(k|top_?k)|num_selected_experts")
"""Keys that say how many of them a token is sent to."""
GROUPS = ("n_group", "num_expert_group", "num_expert_groups")
"""Keys that say of how many groups those are chosen."""
CALLED_OTHERWISE = {
    "jetmoe": "they are called with the tokens of all of them in one matrix",
    "llama4_text": "each is called with all tokens, times the router's weight",
}
"""`model_type` of those whose experts are no module that is called with the router's choice -> why."""


@dataclass(frozen=True)
class Place:
    """Where a tensor of experts, or of their router, belongs."""

    block: int
    experts: str
    """The module that holds the experts."""
    index: int | None
    """Of the expert that the tensor is of; None if it has a part for each."""
    axis: int = 0
    """Along which these parts lie."""


@dataclass(frozen=True)
class Mixture:
    """The experts of a model."""

    count: int
    """Of each block that has some."""
    places: Mapping[str, Place]
    """Of the tensors that change with their number."""

    @property
    def holders(self) -> dict[int, str]:
        """What holds the experts of each block that has some."""
        return {place.block: place.experts for place in self.places.values()}

    def holds(self, tensor: str) -> bool:
        """Say whether a tensor is one of experts, and not of their router."""
        place = self.places.get(tensor)
        return place is not None and tensor.startswith(f"{place.experts}.")

    def name(self, tensor: str, kept: Mapping[int, Sequence[int]]) -> str | None:
        """Return what a tensor is called with these experts of each block; None if it goes."""
        place = self.places.get(tensor)
        if place is None or place.index is None:
            return tensor
        if place.index not in kept[place.block]:
            return None
        number = kept[place.block].index(place.index)
        return f"{place.experts}.{number}{tensor.removeprefix(f'{place.experts}.{place.index}')}"


def mixture_of(shape: ModelShape) -> Mixture:
    """Return the experts of a model. Raises StageError if it has none, or none that can go."""
    text = _told(shape.config)
    if why := CALLED_OTHERWISE.get(str(text.get("model_type"))):
        raise _impossible("nobody can tell what each expert adds", f"{why[0].upper()}{why[1:]}")
    declared = {value for key, value in text.items() if COUNTS.fullmatch(key)}
    found = sorted({each for each in experts_of(shape) if each[2] in declared})
    counts = sorted({count for *_, count in found})
    if not found:
        raise _impossible("the model has no experts that config.json counts", "It says how many there are")
    if len(counts) > 1:
        raise _impossible(f"blocks have {' or '.join(map(str, counts))} experts", "Only one number of them can change")
    if (groups := next((text[key] for key in GROUPS if text.get(key)), 1)) > 1:
        raise _impossible(
            f"the experts are chosen from {groups} groups", "Every group would have to keep as many as the others"
        )
    for name in sorted(routers_of(shape)):
        outputs = shape.tensors[f"{name}.weight"].shape[0]
        if outputs not in (1, counts[0]) and any(name.startswith(f"{holder}.") for holder, *_ in found):
            why = "It chooses from more than these, and nobody can tell which outputs are theirs"
            raise _impossible(f"the router {name} has {outputs} outputs for {counts[0]} experts", why)
    places = dict(_places(shape, found))
    routed = {place.block for name, place in places.items() if place.index is None and f"{place.experts}." not in name}
    if without := sorted({place.block for place in places.values()} - routed):
        raise _impossible(f"no router is known of the experts of block {without[0]}", "It would have to lose outputs")
    return Mixture(counts[0], places)


def fewer_tensors(shape: ModelShape, mixture: Mixture, kept: Mapping[int, Sequence[int]]) -> dict[str, TensorInfo]:
    """Return the tensors that are left with these experts of each block, by their new names.
    Heads that propose tokens go: config.json has one number of experts for them and the blocks.
    """
    heads = tuple(f"{head}." for head in extra_heads(shape))
    found = {}
    for name, info in shape.tensors.items():
        if (new := mixture.name(name, kept)) is None or name.startswith(heads):
            continue
        place = mixture.places.get(name)
        if place is not None and place.index is None:
            sizes = list(info.shape)
            sizes[place.axis] = len(kept[place.block])
            info = replace(info, shape=tuple(sizes))
        found[new] = info
    return found


def fewer_config(config: Mapping[str, Any], count: int, left: int) -> dict[str, Any]:
    """Return config.json of a model with `left` experts a block in place of `count`.
    A token is sent to no more than there are.
    """

    def change(text: Mapping[str, Any]) -> dict[str, Any]:
        told = _told(text)
        found = dict(text) | {key: left for key, value in told.items() if COUNTS.fullmatch(key) and value == count}
        found |= {key: left for key in told if CHOSEN.fullmatch(key) and left < (told[key] or 0)}
        return found | ({PROPOSING_BLOCKS: 0} if text.get(PROPOSING_BLOCKS) else {})

    return with_text_config(config, change)


def with_fewer_experts(shape: ModelShape, left_of: Callable[[int], int]) -> ModelShape:
    """Return a model's shape with as many experts a block as `left_of` says of those that it has."""
    mixture = mixture_of(shape)
    left = left_of(mixture.count)
    kept = dict.fromkeys(mixture.holders, range(left))
    return ModelShape(fewer_config(shape.config, mixture.count, left), fewer_tensors(shape, mixture, kept))


def _told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's part of config.json, with transformers' defaults for what it does
    not say.
    """
    text = text_config(config)
    return {**defaults_of(str(text.get("model_type"))), **text}


def _places(shape: ModelShape, found: Sequence[tuple[str, str, int]]) -> Iterator[tuple[str, Place]]:
    routers = routers_of(shape)
    for name, info in shape.tensors.items():
        if (block := shape.block(name)) is None:
            continue
        for holder, experts, count in found:
            if name.startswith(f"{experts}."):
                index = name.removeprefix(f"{experts}.").partition(".")[0]
                if index.isdigit() or info.shape[:1] == (count,):
                    yield name, Place(block[1], experts, int(index) if index.isdigit() else None)
            elif name.startswith(f"{holder}.") and count in info.shape:
                module = name.rpartition(".")[0]
                if module in routers or f"{module}.weight" not in shape.tensors:
                    yield name, Place(block[1], experts, None, info.shape.index(count))


def _impossible(what: str, why: str) -> StageError:
    return StageError(what, where=WHERE, why=why, remedy="Take remove_layers")
