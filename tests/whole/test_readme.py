"""The README is read in two minutes, and the scorecard that it shows is one that was measured."""

import re
from pathlib import Path

from optkit_cli.output import plain_text
from optkit_cli.scorecard_view import short_scorecard

from optkit.recipe.files import shipped_recipes
from optkit.scorecard import read_json

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CARD = ROOT / "docs" / "benchmarks" / "results" / "sweep_int4_cpu" / "gptq-bits4-group_size32.json"


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_scorecard_is_what_the_terminal_shows() -> None:
    card = read_json(CARD)
    shown = plain_text(*short_scorecard(card, Path("artifacts", card.name))).strip()
    assert f"```text\n{shown}\n```" in README
    assert len(shown.splitlines()) <= 15


def test_the_recipes_that_it_names_are_shipped() -> None:
    cells = re.findall(r"\| ((?:`\w+`(?:, )?)+) \|$", README, re.MULTILINE)
    assert len(cells) == 7
    assert {*re.findall(r"\w+", " ".join(cells))} <= shipped_recipes().keys()
