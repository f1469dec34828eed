"""The tokenizer of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.common.files import reading
from optkit.errors import SourceError
from optkit.source.directory import TOKENIZERS
from optkit.source.quiet import quiet_transformers


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model directory. Raises SourceError if it has none."""
    if not any((directory / name).is_file() for name in TOKENIZERS):
        raise SourceError(
            "there is no tokenizer",
            where=str(directory),
            why=f"None of {', '.join(TOKENIZERS)} is there",
            remedy="Copy tokenizer.json and tokenizer_config.json into it",
        )
    with quiet_transformers():
        from transformers import AutoTokenizer

        remedy = "Copy tokenizer.json and tokenizer_config.json into it"
        with reading(directory, "the tokenizer cannot be loaded", remedy):
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=trust_remote_code
            )
            tokenizer("a", verbose=False)  # some of what is damaged is only found so
            return tokenizer
