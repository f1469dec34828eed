"""A recipe in a process of its own: what becomes of one that fails, crashes or takes too long."""

from pathlib import Path

import pytest

from optkit.progress import SilentProgress
from optkit.recipe.recipe import load_recipe
from optkit.sweep.executors import local
from optkit.sweep.executors.base import Order, Outcome
from optkit.sweep.executors.local import LocalExecutor
from tests.support.remembered import Lines
from tests.support.waiting import is_gone


def run(
    out: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None = None, progress: Lines | None = None
) -> Outcome:
    monkeypatch.setattr(local, "MODULE", "tests.support.make_stand_in")
    recipe = load_recipe("model: smollm2-135m\nevals: [footprint]\n")
    order = Order(out.name, recipe, out, "cpu", out / "store", None)
    return LocalExecutor().run(order, progress or SilentProgress(), timeout_s)


def test_a_verdict_comes_back_and_what_is_said_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    outcome = run(tmp_path / "good", monkeypatch, progress=lines)
    assert (outcome.verdict, outcome.reason) == ("PASS", "")
    assert lines.lines == ["recipe, cpu, good"]
    assert (tmp_path / "logs" / "good.log").read_text() == "printed\n"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no memory", "rtn: memory ran out. Lower the samples."),
        (
            "killed",
            "the process that made it was ended by SIGKILL (the system ends a process so when memory runs out) and "
            "without a result. Its last words: printed",
        ),
        ("crashed", "the process that made it was ended by SIGSEGV and without a result. Its last words: printed"),
        ("bug", "the process that made it failed with ZeroDivisionError at make_stand_in.py:"),
    ],
)
def test_what_ends_it_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    outcome = run(tmp_path / name, monkeypatch)
    assert outcome.verdict is None
    assert outcome.reason.startswith(reason)


def test_it_is_ended_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    outcome = run(tmp_path / "long", monkeypatch, timeout_s=3, progress=lines)
    assert (outcome.verdict, outcome.reason) == (None, "")
    assert all(is_gone(int(line)) for line in lines.lines)
