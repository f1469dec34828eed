"""`--junit`, `--metrics` and what GitHub reads of a job."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from optkit_cli.main import main
from optkit_cli.pipeline_files import _data, _property, annotation_lines

from optkit import pipeline
from optkit.recipe.gate_places import gate_places
from optkit.scorecard import Scorecard, build_scorecard
from tests.support.scorecards import metric, size

RECIPE = """\
model: smollm2-135m
evals:
  - footprint
  - throughput
gates:
  size_bytes: "<= 1"

  decode_tokens_per_s[ batch = 1 ]: ">= 100"
"""


def card() -> Scorecard:
    """Return a scorecard with a gate that FAILs and one that is INCONCLUSIVE."""
    labels = {"batch": 1, "prompt": "50%,\n::error::x"}
    told = {"labels": labels, "interval": (90.0, 110.0), "pairing": "independent", "higher_is_better": True}
    speed = metric("decode_tokens_per_s", 100.0, "tokens/s", "clock", **told)
    gates = {"size_bytes": "<= 1", "decode_tokens_per_s[batch=1]": ">= 100"}
    return build_scorecard(name="small", artifact_key="ab" * 32, recipe={}, metrics=(size(2.0), speed), gates=gates)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a recipe, and runs that do nothing but say a scorecard."""
    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)

    def done(*_words: Any, **_settings: Any) -> Scorecard:
        return card()

    monkeypatch.setattr(pipeline, "run", done)
    monkeypatch.setattr(pipeline, "evaluate", done)
    return tmp_path


COMMANDS = [["run", "tiny.yaml"], ["eval", "m", "--evals", "tiny.yaml"]]


@pytest.mark.parametrize("words", COMMANDS)
def test_files_are_written_and_the_status_stays(words: list[str], desk: Path) -> None:
    assert main([*words, "--junit", "out/junit.xml", "--metrics", "out/metrics.txt"]) == 3
    (suite,) = JUnitXml.fromstring((desk / "out" / "junit.xml").read_bytes())
    assert suite.failures == 2
    assert (desk / "out" / "metrics.txt").read_text().startswith("# HELP optkit_size_bytes size_bytes")
    assert sorted(each.name for each in (desk / "out").iterdir()) == ["junit.xml", "metrics.txt"]


def test_what_an_earlier_run_left_does_not_stand_for_this_one(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "junit.xml").write_text("<testsuites/>")
    assert main(["run", "missing.yaml", "--junit", "junit.xml"]) == 2
    assert not (desk / "junit.xml").exists()


@pytest.mark.parametrize("option", ["--junit", "--metrics"])
def test_a_file_that_cannot_be_written_is_said_before_the_run(
    option: str, desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "run", lambda *_words, **_settings: pytest.fail("it ran"))
    assert main(["run", "tiny.yaml", option, "tiny.yaml/file"]) == 2
    assert f"error: {option}: tiny.yaml/file cannot be written: " in capsys.readouterr().err
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if "junitp" in name or "prom" in name else found(name, *more),
    )
    assert main(["run", "tiny.yaml", option, "file"]) == 1
    assert "is not installed. Run: pip install 'optkit[ci]'" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "what"), [("--junit", "JUnit report"), ("--metrics", "OpenMetrics text")])
def test_no_other_file_is_replaced(option: str, what: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.yaml", option, "tiny.yaml"]) == 2
    said = f"error: {option} tiny.yaml: is a file and no {what}. It would be replaced. Name another.\n"
    assert (capsys.readouterr().err, (desk / "tiny.yaml").read_text()) == (said, RECIPE)
    assert main(["run", "tiny.yaml", "--junit", "a", "--metrics", "./a"]) == 2
    assert capsys.readouterr().err == "error: --metrics: a is the file of --junit. Name another file.\n"


def test_a_pipe_stays_one(desk: Path) -> None:
    os.mkfifo(desk / "pipe")
    reader = os.open(desk / "pipe", os.O_RDWR | os.O_NONBLOCK)
    assert main(["run", "tiny.yaml", "--junit", "pipe"]) == 3
    assert os.read(reader, 12) == b"<testsuites "
    os.close(reader)
    assert (desk / "pipe").is_fifo()


def test_a_link_stays_one(desk: Path) -> None:
    """As /dev/stdout is one to the file that the shell writes the output to."""
    (desk / "there.xml").touch()
    (desk / "link").symlink_to(desk / "there.xml")
    assert main(["run", "missing.yaml", "--junit", "link"]) == 2
    assert main(["run", "tiny.yaml", "--junit", "link"]) == 3
    assert (desk / "link").is_symlink()
    assert (desk / "there.xml").read_bytes().startswith(b"<testsuites ")


def test_github_marks_the_lines_of_the_recipe(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["run", "tiny.yaml"])
    assert "::" not in capsys.readouterr().err
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(desk.parent))
    main(["run", "tiny.yaml", "--json"])
    out, err = capsys.readouterr()
    assert "::" not in out.replace("::error::x", "")
    lines = [line for line in err.splitlines() if line.startswith("::")]
    assert lines == [
        f"::error file={desk.name}/tiny.yaml,line=6,col=15,title=size_bytes <= 1::FAIL: 2.000 B",
        f"::warning file={desk.name}/tiny.yaml,line=8,col=37,title=decode_tokens_per_s[batch=1%2Cprompt=50%25%2C\\n"
        "%3A%3Aerror%3A%3Ax] >= 100::INCONCLUSIVE: 100.0 tok/s [90.00 tok/s, 110.0 tok/s]",
    ]


def test_a_gate_without_a_line_is_marked_without_one(desk: Path) -> None:
    (first, _) = annotation_lines(card(), {})
    assert first == "::error title=size_bytes <= 1::FAIL: 2.000 B"
    (first, _) = annotation_lines(card(), gate_places("tiny.yaml", ["gates.size_bytes=<= 1"]))
    assert first == "::error title=size_bytes <= 1::FAIL: 2.000 B"
    assert gate_places("missing.yaml") == gate_places("-") == {}


def test_commands_of_github_are_escaped() -> None:
    assert _data("50%\r\n:,") == "50%25%0D%0A:,"
    assert _property("50%\r\n:,") == "50%25%0D%0A%3A%2C"


def test_the_summary_of_a_job_is_appended_to(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = desk / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    main(["run", "tiny.yaml"])
    text = summary.read_text()
    assert text.startswith("before\n# small\n\n**FAIL** · ")
    assert "| size_bytes [1] | - | 2.000 B | - | <= 1 FAIL |" in text


def test_a_summary_that_cannot_be_written_is_a_warning(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(desk / "tiny.yaml" / "x"))
    assert main(["run", "tiny.yaml"]) == 3
    assert "warning: $GITHUB_STEP_SUMMARY: the scorecard was not written: " in capsys.readouterr().err
