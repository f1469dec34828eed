"""What attention keeps and computes, layer by layer, from config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optkit.errors import StageError
from optkit.model.config_defaults import defaults_of
from optkit.model.shape import WIDTHS
from optkit.model.state_kernels import keeps_keys_and_values, keeps_states, takes_steps
from optkit.model.text_config import first_number, text_config

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
ATTENDING = ("full_attention", "sliding_attention", "attention", "chunked_attention")
"""Kinds of layers, in the `layer_types` of transformers, that keep keys and values."""


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention."""

    query_width: int
    """Query heads times the channels of a head: a query meets a key in as many multiply-adds."""
    value_width: int
    """Query heads times the channels of a value."""
    cache_width: int
    """Numbers that the KV cache keeps of a token."""
    window: int | None = None
    """How many tokens back it sees, itself included; None: all."""

    def pairs(self, queries: int, context: int) -> int:
        """Return causal attention's query-key pairs: `queries` new tokens behind `context` others."""
        last = context + queries
        if self.window is None or last <= self.window:
            return _triangle(last) - _triangle(context)
        rising = max(0, self.window - context)
        return _triangle(context + rising) - _triangle(context) + (queries - rising) * self.window

    def flops(self, pairs: int) -> int:
        """Return the operations of so many pairs: two per channel, for scores and for values."""
        return 2 * (self.query_width + self.value_width) * pairs

    def cached(self, context: int) -> int:
        """Return how many numbers a step reads of one sequence's cache."""
        return self.cache_width * (context if self.window is None else min(context, self.window))


def attention_of(config: Mapping[str, Any], blocks: int) -> tuple[tuple[AttentionLayer, ...], tuple[str, ...]]:
    """Return the attention of each block that has one, and sentences about what is not counted."""
    text = text_config(config)
    heads, width = first_number(text, HEADS), first_number(text, WIDTHS)
    if not heads or not width:
        return (), ("attention and KV cache are not counted: config.json does not say how many heads there are",)
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) < blocks:
        kinds = [_kind(text, index) for index in range(blocks)]
    layers = tuple(_layer(text, heads, width, kind) for kind in kinds[:blocks] if kind in ATTENDING)
    others = sorted({kind for kind in kinds[:blocks] if kind not in ATTENDING})
    return layers, tuple(f"the states of layers of the kind {kind} are not counted" for kind in others)


def cache_width(config: Mapping[str, Any], blocks: int) -> int:
    """Return how many numbers the KV cache keeps of a token in all blocks."""
    return sum(layer.cache_width for layer in attention_of(config, blocks)[0])


def forgetting_layers(config: Mapping[str, Any]) -> str:
    """Return what is said of layers if some keep less of a text than all of its keys and values; else nothing."""
    text = text_config(config)
    others = {*(text.get("layer_types") or text.get("layers_block_type") or ())} - {"full_attention", "attention"}
    if _window(text) or any("attention" in kind and "linear" not in kind for kind in others):
        return "have windows of their own"
    alone = keeps_keys_and_values(config) and not keeps_states(config)
    return "are not all of attention" if others or not alone else ""


def refuse_own_windows(config: Mapping[str, Any], where: str) -> None:
    """Raise StageError for a model that a window of tokens does not fit."""
    if why := forgetting_layers(config):
        raise StageError(f"the model's layers {why}", where=where, remedy="Take window out of the recipe")


def refuse_other_states(config: Mapping[str, Any], where: str, why: str, remedy: str, beside: bool = False) -> None:
    """Raise StageError for a model that keeps more of its tokens than keys and values.
    `beside`: some of its layers may keep states in their place.
    """
    if not keeps_keys_and_values(config) or (keeps_states(config) and not beside):
        what = f"{text_config(config).get('model_type')} keeps something else of its tokens than keys and values"
        raise StageError(what, where=where, why=why, remedy=remedy)


def refuse_without_steps(config: Mapping[str, Any], where: str) -> None:
    """Raise StageError for a model that cannot be run token by token, in which nothing decodes."""
    if not takes_steps(config):
        raise StageError(
            f"{text_config(config).get('model_type')} cannot be run token by token",
            where=where,
            why="Its code in transformers takes or returns nothing that it keeps of the tokens before",
            remedy="Take it out for this architecture",
        )


def _layer(text: Mapping[str, Any], heads: int, width: int, kind: str) -> AttentionLayer:
    window = _window(text) if kind != "full_attention" else None
    # multi-head latent attention (DeepSeek): the cache keeps the latent and one rotary key
    if latent := text.get("kv_lora_rank"):
        said = {**defaults_of(str(text.get("model_type"))), **text}
        sizes = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        rotary, plain, value = (int(said.get(key) or width // heads) for key in sizes)
        return AttentionLayer(heads * (rotary + plain), heads * value, int(latent) + rotary, window)
    size = int(text.get("head_dim") or width // heads)
    return AttentionLayer(heads * size, heads * size, 2 * key_heads(text, heads) * size, window)


def key_heads(text: Mapping[str, Any], heads: int) -> int:
    """Return the heads of keys and values, of a language model's config with so many of queries."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return first_number(text, KEY_HEADS) or heads


def head_sizes(config: Any) -> tuple[int, ...]:
    """Return the channels of a head in each block, of the language model's config in transformers."""
    return tuple(
        getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads
        for each in config.per_layer_config
    )


def _kind(text: Mapping[str, Any], index: int) -> str:
    """Return the kind of a layer if `layer_types` does not say it."""
    pattern = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 1 and (index + 1) % pattern == 0:
        return "full_attention"
    return "sliding_attention" if _window(text) else "full_attention"


def _window(text: Mapping[str, Any]) -> int | None:
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    return int(window) if window and text.get("use_sliding_window", True) else None


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
