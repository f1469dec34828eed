"""A model that llama.cpp runs: what `TorchSession` is for torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from optkit.gguf.llama_cpp import LlamaCppModel
from optkit.model.formats.gguf import MODEL
from optkit.model.gguf_file import Gguf, read_gguf
from optkit.session.generating import GeneratingSession
from optkit.stage import Opening


class GgufSession(GeneratingSession):
    """An opened GGUF directory; implements `optkit.measure.Session`."""

    notes: tuple[str, ...] = ()
    dtype = "float16"
    """The least precise of what it computes in: that of keys and values."""

    def __init__(self, opening: Opening) -> None:
        """Raises what `LlamaCppModel` raises."""
        super().__init__(opening)
        self._model: LlamaCppModel | None = LlamaCppModel(self.directory / MODEL, opening.device)
        self.vocabulary = self._model.vocabulary
        self.positions = int(self._header.get("context_length"))
        self.hidden_memory = "" if self.device == "cpu" else "llama.cpp's own"

    @cached_property
    def _header(self) -> Gguf:
        return read_gguf(self.directory / MODEL)

    def logits(self, tokens: Tensor) -> Tensor:
        self._check_length(tokens, 0)
        model, found = self._in_use(self._model), []
        for row in tokens.tolist():
            model.start(1, len(row))
            found.append(torch.from_numpy(model.append([(token, at, 0) for at, token in enumerate(row)])))
        return torch.stack(found).to(self.device)

    def stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        self._check_length(tokens, new_tokens)
        return self._stream(tokens, new_tokens)

    def _stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        model, (batch, prompt) = self._in_use(self._model), tokens.shape
        model.start(batch, prompt + new_tokens)
        rows = [
            model.append([(token, at, row) for at, token in enumerate(ids)])[-1:]
            for row, ids in enumerate(tokens.tolist())
        ]
        last = torch.cat([torch.from_numpy(row) for row in rows])
        for position in range(prompt, prompt + new_tokens):
            chosen = last.argmax(-1)
            yield chosen.to(self.device)
            if position + 1 < prompt + new_tokens:
                last = torch.from_numpy(model.append([(t, position, row) for row, t in enumerate(chosen.tolist())]))

    def stepped_logits(self, tokens: Tensor, prompt: int) -> Tensor:
        self._check_length(tokens, 0)
        model, found = self._in_use(self._model), []
        for row in tokens.tolist():
            model.start(1, len(row))
            places = [(token, at, 0) for at, token in enumerate(row)]
            model.append(places[:prompt])
            found.append(torch.cat([torch.from_numpy(model.append([place])) for place in places[prompt:]]))
        return torch.stack(found).to(self.device)

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the fewest bytes of weights and KV cache that a decode step reads at this size.
        llama.cpp has keys and values in float16.
        """
        header = self._header
        tied = "output.weight" not in header.tensors
        weights = sum(each.size_bytes for name, each in header.tensors.items() if tied or name != "token_embd.weight")
        heads = header.get("attention.head_count_kv") * header.get("block_count")
        return int(weights + 2 * 2 * batch * context * heads * header.get("attention.key_length"))

    def close(self) -> None:
        if self._model:
            self._model.close()
            self._model = None
