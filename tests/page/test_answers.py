"""Answers of both models are shown from the files that evals left; a broken file shows nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from optkit.page import scorecard_page
from optkit.page.answers import LONGEST, MOST, answers
from optkit.scorecard import Scorecard
from optkit.scorecard.scorecard import FileLine
from tests.support.full_scorecards import full_scorecard

PLACE = "scorecard_files/lm_eval/flips.jsonl"
FLIP = {
    "task": "arc_easy",
    "item": 7,
    "turned": "right to wrong",
    "question": "What boils at 100 C?",
    "choices": ["water", "iron"],
    "gold": 0,
    "unmodified": 0,
    "artifact": 1,
}


@pytest.fixture
def card() -> Scorecard:
    line = FileLine(path=PLACE, media_type="application/jsonl", size_bytes=1, sha256="0" * 64)
    return full_scorecard().model_copy(update={"files": (line,)})


def left(folder: Path, *records: Any) -> Path:
    path = folder / PLACE
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return folder


def test_an_index_means_a_choice(card: Scorecard, tmp_path: Path) -> None:
    (group,) = answers(card, left(tmp_path, FLIP))
    assert group["title"] == "Answers: arc_easy, right to wrong"
    (shown,) = group["items"]
    assert shown["title"] == "item 7"
    assert shown["prompt"] == "What boils at 100 C?"
    assert shown["sides"] == [("gold", "water"), ("unmodified", "water"), ("artifact", "iron")]


def test_tasks_and_turns_are_apart_and_long_ones_are_cut(card: Scorecard, tmp_path: Path) -> None:
    long = {"prompt": "a" * 5000, "unmodified": "b", "artifact": {"tokens": [1]}}
    records = [*[FLIP] * 20, {**FLIP, "turned": "wrong to right"}, long, {"task": "no answer"}, 3]
    first, second, third = answers(card, left(tmp_path, *records))
    assert (len(first["items"]), first["about"]) == (MOST, f"{MOST} of 20 in {PLACE}")
    assert second["title"] == "Answers: arc_easy, wrong to right"
    assert third["title"] == "Answers of both models"
    assert third["items"][0]["prompt"] == "a" * LONGEST + " ..."
    assert third["items"][0]["sides"] == [("unmodified", "b"), ("artifact", '{"tokens": [1]}')]


def test_a_page_shows_them_as_text(card: Scorecard, tmp_path: Path) -> None:
    page = scorecard_page(card, left(tmp_path, {**FLIP, "question": "<script>alert(1)</script>"}))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "Answers: arc_easy, right to wrong" in page
    assert "Answers" not in scorecard_page(card)


def test_a_file_of_something_else_is_not_shown(card: Scorecard, tmp_path: Path) -> None:
    assert answers(card, left(tmp_path, {"item": 1, "answer": 0}, FLIP)) == []


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[" * 100_000])
def test_a_broken_file_shows_nothing(card: Scorecard, tmp_path: Path, content: bytes) -> None:
    (left(tmp_path) / PLACE).write_bytes(content)
    assert answers(card, tmp_path) == []


def test_a_file_that_is_gone_or_a_directory_shows_nothing(card: Scorecard, tmp_path: Path) -> None:
    assert answers(card, tmp_path) == []
    (tmp_path / PLACE).mkdir(parents=True)
    assert answers(card, tmp_path) == []
