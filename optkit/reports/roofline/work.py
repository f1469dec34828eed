"""The work of a model: bytes moved and operations done for a prompt and for a decode step.

A matrix of n weights costs a token 2 n operations (a multiply and an add). Attention costs 2 (query
width + value width) operations for each pair of a query and a key that it may see. Norms,
activations, rotary angles and softmax are not counted, nor are the bytes of activations. All that
is left out makes the true time longer, so that what follows from these numbers is a limit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from optkit.model.attention import AttentionLayer, attention_of
from optkit.model.shape import ModelShape
from optkit.model.text_config import text_config
from optkit.model.weights import Weights, expert_counts, weights_of
from optkit.reports.roofline.forms import Form


@dataclass(frozen=True)
class Work:
    """What one token needs of a model."""

    weights: tuple[Weights, ...]
    attention: tuple[AttentionLayer, ...]
    experts: int
    """Experts of a layer; 0 if there are none."""
    chosen: int
    """Experts that a token is sent to."""
    dtype: str
    """What the checkpoint says that it computes in: `fp32`, `bf16`, `fp16`."""
    notes: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """All weights of its matrices, whether a token meets them or not."""
        return sum(each.elements for each in self.weights)

    @property
    def quantized(self) -> bool:
        """Whether the files hold packed or rounded weights."""
        return any(each.quantized for each in self.weights)

    def expert_share(self, tokens: int) -> float:
        """Return the share of the experts that so many tokens need, if each is sent to random ones:
        1 - (1 - chosen / experts)^tokens.
        """
        return 1 - (1 - self.chosen / self.experts) ** tokens if self.experts else 1.0

    def weight_bytes(self, form: Form, tokens: int) -> float:
        """Return the bytes of weights that `tokens` tokens read at once.
        Each matrix is read once, of tables a row for each token.
        """
        return sum(self._bytes(each, form) * self._share(each, tokens) for each in self.weights)

    def stored_bytes(self, form: Form) -> float:
        """Return the bytes that all weights take in memory."""
        return sum(self._bytes(each, form) for each in self.weights)

    def cache_bytes(self, form: Form, batch: int, context: int) -> int:
        """Return the bytes of keys and values of `batch` sequences of `context` tokens."""
        return batch * form.wide_bytes * sum(layer.cached(context) for layer in self.attention)

    def matrix_flops(self, form: Form, tokens: int, logits: int) -> dict[str, float]:
        """Return dtype of products -> operations, for `tokens` tokens and `logits` through lm_head."""
        found: Counter[str] = Counter()
        for each in self.weights:
            if each.role == "rows":
                continue
            share = self.chosen / self.experts if each.role == "experts" and self.experts else 1.0
            count = logits if each.role == "head" else tokens
            found[_arithmetic(each, form)] += 2 * each.elements * share * count  # type: ignore[assignment]
        return dict(found)

    def attention_flops(self, batch: int, queries: int, context: int) -> int:
        """Return the operations of causal attention for `queries` new tokens.
        They follow `context` others in each of `batch` sequences.
        """
        return batch * sum(layer.flops(layer.pairs(queries, context)) for layer in self.attention)

    def _share(self, each: Weights, tokens: int) -> float:
        if each.role == "rows":
            return min(tokens, each.length) / each.length
        return self.expert_share(tokens) if each.role == "experts" else 1.0

    def _bytes(self, each: Weights, form: Form) -> float:
        if form.bits is None:
            return each.size_bytes
        if each.role in ("blocks", "experts"):
            return each.elements * form.bits / 8 + each.others * form.wide_bytes
        return (each.elements + each.others) * form.wide_bytes


def work_of(shape: ModelShape) -> Work:
    """Return the work of a model from config and tensors, of which no weight is read.

    Raises SourceError if packed weights lie in a layout that is not known, or nothing makes
    logits.
    """
    weights = weights_of(shape)
    blocks = len({place for name in shape.tensors if (place := shape.block(name))})
    attention, notes = attention_of(shape.config, blocks)
    experts, chosen = expert_counts(shape.config) if any(each.role == "experts" for each in weights) else (0, 0)
    return Work(tuple(weights), attention, experts, chosen, _dtype(shape), notes)


def _arithmetic(each: Weights, form: Form) -> str:
    if form.bits is None:
        return each.arithmetic or form.wide
    return form.arithmetic if each.role in ("blocks", "experts") else form.wide


def _dtype(shape: ModelShape) -> str:
    """Return what config.json says, else the float of most bytes."""
    said = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    names = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
    told = (config.get(key) for config in (text_config(shape.config), shape.config) for key in ("dtype", "torch_dtype"))
    sizes: Counter[str] = Counter()
    for info in shape.tensors.values():
        sizes[names.get(info.dtype, "")] += info.size_bytes
    del sizes[""]
    return said.get(str(next(filter(None, told), None))) or max(sizes, key=sizes.__getitem__, default="bf16")
