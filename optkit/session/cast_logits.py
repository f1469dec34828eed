"""Logits of a model of 16 bits, cast to float32 in slices: those of a long text are larger than the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

LOGITS_BYTES = 64 << 20
"""Most bytes of logits that are computed at once where they have to be cast to float32."""


def cast_logits(model: PreTrainedModel, tokens: Tensor, vocabulary: int, attended: Mapping[str, Any]) -> Tensor:
    """int64 [batch, sequence] -> float32 [batch, sequence, vocabulary] with at most `LOGITS_BYTES` of others beside them.

    The part after the base model runs on slices; a model that does not call its base model as a whole (OPT) computes all of them at once.
    `attended` is how the model is called beside the tokens.
    """
    output = model.base_model(input_ids=tokens, **attended)
    hidden: Tensor = output.last_hidden_state
    batch, sequence = tokens.shape
    logits = torch.empty(batch, sequence, vocabulary, dtype=torch.float32, device=hidden.device)
    width = max(1, LOGITS_BYTES // (batch * vocabulary * hidden.element_size()))
    for start in range(0, sequence, width):
        part = slice(start, start + width)
        output.last_hidden_state = hidden[:, part]
        with _returning(model.base_model, output) as calls:
            sliced = model.forward(input_ids=tokens[:, part], use_cache=False).logits
        if not calls:
            whole: Tensor = model.forward(input_ids=tokens, **attended).logits
            return whole.float()
        logits[:, part] = sliced
    return logits


@contextmanager
def _returning(module: Any, output: Any) -> Iterator[list[Any]]:
    """Let a module return an output that was computed before; yields the list of its calls."""
    calls: list[Any] = []

    def forward(*_: Any, **__: Any) -> Any:
        calls.append(output)
        return output

    replaced = vars(module).get("forward")  # hooks put one there
    module.forward = forward
    try:
        yield calls
    finally:
        if replaced is None:
            del module.forward
        else:
            module.forward = replaced
