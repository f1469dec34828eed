"""Benchmarks are data: each number says what makes it, and pages and pictures show what the data say."""

import shlex
import subprocess
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from optkit_cli.main import optkit
from pydantic import ValidationError
from ruamel.yaml import YAML

from docs.benchmarks.charts import PICTURES, figures, markdown
from docs.benchmarks.drawing import SHAPES
from docs.benchmarks.tables import BLOCK, Interval, Result, filled, pages, read_results, shown, table, wrapped
from optkit.page.charts.chart import Key
from optkit.recipe.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RESULTS = read_results()
SOURCES = [(f"{name} {key}", source) for name, found in RESULTS.items() for key, source in found.sources.items()]
SOURCE = {"command": "optkit --help", "device": "cpu", "versions": {}, "date": "2026-11-20", "commit": "4d58899"}
RESULT: dict[str, Any] = {
    "title": "t",
    "model": "m",
    "protocol": "How.",
    "first": "method",
    "columns": {"a": "A", "b": "B"},
    "sources": {"one": SOURCE, "two": {**SOURCE, "by_hand": "a script", "versions": {"torch": "2.13"}}},
    "rows": [
        {"name": "x", "values": {"a": {"value": 1234, "interval": [1200, 1300]}, "b": 0.00005}},
        {"name": "y", "source": "two", "values": {"a": "none"}},
    ],
}


def test_a_table_says_what_made_each_row() -> None:
    text = table("speed", Result.model_validate(RESULT | {"hidden": ["b"]}))
    assert "| method | A |\n|---|---|\n| x | 1,234 [1,200, 1,300] |\n| y [2] | none |\n" in text
    assert "- `optkit --help`; cpu; versions not recorded; 2026-11-20; 4d58899.\n" in text
    assert "\n- [2] `optkit --help` (by hand: a script); torch 2.13.\n" in text
    assert text.endswith("\n- [The data](results/speed.json) also have: B.")
    assert shown(Decimal("0.00005")) == "5.0e-5"


def test_no_line_of_a_command_begins_a_list() -> None:
    """Markdown takes ` * bits` at the start of a line for the next item, and the command ends there."""
    for mark in ("*", "+", "-", "3."):
        text = "- `" + "x" * 88 + f" errors, {mark} bits`"
        assert wrapped(text, "  ").split("\n") == ["- `" + "x" * 88, f"  errors, {mark} bits`"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"columns": {"a": "A", "b": "B", "c": "C"}}, r"columns \['c'\] are named or used alone"),
        ({"sources": {"one": SOURCE}}, r"sources \['two'\] are named or used alone"),
        ({"sources": {"one": SOURCE, "two": {**SOURCE, "commit": "today"}}}, "commit"),
    ],
)
def test_a_result_without_its_parts_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Result.model_validate(RESULT | change)


def test_intervals_hold_their_numbers() -> None:
    for result in RESULTS.values():
        for row in result.rows:
            for value in row.values.values():
                if isinstance(value, Interval):
                    assert value.interval[0] <= value.value <= value.interval[1], row


@pytest.mark.parametrize(("name", "source"), SOURCES, ids=[name for name, _ in SOURCES])
def test_each_command_is_there(name: str, source: Any) -> None:
    program, *words = shlex.split(source.command.partition(" && ")[0])
    if program == "python":
        file = f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]
        assert source.by_hand or (ROOT / file).is_file(), source.command
        return
    if words == ["--help"]:
        return
    command = optkit.get_command(optkit.make_context("optkit", ["--help"], resilient_parsing=True), words[0])
    assert command is not None
    given = command.make_context(words[0], words[1:], resilient_parsing=True).params
    if evals := given.get("evals"):
        assert load_recipe({"name": "evals", "model": "smollm2-135m", **YAML(typ="safe").load(ROOT / evals)}).evals
    if recipe := given.get("recipe"):
        path = str(ROOT / recipe) if "/" in recipe else recipe
        assert load_recipe(path, given.get("overrides") or ())


def test_each_date_is_that_of_its_commit() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no history here")
    for commit, when in {(source.commit, source.date) for _, source in SOURCES}:
        said = subprocess.run(["git", "show", "-s", "--format=%as", commit], cwd=ROOT, capture_output=True, text=True)
        if said.returncode:
            pytest.skip("the history is cut off")
        assert date.fromisoformat(said.stdout.strip()) == when, commit


def test_pages_show_all_that_is_there_as_it_is() -> None:
    drawn, found = figures(), set()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        found |= {match.groups() for match in BLOCK.finditer(text)}
        made = filled(text, RESULTS, lambda name: markdown(name, drawn[name]))
        assert text == made, f"{page.name} is stale: python -m docs.benchmarks"
    assert found == {("table", name) for name in RESULTS} | {("figure", name) for name in drawn}
    for name, figure in drawn.items():
        picture = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        assert figure.mark in picture, f"{name}.svg is stale: python -m docs.benchmarks"
        assert "prefers-color-scheme: dark" in picture or isinstance(figure.picture, str)
        assert "url(http" not in picture.replace('"', "")


def test_a_picture_knows_every_shape_of_a_legend() -> None:
    assert set(SHAPES) == set(get_args(get_type_hints(Key)["shape"]))
