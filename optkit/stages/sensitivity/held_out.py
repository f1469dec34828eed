"""How far quantized copies of a model diverge from it on some windows of text.
All of them run block by block beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from optkit.kernels.quant_methods import quantized_layers
from optkit.kernels.stored_layer import QuantizedLayer
from optkit.model.checkpoint import Checkpoint
from optkit.model.head import logits_behind
from optkit.model.prompts import Prompts, tokens_in
from optkit.model.replaced_forward import replaced_forward
from optkit.model.skeleton import Projection, Skeleton
from optkit.progress import Progress
from optkit.source.images import Prompts as Images

POSITIONS_AT_ONCE = 256
"""Positions whose logits are held together."""


def mean_divergences(
    skeleton: Skeleton, copies: Sequence[Checkpoint], tokens: Tensor | Prompts, device: str, progress: Progress
) -> list[float]:
    """Return the mean KL(model || copy) of the next token for each copy, in nats per token; tokens:
    int64 [sequences, sequence_length], or prompts with images.

    A copy differs from the model in its quantized layers alone. At most one block and the hidden
    states of all are in memory.
    """
    quantized = [quantized_layers(copy) or {} for copy in copies]
    inputs = skeleton.capture_inputs(tokens, device, batch_size=1)
    streams = [inputs.hidden, *(inputs.copied() for _ in copies)]
    with progress.task("compare", len(skeleton.blocks), "blocks") as task:
        for index, block in enumerate(skeleton.blocks):
            skeleton.load_(block.name, device)
            linears = skeleton.linears(block)
            for hidden, layers in zip(streams, ({}, *quantized), strict=True):
                with _computing_with(linears, layers, skeleton.dtype, device):
                    skeleton.advance_(index, inputs, hidden)
            skeleton.release_(block.name)
            task.advance(note=block.name)
    skeleton.load_outside_(device)
    totals = [
        sum(
            _divergence(skeleton, ours, theirs)
            for (_, ours), (_, theirs) in zip(inputs.each(), inputs.each(stream), strict=True)
        )
        for stream in streams[1:]
    ]
    skeleton.release_outside_()
    return [total / tokens_in(tokens) for total in totals]


@contextmanager
def _computing_with(
    linears: Mapping[str, Projection], layers: Mapping[str, QuantizedLayer], dtype: torch.dtype, device: str
) -> Iterator[None]:
    """Let the quantized layers of a block compute in place of its own."""
    built = {
        module: layers[name].build(module.bias, dtype, device)[0].forward
        for name, module in linears.items()
        if name in layers
    }
    with replaced_forward(built):
        yield


@torch.no_grad()
def _divergence(skeleton: Skeleton, ours: Tensor, theirs: Tensor) -> float:
    """Return the sum of KL(ours || theirs) over the positions of a sequence.
    What leaves the last block is float [1, positions, hidden].
    """
    total = 0.0
    for pair in zip(*(each.split(POSITIONS_AT_ONCE, dim=1) for each in (ours, theirs)), strict=True):
        expected, found = (
            logits_behind(skeleton.model, skeleton.blocks, hidden).float().log_softmax(-1) for hidden in pair
        )
        total += float(kl_div(found, expected, log_target=True, reduction="none").sum(-1).double().sum())
    return total


def unseen_among(windows: Tensor | Images, used: Tensor | Images) -> list[int]:
    """Return the indices of windows, or prompts with images, that are not among those that were used."""
    before = {*_contents(used)}
    return [index for index, content in enumerate(_contents(windows)) if content not in before]


def _contents(inputs: Tensor | Images) -> list[object]:
    return (
        [tuple(row) for row in inputs.tolist()]
        if isinstance(inputs, Tensor)
        else [pair.content for pair in inputs.pairs]
    )
