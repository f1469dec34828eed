"""`make bench` on rows of invented seconds: what is slower is named, and noise is not."""

from __future__ import annotations

import math
import random
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.benchmarks import suite
from docs.benchmarks.suite import (
    DISTURBED,
    KEPT,
    ROWS,
    SLOWER,
    UNKNOWN,
    Row,
    compared,
    judged,
    measured,
    seconds,
    timed,
)
from optkit.devices.cpu_watch import CpuWatch
from tests.support.full_scorecards import full_scorecard

ABOUT = {"cpu": {"device": "a CPU, 2 CPU threads", "versions": {}}}
FAST, SLOW = Row("fast", "fast"), Row("slow", "slow", runs=3)
ALL_KEPT = {KEPT: ["fast", "slow"]}
Run = Callable[..., dict[str, list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Time two rows of 1 s, within 5% and by seed, and return what is said of them."""
    noise = random.Random(0)

    def once(times: float = 1.0, about: Any = ABOUT, accept: bool = False, others: float = 0.0) -> dict[str, list[str]]:
        def timer(command: str) -> tuple[float, str]:
            return noise.uniform(0.95, 1.05) * (times if command == "slow" else 1.0), ""

        monkeypatch.setattr(CpuWatch, "others", lambda self, before: others)
        return measured((FAST, SLOW), tmp_path / "history.jsonl", about, accept, timer)

    return once


def test_a_row_that_got_slower_is_named_and_noise_is_not(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert [run() for _ in range(3)] == [{UNKNOWN: ["fast", "slow"]}] * 3
    assert "not judged yet: earlier calls: 2 of the 3 that are needed\n" in capsys.readouterr().out
    assert [run() for _ in range(5)] == [ALL_KEPT] * 5
    assert run(1.3) == {KEPT: ["fast"], SLOWER: ["slow"]}
    said = capsys.readouterr()
    assert "] the 8 calls before. A loss is seen from " in said.out
    assert said.err.endswith(
        "run 1 of 2: fast\nrun 1 of 3: slow\nrun 2 of 2: fast\nrun 2 of 3: slow\nrun 3 of 3: slow\n"
    )
    assert run(1.3) == {KEPT: ["fast"], SLOWER: ["slow"]}, "what is slower is not written down"
    assert run(0.7) == ALL_KEPT


def test_what_is_accepted_is_history(run: Run, tmp_path: Path) -> None:
    for _ in range(3):
        run()
    before = len((tmp_path / "history.jsonl").read_text().splitlines())
    assert run(1.5, accept=True)[SLOWER] == ["slow"]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == before + 2
    assert run(1.5) == ALL_KEPT


def test_what_others_disturb_is_neither_judged_nor_history(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(4):
        run()
    before = (tmp_path / "history.jsonl").read_text()
    assert run(9.0, others=0.4) == {DISTURBED: ["fast", "slow"]}
    assert (tmp_path / "history.jsonl").read_text() == before
    said = "disturbed: other programs used 40% of the cores. Run it again when nothing else runs\n"
    assert capsys.readouterr().out.endswith(said)


def test_what_a_row_itself_computes_is_not_taken_for_others() -> None:
    watch = CpuWatch()
    before = watch.now()
    timed("python -c 'sum(range(10**7))'")
    after = watch.now()
    assert after.own_s - before.own_s > 0.05


def test_another_device_has_a_history_of_its_own(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(4):
        run()
    capsys.readouterr()
    assert run(1.5, {"cpu": {"device": "another CPU", "versions": {}}}) == {UNKNOWN: ["fast", "slow"]}
    assert capsys.readouterr().out.count("earlier calls: 0 of the 3") == 2


def test_the_interval_is_that_of_one_more_call() -> None:
    assert compared(1.0, [1.0, 1.0]) is None
    three = compared(1.2, [1.0, 1.1, 0.9])
    assert three is not None
    assert three.interval is not None
    assert three.value == pytest.approx(1.2 / (1.0 * 1.1 * 0.9) ** (1 / 3))
    assert three.interval[0] < 1 < three.interval[1]


def test_what_is_said_to_be_seen_is_seen() -> None:
    earlier = [1.0, 1.04, 0.97, 1.01, 1.02]
    least = 1 + int(judged(1.0, earlier, 0.0)[1].rpartition("from ")[2].partition("%")[0]) / 100
    centre = math.prod(earlier) ** (1 / 5)
    assert judged((least + 0.01) * centre, earlier, 0.0)[0] == SLOWER
    assert judged((least - 0.01) * centre, earlier, 0.0)[0] == KEPT


def test_false_alarms_are_rare_when_a_machine_drifts() -> None:
    noise, missed = random.Random(1), 0
    for _ in range(400):
        calls = [min(noise.lognormvariate(noise.gauss(0, 0.1), 0.01) for _ in range(3)) for _ in range(6)]
        missed += judged(calls[-1], calls[:-1], 0.0)[0] == SLOWER
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
    monkeypatch.setattr(suite, "measured", lambda *_: {KEPT: ["help"]})
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
    monkeypatch.setattr(suite, "measured", lambda *_: {SLOWER: ["help"]})
    with pytest.raises(SystemExit, match=r"slower than before: help\. If it is meant, --accept writes it down\."):
        suite.main()
    monkeypatch.setattr(suite, "measured", lambda *_: {DISTURBED: ["help"]})
    suite.main()
    assert capsys.readouterr().out == "nothing is slower than before, of 0 of 1 rows that could be judged\n"
