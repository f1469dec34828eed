"""Control characters of a recipe, a path or a model are shown and never reach the terminal as
themselves.
"""

import io
import json
from pathlib import Path

import click
import pytest
from optkit_cli.main import main
from optkit_cli.output import plain_text, print_document
from optkit_cli.progress import LineProgress, SafePoints
from rich.table import Table

from optkit.common.visible import CONTROLS, visible, visible_lines

ESCAPE = "a\x1b[2J\x1b]0;title\x07\x9b1m\rb\u202ec"


def test_what_is_shown() -> None:
    assert visible("a\nb\x1b[31m\tc\x9b\u2028") == "a\\nb\\x1b[31m\\tc\\x9b\\u2028"
    assert visible("größe 漢字 é 100 %") == "größe 漢字 é 100 %"
    assert visible_lines("a\x1b\nb\r") == "a\\x1b\nb\\r"


@pytest.mark.parametrize(
    "recipe",
    [
        'name: a\nmodel: "x\\e[2J\\nerror: forged"\nevals: [footprint]\n',
        'name: "a\\nerror: forged\\e[1m"\nmodel: x\nevals: [footprint]\n',
        'name: a\nmodel: x\n"bad\\nerror: forged\\e[1m": 1\nevals: [footprint]\n',
        'name: a\nmodel: x\nstages:\n  - rtn: {bits: "4\\nerror: forged\\e[1m"}\nevals: [footprint]\n',
    ],
)
def test_a_recipe_forges_no_line(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    assert (
        main(["run", str(tmp_path / "recipe.yaml"), "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")])
        != 0
    )
    said = capsys.readouterr().err
    assert not CONTROLS.search(said.replace("\n", ""))
    assert not any(line.startswith("error: forged") for line in said.splitlines())
    assert any(shown in said for shown in ("\\nerror: forged", "\\x1b", "U+001B"))


def test_a_path_with_a_newline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"{tmp_path}/a\nerror: forged.yaml"]) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: forged")] == []


def test_progress() -> None:
    stream = io.StringIO()
    progress = SafePoints(LineProgress(stream, interval_s=0))
    progress.say(ESCAPE)
    progress.warn("a\nerror: forged")
    with progress.task("a\nb", 3) as task:
        task.advance(note=ESCAPE)
    lines = stream.getvalue().split("\n")
    assert not any(CONTROLS.search(line) for line in lines)
    assert "warning: a\\nerror: forged" in lines


def test_tables() -> None:
    table = Table("head")
    table.add_row(ESCAPE)
    said = plain_text(table, ESCAPE)
    assert not CONTROLS.search(said.replace("\n", ""))
    assert "\\x1b" in said


def test_documents(capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(click.Command("x")):
        print_document(json.dumps({"a": ESCAPE}, ensure_ascii=False) + "\n")
    said = capsys.readouterr().out
    assert not CONTROLS.search(said.replace("\n", ""))
    assert json.loads(said) == {"a": ESCAPE}
