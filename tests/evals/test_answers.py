"""Exact match and word error rate of what a session answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from optkit_evals.answers import Answers, word_errors

from optkit.errors import EvalError
from optkit.measure import EvalContext


class Parrot:
    """Says what it is given."""

    def answer(self, source: str, new_tokens: int) -> str:
        return source


def answers(tmp_path: Path, pairs: list[tuple[str, str]], **fields: Any) -> dict[str, Any]:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"input": one, "target": two}) for one, two in pairs), encoding="utf-8")
    wanted = Answers(dataset=str(path), input="input", field="target", **fields)
    return {metric.name: metric for metric in wanted.run(Parrot(), EvalContext())}  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize(
    ("said", "wanted", "errors"),
    [
        ("a b c", "a b c", 0),
        ("", "a b c", 3),
        ("a x c", "a b c", 1),
        ("x a b c", "a b c", 1),
        ("a c", "a b c", 1),
        ("c b a", "a b c", 2),
        ("the cat sat on a mat today", "a cat sat on the mat", 3),
    ],
)  # as jiwer 4 counts them
def test_words_to_change(said: str, wanted: str, errors: int) -> None:
    assert word_errors(said.split(), wanted.split()) == errors


def test_rates_are_those_of_all_words(tmp_path: Path) -> None:
    found = answers(tmp_path, [("One, two!", "one two"), ("a b", "a b c d"), ("x", "y")])
    assert found["exact_match"].value == pytest.approx(1 / 3)
    assert found["word_error_rate"].value == pytest.approx(3 / 7)
    assert found["word_error_rate"].interval[0] == 0
    written = answers(tmp_path, [("One, two!", "one two"), ("a b", "a b")], normalize=False)
    assert (written["exact_match"].value, written["word_error_rate"].value) == (0.5, pytest.approx(2 / 4))
    assert "first 2 pairs, target behind input" in written["exact_match"].protocol


def test_a_target_without_words(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="the target of pair 2 has no words"):
        answers(tmp_path, [("a", "a"), ("b", "...")])
