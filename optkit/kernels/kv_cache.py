"""A KV cache that holds codes instead of floats, in the form that transformers' models take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from optkit.algorithms.state_codes import Float8Code, StateCode
from optkit.errors import StageError
from optkit.model.kv_scales import KvScales

CacheFactory = Callable[[], Cache]
HYBRID = LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer
"""Layers with both attention and states, as of Falcon-H1."""


class CodedLayer(CacheLayerMixin):
    """The coded keys and values of one attention layer.
    With a window, those of `window - 1` tokens: the first `sinks` and the last.
    """

    def __init__(self, keys_code: StateCode, values_code: StateCode, window: int | None = None, sinks: int = 0) -> None:
        super().__init__()
        self.keys_code, self.values_code, self.sliding_window, self.sinks = keys_code, values_code, window, sinks
        self.is_sliding = window is not None
        self.key_parts: tuple[Tensor, ...] = ()
        self.value_parts: tuple[Tensor, ...] = ()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is prepared: the first codes are the first parts."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Code float [batch, heads, new tokens, head_dim].
        Return all keys and values as they are read back, in the same dtype.
        """
        self.is_initialized = True
        self.length += key_states.shape[-2]
        self.key_parts = _joined(self.key_parts, self.keys_code.encode(key_states))
        self.value_parts = _joined(self.value_parts, self.values_code.encode(value_states))
        keys = self.keys_code.decode(self.key_parts, key_states.dtype)
        values = self.values_code.decode(self.value_parts, value_states.dtype)
        if self.sliding_window is not None and keys.shape[-2] >= self.sliding_window:
            self._change_(self._kept)
        return keys, values

    def _change_(self, change: Callable[[Tensor], Tensor]) -> None:
        self.key_parts = tuple(map(change, self.key_parts))
        self.value_parts = tuple(map(change, self.value_parts))

    def _kept(self, part: Tensor) -> Tensor:
        last = part[..., part.shape[-2] - ((self.sliding_window or 0) - 1 - self.sinks) :, :]
        return torch.cat([part[..., : self.sinks, :], last], dim=-2)

    def reset(self) -> None:
        """Forget all tokens."""
        self.key_parts, self.value_parts, self.length = (), (), 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on from these sequences of the batch, int64 [batch]."""
        self._change_(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as many as the absolute value says.
        Raises StageError if a window has forgotten others for them.
        """
        if count := abs(tokens_to_remove):
            if self.sliding_window is not None and self.length >= self.sliding_window:
                raise _no_crop(f"A window of {self.sliding_window} tokens has forgotten others for them")
            self._change_(lambda part: part[..., :-count, :])
            self.length -= count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens attention sees, and how many before them it does not."""
        held = self.length if self.sliding_window is None else min(self.length, self.sliding_window - 1)
        return held + query_length, self.length - held

    def get_seq_length(self) -> int:
        """Return how many tokens went through the layer."""
        return self.length

    def get_max_length(self) -> int:
        """Return the window, -1 without one."""
        return -1 if self.sliding_window is None else self.sliding_window

    def token_bytes(self) -> int:
        """Return the bytes per token of one sequence; raises ValueError for an empty layer."""
        parts = (*self.key_parts, *self.value_parts)
        if not parts:
            raise ValueError("the layer holds no token")
        return sum(part.nbytes // (part.shape[0] * part.shape[-2]) for part in parts)


class CodedBesideStates(LinearAttentionLayer, CodedLayer):
    """Coded keys and values of a layer that keeps states too, and these as they are."""

    def __init__(self, number_of_states: int, *coded: Any) -> None:
        CodedLayer.__init__(self, *coded)
        LinearAttentionLayer.__init__(self, number_of_states)

    def get_max_length(self) -> int:
        """Return that of the keys."""
        return CodedLayer.get_max_length(self)

    def reset(self) -> None:
        """Forget all tokens."""
        CodedLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on from these sequences of the batch, int64 [batch]."""
        CodedLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise StageError: a state holds all tokens in one, and none can be taken out."""
        raise _no_crop("A state of linear attention holds all tokens in one")


def _no_crop(why: str) -> StageError:
    return StageError(
        "the last tokens cannot be taken out of the cache", where="kv_cache", why=why, remedy="Take kv_cache out"
    )


def coded_cache(
    config: Any,
    codes: Sequence[tuple[StateCode, StateCode]] | tuple[StateCode, StateCode],
    where: str,
    window: int | None = None,
    sinks: int = 0,
) -> CacheFactory:
    """Return what makes an empty coded cache for a model.
    `codes` of keys and values are one pair for all layers or one for each.

    A `window` is for models without windows of their own (`attention_window.see_window_`). Layers
    of linear attention and convolutions keep their states as they are, also beside attention.

    Raises StageError for a model with layers of other kinds, and with none of attention alone.
    """
    beside = () if window or not isinstance(codes, tuple) else (LinearAttentionLayer, *HYBRID)
    like = _plain_layers(config, where, beside)
    if not isinstance(codes, tuple) and len(codes) != len(like):
        raise StageError(
            f"there are scales for {len(codes)} of {len(like)} layers", where=where, remedy="Make the artifact again"
        )
    windows = [window or getattr(layer, "sliding_window", None) for layer in like]
    pairs = [codes] * len(like) if isinstance(codes, tuple) else codes

    def make() -> Cache:
        empty = DynamicCache(config=config).layers
        return Cache(
            layers=[
                _coded(layer, keys, values, size, sinks)
                for layer, (keys, values), size in zip(empty, pairs, windows, strict=True)
            ]
        )

    return make


def _coded(layer: Any, *coded: Any) -> Any:
    """Return the layer that takes the place of one of transformers' own."""
    if isinstance(layer, HYBRID):
        return CodedBesideStates(layer.number_of_states, *coded)
    return layer if isinstance(layer, LinearAttentionLayer) else CodedLayer(*coded)


