"""Prompts through the layers of a `GraphDecoder`: many tokens in parts, few of them as a CUDA graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels.cuda.layer_pass import Rows
from optkit.kernels.cuda.padded_prompts import PaddedPrompts
from optkit.kernels.cuda.step_layers import GatedMlp, Layer
from optkit.kernels.cuda.step_products import step_product

if TYPE_CHECKING:
    from optkit.kernels.cuda.decoding import Steps

MOST_ROWS = 16384
"""Tokens of prompts that are read at once: what they need at most besides the cache."""


class Prompts:
    """Reads prompts into the cache of steps, which are given each time: they own this, and go when nobody else does."""

    def __init__(self, capacity: int) -> None:
        self._padded = PaddedPrompts(capacity)

    def read(self, steps: Steps, tokens: Tensor) -> Tensor:
        """Return the tokens behind prompts, int64 [batch]; tokens: int64 [batch, prompt]."""
        length, decoder = tokens.shape[1], steps.decoder
        whole = all(isinstance(layer.mlp, GatedMlp) for layer in decoder.layers)
        if whole and self._padded.takes(tokens):
            logits = self._padded.read(tokens, lambda padded, last: through(steps, padded, steps.cache, last))
            return decoder.all_logits(logits).argmax(-1)
        parts = tokens.split(max(1, MOST_ROWS // length))
        caches = steps.cache.split(len(parts[0]), dim=2)
        logits = torch.cat([through(steps, part, cache) for part, cache in zip(parts, caches, strict=True)])
        return decoder.all_logits(logits).argmax(-1)


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
