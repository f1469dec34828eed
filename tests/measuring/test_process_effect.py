"""The benchmark that says what differs between processes: its arithmetic, and that it runs."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy
import pytest

from optkit.environment import describe_environment
from optkit.measure import EvalContext, Found, Turn
from optkit.measuring.fresh_process import Answer
from optkit.session import open_session

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("process_effect")


def test_it_tells_the_two_spreads_apart(script: ModuleType) -> None:
    chance = numpy.random.default_rng(0)
    seconds = 50 * (1 + 0.02 * chance.normal(size=(4000, 1)) + 0.01 * chance.normal(size=(4000, 3)))
    assert script.spreads(seconds.tolist()) == (pytest.approx(0.02, rel=0.05), pytest.approx(0.01, rel=0.05))
    assert script.spreads([[1.0, 3.0], [1.0, 3.0]]) == (0.0, pytest.approx(2**0.5 / 2))
    cells = script.row("decode", seconds[:800].tolist(), 0).split(" | ")
    found, of = map(int, cells[4].split(" of "))
    assert of == 100
    assert found <= 10
    assert float(cells[5].rstrip("%")) == pytest.approx(5, abs=2)
    assert script.differs([(1.0, 2.0), (1.01, 2.02), (1.0, 2.01), (1.0, 2.0)])


def test_it_runs(
    script: ModuleType,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def here(
        directory: Path, settings: object, evals: list, device: str, trusted: bool, context: EvalContext, index: int
    ) -> list[Answer]:
        session = open_session(directory, device=device)
        context = EvalContext(turn=Turn(index, evals[0].turns()))
        return [Answer(Found.of(evals[0], session, context), (), (), describe_environment(device))]

    monkeypatch.setattr(script, "measure_apart", here)
    kept = tmp_path / "samples.json"
    few = f"--device cpu --processes 8 --prompt 4 --new-tokens 3 --repeats 2 --limit-s 20 --samples {kept}".split()
    monkeypatch.setattr(sys, "argv", ["process_effect", str(tiny_model("llama")), *few])
    assert script.main() == 0
    assert kept.is_file()
    printed = capsys.readouterr().out
    assert "prompt 4, 3 new tokens, 8 processes" in printed
    assert printed.count(" of 1 |") == 2
