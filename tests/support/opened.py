"""Models opened by transformers, tokens to give to them, and changed copies of them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from optkit.stage import Setting

KINDS = ["llama", "qwen2", "gemma3", "gpt2", "mixtral", "qwen2_moe"]


def prompt(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(1, 500, (batch, length), generator=torch.Generator().manual_seed(batch * length))


def reference(directory: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def transformers_logits(directory: Path, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(directory, **options)(tokens).logits
    return logits


class Traced(Setting):
    """As `compile`, without generating code."""

    def on_load(self, model: Any, device: str) -> Any:
        model.compile(backend="eager", dynamic=False)
        return model
