import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from optkit.errors import SourceError
from optkit.source.calibration import Calibration, load_tokenizer
from tests.support.changes import changed_copy


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory):
    from tests.support.tiny_models import save_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return directory


@pytest.fixture
def jsonl(tmp_path):
    def write(*texts):
        file = tmp_path / "mine.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return str(file)

    return write


def ids(directory: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids)


class TestFields:
    def test_it_nests_and_takes_a_bare_name(self):
        class Stage(BaseModel):
            calibration: Calibration

        stage = Stage.model_validate({"calibration": "python-reference"})
        assert stage.calibration.model_dump() == {
            "dataset": "python-reference",
            "split": "train",
            "field": "text",
            "revision": None,
            "samples": 128,
            "sequence_length": 512,
            "packing": "auto",
            "bos": "tokenizer",
        }

    @pytest.mark.parametrize("fields", [{"samples": 0}, {"sequence_length": 1}, {"packing": "padded"}, {"length": 3}])
    def test_out_of_range(self, fields):
        with pytest.raises(ValidationError, match=next(iter(fields))):
            Calibration(dataset="c4", **fields)

    @pytest.mark.parametrize(
        ("dataset", "split", "documents"),
        [
            ("c4", "train", True),
            ("wikitext2", "train", False),
            ("python-reference", "train", False),
            ("a.txt", "all", False),
            ("a.jsonl", "all", True),
            ("org/name", "train", True),
        ],
    )
    def test_split_and_packing_by_themselves(self, dataset, split, documents):
        calibration = Calibration(dataset=dataset)
        assert (calibration.split, calibration.packs_documents) == (split, documents)
        assert Calibration(dataset=dataset, packing="documents").packs_documents
        assert not Calibration(dataset=dataset, packing="joined").packs_documents

    def test_pinning_keeps_the_windows(self):
        pinned = Calibration(dataset="python-reference", samples=3).pinned(None)
        assert isinstance(pinned, Calibration)
        assert pinned.samples == 3
        assert pinned.revision is not None


class TestDocuments:
    def test_the_start_of_the_first_that_are_long_enough(self, jsonl, tokenizer_directory):
        texts = ["short", "import os " * 30, "also short", "def run(): pass " * 30, "tokens " * 50]
        calibration = Calibration(dataset=jsonl(*texts), samples=2, sequence_length=16)
        expected = [ids(tokenizer_directory, texts[1])[:16], ids(tokenizer_directory, texts[3])[:16]]
        windows = calibration.tokens(tokenizer_directory, None)
        assert str(windows.dtype) == "torch.int64"
        assert windows.tolist() == expected

    def test_exactly_long_enough_is_taken(self, jsonl, tokenizer_directory):
        text = "tokens " * 20
        length = len(ids(tokenizer_directory, text))
        dataset = jsonl(text)
        assert Calibration(dataset=dataset, samples=1, sequence_length=length).tokens(
            tokenizer_directory, None
        ).shape == (1, length)
        with pytest.raises(SourceError, match="0 of 1 documents have"):
            Calibration(dataset=dataset, samples=1, sequence_length=length + 1).tokens(tokenizer_directory, None)

    def test_too_few(self, jsonl, tokenizer_directory):
        dataset = jsonl("tokens " * 50, "short")
        longest = len(ids(tokenizer_directory, "tokens " * 50))
        with pytest.raises(SourceError) as caught:
            Calibration(dataset=dataset, samples=4, sequence_length=16).tokens(tokenizer_directory, None)
        assert str(caught.value) == (
            f"{dataset}: 1 of 2 documents have 16 tokens and 4 are needed. The longest has {longest}."
            " Lower `samples` or `sequence_length`, or set `packing: joined`."
        )

    def test_c4_gives_the_tokens_of_the_benchmark(self, shared_data, smol_tokenizer):
        windows = Calibration(dataset="c4", samples=64, sequence_length=512).tokens(smol_tokenizer, shared_data)
        tokenizer = load_tokenizer(smol_tokenizer)
        lines = (shared_data / "c4_sample" / "c4_rp1.jsonl").read_text(encoding="utf-8").splitlines()
        encoded = (tokenizer.backend_tokenizer.encode(json.loads(line)["text"]).ids for line in lines)
        long = (list(tokens[:512]) for tokens in encoded if len(tokens) >= 512)
        assert windows.tolist() == list(islice(long, 64))


class TestJoined:
    def test_windows_are_spread_evenly_over_the_text(self, tmp_path, tokenizer_directory):
        text = " ".join(map(str, range(1000)))  # no window of it is there twice
        (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
        stream = ids(tokenizer_directory, text)
        windows = Calibration(dataset=str(tmp_path / "mine.txt"), samples=3, sequence_length=32).tokens(
            tokenizer_directory, None
        )
        places = [
            next(at for at in range(len(stream)) if stream[at : at + 32] == window) for window in windows.tolist()
        ]
        third = len(stream) / 3
        assert places[0] == 0
        assert all(place % 32 == 0 and abs(place - index * third) <= 32 for index, place in enumerate(places))

    def test_all_windows_of_a_text_are_the_text(self, tmp_path, tokenizer_directory):
        text = "tokens of a text " * 40
        (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
        stream = ids(tokenizer_directory, text)
        count = len(stream) // 8
        windows = Calibration(dataset=str(tmp_path / "mine.txt"), samples=count, sequence_length=8).tokens(
            tokenizer_directory, None
        )
        assert windows.flatten().tolist() == stream[: count * 8]

    @pytest.mark.parametrize(
        ("length", "remedy"),
        [(16, "Lower `samples` to {available}, or `sequence_length`."), (4096, "Lower `sequence_length`.")],
    )
    def test_too_short(self, tmp_path, tokenizer_directory, length, remedy):
        file = tmp_path / "mine.txt"
        file.write_text("tokens " * 50, encoding="utf-8")
        count = len(ids(tokenizer_directory, "tokens " * 50))
        with pytest.raises(SourceError) as caught:
            Calibration(dataset=str(file), samples=100, sequence_length=length).tokens(tokenizer_directory, None)
        assert str(caught.value) == (
            f"{file}: the text has {count:,} tokens and 100 x {length:,} = {100 * length:,} are needed."
            f" {remedy.format(available=count // length)}"
        )

    def test_the_reference_is_enough_for_the_default(self, smol_tokenizer):
        windows = Calibration(dataset="python-reference").tokens(smol_tokenizer, None)
        assert windows.shape == (128, 512)
        assert windows.tolist() == Calibration(dataset="python-reference").tokens(smol_tokenizer, None).tolist()


def test_a_directory_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(
        SourceError, match="there is no tokenizer. None of tokenizer.json, .* is there. Copy tokenizer.json and tok"
    ):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(
        SourceError, match="the tokenizer cannot be loaded. .* Take tokenizer.json, .* from the model's source again"
    ):
        load_tokenizer(tmp_path)


def test_a_tokenizer_beside_a_config_that_is_wrong(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = changed_copy(tiny_model("qwen2"), tmp_path, num_hidden_layers=1)
    with pytest.raises(
        SourceError, match=r"config.json: transformers cannot read it. .*`num_hidden_layers` \(1\) must be equal"
    ):
        load_tokenizer(model)
