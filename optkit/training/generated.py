"""Text that the teacher writes itself: drawn token by token from what it predicts, kept on disk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from optkit.model.carried_state import CarriedState
from optkit.progress import Progress
from optkit.training.checkpoints import write_tensors
from optkit.training.shared_answers import SharedPlace

TOKENS_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 20}
"""Tokens that are written side by side, and lie in one file, by the kind of device; the KV cache of
all of them is in its memory.
"""


def generated(
    open_model: Callable[[], PreTrainedModel],
    prompts: Tensor,
    length: int,
    temperature: float,
    seed: int,
    at_once: int,
    shared: SharedPlace,
    progress: Progress,
) -> Tensor:
    """Return int64 [prompts, length].
    Each row is a prompt, int64 [prompts, p], and what the model writes after it, ends of text
    included.

    `at_once` of them are written side by side. What lies in the shared place is not written again.
    Raises ResourceError on a full disk.
    """
    parts = list(enumerate(prompts.split(at_once)))
    paths = {number: shared.place / f"generated-{number:05d}.safetensors" for number, _ in parts}
    with shared.alone():
        missing = [(number, some) for number, some in parts if not paths[number].is_file()]
        if missing:
            model = open_model()
            with progress.task("generate", sum(len(some) for _, some in missing), "sequences") as task:
                for number, some in missing:
                    generator = torch.Generator(model.device).manual_seed((seed << 20) + number)
                    tokens = continued(model, some.to(model.device), length, temperature, generator)
                    write_tensors(paths[number], {"tokens": tokens.to("cpu", torch.int32)})
                    task.advance(len(some))
    return torch.cat([load_file(path)["tokens"].to(torch.int64) for path in paths.values()])


def sequences_at_once(device: str, length: int) -> int:
    """Return how many sequences are written side by side."""
    return max(1, TOKENS_AT_ONCE["cuda" if device.startswith("cuda") else "cpu"] // length)


@torch.no_grad()
def continued(
    model: PreTrainedModel, prompts: Tensor, length: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Return int64 [b, length]: int64 [b, p] and the tokens drawn after it.
    They are drawn one after the other from softmax(logits / temperature).
    """
    state = CarriedState(model)
    tokens, last = prompts, prompts
    while tokens.shape[1] < length:
        logits = state.step(last, model)[:, -1].float()
        last = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, last], dim=1)
    return tokens
