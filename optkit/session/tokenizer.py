"""The tokenizer of an opened model, whatever runs the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def encode(tokenizer: Any, text: str) -> Tensor:
    """Return a text's token ids, int64 [tokens], with the tokenizer's own special tokens."""
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