def stored_codes(scales: KvScales) -> list[tuple[StateCode, StateCode]]:
    """Return the float8 codes of keys and values of each layer, by the scales of a checkpoint."""
    return [(Float8Code(key), Float8Code(value)) for key, value in zip(scales.keys, scales.values, strict=True)]


class RecordingLayer(DynamicLayer):
    """A layer that notes the largest key and value, NaN once there was one, and forgets the states."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_key = self.largest_value = 0.0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take float [batch, heads, tokens, head_dim] and hand it on."""
        self.largest_key = _larger(self.largest_key, key_states)
        self.largest_value = _larger(self.largest_value, value_states)
        return key_states, value_states


def recording_cache(config: Any, where: str) -> tuple[Cache, list[RecordingLayer]]:
    """Return a cache that notes the largest key and value of each layer, and its layers.
    Raises StageError as `coded_cache` does.
    """
    layers = [RecordingLayer() for _ in _plain_layers(config, where)]
    return Cache(layers=list(layers)), layers


def _plain_layers(config: Any, where: str, beside: tuple[type, ...] = ()) -> list[Any]:
    """Return transformers' own layers for a model, all of keys and values but those of `beside`."""
    like = DynamicCache(config=config).layers
    plain = DynamicLayer, DynamicSlidingWindowLayer
    others = sorted({type(layer).__name__ for layer in like if type(layer) not in (*plain, *beside)})
    if others or all(type(layer) is LinearAttentionLayer for layer in like):
        raise StageError(
            f"the cache of {config.model_type} has layers of another kind: {', '.join(others) or 'none are known'}",
            where=where,
            why="Only keys and values are coded, and these layers hold states of linear attention or an index",
            remedy="Take the quantized KV cache out for this architecture",
        )
    return list(like)


def _larger(largest: float, states: Tensor) -> float:
    return float(torch.maximum(states.abs().max().float(), torch.tensor(largest, device=states.device)))


def _joined(held: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(pair, dim=-2) for pair in zip(held, new, strict=True)) if held else new
