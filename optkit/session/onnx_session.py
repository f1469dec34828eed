"""A model that ONNX Runtime runs: what `TorchSession` is for torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from optkit.model.task import ENCODER_DECODERS, Task, task_of
from optkit.onnx.decode_bytes import decode_bytes
from optkit.onnx.directory import OnnxDirectory
from optkit.onnx.genai import GenaiModel
from optkit.onnx.opening import HIDDEN_MEMORY
from optkit.onnx.runtime import OnnxRunner
from optkit.session.generating import NO_POSITIONS, GeneratingSession
from optkit.session.onnx_encoder import OnnxEncoder
from optkit.stage import Opening

if TYPE_CHECKING:
    from optkit.session.onnx_encoder_decoder import OnnxEncoderDecoder


def open_onnx(opening: Opening) -> OnnxSession | OnnxEncoder | OnnxEncoderDecoder:
    """Open an ONNX directory; see `optkit.session.open_session`."""
    task = task_of(OnnxDirectory(opening.directory).config) or Task.GENERATION
    if task is Task.GENERATION:
        return OnnxSession(opening)
    if task in ENCODER_DECODERS:
        from optkit.session.onnx_encoder_decoder import OnnxEncoderDecoder

        return OnnxEncoderDecoder(opening)
    return OnnxEncoder(opening, task)


class OnnxSession(GeneratingSession):
    """An opened ONNX directory; implements `optkit.measure.Session`."""

    def __init__(self, opening: Opening) -> None:
        """Open it. If ONNX Runtime GenAI generates, `OnnxRunner` opens the model only when logits are asked for.
        Raises what `OnnxDirectory`, `OnnxRunner` and `GenaiModel` raise.
        """
        super().__init__(opening)
        options = dict(opening.load_kwargs)
        by_genai = options.pop("engine", "") == "onnxruntime-genai"
        self._model = OnnxDirectory(self.directory)
        self._open = partial(OnnxRunner, self._model, self.device, **options)
        self._genai = GenaiModel(self._model, self.device, options.get("threads")) if by_genai else None
        self.generates_elsewhere = self._genai is not None
        """Whether ONNX Runtime GenAI generates, and `runner` computes logits alone."""
        self.vocabulary = self._genai.vocabulary if self._genai else self.runner.vocabulary
        self.positions = self._model.positions or NO_POSITIONS
        self.notes: tuple[str, ...] = self._genai.notes if self._genai else tuple(self._notes())
        self.hidden_memory = "" if self.device == "cpu" else HIDDEN_MEMORY

    @cached_property
    def runner(self) -> OnnxRunner:
        """ONNX Runtime with the model open."""
        return self._open()

    @property
    def dtype(self) -> str:
        """What the graph computes its states in, e.g. `float16`."""
        return (
            next((layer.past.dtype for layer in self._model.cache if "float" in layer.past.dtype), None)
            or self.runner.logits_port.dtype
        )

    def logits(self, tokens: Tensor) -> Tensor:
        self._check_length(tokens, 0)
        return self.runner.logits(tokens)

    def stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        self._check_length(tokens, new_tokens)
        if self._genai:
            found = self._genai.stream(tokens.cpu().numpy().astype(np.int32), new_tokens)
            return (torch.from_numpy(chosen).to(self.device) for chosen in found)
        return self._cached_stream(tokens, new_tokens) if self.runner.cache else self._plain_stream(tokens, new_tokens)

    def stepped_logits(self, tokens: Tensor, prompt: int) -> Tensor:
        self._check_length(tokens, 0)
        if not self.runner.cache:
            return self.runner.logits(tokens)[:, prompt:]
        decoding = self.runner.prefill(tokens[:, :prompt], tokens.shape[1])
        return torch.stack([decoding.step(each).clone() for each in tokens[:, prompt:].unbind(1)], dim=1)

    def decode_bytes(self, batch: int, context: int) -> int:
        return decode_bytes(self._model, batch, context)

    def close(self) -> None:
        if self._genai:
            self._genai.close()
        if opened := self.__dict__.get("runner"):
            opened.close()

    def _cached_stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        if not new_tokens:
            return
        decoding = self.runner.prefill(tokens, tokens.shape[1] + new_tokens)
        chosen = self._finished(decoding.logits)
        yield chosen
        for _ in range(new_tokens - 1):
            chosen = self._finished(decoding.step(chosen))
            yield chosen

    def _plain_stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """Without a KV cache every token is computed from the whole sequence."""
        sequence = tokens.to(self.device)
        for _ in range(new_tokens):
            chosen = self._finished(self.runner.logits(sequence)[:, -1])
            sequence = torch.cat([sequence, chosen.unsqueeze(1)], dim=1)
            yield chosen

    def _finished(self, logits: Tensor) -> Tensor:
        """float32 [batch, vocabulary] -> int64 [batch], the most likely tokens.
        They are there when the device has them.
        """
        if self.device == "cpu":  # torch would wake threads that get in the way of ONNX Runtime's
            return torch.from_numpy(logits.numpy().argmax(-1))
        chosen = logits.argmax(-1)
        torch.cuda.synchronize(chosen.device)
        return chosen

    def _notes(self) -> Iterator[str]:
        yield self.runner.opened.note()
        if not self.runner.cache:
            yield "onnxruntime: the graph has no KV cache, so that each new token is computed from the whole sequence"
        elif not all(layer.shared for layer in self.runner.cache):
            yield "onnxruntime: the graph copies its KV cache at each token, because its attention cannot write into it"
