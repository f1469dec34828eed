from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.kernels import kept_choices
from optkit.kernels.kept_choices import kept_choice


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache and a process that knows nothing; where choices are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_choices, "_known", {})
    return tmp_path / "optkit" / "kernel_choices"


def chosen(answer: int | None, outputs: int = 8, kernels: tuple[str, ...] = ("a", "b")) -> int:
    """Ask for a choice; `answer` is what timing would say, None if nothing may be timed."""

    def choose() -> int:
        assert answer is not None, "it was timed again"
        return answer

    return kept_choice({"outputs": outputs}, kernels, "cpu", choose)


def forget() -> None:
    kept_choices._known.clear()


def test_what_one_process_chose_holds_for_all(new_process: Path) -> None:
    assert chosen(1) == 1
    assert chosen(None) == 1
    forget()
    assert chosen(None) == 1
    assert chosen(0, outputs=16) == 0
    assert chosen(0, kernels=("a", "c")) == 0
    kept = [json.loads(path.read_text()) for path in new_process.iterdir()]
    assert sorted((each["layer"]["outputs"], each["kernels"], each["chosen"]) for each in kept) == [
        ("16", ["a", "b"], 0),
        ("8", ["a", "b"], 1),
        ("8", ["a", "c"], 0),
    ]


def test_the_first_of_two_processes_decides(new_process: Path) -> None:
    def choose() -> int:
        forget()
        assert chosen(0) == 0  # another process, meanwhile
        return 1

    assert kept_choice({"outputs": 8}, ["a", "b"], "cpu", choose) == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"chosen": 2}', '{"chosen": -1}', '{"chosen": "a"}'])
def test_a_damaged_choice_is_made_again(new_process: Path, text: str) -> None:
    chosen(1)
    (place,) = new_process.iterdir()
    place.write_text(text)
    forget()
    assert chosen(0) == 0
    assert json.loads(place.read_text())["chosen"] == 0


def test_without_a_place_to_keep_it_each_process_chooses(new_process: Path) -> None:
    new_process.parent.write_text("in the way")
    assert chosen(1) == 1
    assert chosen(None) == 1
    forget()
    assert chosen(0) == 0
