"""Models opened by transformers, tokens to give to them, and changed copies of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

KINDS = ["llama", "qwen2", "gemma3", "gpt2", "mixtral", "qwen2_moe"]


def prompt(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(1, 500, (batch, length), generator=torch.Generator().manual_seed(batch * length))


def reference(directory: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def copied(
    source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **config: Any
) -> Path:
    shutil.copytree(source, target)
    if change:
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    held = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(held))
    return target
