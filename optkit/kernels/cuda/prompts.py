"""Prompts through the layers of a `GraphDecoder`: many tokens in parts, few of them as a CUDA graph.

Python needs about 20 ms to launch the kernels of a prompt, and a few hundred tokens take the GPU
less. So prompts of such a length are padded and captured when they come again: in causal attention
what stands behind a token does not change it, and steps write over what padding left in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.cuda.graph_capture import captured
from optkit.kernels.cuda.layer_pass import Rows, has_kernels_for
from optkit.kernels.cuda.step_layers import Layer
from optkit.kernels.cuda.step_products import step_product

if TYPE_CHECKING:
    from optkit.kernels.cuda.decoding import Steps

MOST_ROWS = 16384
"""Tokens of prompts that are read at once: what they need at most besides the cache."""
MOST_CAPTURED, MOST_SPLIT = 2048, 4096
"""Tokens of prompts, padded, that a graph reads, on one GPU and on several: more keep them busy while Python launches.
Several need less time for them, and Python more, which launches their sums too.
"""
TOKENS_STEP, LENGTH_STEP, MOST_GRAPHS = 64, 8, 16
"""All prompts together are padded to about a multiple of the first, each to one of the second at least.
Graphs of so many lengths are kept.
"""


class Prompts:
    """Reads prompts into the cache of steps, which are given each time: they own this, and go when nobody else does."""

    def __init__(self) -> None:
        self._padded: dict[int, PaddedPrompt] = {}

    def read(self, steps: Steps, tokens: Tensor) -> Tensor:
        """Return the tokens behind prompts, int64 [batch]; tokens: int64 [batch, prompt]."""
        (batch, length), decoder = tokens.shape, steps.decoder
        step = max(LENGTH_STEP, TOKENS_STEP // batch)
        padded = min(-(-length // step) * step, steps.capacity)
        rows = batch * padded
        most = MOST_SPLIT if decoder.exchange else MOST_CAPTURED
        if rows <= most and all(has_kernels_for(layer, rows) for layer in decoder.layers):
            if padded not in self._padded:
                while len(self._padded) >= MOST_GRAPHS:
                    del self._padded[next(iter(self._padded))]
                self._padded[padded] = PaddedPrompt(tokens.new_zeros(batch, padded))
            return self._padded[padded].read(steps, tokens)
        parts = tokens.split(max(1, MOST_ROWS // length))
        caches = steps.cache.split(len(parts[0]), dim=2)
        logits = torch.cat([through(steps, part, cache) for part, cache in zip(parts, caches, strict=True)])
        return decoder.all_logits(logits).argmax(-1)


class PaddedPrompt:
    """Prompts of about one length: the first are launched, those behind them are a graph."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens, self._uses = tokens, 0
        self._last, self._chosen = tokens.new_zeros(1), tokens.new_zeros(0)
        self._graph: torch.cuda.CUDAGraph | None = None

    def read(self, steps: Steps, tokens: Tensor) -> Tensor:
        """Return the tokens behind prompts, int64 [batch]."""

        def launch() -> None:
            logits = through(steps, self._tokens, steps.cache, self._last)
            self._chosen = steps.decoder.all_logits(logits).argmax(-1)

        length = tokens.shape[1]
        self._tokens[:, :length] = tokens
        self._last.fill_(length - 1)
        self._uses += 1
        if self._graph is None and self._uses > 1:
            self._graph = captured(launch, steps.graph)
        if self._graph is None:
            launch()
        else:
            self._graph.replay()
        return self._chosen.clone()


def through(steps: Steps, tokens: Tensor, cache: Tensor, last: Tensor | None = None) -> Tensor:
    """Return this process's logits behind the tokens at `last`, int64 [1], else behind the last ones.
    cache: float [layers, 2, batch, heads, capacity, channels].
    """
    decoder, (batch, length) = steps.decoder, tokens.shape
    rows = Rows(decoder, batch, length)
    torch.mul(F.embedding(tokens.flatten(), decoder.embedding), decoder.embedding_scale, out=rows.hidden)
    ends = torch.arange(batch, device=tokens.device) * length + (length - 1 if last is None else last)
    for index, layer in enumerate(decoder.layers):
        keys, values = cache[index]

        def attend(index: int = index, layer: Layer = layer, keys: Tensor = keys, values: Tensor = values) -> Tensor:
            turned = (*steps.rotations[index], length, steps.capacity, *steps.head_norms(layer), decoder.epsilon)
            kernel = steps.kernel("attention.cu", "turn_prompt", steps.macros(index, rows))
            kernel((batch * length, 1, 1), 128, (rows.qkv, keys, values, *turned, *rows.scaled))
            queries = rows.qkv.view(batch, length, -1, decoder.size)[:, :, : decoder.heads].transpose(1, 2)
            past = keys[:, :, :length], values[:, :, :length]
            found = F.scaled_dot_product_attention(
                queries, *past, is_causal=True, scale=decoder.scaling, enable_gqa=decoder.heads != decoder.kv_heads
            )
            attended = found.transpose(1, 2).reshape(batch * length, -1)
            if index + 1 < len(decoder.layers):
                return attended
            rows.keep_rows(ends)  # the keys and values of the others are all that steps need
            return attended.index_select(0, ends)

        rows.through(layer, attend)
    rows.finish()
    logits = torch.empty(batch, decoder.head.outputs, dtype=torch.float32, device=tokens.device)
    step_product(decoder.head, rows.hidden, logits, norm=decoder.norm, epsilon=decoder.epsilon)
    return logits
