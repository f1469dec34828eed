"""What a model keeps of the tokens it has seen, and how each pass takes it in and gives it out.

past_key_values   attention, and blocks of it beside others   a `Cache`, filled in place
cache_params      Mamba, Mamba 2, Falcon-Mamba                a `Cache`, filled in place
state             RWKV                                        tensors that each pass returns
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from optkit.errors import SourceError, StageError

KEYS_AND_VALUES = "past_key_values"
CACHES = KEYS_AND_VALUES, "cache_params"
NAMES = *CACHES, "state"
"""Arguments of a pass, and fields of what it returns, that carry the state of causal language
models.
"""
PROBE = 8
"""Tokens in front of the one whose position is tried."""
_positions_needed: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class CarriedState:
    """What a model keeps of the tokens that went through `step`."""

    def __init__(self, model: Any, cache: Cache | None = None) -> None:
        """Begin with nothing seen, or with an empty cache of another kind.

        Raises SourceError for a state of no known kind.
        """
        self.model, self.name = model, state_name(model)
        self.held: Any = cache
        self.seen = 0
        """Tokens of each sequence."""
        if cache is None and self.name == KEYS_AND_VALUES:
            self.held = _empty_cache(model)

    def step(self, tokens: Tensor, call: Callable[..., Any] | None = None, *, last: bool = False) -> Tensor:
        """Return the logits, [batch, new, vocabulary], of the next tokens, int64 [batch, new].
        `call` runs the model.

        If `last`, those of the last token are enough.

        Raises SourceError for a model that gives no state back, or mixes the sequences of a batch.
        """
        output = (call or self.model.forward)(input_ids=tokens, use_cache=True, **self._carried(tokens, last))
        self.held, self.seen = getattr(output, self.name, None), self.seen + tokens.shape[1]
        if self.held is None:
            raise _no_steps(self.model, f"takes `{self.name}` and returns none")
        logits: Tensor = output.logits
        if logits.shape[1] not in (1, tokens.shape[1]):
            raise SourceError(
                f"{type(self.model).__name__} gives logits of {list(logits.shape[:2])} for tokens "
                f"of {list(tokens.shape)}",
                where=str(self.model.config.model_type),
                why="Its step in transformers mixes the sequences of a batch",
                remedy="Use a batch of one",
            )
        return logits

    @property
    def layers(self) -> Sequence[Any]:
        """The layers of a cache; none of a state of tensors."""
        return getattr(self.held, "layers", ())

    def crop(self, count: int) -> None:
        """Take the last `count` tokens out again."""
        if count:
            self.held.crop(-count)
            self.seen -= count

    def spread(self, owners: Tensor) -> None:
        """Copy what is kept of each sequence for all that go on from it.
        `owners`, int64 [sequences], names the one that stands before each. It must be a `Cache`.
        """
        self.held.batch_select_indices(owners)

    def _carried(self, tokens: Tensor, last: bool) -> dict[str, Any]:
        given = {} if self.held is None else {self.name: self.held}
        # For a state of tensors, the shape of a single token's logits has to show whether the batch
        # was mixed.
        if last and (self.name in CACHES or tokens.shape[1] > 1) and "logits_to_keep" in _arguments(self.model):
            given["logits_to_keep"] = 1
        if self.name == KEYS_AND_VALUES and needs_positions(self.model, tokens.device):
            given["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None] + self.seen
        return given


def state_name(model: Any) -> str:
    """Return the argument that carries a model's state; raises SourceError if none is known."""
    arguments = _arguments(model)
    if found := next((name for name in NAMES if name in arguments), None):
        return found
    raise _no_steps(model, f"cannot be run token by token: its passes take none of {', '.join(NAMES)}")


def _no_steps(model: Any, what: str) -> SourceError:
    return SourceError(
        f"{type(model).__name__} {what}",
        where=str(model.config.model_type),
        why="Each token would see only the one before it",
        remedy="Measure it by evals that read whole texts, such as perplexity",
    )


def keeps_keys_and_values(model: Any) -> bool:
    """Whether keys and values are all that a model keeps, in every layer.
    Raises SourceError as `state_name` does.
    """
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    if state_name(model) != KEYS_AND_VALUES or own_cache(model):
        return False
    return all(type(layer) in plain for layer in CarriedState(model).layers)


def check_keys_and_values(model: Any, where: str) -> None:
    """Raise StageError for a model that keeps something else than keys and values."""
    name, own = state_name(model), own_cache(model)
    if own or name != KEYS_AND_VALUES:
        raise StageError(
            f"{type(model).__name__} has no KV cache",
            where=where,
            why=f"What it keeps of the tokens before is its `{own.__name__ if own else name}`",
            remedy="Take it out for this architecture",
        )


def _empty_cache(model: Any) -> Cache:
    own = own_cache(model)
    return own() if own else DynamicCache(config=model.config)


def own_cache(model: Any) -> type[Cache] | None:
    """Return the cache that a model's code defines for itself and takes no other than (MiniMax)."""
    code = sys.modules[type(model).__module__]
    return next(
        (
            each
            for each in vars(code).values()
            if isinstance(each, type) and issubclass(each, Cache) and each.__module__ == code.__name__
        ),
        None,
    )


def needs_positions(model: Any, device: torch.device) -> bool:
    """Whether each pass, of tokens on `device`, has to be told where its tokens stand.
    The model counts them from 0 then (Bamba).

    Found once for each model, by running a token behind others with its position and without. Those
    that count otherwise than from 0 (RoBERTa) are left to themselves.
    """
    if model not in _positions_needed:
        _positions_needed[model] = _try_positions(model, device)
    return _positions_needed[model]


@torch.no_grad()
def _try_positions(model: Any, device: torch.device) -> bool:
    if "position_ids" not in _arguments(model):
        return False
    tokens = torch.arange(1, PROBE + 2, device=device)[None] % model.config.get_text_config(decoder=True).vocab_size
    untold = _last_logits(model, tokens, {})
    told = _last_logits(model, tokens, {"position_ids": tokens.new_full((1, 1), PROBE)})
    if torch.equal(untold, told):
        return False
    whole: Tensor = model.forward(input_ids=tokens, use_cache=False).logits[:, -1].float()
    return bool((told - whole).norm() < (untold - whole).norm())


def _last_logits(model: Any, tokens: Tensor, options: dict[str, Tensor]) -> Tensor:
    cache = _empty_cache(model)
    model.forward(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True)
    logits: Tensor = model.forward(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True, **options).logits
    return logits[:, -1].float()


def _arguments(model: Any) -> Mapping[str, Any]:
    return signature(type(model).forward).parameters
