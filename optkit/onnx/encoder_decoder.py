"""Run the graphs of an encoder-decoder with ONNX Runtime: an input once, a target token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from optkit.errors import SourceError
from optkit.model.onnx_file import DECODER, ENCODER, STEPS, OnnxFile
from optkit.onnx.opening import Opened, open_model, runtime_errors

CACHES = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
"""What the KV cache has of each layer: of the target, which grows, and of the input."""


def past_name(layer: int, state: str) -> str:
    """Return the input that takes a state of the KV cache."""
    return f"past_key_values.{layer}.{state}"


class Graph:
    """One graph, opened: named tensors in, named tensors out."""

    def __init__(self, path: Path, device: str, threads: int | None, providers: Sequence[str]) -> None:
        self.file, self.device = OnnxFile(path), device
        self.opened: Opened = open_model(path, device, threads, providers)

    def run(self, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, on the CPU. Raises SourceError for an input that is not known, ResourceError
        without memory.
        """
        where = str(self.file.path)
        if strange := next((name for name in self.file.inputs if name not in known), None):
            raise SourceError(
                f"optkit does not know what to give to its input {strange}",
                where=where,
                why=f"It knows {', '.join([*known][:4])}",
                remedy="Export the model again with optkit",
            )
        asked = self.file.inputs.items()
        feeds = {name: known[name].cpu().numpy().astype(port.dtype, copy=False) for name, port in asked}
        shapes = ", ".join(f"{name} {list(known[name].shape)}" for name in [*feeds][:2])
        with runtime_errors(f"with {shapes}", where, self.device, "Lower the batch or the length"):
            found = self.opened.session.run(None, feeds)
        return dict(zip(self.file.outputs, map(torch.from_numpy, found), strict=True))


class OnnxParts:
    """An opened encoder-decoder."""

    def __init__(
        self, directory: Path, device: str = "cpu", threads: int | None = None, providers: Sequence[str] = ()
    ) -> None:
        """Raises what `OnnxFile` and `open_model` raise."""
        self.encoder, self.decoder, self.steps = (
            Graph(directory / name, device, threads, providers) for name in (ENCODER, DECODER, STEPS)
        )

    def encode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return what the encoder makes of its inputs, [batch, input, hidden]; a mask may be missing."""
        first = next(iter(inputs.values()))
        mask = {"attention_mask": torch.ones_like(first, dtype=torch.int64)}
        return self.encoder.run({**mask, **inputs})["last_hidden_state"]

    def read(self, tokens: Tensor, hidden: Tensor, mask: Tensor | None, past: dict[str, Tensor]) -> Tensor:
        """Return the logits of more tokens of a target, int64 [b, d] -> float32 [b, d, vocabulary].

        `past` is the KV cache by the names of its inputs, empty at first; what is read is added. `hidden`
        and `mask`, [b, e], are those of the encoder; without a mask no row is padded.
        """
        mask = torch.ones(hidden.shape[:2], dtype=torch.int64) if mask is None else mask
        known = {"input_ids": tokens, "encoder_attention_mask": mask, "encoder_hidden_states": hidden}
        made = (self.steps if past else self.decoder).run({**known, **past})
        logits = made.pop("logits").float()
        past |= {name.replace("present", "past_key_values", 1): state for name, state in made.items()}
        return logits
