import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from optkit.errors import SourceError
from optkit.model.gguf_file import read_gguf
from optkit.progress import SilentProgress
from optkit.source.calibration import load_tokenizer
from optkit.source.gguf_llama import checkpoint_shape
from optkit.source.gguf_tokenizer import found_by_hash, import_tokenizer
from tests.conftest import Warnings
from tests.support.gguf_files import save_gguf

gguf = pytest.importorskip("gguf", reason="needs gguf, of the extra `gguf`")


class TestTokenizer:
    @pytest.mark.parametrize(
        ("kind", "pieces"),
        [
            ("default", ["it", "'s", "Ġ12345", "Ċ", "Ċ", "IT", "'", "S"]),
            ("smollm", ["it", "'s", "Ġ12345", "Ċ", "Ċ", "IT", "'", "S"]),
            ("llama-bpe", ["it", "'s", "Ġ", "123", "45", "ĊĊ", "IT", "'S"]),
        ],
    )
    def test_text_is_cut_as_the_file_says(self, models, tmp_path, kind, pieces):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama", tokenizer__ggml__pre=kind)
        header = read_gguf(file)
        import_tokenizer(header, checkpoint_shape(header).config, tmp_path, SilentProgress())
        tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it's 12345\n\nIT'S")] == pieces
        text = Path(__file__).read_text(encoding="utf-8")
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    @pytest.mark.parametrize(
        ("says", "first"),
        [
            ({}, []),
            ({"tokenizer__ggml__add_bos_token": True}, [0]),
            ({"tokenizer__ggml__add_bos_token": False}, []),
            ({"tokenizer__ggml__pre": "llama-bpe"}, [0]),
            ({"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": False}, []),
        ],
    )
    def test_the_first_token_stands_where_the_file_says(self, models, tmp_path, says, first):
        header = read_gguf(save_gguf(models["llama"], tmp_path / "model.gguf", "llama", **says))
        import_tokenizer(header, checkpoint_shape(header).config, tmp_path, SilentProgress())
        tokenizer, original = load_tokenizer(tmp_path), load_tokenizer(models["llama"])
        assert tokenizer("a text").input_ids == [*first, *original("a text").input_ids]

    @pytest.mark.parametrize("first", [True, False])
    def test_the_last_token_stands_where_the_file_says(self, models, tmp_path, first):
        says = {"tokenizer__ggml__add_bos_token": first, "tokenizer__ggml__add_eos_token": True}
        header = read_gguf(save_gguf(models["llama"], tmp_path / "model.gguf", "llama", **says))
        import_tokenizer(header, checkpoint_shape(header).config, tmp_path, SilentProgress())
        tokenizer, plain = load_tokenizer(tmp_path), load_tokenizer(models["llama"])("a text").input_ids
        assert tokenizer("a text").input_ids == [*([0] if first else []), *plain, 1]
        assert tokenizer("a text", "a text").input_ids == 2 * [*([0] if first else []), *plain, 1]

    @pytest.mark.parametrize(("kind", "lines"), [("qwen2", 0), ("deepseek-r1-qwen", 0), ("viking", 1)])
    def test_a_way_of_cutting_of_qwen2_that_is_not_its_own_is_said(self, models, tmp_path, kind, lines):
        header = read_gguf(save_gguf(models["qwen2"], tmp_path / "model.gguf", "qwen2", tokenizer__ggml__pre=kind))
        told = Warnings()
        import_tokenizer(header, checkpoint_shape(header).config, tmp_path, told)
        assert [
            line
            for line in told.lines
            if "the file cuts text by 'viking', which optkit does not know; it is cut as Qwen2 does" in line
        ] == (told.lines)
        assert len(told.lines) == lines

    def test_a_way_of_cutting_that_is_not_known_is_said(self, models, tmp_path):
        header = read_gguf(save_gguf(models["llama"], tmp_path / "model.gguf", "llama", tokenizer__ggml__pre="viking"))
        told = Warnings()
        import_tokenizer(header, checkpoint_shape(header).config, tmp_path, told)
        assert len(told.lines) == 1
        assert "the file cuts text by 'viking', which optkit does not know; it is cut as GPT-2 did" in told.lines[0]

    def test_a_tokenizer_that_cannot_be_read(self, models, tmp_path):
        file = save_gguf(models["llama"], tmp_path / "model.gguf", "llama")
        file.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenx"))
        header = read_gguf(file)
        with pytest.raises(SourceError, match="model.gguf: the tokenizer in the file cannot be read"):
            import_tokenizer(header, checkpoint_shape(header).config, tmp_path, SilentProgress())


def test_merges_of_sentencepiece_are_those_of_transformers_and_their_partsfound_by_hash():
    from transformers.integrations import ggml

    letters = random.Random(0)
    tokens = [*"abcdefgh"]
    while len(tokens) < 600:
        tokens.append(letters.choice(tokens)[:5] + letters.choice(tokens)[:5])
    tokens = list(dict.fromkeys(tokens))
    described = {"tokens": tokens, "scores": [-float(place) for place in range(len(tokens))]}
    plain = ggml.GGUFTokenizerSkeleton(described)
    with found_by_hash():
        quick = ggml.GGUFTokenizerSkeleton(described)
    assert len(plain.merges) > 100
    assert quick.merges == plain.merges
    assert quick.tokens == plain.tokens

    class Counted(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    with found_by_hash():
        ggml.GGUFTokenizerSkeleton({**described, "tokens": [Counted(token) for token in tokens]})
    assert Counted.compared < 100 * len(tokens)  # and not once for each token and each part
