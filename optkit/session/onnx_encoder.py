"""An encoder that ONNX Runtime runs: what `TorchEncoder` is for torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optkit.errors import SourceError, StageError
from optkit.model.memory import return_freed_memory
from optkit.model.task import Task
from optkit.onnx.directory import OnnxDirectory
from optkit.onnx.feeds import prompt_feeds
from optkit.onnx.opening import HIDDEN_MEMORY, Opened, open_model, runtime_errors
from optkit.session.encoder import Encoder
from optkit.stage import Opening

FEATURES = ("last_hidden_state", "token_embeddings")
"""What exporters call the features of tokens."""
LOGITS = ("logits",)


def refuse_engine(opening: Opening, phrase: str) -> None:
    """Raise StageError for an engine that opens causal language models alone."""
    if engine := opening.load_kwargs.get("engine"):
        said = f"{engine} runs causal language models, and this is {phrase}"
        raise StageError(said, where="onnx_provider.engine", remedy="Leave engine out")


class OnnxEncoder(Encoder):
    """An opened ONNX directory of an encoder; implements `optkit.measure.EncoderSession`."""

    def __init__(self, opening: Opening, task: Task) -> None:
        """Open it.
        Raises what `OnnxDirectory` and `open_model` raise, SourceError if its graph is not that of
        an encoder.
        """
        refuse_engine(opening, "an encoder")
        self.graph = OnnxDirectory(opening.directory)
        if not (vocabulary := self.graph.config.get("vocab_size")):
            raise SourceError(
                "there is no vocab_size in config.json",
                where=str(opening.directory),
                remedy="Copy config.json from the source again",
            )
        super().__init__(opening, task, self.graph.positions, int(vocabulary))
        self.output = self._named(FEATURES if self._pooling else LOGITS)
        self._opened: Opened | None = open_model(self.graph.path, self.device, **opening.load_kwargs)
        self.notes = (self._opened.note(), *self._pooling_notes())
        self.hidden_memory = "" if self.device == "cpu" else HIDDEN_MEMORY

    @property
    def dtype(self) -> str:
        """What the graph gives, e.g. `float16`."""
        return self.graph.graph.outputs[self.output].dtype

    def outputs(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """See `EncoderSession`. Raises EvalError for more tokens than positions, ResourceError
        without memory.
        """
        return torch.from_numpy(self._run(tokens, mask))

    def embed(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """See `EncoderSession`. NumPy pools: torch would wake threads that get in the way of ONNX
        Runtime's.
        """
        return torch.from_numpy(self._pool(self._run(tokens, mask), mask.numpy().astype(np.float32)))

    def close(self) -> None:
        self._opened = None
        return_freed_memory()

    def _run(self, tokens: Tensor, mask: Tensor) -> NDArray[np.float32]:
        self._check(tokens)
        session = self._in_use(self._opened).session
        batch, sequence = tokens.shape
        inputs = self.graph.graph.inputs
        feeds = prompt_feeds(inputs, tokens.numpy())
        if "attention_mask" in inputs:
            feeds["attention_mask"] = mask.numpy().astype(inputs["attention_mask"].dtype)
        where, remedy = str(self.directory), "Lower the batch or the length"
        with runtime_errors(f"for {batch} x {sequence} tokens", where, self.device, remedy):
            found: NDArray[Any] = session.run([self.output], feeds)[0]
        return found.astype(np.float32, copy=False)

    def _named(self, names: Sequence[str]) -> str:
        outputs = self.graph.graph.outputs
        if found := next((name for name in names if name in outputs), None):
            return found
        raise SourceError(
            f"the graph has no output '{names[0]}' but {', '.join([*outputs][:4])}",
            where=str(self.graph.path),
            why="By its config.json it is "
            + ("an encoder that gives features" if names == FEATURES else "an encoder with a head"),
            remedy="Export it again, with exporter: torch",
        )
