"""Logits of a model of 16 bits, cast to float32 in slices.
Those of a long text are larger than the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optkit.model.replaced_forward import replaced_forward

LOGITS_BYTES = 64 << 20
"""Most bytes of logits that are computed at once if they have to be cast to float32."""


def cast_logits(model: PreTrainedModel, given: Mapping[str, Any], vocabulary: int) -> Tensor:
    """Return float32 [batch, sequence, vocabulary] of what a model is called with.
    That is `input_ids`, int64 [batch, sequence], pixels, and a cache, which is filled once. At most
    `LOGITS_BYTES` of others lie beside them.

    What stands behind the decoder runs on slices; a model without a decoder that it calls as a
    whole computes all of them at once.
    """
    tokens: Tensor = given["input_ids"]
    decoder = _decoder(model, tokens.device)
    if decoder is None:
        whole: Tensor = model.forward(**given).logits
        return whole.float()
    output = decoder(**given)
    hidden: Tensor = output.last_hidden_state
    batch, sequence = tokens.shape
    logits = torch.empty(batch, sequence, vocabulary, dtype=torch.float32, device=hidden.device)
    width = max(1, LOGITS_BYTES // (batch * vocabulary * hidden.element_size()))
    for start in range(0, sequence, width):
        part = slice(start, start + width)
        output.last_hidden_state = hidden[:, part]
        with replaced_forward({decoder: lambda *_, **__: output}):
            logits[:, part] = model.forward(input_ids=tokens[:, part], use_cache=False).logits
    return logits


class _ReachedError(Exception):
    """Raised by the decoder in place of its work."""


def _decoder(model: PreTrainedModel, device: torch.device) -> Any:
    """Return the module whose output the model turns into logits.
    None for a model that reaches neither its base model nor a decoder in it.
    """

    def reached(*_: Any, **__: Any) -> Any:
        raise _ReachedError

    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    # OPT calls the decoder in its base model
    for module in (model.base_model, getattr(model.base_model, "decoder", None)):
        if module is not None and module is not model:
            try:
                with replaced_forward({module: reached}):
                    model.forward(input_ids=token, use_cache=False)
            except _ReachedError:
                return module
    return None
