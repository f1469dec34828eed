"""Let a model see its newest and its first tokens alone (StreamingLLM, arXiv:2309.17453).

Unlike there, tokens keep the positions that they have in the text, so a text may not be longer than
the model's positions.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from optkit.errors import StageError, first_line
from optkit.model.attention import refuse_own_windows


def see_window_(model: Any, window: int, sinks: int, where: str) -> None:
    """Let every call mask what lies outside of a window.
    The KV cache has to forget it (`CodedLayer`).

    Raises StageError for attention that takes no mask, and for a model with windows of its own.
    """
    kind = model.config._attn_implementation
    if kind not in ("sdpa", "eager"):
        raise StageError(f"{kind} takes no mask of a window", where=where, remedy="Use sdpa or eager attention")
    refuse_own_windows(model.config.get_text_config(decoder=True).to_dict(), where)
    whole = model.forward
    _refuse_without_masks(model, kind, where)

    @wraps(whole)
    def forward(input_ids: Tensor, *args: Any, past_key_values: Any = None, **options: Any) -> Any:
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        count = input_ids.shape[1]
        if count > 1 and past + count > window:
            seen = visible(past, count, window, sinks).to(input_ids.device)
            options["attention_mask"] = _mask(seen, model.dtype, kind).expand(len(input_ids), 1, *seen.shape)
        return whole(input_ids, *args, past_key_values=past_key_values, **options)

    model.forward = forward


def _mask(seen: Tensor, dtype: torch.dtype, kind: str) -> Tensor:
    if kind != "eager":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


@torch.no_grad()
def _refuse_without_masks(model: Any, kind: str, where: str) -> None:
    """Raise StageError if a mask of what each token sees is not what attention heeds (alibi of Bloom)."""
    tokens = torch.arange(3, device=model.device)[None]

    def logits(seen: Tensor) -> Tensor:
        mask = _mask(seen.to(tokens.device), model.dtype, kind)[None, None]
        found: Tensor = model.forward(tokens, attention_mask=mask, use_cache=False).logits
        return found

    try:
        alone, causal = logits(torch.eye(3, dtype=torch.bool)), logits(torch.ones(3, 3, dtype=torch.bool).tril())
        heeded, why = not torch.equal(alone, causal), "A mask changes nothing"
    except Exception as error:  # whatever a model makes of a mask that it does not expect
        heeded, why = False, first_line(error)
    if not heeded:
        raise StageError(
            f"the attention of {model.config.model_type} takes no mask of what each token sees",
            where=where,
            why=why,
            remedy="Take window out of the recipe for this architecture",
        )


def visible(past: int, count: int, window: int, sinks: int) -> Tensor:
    """Return which keys, kept or new, each of `count` new tokens sees: bool [count, keys]."""
    new = torch.arange(past, past + count)
    keys = torch.cat([kept_tokens(past, window, sinks), new])
    distance = new[:, None] - keys
    return (distance >= 0) & ((distance < window - sinks) | (keys < sinks))


def kept_tokens(length: int, window: int, sinks: int) -> Tensor:
    """Return the tokens of `length` that are kept for those to come, int64.
    They are the first `sinks`, and with them `window - 1` in all.
    """
    tokens = torch.arange(length)
    return tokens if length < window else torch.cat([tokens[:sinks], tokens[length - (window - 1 - sinks) :]])
