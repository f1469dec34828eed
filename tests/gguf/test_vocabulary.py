"""Each way of cutting text has its name, llama.cpp cuts by it as transformers does, and others are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import StageError
from optkit.gguf.vocabulary import BYTE, CONTROL, NORMAL, PRE_TOKENIZERS, QWEN2, TEKKEN, UNKNOWN, UNUSED, vocabulary
from optkit.gguf.writing import write_gguf
from optkit.progress import SilentProgress
from optkit.source.calibration import load_tokenizer
from optkit.source.gguf_tokenizer import LLAMA3
from tests.conftest import TinyModel

pytest.importorskip("gguf", reason="needs gguf, of the extra `gguf`")
TEXT = (
    "The 1234 ships of 2026-11-21, «La mer»: it's HERE, I'LL  be\tthere.\n\n"
    "  def f(x):\n    return x**2  # 日本語 é 🙂 x\r\n   end "
)
PLAIN = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
CUT = {**PLAIN, "use_regex": False}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def steps(*each: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(each)}


KNOWN: dict[str, tuple[dict[str, Any], bool]] = {
    "gpt-2": (PLAIN, False),
    "smollm": (steps({"type": "Digits", "individual_digits": True}, PLAIN), False),
    "llama-bpe": (steps(split(LLAMA3), CUT), True),
    "qwen2": (steps(split(QWEN2), CUT), False),
    "tekken": (steps(split(TEKKEN), CUT), True),
}


def byte_level(pre_tokenizer: dict[str, Any], ignore_merges: bool, **changes: Any) -> str:
    """Return a tokenizer.json of 400 tokens, and one that ends texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    made.train_from_iterator([TEXT * 3, Path(__file__).read_text(encoding="utf-8")], trainer)
    described = json.loads(made.to_str()) | {"pre_tokenizer": pre_tokenizer, "decoder": PLAIN} | changes
    described["model"]["ignore_merges"] = ignore_merges
    return json.dumps(described)


def sentence_piece(**changes: Any) -> str:
    """Return a tokenizer.json like Llama 2's."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=430, special_tokens=names, show_progress=False)
    made.train_from_iterator(" ".join(TEXT.split()[:12]).split(), trainer)
    described = json.loads(made.to_str())
    described["added_tokens"] = described["added_tokens"][:3]
    return json.dumps(described | changes)


def saved(described: str, directory: Path, **special: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(described, encoding="utf-8")
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    return directory


def made_of(described: str, directory: Path, rows: int = 512, **special: str) -> dict[str, Any]:
    return vocabulary(load_tokenizer(saved(described, directory, **special)), rows)


@pytest.mark.parametrize("name", KNOWN)
def test_the_name(tmp_path: Path, name: str) -> None:
    found = made_of(byte_level(*KNOWN[name]), tmp_path, eos_token="<|endoftext|>")
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.pre"] == name
    assert len(found["tokenizer.ggml.tokens"]) == 512
    types = found["tokenizer.ggml.token_type"]
    assert (types[0], types[300], types[511]) == (CONTROL, NORMAL, UNUSED)
    assert found["tokenizer.ggml.tokens"][511] == "[PAD511]"
    assert found["tokenizer.ggml.eos_token_id"] == 0
    assert not found["tokenizer.ggml.add_bos_token"]
    assert set(KNOWN) == set(PRE_TOKENIZERS.values())


def test_a_byte_level_one_that_an_import_from_gguf_wrote(tmp_path: Path) -> None:
    described = json.loads(byte_level(PLAIN, False, normalizer={"type": "Sequence", "normalizers": []}))
    described["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<|endoftext|>"}
    assert made_of(json.dumps(described), tmp_path)["tokenizer.ggml.pre"] == "gpt-2"


def test_sentence_piece(tmp_path: Path) -> None:
    found = made_of(sentence_piece(), tmp_path, bos_token="<s>", unk_token="<unk>")
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.add_space_prefix"] is True
    types = found["tokenizer.ggml.token_type"]
    assert types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE]
    assert types.count(BYTE) == 256
    merges = json.loads(sentence_piece())["model"]["merges"]
    scores = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    ranked = [scores["".join(pair)] for pair in merges]
    assert ranked == sorted(ranked, reverse=True)
    assert max(scores.values()) == 0


@pytest.mark.parametrize("name", [*KNOWN, "SentencePiece"])
def test_llama_cpp_cuts_as_transformers_does(tiny_model: TinyModel, tmp_path: Path, name: str) -> None:
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, of the extra `llama-cpp`")
    from optkit.gguf.llama_cpp import tokens_of

    described = sentence_piece() if name == "SentencePiece" else byte_level(*KNOWN[name])
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    for path in model.glob("*token*"):
        path.unlink()
    saved(described, model)
    write_gguf(model, tmp_path / "x.gguf", None, None, False, SilentProgress().task("", 0).__enter__())
    assert tokens_of(tmp_path / "x.gguf", TEXT) == load_tokenizer(model)(TEXT)["input_ids"]


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (lambda: byte_level(steps(split(r"\w+"), CUT), False), r"It cuts text by \\w\+ and ByteLevel"),
        (lambda: byte_level({**PLAIN, "add_prefix_space": True}, False), r"It cuts text by a space and ByteLevel\+"),
        (lambda: byte_level(*KNOWN["llama-bpe"][:1], False), "It cuts as llama-bpe does, and ignore_merges is False"),
        (lambda: byte_level(PLAIN, False, normalizer={"type": "Lowercase"}), "It changes text by Lowercase"),
        (lambda: sentence_piece(normalizer=None), "It cuts text by nothing"),
    ],
)
def test_what_llama_cpp_has_not(tmp_path: Path, described: Any, why: str) -> None:
    message = f"tokenizer: llama.cpp would cut text into other tokens. {why}. optkit writes tokenizers that cut as gpt"
    with pytest.raises(StageError, match=message):
        made_of(described(), tmp_path)


def test_other_models_of_tokenizers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(StageError, match="other tokens. Its model is WordLevel"):
        made_of(words.to_str(), tmp_path / "a")
    with pytest.raises(StageError, match="other tokens. It has the token 399, and the embedding 300 rows"):
        made_of(byte_level(PLAIN, False), tmp_path / "b", rows=300)
    with pytest.raises(StageError, match="other tokens. It has no tokenizer.json"):
        vocabulary(object(), 512)
