import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import SourceError
from optkit.source.calibration import Calibration, load_tokenizer
from optkit.source.cut_text import apart, encoder
from optkit.source.token_counts import TokenCounts
from optkit.source.training_text import TrainingText
from optkit.training.data import read_texts
from tests.support.tiny_models import save_tokenizer

BOS, END = 6, 0
TEXT = " ".join(map(str, range(400)))
DOCUMENTS = ["import os " * 30, "def run(): pass " * 30, "tokens " * 50]
MODES = ("tokenizer", "window", "text", "none")


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Path]:
    """Return what makes a tokenizer, with BOS before a text or without, which has a BOS token or
    not.
    """

    def make(adds: bool, has: bool = True) -> Path:
        save_tokenizer(tmp_path)
        path, configured = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
        config = json.loads(configured.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        config["bos_token"] = "&" if has else None
        configured.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        if adds:
            piece, text = {"SpecialToken": {"id": "&", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
            other = {"Sequence": {"id": "B", "type_id": 1}}
            token = {"&": {"id": "&", "ids": [BOS], "tokens": ["&"]}}
            processor = {
                "type": "TemplateProcessing",
                "single": [piece, text],
                "pair": [piece, text, other],
                "special_tokens": token,
            }
            path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": processor}))
        return tmp_path

    return make


def ids_of(directory: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def write(directory: Path, text: str | list[str]) -> str:
    path = directory / ("text.txt" if isinstance(text, str) else "texts.jsonl")
    path.write_text(text if isinstance(text, str) else "".join(json.dumps({"text": each}) + "\n" for each in text))
    return str(path)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("bos", MODES)
def test_windows_of_a_running_text(place: Callable[..., Path], bos: Any, adds: bool) -> None:
    directory = place(adds)
    ids, led = ids_of(directory, TEXT), bos == "window" or (adds and bos == "tokenizer")
    room = 15 if led else 16
    text = Calibration(dataset=write(directory, TEXT), samples=len(ids) // room, sequence_length=16, bos=bos)
    windows = text.tokens(directory, None).tolist()
    body = [BOS, *ids] if adds and bos == "text" else ids
    assert windows == [
        ([BOS] if led else []) + body[start : start + room] for start in range(0, len(ids) // room * room, room)
    ]


@pytest.mark.parametrize("bos", MODES)
def test_windows_of_documents(place: Callable[..., Path], bos: Any) -> None:
    directory = place(adds=True)
    windows = (
        Calibration(dataset=write(directory, DOCUMENTS), samples=3, sequence_length=16, bos=bos)
        .tokens(directory, None)
        .tolist()
    )
    assert windows == [
        ([] if bos == "none" else [BOS]) + ids_of(directory, each)[: 16 if bos == "none" else 15] for each in DOCUMENTS
    ]


@pytest.mark.parametrize("bos", MODES)
def test_sequences_to_train_on_and_how_many_are_counted(place: Callable[..., Path], tmp_path: Path, bos: Any) -> None:
    directory = place(adds=True)
    text = TrainingText(dataset=write(directory, DOCUMENTS), bos=bos).pinned(None)
    inner = [] if bos == "none" else [BOS]
    stream = [token for each in DOCUMENTS for token in (*inner, *ids_of(directory, each), END)]
    led = bos in ("tokenizer", "window")
    body, room = (stream[1:], 15) if led else (stream, 16)
    data = read_texts([text], directory, 16, 1, None)
    assert data.tokens.tolist() == [
        [BOS] * led + body[start : start + room] for start in range(0, len(body) // room * room, room)
    ]
    assert data.lead == led
    counts = TokenCounts(directory, None, tmp_path / "counts")
    assert counts.enough_sequences((text,), 16, 10_000) == len(data.tokens)


def test_a_token_that_there_is_not(place: Callable[..., Path]) -> None:
    directory = place(adds=False, has=False)
    tokenizer = load_tokenizer(directory)
    assert apart(encoder(tokenizer), "a text") == ([], ids_of(directory, "a text"))
    with pytest.raises(
        SourceError,
        match=r"text.txt: bos is `window`, and the tokenizer has no such token. Set bos to tokenizer or none",
    ):
        Calibration(dataset=write(directory, TEXT), samples=2, sequence_length=16, bos="window").tokens(directory, None)


def test_prompts_of_a_teacher_begin_as_sequences_do(place: Callable[..., Path]) -> None:
    import torch

    from optkit.stage import Context
    from optkit.stages.distill import Distill
    from optkit.stages.teaching.teacher import Generated

    directory = place(adds=True)
    data = read_texts([TrainingText(dataset=write(directory, DOCUMENTS))], directory, 16, 1, None)
    asked = Generated(tokens=320, prompt_tokens=4)
    prompts = Distill()._prompts(asked, data, directory, Context())
    assert prompts.shape[1] == 5
    assert prompts[:, 0].unique().tolist() == [BOS]
    windows = data.tokens[:, 1:].unfold(1, 4, 4).reshape(-1, 4)
    assert all(bool((windows == prompt[1:]).all(1).any()) for prompt in prompts)
    assert torch.equal(prompts, Distill()._prompts(asked, data, directory, Context()))
