"""How far torch is from itself: the same model computed in other, equally good ways.

An export that is no further from torch's float32 than a few times this has nothing to be blamed
for. Models whose hidden states are large beside what their blocks add (Gemma 3) or whose gains are
high lose more digits than others, whoever computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optkit.model.attention_choice import asked_of_attention
from optkit.model.replaced_forward import replaced_forward

PLAIN = (nn.Linear, nn.Embedding, nn.LayerNorm)
"""Modules whose own `forward` follows the dtype of their weights."""


@dataclass(frozen=True)
class Rounding:
    """How far two ways of computing the same model are apart."""

    share: float
    """The largest difference of a logit, as a share of the largest logit (of 1 if that is
    smaller).
    """
    how: str
    """The other way than float32 with eager attention: `float64`, `float32 with sdpa`, `float16`."""


def own_rounding(model: Any, tokens: Tensor, dtype: str, quantized: bool) -> Rounding:
    """Return how far a float32 model's logits with eager attention are from the farthest way's.
    They are for int64 [b, s].

    The ways: its products in float64; fused attention, if that computes what the model asks for;
    its products in the dtype of a graph of float weights.
    """
    wanted = _logits(model, tokens)
    found = {}
    with _products_in_float64(model):
        found["float64"] = _logits(model, tokens)
    if not asked_of_attention(model.config.to_dict()):
        model.set_attn_implementation("sdpa")
        try:
            found["float32 with sdpa"] = _logits(model, tokens)
        finally:
            model.set_attn_implementation("eager")
    if dtype != "float32" and not quantized:
        with torch.autocast("cpu", getattr(torch, dtype)):
            found[dtype] = _logits(model, tokens)
    largest = max(float(wanted.abs().max()), 1.0)
    return max(
        (Rounding(float((logits - wanted).abs().max()) / largest, how) for how, logits in found.items()),
        key=lambda each: each.share,
    )


@torch.no_grad()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.double()


@contextmanager
def _products_in_float64(model: nn.Module) -> Iterator[None]:
    """Let layers compute in float64 within the block, one layer's weights at a time.

    Layers of codes compute as they are; so does what a model casts to float32 itself, such as the
    root mean square of a norm.
    """
    widened = {
        module: _in_float64(module, module.forward)
        for module in model.modules()
        if not list(module.children()) and (list(module.parameters()) or hasattr(module, "in_features"))
    }
    with replaced_forward(widened):
        yield


def _in_float64(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    codes = not isinstance(module, PLAIN) and hasattr(module, "in_features")

    def computed(given: Tensor, *more: Any, **options: Any) -> Any:
        if codes:
            return forward(given.float(), *more, **options).double()
        held = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
        try:
            for name, value in held.items():
                getattr(module, name).data = value.double()
            return forward(given.double() if given.is_floating_point() else given, *more, **options)
        finally:
            for name, value in held.items():
                getattr(module, name).data = value

    return computed
