"""`optkit sweep`, and `plan` and `validate` of a recipe with a matrix, as a user calls them."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from optkit_cli import sweep_view
from optkit_cli.output import plain_text
from optkit_cli.sweep_view import LiveTable, closing_view
from rich.console import Console

from optkit.scorecard import read_json
from optkit.sweep import run as sweeping
from optkit.sweep.executors import local
from optkit.sweep.record import Status, SweepRecord
from tests.support.command_line import desk_with, spoken
from tests.support.fresh_python import environment
from tests.support.sweeps import NAMES, Here, recipe
from tests.support.waiting import wait_until


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Callable[[str], Path], letters: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with the recipe of a sweep; artifacts are made in this process."""
    monkeypatch.setattr(local, "LocalExecutor", Here)
    return desk_with(tmp_path, monkeypatch, "s.json", json.dumps(recipe(tiny_model("llama"), letters)))


def test_the_whole_way(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert spoken(capsys, "validate", "s.json")[0] == "s.json: ok, 4 combinations\n"
    out, _ = spoken(capsys, "plan", "s.json", "--device", "cpu")
    assert "s  4 combinations · cpu" in out
    assert "5 of 6 steps to do, steps shared 6 times" in out
    out, err = spoken(capsys, "sweep", "s.json", "--device", "cpu")
    assert out.splitlines()[-1] == "4 of 4 are there  artifacts/s"
    assert f"4/4  {NAMES[3]}: done in 1 s, PASS" in err.splitlines()
    assert "perplexity" in out
    out, err = spoken(capsys, "sweep", "s.json", "--device", "cpu", "--json", "--quiet")
    assert err == ""
    document = json.loads(out)
    assert document["exit_status"] == 0
    assert document["directory"] == "artifacts/s"
    assert [entry["status"] for entry in document["entries"]] == ["done"] * 4
    out, _ = spoken(capsys, "plan", "s.json", "--device", "cpu")
    assert "0 of 6 steps to do" in out
    assert json.loads(spoken(capsys, "plan", "s.json", "--device", "cpu", "--json")[0])["shared"] == 6


def test_very_many_combinations_are_validated_and_some_are_planned(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = json.loads((desk / "s.json").read_text())
    (desk / "many.json").write_text(json.dumps(asked | {"matrix": asked["matrix"] | {"seed": [*range(300)]}}))
    said = "many.json: ok, 1,200 combinations (each value in one of 301 that were checked; a sweep of them needs"
    assert spoken(capsys, "validate", "many.json")[0] == f"{said} --trials)\n"
    _, err = spoken(capsys, "plan", "many.json", status=2)
    assert "the matrix has 1,200 combinations, and no more than 500 are all made. Let some of them be chosen" in err
    assert "s  3 combinations" in spoken(capsys, "plan", "many.json", "--trials", "3", "--device", "cpu")[0]
    (desk / "one.json").write_text(json.dumps({key: value for key, value in asked.items() if key != "matrix"}))
    _, err = spoken(capsys, "plan", "one.json", "--trials", "3", status=2)
    assert "one.json: this is one recipe. A sweep has a `matrix:`, or a field with several values" in err
    assert err.rstrip().endswith("Leave out --trials.")


def test_a_failed_combination_is_shown_and_is_exit_status_1(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--set", "stages.1.rtn.bits=4", "--set", "stages.1.rtn.group_size=16,48", "--device", "cpu"]
    out, _ = spoken(capsys, "sweep", "s.json", *words, status=1)
    assert "1 of 2 are there, 1 failed (--retry tries them again)  artifacts/s" in out
    assert "48" in out.partition("failed")[2]
    planned, _ = spoken(capsys, "plan", "s.json", *words)
    assert "of" in planned


def test_a_run_of_many_recipes_points_to_the_sweep(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = spoken(capsys, "run", "s.json", status=2)
    assert "a recipe with a matrix is many recipes. Run it with `optkit sweep`." in err


@pytest.mark.usefixtures("warm_children")
def test_a_kill_loses_nothing_and_the_same_command_goes_on(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "s.json", "--device", "cpu", "--set", "stages.1.rtn.group_size=16"]
    command = [sys.executable, "-m", "optkit_cli.main", *words]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        record = desk / "artifacts" / "s" / "sweep.json"
        assert wait_until(lambda: record.is_file() and '"done"' in record.read_text())
        first.send_signal(signal.SIGKILL)
    _, said = spoken(capsys, *words)
    assert "1/2  bits8-group_size16" in said
    assert "bits4-group_size16: " not in said
    whole = sweeping.sweep(
        "s.json", overrides=words[-1:], out=desk / "whole", store=desk / "other", device="cpu", executor=Here()
    )
    for name in ("bits4-group_size16", "bits8-group_size16"):
        cards = [read_json(place / name / "scorecard.json") for place in (desk / "artifacts" / "s", whole.directory)]
        assert cards[0].rows == cards[1].rows


def record(*entries: tuple[str, Status, str]) -> SweepRecord:
    fields = {"assignment": {}, "recipe": ""}
    said = [{"name": name, "status": status, "reason": reason, **fields} for name, status, reason in entries]
    return SweepRecord.model_validate({"name": "s", "created": "", "entries": said})


def test_on_a_terminal_a_table_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sweep_view, "Console", lambda **_: Console(file=screen, force_terminal=True, width=90))
    monkeypatch.setattr(sweep_view, "line_progress", lambda **_: None)
    with sweep_view.watching() as (watcher, progress):
        watcher.show(record(("a", Status.DONE, ""), ("b", Status.WAITING, "")), ["b"])
        with progress.task("rtn", 3, "blocks") as task:
            task.advance()
            progress.warn("mind this")
            shown = plain_text(watcher)  # type: ignore[arg-type]
    assert shown.splitlines()[1:] == [
        "a            done     -            -",
        "b            at work  -            -",
        "b  rtn  1/3 blocks  0:00 left",
    ]
    assert "warning: mind this" in screen.getvalue()


def test_what_waits_and_what_failed_is_counted(tmp_path: Path) -> None:
    said = plain_text(*closing_view(record(("a", Status.WAITING, ""), ("b", Status.FAILED, "so")), tmp_path))
    assert "0 of 2 are there, 1 failed (--retry tries them again), 1 wait for the same command" in said
    assert plain_text(LiveTable(Console())) == "\n"
