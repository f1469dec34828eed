"""The tokenizer of a checkpoint in the words of GGUF: tokens, their types, and how text is cut.

llama.cpp knows ways of cutting by name alone. Each is told here by what tokenizer.json says of it;
another one is refused, for a wrong one would give wrong tokens in silence. The names and patterns
are those of llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from optkit.errors import StageError
from optkit.source.gguf_tokenizer import LLAMA3

QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    ("ByteLevel+",): "gpt-2",
    ("Digits", "ByteLevel+"): "smollm",
    (LLAMA3, "ByteLevel"): "llama-bpe",
    (QWEN2, "ByteLevel"): "qwen2",
    (TEKKEN, "ByteLevel"): "tekken",
}
"""Steps of `pre_tokenizer`, patterns for splits and + for GPT-2's own one -> `tokenizer.ggml.pre`."""
WHOLE_FIRST = ("llama-bpe", "tekken")
"""Those that take a word that is a token whole, whatever the merges (`ignore_merges`)."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""
LOWEST = -1e6
"""Score of a token that no merge makes."""


def vocabulary(tokenizer: Any, rows: int) -> dict[str, Any]:
    """Return key -> value of `tokenizer.*`, of a tokenizer of transformers and the rows of the
    embedding. Raises StageError for one that llama.cpp does not have.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise _unknown("it has no tokenizer.json")
    described = json.loads(backend.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise _unknown(f"its model is {model['type']}")
    added = {each["id"]: each for each in described["added_tokens"]}
    names = {number: text for text, number in model["vocab"].items()} | {
        i: each["content"] for i, each in added.items()
    }
    if max(names) >= rows:
        raise _unknown(f"it has the token {max(names)}, and the embedding {rows:,} rows")
    tokens = [names.get(number, f"[PAD{number}]") for number in range(rows)]
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    cut = {str(each["type"]) for each in _parts(described["pre_tokenizer"], "pretokenizers")}
    spaced = bool(model["byte_fallback"]) and "ByteLevel" not in cut  # an import from GGUF says both
    own = _by_scores(described, tokens, pairs) if spaced else _by_merges(described, pairs)
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    ids["unknown"] = tokenizer.unk_token_id
    types = [_type(number, names, added, model.get("unk_token") if spaced else None) for number in range(rows)]
    first, last = _ends(tokenizer)
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            BYTE if spaced and re.fullmatch("<0x.{2}>", t, re.DOTALL) else k for t, k in zip(tokens, types, strict=True)
        ],
        **own,
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items() if number is not None},
        "tokenizer.ggml.add_bos_token": first,
        "tokenizer.ggml.add_eos_token": last,
        **({"tokenizer.chat_template": tokenizer.chat_template} if isinstance(tokenizer.chat_template, str) else {}),
    }


def _by_merges(described: Mapping[str, Any], pairs: list[list[str]]) -> dict[str, Any]:
    """Return what a byte-level BPE has of its own."""
    steps = tuple(_step(each) for each in _parts(described["pre_tokenizer"], "pretokenizers"))
    if (name := PRE_TOKENIZERS.get(steps)) is None:
        raise _unknown(f"it cuts text by {' and '.join(steps) or 'nothing'}")
    if bool(described["model"].get("ignore_merges")) != (name in WHOLE_FIRST):
        raise _unknown(f"it cuts as {name} does, and ignore_merges is {name not in WHOLE_FIRST}")
    changes = [str(each["type"]) for each in _parts(described["normalizer"], "normalizers")]
    if changes and (name, changes) != ("qwen2", ["NFC"]):  # which llama.cpp leaves out for Qwen 2 itself
        raise _unknown(f"it changes text by {' and '.join(changes)}")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
    }


def _by_scores(described: Mapping[str, Any], tokens: list[str], pairs: list[list[str]]) -> dict[str, Any]:
    """Return what a BPE of SentencePiece has of its own: a score for each token, the highest for what
    is merged first.
    """
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    steps = [*_parts(described["normalizer"], "normalizers"), *_parts(described["pre_tokenizer"], "pretokenizers")]
    if any(each["type"] == "Replace" for each in steps):  # after which there is no space to cut at, as Gemma does
        steps = [each for each in steps if each["type"] != "Split" or each["pattern"] != {"String": " "}]
    kinds = [each["type"] for each in steps]
    if not kinds or not set(kinds) <= {"Prepend", "Replace", "Metaspace"}:
        raise _unknown(f"it cuts text by {' and '.join(kinds) or 'nothing'}")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [float(-ranks[token]) if token in ranks else LOWEST for token in tokens],
        "tokenizer.ggml.add_space_prefix": any(
            each["type"] == "Prepend" or each.get("prepend_scheme", "never") != "never" for each in steps
        ),
    }


def _parts(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    return [] if step is None else list(step.get(name, ())) if step["type"] == "Sequence" else [step]


def _step(step: Mapping[str, Any]) -> str:
    kind = str(step["type"])
    if kind == "Split":
        pattern = next(iter(step["pattern"].values()))
        return str(pattern) if step["behavior"] == "Isolated" and not step["invert"] else f"{kind} {step['behavior']}"
    if kind == "ByteLevel":
        return f"{'a space and ' if step['add_prefix_space'] else ''}{kind}{'+' if step['use_regex'] else ''}"
    if kind == "Digits":
        return kind if step["individual_digits"] else "Digits together"
    return kind


def _type(number: int, names: Mapping[int, str], added: Mapping[int, Mapping[str, Any]], unknown: str | None) -> int:
    if number not in names:
        return UNUSED
    if names[number] == unknown:
        return UNKNOWN
    return NORMAL if number not in added else CONTROL if added[number]["special"] else USER_DEFINED


def _ends(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether a text gets a first token and a last one."""
    ids = tokenizer("a", verbose=False)["input_ids"]
    return ids[0] == tokenizer.bos_token_id, len(ids) > 1 and ids[-1] == tokenizer.eos_token_id


def _unknown(why: str) -> StageError:
    return StageError(
        "llama.cpp would cut text into other tokens",
        where="tokenizer",
        why=why[0].upper() + why[1:],
        remedy=f"optkit writes tokenizers that cut as {', '.join(PRE_TOKENIZERS.values())} or SentencePiece's BPE do",
    )
