"""`--against`: gates that are relative to an earlier release, as a pipeline runs them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from optkit import pipeline
from optkit.errors import RecipeError
from tests.cli.test_run import RECIPE as LIMITED
from tests.support.command_line import desk_with, spoken

RECIPE = LIMITED + '  perplexity: "<= 1.01x of previous"\n'


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory with a recipe and a store of its own."""
    return desk_with(tmp_path, monkeypatch, "tiny.yaml", RECIPE.format(model=tiny_model("llama"), limit="<= 0.9x"))


def test_releases_one_after_the_other(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "tiny.yaml", "--device", "cpu", "--quiet"]
    out, _ = spoken(capsys, *run, "--against", "none", "--out", "first")
    assert "<= 1.01x of previous SKIPPED\n" in out
    assert "there is no earlier release" in out
    assert out.splitlines()[-1] == "PASS  1 of 1 gates pass, 1 skipped  first"

    out, _ = spoken(capsys, *run, "--against", "first", "--out", "second", "--verbose")
    assert out.splitlines()[-1] == "PASS  2 of 2 gates pass  second"
    assert "1.000x [1.000, 1.000]" in out
    assert "  previous  tiny of 20" in out
    assert spoken(capsys, "show", "second", "--verbose")[0] == out

    # in place, against the scorecard that is replaced; with weights that are worse
    worse = ["--set", "stages=[{rtn: {bits: 3, group_size: 32}}]", "--set", "gates.size_bytes='<= 0.1x of previous'"]
    out, _ = spoken(capsys, *run, *worse, "--against", "second/scorecard.json", "--out", "second", status=3)
    assert json.loads((desk / "second" / "scorecard.json").read_text())["previous"]["name"] == "tiny"
    evaluate = ["eval", "first", "--evals", "tiny.yaml", "--device", "cpu", "--quiet"]
    assert spoken(capsys, *evaluate, "--against", "first")[0].splitlines()[-1] == "PASS  2 of 2 gates pass"


def test_another_protocol_is_named(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "tiny.yaml", "--device", "cpu", "--quiet"]
    spoken(capsys, *run, "--against", "none")
    changed = ["--set", "evals.1.perplexity.window=32", "--against", "artifacts/tiny", "--json"]
    document = json.loads(spoken(capsys, *run, *changed, status=3)[0])
    (why,) = [gate["why"] for row in document["rows"] for gate in row["gates"] if gate["verdict"] == "FAIL"]
    assert "'first 4 windows of 32 tokens without overlap, " in why
    assert "on the earlier release tiny, 'first 4 windows of 64 tokens without overlap, " in why


def test_the_release_has_to_be_named_before_anything_runs(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = (
        "perplexity: the limit <= 1.01x of previous is relative to an earlier release, and the run is told of "
        "none. Give it: --against ARTIFACT, or --against none before the first one.\n"
    )
    assert spoken(capsys, "run", "tiny.yaml", status=2)[1] == f"error: tiny.yaml:10:15: {message}"
    set_so = ["--set", "gates={perplexity: <= 1.01x of previous}"]
    assert spoken(capsys, "run", "tiny.yaml", *set_so, status=2)[1] == f"error: --set gates: {message}"
    (desk / "evals.yaml").write_text((desk / "tiny.yaml").read_text(encoding="utf-8").replace("  - bf16\n", "  []\n"))
    model = (desk / "tiny.yaml").read_text(encoding="utf-8").splitlines()[1].removeprefix("model: ")
    _, err = spoken(capsys, "eval", model, "--evals", "evals.yaml", "--quiet", status=2)
    assert err == f"error: evals.yaml:10:15: {message}"
    with pytest.raises(RecipeError, match="^perplexity: the limit <= 1.01x of previous is relative"):
        pipeline.run("tiny.yaml")
    assert not (desk / "artifacts").exists()
    spoken(capsys, "validate", "tiny.yaml")
    spoken(capsys, "plan", "tiny.yaml", "--device", "cpu")


@pytest.mark.parametrize("there", ["nothing", "folder"])
def test_a_release_that_is_not_there(desk: Path, capsys: pytest.CaptureFixture[str], there: str) -> None:
    (desk / "folder").mkdir()
    _, err = spoken(capsys, "run", "tiny.yaml", "--against", there, status=2)
    place = {"nothing": "nothing", "folder": "folder/scorecard.json"}[there]
    assert err == (
        f"error: --against: there is no scorecard at {place}. Name the artifact of an earlier release or "
        "its scorecard.json, or write none before the first.\n"
    )


def test_a_release_that_cannot_be_read(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "card.json").write_text('{"schema": 9}', encoding="utf-8")
    _, err = spoken(capsys, "run", "tiny.yaml", "--against", "card.json", status=1)
    assert err.startswith("error: card.json: the scorecard has schema 9")
