"""The tokenizer of a model directory, and whether two of them mean the same by a number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optkit.common.files import read_object, reading
from optkit.errors import SourceError, StageError
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
        from transformers import AutoConfig, AutoTokenizer

        options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        remedy = "Take {} from the model's source again"
        files = remedy.format("tokenizer.json, tokenizer_config.json and config.json")
        with reading(directory, "the tokenizer cannot be loaded", files):
            try:
                tokenizer = AutoTokenizer.from_pretrained(directory, **options)
                tokenizer("a", verbose=False)  # some of what is damaged is only found so
            except Exception:
                if (config := directory / "config.json").is_file():
                    with reading(config, "transformers cannot read it", remedy.format("config.json")):
                        AutoConfig.from_pretrained(directory, **options)
                raise
            return tokenizer


def refuse_other_tokens(role: str, theirs: Path, beside: str, ours: Path, where: str, remedy: str) -> None:
    """Raise StageError if the tokenizer of a model that plays a role gives a token another number.
    Nothing is said if a directory has no tokenizer.json.
    """
    first, second = _vocabulary(theirs), _vocabulary(ours)
    if first is None or second is None:
        return
    if other := next((token for token in second if first.get(token) != second[token]), None):
        raise StageError(
            f"the {role}'s tokenizer is another one: {other!r} is {first.get(other, 'unknown')} to it and "
            f"{second[other]} to the {beside}",
            where=where,
            why="What it says would be about other tokens",
            remedy=remedy,
        )


def _vocabulary(directory: Path) -> Mapping[str, int] | None:
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    found = read_object(file)
    with reading(file, "is no tokenizer of the library tokenizers"):
        vocabulary = found.get("model", {}).get("vocab")
        if isinstance(vocabulary, list):  # Unigram: [token, score], the id is the place
            return {str(entry[0]): index for index, entry in enumerate(vocabulary)}
    return vocabulary if isinstance(vocabulary, dict) else None
