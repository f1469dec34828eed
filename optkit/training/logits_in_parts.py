"""A causal language model as two functions: tokens -> hidden -> logits.
So the logits of all positions are never held together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optkit.errors import SourceError


class _Output:
    """What a decoder returns, whatever its class: hidden states, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands in the place of the decoder and returns what it was given."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.output = _Output(hidden)

    def forward(self, *_arguments: Any, **_keywords: Any) -> _Output:
        return self.output


class TwoParts:
    """The decoder of a model, and what follows: lm_head, and what the model does to logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the two parts by running both on a few tokens. Raises SourceError for a model that
        cannot be taken apart.
        """
        self.model = model
        self.owner, self.leaf = self._place()

    @property
    def decoder(self) -> nn.Module:
        """The module from tokens to the hidden states that lm_head is given."""
        return self.owner.get_submodule(self.leaf)

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
        decoder = self.decoder
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        try:
            self.owner._modules[self.leaf] = _Given(hidden)
            return self.model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]
        finally:
            self.owner._modules[self.leaf] = decoder

    @torch.no_grad()
    def _place(self) -> tuple[nn.Module, str]:
        base = self.model.base_model
        tokens = torch.arange(1, 9, device=self.model.device)[None]
        whole = self.model(input_ids=tokens, use_cache=False).logits
        reason = "it has no module of its own for them"
        for owner, leaf in ((self.model, self.model.base_model_prefix), (base, "decoder")):
            if leaf not in owner._modules:
                continue
            self.owner, self.leaf = owner, leaf
            try:
                found = self.logits(self.run(tokens).last_hidden_state)
            except (TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
                reason = str(error).partition("\n")[0]
                continue
            if found.shape == whole.shape and torch.allclose(found.float(), whole.float(), rtol=1e-3, atol=1e-3):
                return owner, leaf
            reason = "its logits are others than those of the whole model"
        raise SourceError(
            f"unsupported architecture {type(self.model).__name__}: decoder and output layer cannot be run apart",
            where=str(self.model.config.model_type),
            why=reason,
        )
