"""Which layers quantizers and pruning take: the decoder blocks' but routers, by patterns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from optkit.common.grouping import grouped
from optkit.errors import StageError, did_you_mean
from optkit.model.read_weights import Read, reads_of
from optkit.model.routers import routers_of
from optkit.model.shape import ModelShape, place_in_list
from optkit.model.task import TOWERS

CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt"})
"""Architectures whose projections are transformers' Conv1D, stored [in, out]."""
OUTSIDE, ROUTER = "outside the decoder blocks", "router"
"""Why a layer is not quantized whatever the patterns say."""
EXPERTS = ".experts."
"""In the name of every layer of an expert."""


@dataclass(frozen=True)
class Layer:
    """One linear layer of a decoder block."""

    name: str
    outputs: int
    inputs: int
    transposed: bool
    """Stored [in, out] (Conv1D)."""
    router: bool = False
    reads: frozenset[Read] = frozenset()
    """What the model's own code does with its weight."""
    tower: bool = False
    """In a block of a tower of vision or audio."""
    whole_bytes: bool = False
    """Its codes take a byte each, so that what holds them is called weight."""


@dataclass(frozen=True)
class Selection:
    """The layers to quantize, in order, and why the others are not."""

    layers: Mapping[str, Layer]
    skipped: Mapping[str, str]

    def without(self, reasons: Mapping[str, str], stage: str) -> Selection:
        """Return the selection with some layers skipped, each with its reason. Raises StageError
        if no layer is left.
        """
        chosen = {name: layer for name, layer in self.layers.items() if name not in reasons}
        _refuse_nothing(chosen, len(self.layers), stage)
        return Selection(chosen, dict(sorted({**self.skipped, **reasons}.items())))


JOINED = {leaf: joined for joined in ("q_proj k_proj v_proj", "gate_proj up_proj", "w1 w3") for leaf in joined.split()}
"""Layers with one input, by their last names: quantized together, and one layer of vLLM."""


def stacks(names: Iterable[str]) -> list[list[str]]:
    """Return layers with those that share their input together, as far as names tell."""

    def inputs(name: str) -> tuple[str, str]:
        parent, _, leaf = name.rpartition(".")
        return parent, JOINED.get(leaf, leaf)

    return list(grouped(names, inputs).values())


def scaled_together(names: Iterable[str]) -> list[list[list[str]]]:
    """Return the `stacks` of a block with those behind one norm together, as far as names tell.
    All experts' gate and up are.
    """
    found = grouped(stacks(names), lambda stack: JOINED.get(stack[0].rpartition(".")[2], stack[0]))
    return list(found.values())


def by_block(shape: ModelShape, names: Iterable[str]) -> list[list[str]]:
    """Return layers with those of one block together; what is in no block (lm_head) is too."""
    return list(grouped(names, lambda name: shape.block(f"{name}.weight")).values())


def layers_of(shape: ModelShape) -> dict[str, Layer]:
    """Return the decoder blocks' linear layers by names and shapes, as `Skeleton.linears` does."""
    return {name: layer for name, layer in matrices_of(shape).items() if shape.block(f"{name}.weight")}


def matrices_of(shape: ModelShape) -> dict[str, Layer]:
    """Return everything that looks like a linear layer: matrices that no name calls an embedding."""
    transposed = shape.config.get("model_type") in CONV1D_MODELS
    routers, reads = routers_of(shape), reads_of(shape.config)
    towers: Mapping[str, Any] = next((shape.config[key] for key in TOWERS if shape.config.get(key)), {})
    tower_reads = reads_of({"model_type": shape.config.get("model_type"), **towers})
    apart = {Read.REPLACED} if any(".experts.0." in name for name in shape.tensors) else frozenset[Read]()
    layers = {}
    for tensor, info in shape.tensors.items():
        name, _, leaf = tensor.rpartition(".")
        looked_up = any(word in name.rpartition(".")[2] for word in ("embed", "wte", "wpe", "relative_attention_bias"))
        if leaf == "weight" and len(info.shape) == 2 and not looked_up:
            outputs, inputs = reversed(info.shape) if transposed else info.shape
            tower = place_in_list(tensor) is not None and not shape.block(tensor) and shape.in_tower(tensor)
            read = (tower_reads if tower else reads)(name) - apart
            layers[name] = Layer(name, outputs, inputs, transposed, name in routers, read, tower)
    return layers


def select(
    layers: Mapping[str, Layer], outside: Iterable[str], include: Sequence[str], exclude: Sequence[str], stage: str
) -> Selection:
    """Choose layers by glob patterns against their full names. `outside` are the linear layers
    outside the blocks (lm_head), never taken.

    Raises StageError for a pattern that matches nothing and if no layer is left.
    """
    beyond = tuple(outside)
    refuse_unmatched(f"{stage}.include", include, layers, beyond)
    refuse_unmatched(
        f"{stage}.exclude",
        [pattern for pattern in exclude if not any(fnmatchcase(name, pattern) for name in beyond)],
        layers,
    )
    skipped = dict.fromkeys(beyond, OUTSIDE)
    chosen = {}
    for name, layer in layers.items():
        if not any(fnmatchcase(name, pattern) for pattern in include):
            skipped[name] = "not included"
        elif any(fnmatchcase(name, pattern) for pattern in exclude):
            skipped[name] = "excluded"
        elif layer.router:
            skipped[name] = ROUTER
        else:
            chosen[name] = layer
    _refuse_nothing(chosen, len(layers), stage)
    return Selection(chosen, dict(sorted(skipped.items())))


def refuse_unmatched(
    where: str, patterns: Iterable[str], layers: Mapping[str, Layer], outside: Sequence[str] = ()
) -> None:
    """Raise StageError, with a did-you-mean, for a pattern that matches none of the layers."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            _refuse(where, pattern, layers, outside)


def _refuse_nothing(chosen: Mapping[str, Layer], count: int, stage: str) -> None:
    if not chosen:
        raise StageError(
            f"no layer is left of {count:,} in the decoder blocks",
            where=stage,
            remedy="Widen `include` or narrow `exclude`",
        )


def _refuse(where: str, pattern: str, layers: Mapping[str, Layer], outside: Sequence[str]) -> None:
    if any(fnmatchcase(name, pattern) for name in outside):
        raise StageError(
            f"`{pattern}` is outside the decoder blocks", where=where, why="lm_head and embeddings stay as they are"
        )
    ends = sorted({f"*.{name.rpartition('.')[2]}" for name in layers})
    near = difflib.get_close_matches(pattern, layers, n=1, cutoff=0.8)
    hint = did_you_mean(pattern, near or ends)
    raise StageError(f"`{pattern}` matches none of {len(layers):,} layers", where=where, remedy=hint.strip())
