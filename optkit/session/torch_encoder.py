"""An encoder that torch runs: features or logits of whole texts, any number at once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optkit.common.out_of_resources import memory_errors
from optkit.model.memory import return_freed_memory
from optkit.model.pooling import Pooling
from optkit.model.task import positions_of
from optkit.session.encoder import Encoder


class TorchEncoder(Encoder):
    """An opened encoder; implements `optkit.measure.EncoderSession`."""

    def __init__(
        self,
        model: PreTrainedModel,
        directory: Path,
        device: str,
        notes: tuple[str, ...],
        trust_remote_code: bool,
        pooling: Pooling | None,
    ) -> None:
        positions, vocabulary = positions_of(model.config.to_dict()), int(model.config.vocab_size)
        super().__init__(directory, device, trust_remote_code, pooling, positions, vocabulary)
        self._opened: PreTrainedModel | None = model
        self.notes = (*notes, *self._pooling_notes())

    @property
    def model(self) -> PreTrainedModel:
        """The torch model; raises OptkitError after `close`."""
        return self._in_use(self._opened)

    @property
    def dtype(self) -> str:
        """What the model computes in, e.g. `float16`."""
        return str(self.model.dtype).removeprefix("torch.")

    def outputs(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """See `EncoderSession`. Raises EvalError for more tokens than positions, ResourceError
        without memory.
        """
        return self._run(tokens, mask).cpu()

    def embed(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """See `EncoderSession`. Raises what `outputs` raises, and EvalError for an encoder that
        gives labels.
        """
        features = self._run(tokens, mask)
        pooled: Tensor = self._pool(features, mask.to(features.device, features.dtype))
        return pooled.cpu()

    def close(self) -> None:
        """Give the memory back; the session cannot be used afterwards."""
        self._opened = None
        return_freed_memory(self.device)

    def _run(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """int64 [batch, sequence] twice -> the first output, float32, on the device."""
        self._check(tokens)
        batch, sequence = tokens.shape
        remedy = "Lower the batch or the length"
        with (
            memory_errors(f"for {batch} x {sequence} tokens on {self.device}", str(self.directory), remedy),
            torch.inference_mode(),
        ):
            found: Tensor = self.model(input_ids=tokens.to(self.device), attention_mask=mask.to(self.device))[0]
            return found.float()
