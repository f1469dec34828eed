"""`make bench` on rows of invented seconds: what is slower is named, and noise is not."""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.benchmarks import suite
from docs.benchmarks.suite import ROWS, Row, compared, measured, seconds, timed
from tests.support.full_scorecards import full_scorecard

ABOUT = {"cpu": {"device": "a CPU, 2 CPU threads", "versions": {}}}
FAST, SLOW = Row("fast", "fast"), Row("slow", "slow")
Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Time two rows of 1 s, within 5% and by seed, and return the names of those that are slower."""
    noise = random.Random(0)

    def once(times: float = 1.0, about: Any = ABOUT, accept: bool = False) -> list[str]:
        def timer(command: str) -> tuple[float, str]:
            return noise.uniform(0.95, 1.05) * (times if command == "slow" else 1.0), ""

        return measured((FAST, SLOW), 3, tmp_path / "history.jsonl", about, accept, timer)

    return once


def test_a_row_that_got_slower_is_named_and_noise_is_not(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert [run() for _ in range(8)] == [[]] * 8
    assert "fast: " in capsys.readouterr().out
    assert run(1.3) == ["slow"]
    assert "earlier runs: 8" in capsys.readouterr().out
    assert run(1.3) == ["slow"], "what is slower is not written down"
    assert run(0.7) == []


def test_what_is_accepted_is_history(run: Run, tmp_path: Path) -> None:
    for _ in range(3):
        run()
    before = len((tmp_path / "history.jsonl").read_text().splitlines())
    assert run(1.5, accept=True) == ["slow"]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == before + 2
    assert run(1.5) == []


def test_another_device_has_a_history_of_its_own(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        run()
    capsys.readouterr()
    assert run(1.5, {"cpu": {"device": "another CPU", "versions": {}}}) == []
    assert capsys.readouterr().out.count("the first run here") == 2
    assert run(1.5, {"cuda": {"device": "a GPU", "versions": {}}}) == [], "rows of devices that are not here wait"
    assert capsys.readouterr().out == ""


def test_the_interval_is_that_of_one_more_run() -> None:
    assert compared([1.0, 1.0], []) is None
    two = compared([1.2, 1.2], [[1.0, 1.02], [1.1, 1.12], [0.9, 0.92]])
    assert two is not None
    assert two.interval is not None
    assert two.value == pytest.approx(1.2 / (1.01 * 1.11 * 0.91) ** (1 / 3))
    assert two.interval[0] < 1 < two.interval[1]
    one = compared([2.0, 2.01, 1.99], [[1.0, 1.01, 0.99]])
    assert one is not None
    assert one.interval is not None
    assert 1.9 < one.interval[0] < 2 < one.interval[1] < 2.1


def test_false_alarms_are_rare_when_a_machine_drifts() -> None:
    noise, missed = random.Random(1), 0
    for _ in range(400):
        runs = [
            [noise.lognormvariate(drift, 0.01) for _ in range(3)] for drift in (noise.gauss(0, 0.1) for _ in range(6))
        ]
        ratio = compared(runs[-1], runs[:-1])
        assert ratio is not None
        assert ratio.interval is not None
        missed += ratio.interval[0] > 1
    assert missed / 400 < 0.05


def test_a_command_is_run_and_its_metric_read() -> None:
    wall, printed = timed("python -c 'import sys; print(sys.argv[1])' SCRATCH/x")
    assert wall > 0
    assert printed.endswith("/x\n")
    assert not printed.startswith("SCRATCH")
    card = full_scorecard()
    rate = next(row.metric.value for row in card.rows if row.metric.name == "decode_tokens_per_s")
    printed = card.model_dump_json(by_alias=True)
    assert seconds(Row("r", "c", "decode_tokens_per_s"), 9.0, printed) == pytest.approx(1 / rate)
    assert seconds(Row("r", "c"), 9.0, "") == 9.0
    with pytest.raises(SystemExit, match="went wrong"):
        timed("python -c 'raise SystemExit(\"went wrong\")'")


def test_each_row_is_a_command_of_optkit() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(shlex.split(row.command)[0] == "optkit" for row in ROWS)
    assert {row.device for row in ROWS} == {"cpu", "cuda"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--repeats", "1"], "Give 2 or more"),
        (["--only", "nothing"], "no row for cpu is named nothing. There are: help; "),
        (["--only", "gptq on a GPU"], "no row for cpu is named gptq on a GPU. There are: help; "),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["suite", *words])
    monkeypatch.setattr(suite, "best_device", lambda: "cpu")
    with pytest.raises(SystemExit):
        suite.main()
    assert said in capsys.readouterr().err


def test_rows_of_devices_that_are_not_here_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "best_device", lambda: "cpu")
    monkeypatch.setattr(suite, "measured", lambda *_: [])
    monkeypatch.setattr(suite.os, "getloadavg", lambda: (0.0, 0, 0))
    for only, said in (("gptq*", "no NVIDIA GPU here: gptq on a GPU; gptq, decode on a GPU\n"), ("help", "")):
        monkeypatch.setattr(sys, "argv", ["suite", "--only", only, "--history", str(tmp_path / "history.jsonl")])
        suite.main()
        waiting, nothing, _ = capsys.readouterr().out.partition("nothing is slower")
        assert waiting.endswith(said)
        assert bool(waiting) == bool(said)
        assert nothing


def test_a_slower_row_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["suite", "--only", "help", "--history", str(tmp_path / "history.jsonl")])
    monkeypatch.setattr(suite, "best_device", lambda: "cpu")
    monkeypatch.setattr(suite, "measured", lambda *_: ["help"])
    with pytest.raises(SystemExit, match=r"slower than before: help\. If it is meant, --accept writes it down\."):
        suite.main()
    monkeypatch.setattr(suite, "measured", lambda *_: [])
    monkeypatch.setattr(suite.os, "getloadavg", lambda: (1e3, 0, 0))
    suite.main()
    told = capsys.readouterr().out
    assert "1000.0 programs wait for" in told
    assert told.endswith(f"nothing is slower than before; written to {tmp_path / 'history.jsonl'}\n")
