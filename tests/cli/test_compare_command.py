"""`optkit compare` on the terminal and as CSV, Markdown and JSON."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest
from optkit_cli.compare_view import comparison_view
from optkit_cli.main import main
from optkit_cli.output import plain_text

from optkit.comparison import compare_scorecards
from optkit.scorecard import Scorecard, to_json
from tests.support.scorecards import TEXT, card, decode, divergence, perplexity, size

LOSSES = [3.0 + 0.1 * (index % 4) for index in range(12)]
BASELINE = [perplexity(LOSSES), decode([20.0, 20.2, 19.9, 20.1]), size(500e6)]


def made(name: str, loss: float, speed: float, size_bytes: float, text: str = TEXT, **fields: object) -> Scorecard:
    losses = [each + loss * (1 + 0.05 * (-1) ** index) for index, each in enumerate(LOSSES)]
    rates = decode([each * speed for each in (20.1, 20.0, 20.2, 19.9)])
    kl = divergence([loss * (1 + 0.1 * (-1) ** index) for index in range(12)], text)
    return card(name, [perplexity(losses, text), kl, rates, size(size_bytes)], BASELINE, **fields)


CARDS = [
    made("gptq-32", 0.02, 2.0, 250e6, gates={"perplexity": "<= 1.1x"}),
    made("auto_bits-4.5", 0.05, 2.3, 240e6, gates={"perplexity": "<= 1.06x"}),
    made("rtn", 0.20, 2.3, 245e6, gates={"perplexity": "<= 1.06x"}),
    made("fast", 0.30, 3.0, 200e6),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for each in CARDS:
        (tmp_path / each.name).mkdir()
        (tmp_path / each.name / "scorecard.json").write_text(to_json(each), encoding="utf-8")
    return tmp_path


def shown(width: int, *cards: Scorecard, **options: object) -> list[str]:
    found = compare_scorecards([(Path(each.name), each) for each in cards], **options)
    return plain_text(*comparison_view(found), width=width).splitlines()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_fits_and_says_who_stands_where(width: int) -> None:
    lines = shown(width, *CARDS, require=["perplexity<=1.1x"], best="size_bytes")
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for part in ("unmodified", "behind auto_bits-4.5", "FAIL", "1.051x", "240.0 MB"):
        assert part in text
    assert "…" not in text
    assert "pick auto_bits-4.5 over gptq-32: 4.0% smaller, 15% faster, but 3.0% higher perplexity" in text
    assert "beside auto_bits-4.5" in text
    assert "[1] perplexity: wikitext2 test" in text
    assert ("kl_divergence ↓" in text) == (width > 80)


def test_a_wide_terminal_has_a_line_for_each() -> None:
    lines = [" ".join(line.split()) for line in shown(200, *CARDS)]
    assert any(line.startswith("gptq-32 ") and " PASS " in line for line in lines)
    assert any(line.startswith("rtn ") and " FAIL " in line for line in lines)


def test_groups_say_what_differs() -> None:
    other = made("other", 0.1, 2.0, 1e6, TEXT.replace("256", "512"))
    lines = shown(100, *CARDS, other)
    assert "group 2" in lines
    assert "  perplexity: first 12 windows of 512 tokens, not first 12 windows of 256 tokens" in lines


def test_many_are_cut_off_with_a_hint() -> None:
    lines = shown(100, *(made(f"r{index}", 0.01 * index, 2.0, 1e6 * index + 1e8) for index in range(50)))
    assert "and 10 more, in --csv and --json" in lines


def test_exit_status_and_forms(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", str(folder), "--best", "size_bytes"]
    assert main([*words, "--require", "perplexity<=1.1x"]) == 0
    assert main([*words, "--require", "perplexity<=1.001x"]) == 3
    capsys.readouterr()
    assert main([*words, "--json", "--require", "perplexity<=1.1x"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["groups"][0]["pick"], said["verdict"], said["best"]) == ("auto_bits-4.5", "PASS", "size_bytes")
    assert main([*words, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["label"] for row in rows} == {each.name for each in CARDS}
    assert float(rows[0]["size_bytes.value"]) == 200e6
    assert main([*words, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("|  | stands | gates | perplexity ↓ |")


@pytest.mark.parametrize("form", ["--csv", "--markdown"])
def test_names_of_others_do_not_move_the_cursor(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = CARDS[0].model_copy(update={"name": "odd\x1b[2J"})
    (tmp_path / "scorecard.json").write_text(to_json(odd), encoding="utf-8")
    assert main(["compare", str(tmp_path), form]) == 0
    said = capsys.readouterr().out
    assert "odd\\x1b[2J" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--json", "--csv"], 2, "--json and --csv exclude each other"),
        (["--require", "perplexity"], 2, "--require: 'perplexity' is no limit"),
        (["--best", "speed"], 2, "--best: no scorecard has 'speed'"),
    ],
)
def test_mistakes(
    folder: Path, words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(folder), *words]) == status
    said = capsys.readouterr()
    assert message in said.err + said.out


def test_what_an_encoding_lacks_is_escaped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stdout, encoding="latin-1", write_through=True))
    assert main(["compare", str(folder)]) == 0
    assert b"perplexity \\u2193" in stdout.getvalue()


def test_a_long_name_is_broken_and_not_cut() -> None:
    name = "bits4-group_size32-symmetrictrue-seed1"
    lines = shown(80, made(name, 0.1, 2.0, 1e6), made("rtn", 0.1, 2.0, 2e6))
    assert name in "".join(line[:24].rstrip() for line in lines)
    assert "…" not in "".join(lines)
