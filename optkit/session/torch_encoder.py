"""An encoder that torch runs: features or logits of whole texts, any number at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from optkit.model.task import Task, positions_of
from optkit.session.encoder import Encoder
from optkit.session.torch_model import TorchModel
from optkit.stage import Opening


class TorchEncoder(TorchModel, Encoder):
    """An opened encoder; implements `optkit.measure.EncoderSession`."""

    def __init__(self, model: PreTrainedModel, opening: Opening, notes: Sequence[str], task: Task) -> None:
        super().__init__(opening, task, positions_of(model.config.to_dict()), int(model.config.vocab_size))
        self._opened = model
        self.notes = (*notes, *self._pooling_notes())

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

    def _run(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """int64 [batch, sequence] twice -> the first output, float32, on the device."""
        self._check(tokens)
        batch, sequence = tokens.shape
        with self._computes(f"for {batch} x {sequence} tokens", "Lower the batch or the length"):
            found: Tensor = self.model(input_ids=tokens.to(self.device), attention_mask=mask.to(self.device))[0]
            return found.float()
