"""Who reads and who writes the residual stream, found by running a few tokens, not by names.

A layer reads the stream if every row of its input is a row of what a norm made, bit by bit. That
holds for experts too, which are given some of the rows. A linear layer that makes vectors as wide
as the stream and does not read it writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optkit.errors import StageError
from optkit.model.replaced_forward import hooked
from optkit.model.shape import without_indices
from optkit.model.skeleton_layers import weight_of

OFFSETS = (0.0, 1.0)
"""What a norm may add to its weight before it multiplies by it; 1 is Gemma's."""


@dataclass(frozen=True)
class StreamNorm:
    """A norm of the residual stream, and the layers that read what it makes."""

    name: str
    module: nn.Module
    readers: Mapping[str, nn.Module]
    """Linear layers and routers: weights [out, width]."""
    offset: float
    """What the norm adds to its weight, so `1 - offset` is the weight of one that only normalizes.
    """


@dataclass(frozen=True)
class StreamParts:
    """The layers, by module name, of a block or the part after it that touch the stream."""

    norms: tuple[StreamNorm, ...]
    writers: Mapping[str, nn.Linear]

    @property
    def readers(self) -> dict[str, nn.Module]:
        return {name: module for norm in self.norms for name, module in norm.readers.items()}


def stream_parts(modules: Mapping[str, nn.Module], width: int, run: Callable[[], Any], where: str) -> StreamParts:
    """Find what reads and writes a residual stream of `width` in `run()`, on a few tokens.

    Raises StageError if the stream cannot be rotated: a norm that subtracts the mean or has a
    bias, one behind a writer, a layer that `run` never called.
    """
    norms = {name: module for name, module in modules.items() if _weight_shape(module) == (width,)}
    layers = {
        name: module
        for name, module in modules.items()
        if len(_weight_shape(module)) == 2 and not isinstance(module, nn.Embedding)
    }
    entered, left = _observe(norms | layers, run)
    _refuse_unseen(layers, entered, where)
    reads: dict[str, str] = {}
    for name, rows in entered.items():
        norm = next(
            (norm for norm in norms if name in layers and norm in left and _are_rows_of(rows, left[norm])), None
        )
        if norm is not None:
            reads[without_indices(name)] = norm
    reading = {name: reads[without_indices(name)] for name in layers if without_indices(name) in reads}
    found = []
    for name, module in norms.items():
        if readers := {layer: layers[layer] for layer, norm_read in reading.items() if norm_read == name}:
            found.append(StreamNorm(name, module, readers, _offset(name, module)))
    read = {norm.name for norm in found}
    # norms of queries and keys, if they are as wide as the stream, are of what layers make
    made = [left[name] for name in reading if name in left]
    read |= {norm for norm in norms if norm in entered and any(_are_rows_of(entered[norm], each) for each in made)}
    if unread := [name for name in entered if name in norms and name not in read]:
        raise StageError(
            f"no linear layer reads what this {type(norms[unread[-1]]).__name__} makes",
            where=f"rotate: {unread[-1]}",
            why="A norm behind the attention or the feed-forward layers scales what they add to the residual "
            "stream; its scales cannot be folded into a layer",
            remedy="Set rotate.residual to false for this architecture",
        )
    if not found:
        raise StageError(
            "no linear layer reads what a norm makes", where=f"rotate: {where}", why="Its weights could not be folded"
        )
    writers = {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, nn.Linear) and name not in reading and len(layer.weight) == width
    }
    return StreamParts(tuple(found), writers)


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    weight = module._parameters.get("weight")
    return () if weight is None else tuple(weight.shape)


def _observe(modules: Mapping[str, nn.Module], run: Callable[[], Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what entered and left each module, float [rows, features], by the module's name."""
    entered: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def observe(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            given = next((value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor)), None)
            if given is not None and given.numel():
                entered[name] = given.detach().flatten(0, -2).clone()
            if isinstance(output, Tensor):
                left[name] = output.detach().flatten(0, -2).clone()

        return observe

    with hooked(module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules.items()):
        run()
    return entered, left


def _refuse_unseen(layers: Mapping[str, nn.Module], entered: Mapping[str, Tensor], where: str) -> None:
    seen = {without_indices(name) for name in entered}
    unseen = [name for name in layers if without_indices(name) not in seen]
    if unseen:
        raise StageError(
            f"{len(unseen):,} of {len(layers):,} layers were not called ({', '.join(unseen[:3])})",
            where=f"rotate: {where}",
            why="Whether they read the residual stream is seen by running them",
        )


def _are_rows_of(rows: Tensor, others: Tensor) -> bool:
    """Whether each row, float [n, features], is one of the others, float [m, features], bit by bit."""
    return rows.shape[-1] == others.shape[-1] and all(bool((row == others).all(-1).any()) for row in rows)


def _offset(name: str, norm: nn.Module) -> float:
    """Return what an RMS norm adds to its weight; raises StageError for another kind of norm."""
    weight = weight_of(norm)
    probe = torch.linspace(-2, 6, weight.numel(), dtype=weight.dtype, device=weight.device)[None]  # its mean is 2
    with torch.no_grad():
        made = norm(probe)
    normalized = probe * probe.pow(2).mean().rsqrt()
    for offset in OFFSETS:
        if torch.allclose(made, normalized * (weight + offset), rtol=1e-3, atol=1e-4):
            return offset
    raise StageError(
        f"{type(norm).__name__} is no RMS norm",
        where=f"rotate: {name}",
        why="A norm that subtracts the mean or adds a bias does not commute with a rotation of the residual stream",
        remedy="Set rotate.residual to false for this architecture",
    )
