"""What torch makes of the source of an export: logits in float32, and what leaves each block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optkit.kernels.cpu.native import exact_products
from optkit.kernels.open_packed import load_packed
from optkit.kernels.quant_methods import quantized_layers
from optkit.model.blocks import find_blocks
from optkit.model.checkpoint import Checkpoint
from optkit.model.memory import return_freed_memory
from optkit.model.replaced_forward import hooked
from optkit.model.skeleton import Skeleton
from optkit.onnx.torch_noise import Rounding, own_rounding
from optkit.progress import SilentProgress

EXACT = "eager"
"""The attention that knows all that a model asks for; sdpa leaves out the soft cap of Gemma 2."""


class Reference:
    """An opened checkpoint, float or quantized, that computes in float32 on the CPU."""

    def __init__(self, directory: Path, trust_remote_code: bool = False) -> None:
        """Raises SourceError if weights and model do not belong together, or are NaN or Inf."""
        checkpoint = Checkpoint(directory)
        quantized = quantized_layers(checkpoint)
        self._quantized = bool(quantized)
        if quantized:
            options = {"attn_implementation": EXACT}
            self._model: Any = load_packed(
                checkpoint, quantized, "cpu", torch.float32, SilentProgress(), trust_remote_code, **options
            )[0]
        else:
            skeleton = Skeleton(checkpoint, torch.float32, EXACT, trust_remote_code)
            skeleton.load_("", "cpu")
            self._model = skeleton.model
        self._blocks = find_blocks(self._model)
        config = self._model.config.get_text_config(decoder=True)
        self.vocabulary: int = config.vocab_size
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        self.window: int | None = getattr(config, "sliding_window", None)
        """Tokens that a sliding window attends to, None if there is none."""

    @property
    def head(self) -> Tensor:
        """The weight of lm_head, float [vocabulary, hidden], if it is not quantized."""
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    def take_head_(self, weight: Tensor, embedding_too: bool) -> None:
        """Compute with another lm_head, float32 [vocabulary, hidden].
        If asked to, with the same matrix as embedding.
        """
        old: nn.Linear = self._model.get_output_embeddings()
        new = nn.Linear(weight.shape[1], weight.shape[0], bias=old.bias is not None, device="meta")
        new.weight, new.bias = nn.Parameter(weight, requires_grad=False), old.bias
        self._model.set_output_embeddings(new)
        if embedding_too:
            self._model.get_input_embeddings().weight = new.weight

    @exact_products()
    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [b, s] -> float32 [b, s, v]."""
        found: Tensor = self._model(tokens, use_cache=False).logits
        return found

    @exact_products()
    def rounding(self, tokens: Tensor, dtype: str) -> Rounding:
        """Return how far torch is from itself on int64 [b, s]; `dtype` is the graph's."""
        return own_rounding(self._model, tokens, dtype, self._quantized)

    def states(self, tokens: Tensor) -> list[Tensor]:
        """Return what enters the first block and what leaves each of them, float32 [b, s, hidden]."""
        found: list[Tensor] = []

        def enters(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            found.append(arguments[0] if arguments else keywords["hidden_states"])

        def leaves(_module: nn.Module, _arguments: Any, output: Any) -> None:
            found.append(output[0] if isinstance(output, tuple) else output)

        first = self._blocks[0].module
        hooks = [first.register_forward_pre_hook(enters, with_kwargs=True)]
        hooks += [block.module.register_forward_hook(leaves) for block in self._blocks]
        with hooked(hooks):
            self.logits(tokens)
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._model = None
        self._blocks = ()
        return_freed_memory()
