"""The tensor inventory of a step: every tensor of its source is in what it leaves, or is named.

Headers alone are compared, so it is no proof of values. Packed layers, renumbered blocks, and
experts that were joined or taken apart are followed by their names. No torch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from optkit.common.grouping import by_key
from optkit.model.output_layer import HEAD, tied, tied_embedding
from optkit.model.packed_names import BESIDE, CODES, SCALES, by_module, split_tensor
from optkit.model.shape import ModelShape, TensorInfo, place_in_list, without_indices

OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.(attn|attention)\.(masked_)?bias$")
"""Rotary frequencies, positions and causal masks that older files hold and today's models compute.
"""
PROPOSING = re.compile(r"((?:.*?\.)?mtp(?:_\w+)?)\.")
"""Modules beside the decoder that propose tokens, as those who publish such models call them."""
EXPERT = re.compile(r"(.+\.experts)\.(?:(\d+)\.)?")
JOINED_CODES = ("_blocks", "_scales")
"""How names of experts in MXFP4 end that lie in one tensor."""
WEIGHT = frozenset({"weight", *CODES, *BESIDE})
"""Last names of what a weight is stored as."""
FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass
class Inventory:
    """What became of the tensors of a source."""

    counts: Counter[str] = field(default_factory=Counter)
    """`kept`: same header. `changed`: another dtype, shape or name. `packed`: the weight is codes and
    scales now. `dropped`, and `added`, which the source has not.
    """
    dropped: dict[str, str] = field(default_factory=dict)
    """Tensor, or module, or pattern of several -> why it is not there."""
    lost: list[str] = field(default_factory=list)
    """Tensors that are neither there nor dropped for a reason."""


def take_inventory(before: ModelShape, after: ModelShape, dropped: Mapping[str, str]) -> Inventory:
    """Return what became of each tensor. `dropped`: tensors or modules that the stage left out ->
    the reason; members of a list behind one that was left out are numbered anew.
    """
    found, there, used = Inventory(), _Names(before, after), set[str]()
    moved = _Renumbering(dropped)
    for name, info in before.tensors.items():
        said = next((module for module in _parents(name) if module in dropped), None)
        stays = name in after.tensors and place_in_list(name) in before.extra_blocks
        new = name if stays else moved.name(name)
        if said is not None:
            found.counts["dropped"] += 1
            found.dropped[said] = dropped[said]
        elif state := there.state(new, info):
            found.counts[state] += 1
            used.add(split_tensor(new)[0])
        elif reason := _needless(name, after):
            found.counts["dropped"] += 1
            found.dropped[without_indices(name)] = reason
        else:
            found.lost.append(name)
    found.counts["added"] = sum(
        split_tensor(name)[0] not in used and not there.is_joined(name) for name in after.tensors
    )
    return found


def extra_heads(shape: ModelShape) -> tuple[str, ...]:
    """Return the modules that propose tokens: blocks behind those that config.json counts, and others
    that are named so.
    """
    named = (PROPOSING.match(name) for name in shape.tensors)
    behind = (f"{name}.{index}".lstrip(".") for name, index in shape.extra_blocks)
    return tuple(dict.fromkeys([*behind, *(each[1] for each in named if each)]))


class _Renumbering:
    """Names of members of lists from which others were taken out."""

    def __init__(self, dropped: Mapping[str, str]) -> None:
        members = [(parent, int(index)) for parent, _, index in (m.rpartition(".") for m in dropped) if index.isdigit()]
        self.removed = by_key(sorted(members, key=lambda member: -len(member[0])))  # lists within lists come first

    def name(self, name: str) -> str:
        for parent, removed in self.removed.items():
            index, dot, rest = name.removeprefix(f"{parent}.").partition(".")
            if name.startswith(f"{parent}.") and index.isdigit():
                name = f"{parent}.{int(index) - sum(each < int(index) for each in removed)}{dot}{rest}"
        return name


class _Names:
    """What a directory has for a tensor of another."""

    def __init__(self, before: ModelShape, after: ModelShape) -> None:
        self.tensors = after.tensors
        self.leaves = by_module(after.tensors)
        self.apart, _ = _experts(before)
        self.taken_apart, self.joined = _experts(after)

    def state(self, name: str, info: TensorInfo) -> str:
        """Return `kept`, `changed` or `packed`; empty if nothing stands for it."""
        if self.tensors.get(name) == info:
            return "kept"
        module, leaf = split_tensor(name)
        leaves = self.leaves.get(module, {})
        if leaf in WEIGHT or leaf.startswith("weight."):
            if not leaves.keys().isdisjoint(CODES) or ("weight" in leaves and leaves["weight"].dtype not in FLOATS):
                scaled = any(each in SCALES or each.startswith("weight.") for each in leaves)
                return "packed" if scaled else ""
            if "weight" in leaves:
                return "changed"
        return "changed" if name in self.tensors or self._holds_experts(name, info) else ""

    def is_joined(self, name: str) -> bool:
        """Say whether a tensor holds experts of the source in another form."""
        place = EXPERT.match(name)
        return place is not None and (place[1] in self.apart if place[2] is None else place[1] in self.taken_apart)

    def _holds_experts(self, name: str, info: TensorInfo) -> bool:
        if not (place := EXPERT.match(name)):
            return False
        if place[2] is not None:
            return len(self.apart[place[1]]) in self.joined.get(place[1], ())
        base = name
        for end in JOINED_CODES:
            base = base.removesuffix(end)
        if base in self.tensors or all(f"{base}{end}" in self.tensors for end in JOINED_CODES):
            return True
        return bool(info.shape) and self.taken_apart.get(place[1], set()) >= set(range(info.shape[0]))


def _experts(shape: ModelShape) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Return the indices of experts that lie apart, and how many lie in one tensor, of each list."""
    apart, joined = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for name, info in shape.tensors.items():
        if place := EXPERT.match(name):
            if place[2] is not None:
                apart[place[1]].add(int(place[2]))
            elif len(info.shape) > 2:
                joined[place[1]].add(info.shape[0])
    return dict(apart), dict(joined)


def _needless(name: str, after: ModelShape) -> str:
    """Return why a model computes the same without a tensor; empty if it does not."""
    if name == f"{HEAD}.weight" and tied(after.config) and tied_embedding(after):
        return "lm_head is tied to the embedding"
    if any(re.search(pattern, name) for pattern in OLD_BUFFERS):
        return "the model's code computes this buffer"
    return ""


def _parents(name: str) -> Iterator[str]:
    """Yield a tensor's name and those of the modules that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]
