"""A causal language model as two functions: tokens -> hidden -> logits.
So the logits of all positions are never held together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optkit.errors import SourceError
from optkit.model.blocks import find_blocks
from optkit.model.mixed_dtypes import one_dtype
from optkit.model.replaced_forward import replaced_forward


class _Output:
    """What a decoder returns, whatever its class: hidden states, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class TwoParts:
    """The decoder of a model, and what follows: lm_head, and what the model does to logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the two parts by running both on a few tokens. Raises SourceError for a model that
        cannot be taken apart.
        """
        self.model = model
        self.decoder: nn.Module
        """From tokens to the hidden states that lm_head is given."""
        self._find_decoder()

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters that `logits` uses; tied embeddings are among them."""
        inside = {id(parameter) for module in self.decoder.modules() for parameter in module._parameters.values()}
        outside = [parameter for parameter in self.model.parameters() if id(parameter) not in inside]
        head = self.model.get_output_embeddings()
        found = {id(parameter): parameter for parameter in (*outside, *(head.parameters() if head is not None else ()))}
        return [parameter for parameter in found.values() if parameter.requires_grad]

    def run(self, tokens: Tensor, **options: Any) -> Any:
        """Return the decoder's output for int64 [b, s]; `last_hidden_state` is float [b, s, h]."""
        return self.decoder(input_ids=tokens, use_cache=False, return_dict=True, **options)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float [b, n, v] for any positions, float [b, n, h], of what the decoder returned."""
        tokens, output = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device), _Output(hidden)
        with replaced_forward({self.decoder: lambda *_, **__: output}):
            return self.model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]

    @torch.no_grad()
    def _find_decoder(self) -> None:
        tokens = torch.arange(1, 9, device=self.model.device)[None]
        with one_dtype(self.model.config.model_type):
            whole = self.model(input_ids=tokens, use_cache=False).logits
        reason = "it has no module of its own for them"
        around = find_blocks(self.model)[0].name.split(".")[:-2]
        for depth in range(1, len(around) + 1):
            self.decoder = self.model.get_submodule(".".join(around[:depth]))
            try:
                found = self.logits(self.run(tokens).last_hidden_state)
            except (TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
                reason = str(error).partition("\n")[0]
                continue
            if found.shape == whole.shape and torch.allclose(found.float(), whole.float(), rtol=1e-3, atol=1e-3):
                return
            reason = "its logits are others than those of the whole model"
        raise SourceError(
            f"unsupported architecture {type(self.model).__name__}: decoder and output layer cannot be run apart",
            where=str(self.model.config.model_type),
            why=reason,
        )
