"""Write the tokenizer of a GGUF file as transformers reads it, and correct what it gets wrong.

transformers 5.17 takes the first token for the last one, and leaves it out before a text. It cuts
text as GPT-2 did, whatever the file says of it (`GGUFLlamaConverter` in
transformers/integrations/ggml.py). The patterns are those of llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optkit.common.files import reading
from optkit.model.gguf_file import Gguf
from optkit.progress import Progress
from optkit.source.quiet import quiet_transformers

LOADING_KEYS = (
    "is_local", "local_files_only", "backend", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "model_type",
)  # fmt: skip
"""What transformers writes into tokenizer_config.json of how the tokenizer was loaded, and not of
what it is.
"""
PORTABLE_CLASS = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""The name that transformers 4 knows as well."""
GPT2 = frozenset({"default", "gpt-2", "smollm"})
"""Cut as GPT-2 did. So does transformers 5 with the hub's SmolLM2 (WikiText-2 test: 304,986
tokens); llama.cpp takes digits out first, which with its vocabulary changes only white space before
a digit (8 tokens fewer)."""
QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Cut as Qwen2 does (src/llama-vocab.cpp)."""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3}


def import_tokenizer(gguf: Gguf, config: Mapping[str, Any], target: Path, progress: Progress) -> None:
    """Write the tokenizer with the special tokens that `config` names and its chat template. Raises
    SourceError if it cannot be read.
    """
    with quiet_transformers(), found_by_hash():
        from transformers import AutoTokenizer

        with reading(gguf.path, "the tokenizer in the file cannot be read"):
            tokenizer = AutoTokenizer.from_pretrained(
                str(gguf.path.parent), gguf_file=gguf.path.name, local_files_only=True
            )
        for name in ("bos_token", "eos_token", "pad_token"):
            number = config[f"{name}_id"]
            setattr(tokenizer, name, None if number is None else tokenizer.convert_ids_to_tokens(number))
        tokenizer.clean_up_tokenization_spaces = False
        _set_pre_tokenizer(gguf, tokenizer, progress)
        _set_first_and_last_token(gguf, tokenizer)
        tokenizer.save_pretrained(target)
    describe_(target, PORTABLE_CLASS)


def describe_(target: Path, names: Mapping[str, str]) -> None:
    """Let tokenizer_config.json say what the tokenizer is, and not how it was loaded.
    `names` are classes by other names.
    """
    file = target / "tokenizer_config.json"
    described = {
        name: value for name, value in json.loads(file.read_text(encoding="utf-8")).items() if name not in LOADING_KEYS
    }
    described["tokenizer_class"] = names.get(described["tokenizer_class"], described["tokenizer_class"])
    file.write_text(json.dumps(described, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


class Vocabulary(list[str]):
    """A vocabulary in which a token is found at once."""

    def __init__(self, tokens: Iterable[str]) -> None:
        super().__init__(tokens)
        self._known = frozenset(self)

    def __contains__(self, token: object) -> bool:
        return token in self._known


@contextmanager
def found_by_hash() -> Iterator[None]:
    """Let transformers find the parts of a SentencePiece token by their hash.
    It goes through the whole list for each, for minutes.
    """
    from transformers.integrations import ggml

    plain = ggml.GGUFTokenizerSkeleton

    def skeleton(found: Mapping[str, Any]) -> Any:
        return plain({**found, "tokens": Vocabulary(found["tokens"])} if "tokens" in found else found)

    ggml.GGUFTokenizerSkeleton = skeleton
    try:
        yield
    finally:
        ggml.GGUFTokenizerSkeleton = plain


def _set_pre_tokenizer(gguf: Gguf, tokenizer: Any, progress: Progress) -> None:
    """Cut text before BPE as `tokenizer.ggml.pre` says.
    Only `llama` files with a byte-level BPE need it.
    """
    kind = str(gguf.metadata.get("tokenizer.ggml.pre", "default"))
    if gguf.metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    if gguf.architecture != "llama":
        if kind not in QWEN2:
            progress.warn(_otherwise_cut(gguf, kind, "Qwen2 does"))
        return
    from tokenizers import Regex, pre_tokenizers

    if kind in PATTERNS:
        steps = [
            pre_tokenizers.Split(Regex(PATTERNS[kind]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.backend_tokenizer.model.ignore_merges = True
    elif kind not in GPT2:
        progress.warn(_otherwise_cut(gguf, kind, "GPT-2 did"))


def _otherwise_cut(gguf: Gguf, kind: str, cut: str) -> str:
    return (
        f"{gguf.path}: the file cuts text by '{kind}', which optkit does not know; it is cut as {cut},"
        " so some tokens may differ from those of the original model. Take the safetensors "
        "form of the model to be sure."
    )


def _set_first_and_last_token(gguf: Gguf, tokenizer: Any) -> None:
    """Put tokens before and behind each text if the file says so.
    If unsaid, llama.cpp puts one before it for SentencePiece and Llama 3.
    """
    kind = str(gguf.metadata.get("tokenizer.ggml.pre", ""))
    usual = gguf.metadata.get("tokenizer.ggml.model") == "llama" or kind in PATTERNS
    first = tokenizer.bos_token if gguf.metadata.get("tokenizer.ggml.add_bos_token", usual) else None
    last = tokenizer.eos_token if gguf.metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if first is None and last is None:
        return
    from tokenizers.processors import TemplateProcessing

    before, behind = ([token] if token else [] for token in (first, last))
    second = [f"{token}:1" for token in (*before, "$B", *behind)]
    known = {token: tokenizer.convert_tokens_to_ids(token) for token in (*before, *behind)}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *behind], pair=[*before, "$A", *behind, *second], special_tokens=[*known.items()]
    )
