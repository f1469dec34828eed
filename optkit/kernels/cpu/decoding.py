"""The greedy decode step of a Llama-like model as one call of C++.
Nothing of transformers or torch runs between two tokens.

Activations and the KV cache are float32 whatever the model's dtype; weights are read as the model's
layers hold them, in codes or floats.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from optkit.kernels.cpu.coded_linear import CodedLinear
from optkit.kernels.cpu.families import DECODES, why_not_config, why_not_family
from optkit.kernels.cpu.native import library, why_not_native
from optkit.kernels.cpu.prompts import PromptPass, products
from optkit.kernels.cpu.structures import Structures
from optkit.model.memory import keep_freed_memory

LANES = 16
CAPACITY_STEP = 128
"""A cache is as long as the next multiple of this, so that requests of like lengths share one."""


def why_not_step(model: Any) -> str | None:
    """Return why a CPU model's step cannot be one call, None if it can; compiles the kernels."""
    config = model.config
    if reason := why_not_config(config.to_dict()):
        return reason
    if not hasattr(model, "lm_head"):
        return f"{type(model).__name__} has no output layer over a vocabulary"
    attention = model.model.layers[0].self_attn
    if any(size % LANES for size in (config.hidden_size, config.intermediate_size, attention.head_dim)):
        return f"its widths are no multiples of {LANES}"
    for name, module in model.named_modules():
        read = name.endswith("_proj") or name == "lm_head"
        if read and (reason := _why_not_read(module)):
            return f"{name} {reason}"
    if model.model.embed_tokens.weight.dtype not in (torch.float32, torch.bfloat16):
        return "its embedding is neither float32 nor bfloat16"
    return why_not_native()


def _why_not_read(module: nn.Module) -> str | None:
    if isinstance(module, CodedLinear):
        return None if module.order is None else "takes its inputs in another order (activation order)"
    if not isinstance(module, nn.Linear):
        return "has weights in a form that it does not read"
    if module.weight.dtype not in (torch.float32, torch.bfloat16) or not module.weight.is_contiguous():
        return "is neither float32 nor bfloat16"
    return None


def step_decoder(model: Any) -> tuple[StepDecoder | None, list[str]]:
    """Return an opened model's decoder, None if there is none; then a note if its family has one."""
    if why_not_family(model.config.model_type):
        return None, []
    reason = why_not_step(model)
    if reason is not None:
        return None, [f"decode: transformers computes each step, because {reason}"]
    return StepDecoder(model), []


class StepDecoder:
    """Greedy decoding of an opened model; `why_not_step` says of which."""

    notes: tuple[str, ...] = (DECODES,)

    def __init__(self, model: Any) -> None:
        keep_freed_memory()
        self.model = model
        self._idle: Steps | None = None

    @contextmanager
    def steps(self, batch: int, length: int) -> Iterator[Steps]:
        """Lend the buffers for so many sequences and tokens; a fitting request reuses the last."""
        capacity = min(
            -(-length // CAPACITY_STEP) * CAPACITY_STEP, max(length, int(self.model.config.max_position_embeddings))
        )
        steps, self._idle = self._idle, None
        if steps is None or (steps.batch, steps.capacity) != (batch, capacity):
            steps = None
            steps = Steps(self.model, batch, capacity)
        try:
            yield steps
        finally:
            self._idle = steps


class Steps:
    """The KV cache and the structures for a number of sequences and positions."""

    def __init__(self, model: Any, batch: int, capacity: int) -> None:
        self.model, self.batch, self.capacity = model, batch, capacity
        self.position = 0
        base = model.model
        attention = base.layers[0].self_attn
        sizes = (batch, int(model.config.num_key_value_heads), capacity, int(attention.head_dim))
        self.cache = torch.zeros(len(base.layers), 2, *sizes)
        self.tokens = torch.zeros(batch, dtype=torch.int64)
        self.logits = torch.zeros(batch, model.lm_head.out_features)
        cosines, sines = base.rotary_emb(torch.zeros(1, 1), torch.arange(capacity)[None])
        self._structures = Structures(model, base.layers, self.cache, cosines[0], sines[0])
        self._step, self._prompts = _step_function(), PromptPass(base.layers, self._structures)

    def prompt(self, tokens: Tensor) -> Tensor:
        """Return the first tokens behind prompts, int64 [batch], for int64 [batch, prompt]."""
        base = self.model.model
        hidden = base.norm(self._prompts.hidden(base.embed_tokens(tokens).float())[:, -1])
        self.logits.copy_(products((self.model.lm_head,), hidden)[0])
        self.position = tokens.shape[1]
        self.tokens.copy_(self.logits.argmax(-1))
        return self.tokens.clone()

    def next(self) -> Tensor:
        """Return the tokens behind those returned last, int64 [batch].
        `logits` are theirs, float32 [batch, vocabulary].
        """
        self._step(self._structures.model, self.position, self.tokens.data_ptr(), self.logits.data_ptr())
        self.position += 1
        return self.tokens.clone()

    def logits_after(self, tokens: Tensor) -> Tensor:
        """Return the logits, float32 [batch, vocabulary], behind given tokens, int64 [batch]."""
        self.tokens.copy_(tokens)
        self.next()
        return self.logits.clone()


def _step_function() -> Any:
    function = ctypes.CDLL(str(library())).optkit_decode_step
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p], None
    return function
