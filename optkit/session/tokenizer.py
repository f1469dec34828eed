"""The tokenizer of an opened model, whatever runs the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from optkit.errors import SourceError
from optkit.source.quiet import quiet_transformers


def open_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a directory; raises SourceError where there is none."""
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, ImportError) as error:
        first = next(iter(str(error).strip().splitlines()), repr(error))
        raise SourceError("there is no tokenizer that transformers can open", where=str(directory), why=first) from error


def encode(tokenizer: Any, text: str) -> Tensor:
    """Return the token ids of a text, int64 [tokens], with the special tokens that the tokenizer itself adds."""
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
