"""Decode steps of the model itself, where there is no graph of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class ModelSteps:
    """The steps of a batch that the graph does not take: each runs through the model."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self.model, self.cache = model, DynamicCache(config=model.config)

    def prompt(self, tokens: Tensor) -> Tensor:
        """Run the prompts, int64 [batch, prompt].
        Return the tokens behind them, int64 [batch], without waiting for the device.
        """
        logits = self.model.forward(
            input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits
        chosen: Tensor = logits[:, -1].argmax(-1)
        self._last = chosen
        return chosen

    def next(self) -> Tensor:
        """Return the tokens behind those returned last."""
        return self.prompt(self._last[:, None])
