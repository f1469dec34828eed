"""Texts become sequences: none is lost but the rest at the end, none that is held out is trained
on, and the order is the seed's.
"""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from optkit.errors import StageError
from optkit.source.training_text import TrainingText
from optkit.training.budget import Budget
from optkit.training.data import TrainingData, read_texts, split

END = 0
"""The id of the end-of-text token of the tests' tokenizer."""


def made(sequences: int, held_out: int = 2, length: int = 4, seed: int = 0) -> TrainingData:
    tokens = torch.arange(sequences * length).view(sequences, length)
    return split(tokens, [f"row {row}" for row in range(sequences)], held_out, seed, "distill")


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    documents, running = tmp_path / "documents.jsonl", tmp_path / "running.txt"
    lines = [f"document {number} says something of its own" for number in range(20)]
    documents.write_text("".join(json.dumps({"text": line}) + "\n" for line in [*lines, "  "]), encoding="utf-8")
    running.write_text("a text that runs on and on. " * 30, encoding="utf-8")
    return documents, running


def test_documents_end_and_running_text_runs_on(tiny_model, texts):
    directory, (documents, running) = tiny_model("llama"), texts
    encode = Tokenizer.from_file(str(directory / "tokenizer.json")).encode
    data = read_texts([TrainingText.model_validate(str(each)) for each in texts], directory, 8, 3, None, seed=1)
    first: list[int] = []
    for line in documents.read_text().splitlines():
        if text := json.loads(line)["text"].strip():
            first += [*encode(text).ids, END]
    second = encode(running.read_text()).ids
    expected = [ids[: len(ids) // 8 * 8] for ids in (first, second)]
    assert data.tokens.flatten().tolist() == expected[0] + expected[1]
    assert data.places[0] == f"{documents}, tokens 0 to 7"
    assert data.places[-1].startswith(f"{running}, tokens ")


@given(sequences=st.integers(3, 60), held_out=st.integers(1, 59), seed=st.integers(0, 9), count=st.integers(1, 200))
@settings(max_examples=40)
def test_held_out_is_never_trained_on_and_an_epoch_has_every_row_once(sequences, held_out, seed, count):
    if held_out >= sequences:
        return
    data = made(sequences, held_out, seed=seed)
    assert len(data.held_out) == held_out
    assert sorted((*data.training, *data.held_out)) == list(range(sequences))
    size = len(data.training)
    assert sorted(data.rows(0, size)) == sorted(data.rows(size, size)) == list(data.training)
    assert data.rows(0, count) == data.rows(0, 1) + data.rows(1, count - 1)
    assert not set(data.rows(0, count)) & set(data.held_out)


def test_the_order_is_the_seeds_and_another_one_in_each_epoch():
    one, same, other = made(50), made(50), made(50, seed=1)
    assert one.rows(0, 96) == same.rows(0, 96)
    assert one.rows(0, 48) != one.rows(48, 48)
    assert one.rows(0, 48) != other.rows(0, 48)
    assert one.digest() == same.digest() != other.digest()


def test_nothing_left_to_train_on():
    with pytest.raises(
        StageError, match=r"distill: the texts give 4 sequences of 4 tokens, and 4 are to be held out. Nothing is left"
    ):
        made(4, held_out=4)


@pytest.mark.parametrize(
    ("tokens", "epochs", "steps"), [(None, 1, 12), (None, 3, 36), (33, 1, 3), (192, 1, 12), (384, 2, 24)]
)
def test_a_budget_of_tokens_is_a_number_of_steps(tokens, epochs, steps):
    assert Budget(4, 4, 2, tokens, epochs, "distill").steps(48) == steps


@pytest.mark.parametrize(
    ("tokens", "epochs", "sequences", "message"),
    [
        (193, 1, 4, r"208 tokens are asked for, and the texts have 192 to train on. A step takes 16. Set `epochs: 2`"),
        (
            1000,
            2,
            4,
            r"1,008 tokens are asked for, and the texts have 192 to train on, 384 in 2 epochs. A "
            r"step takes 16. Set `epochs: 6`",
        ),
        (
            None,
            1,
            64,
            r"256 tokens are asked for, and the texts have 192 to train on. A step takes 256. Set `epochs: 2`",
        ),
    ],
)
def test_too_little_text(tokens, epochs, sequences, message):
    with pytest.raises(StageError, match=message):
        Budget(4, sequences, 2, tokens, epochs, "distill").steps(48)


def test_what_a_teacher_wrote_is_trained_on_and_never_held_out():
    data = made(10).extended(torch.full((3, 4), 7), "written")
    assert data.training[-3:] == (10, 11, 12)
    assert data.places[-1] == "written, sequence 2"
    assert data.held_out == made(10).held_out
    assert data.tokens_digest() != made(10).tokens_digest()
