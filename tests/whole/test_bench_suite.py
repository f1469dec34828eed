"""`make bench` on rows of invented seconds: what is slower is named, and noise is not."""

import math
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from docs.benchmarks import suite
from docs.benchmarks.suite import (
    DISTURBED,
    FASTER,
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

    def once(
        times: float = 1.0, about: Any = ABOUT, accept: bool = False, others: Sequence[float] = (0.0,)
    ) -> dict[str, list[str]]:
        seen = cycle(others)

        def timer(command: str) -> tuple[float, str]:
            return noise.uniform(0.95, 1.05) * (times if command == "slow" else 1.0), ""

        monkeypatch.setattr(CpuWatch, "others", lambda self, before: next(seen))
        return measured((FAST, SLOW), tmp_path / "history.jsonl", about, accept, timer)

    return once


def test_a_row_that_got_slower_is_named_and_noise_is_not(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert [run() for _ in range(3)] == [{UNKNOWN: ["fast", "slow"]}] * 3
    needed = "not judged yet: 2 earlier calls with this device and these versions, 3 are needed.\n"
    assert needed in capsys.readouterr().out
    assert [run() for _ in range(5)] == [ALL_KEPT] * 5
    assert run(1.3) == {KEPT: ["fast"], SLOWER: ["slow"]}
    said = capsys.readouterr()
    assert " times as long as in 8 earlier calls, 95% interval [" in said.out
    assert "]. Slowdowns from " in said.out
    assert said.err.endswith(
        "run 1 of 2: fast\nrun 1 of 3: slow\nrun 2 of 2: fast\nrun 2 of 3: slow\nrun 3 of 3: slow\n"
    )
    assert run(1.3) == {KEPT: ["fast"], SLOWER: ["slow"]}, "what is slower is not written down"


@pytest.mark.parametrize(("times", "verdict"), [(1.5, SLOWER), (0.7, FASTER)])
def test_behind_a_row_that_changed_its_history_begins_anew(
    times: float, verdict: str, run: Run, tmp_path: Path
) -> None:
    for _ in range(6):
        run()
    before = len((tmp_path / "history.jsonl").read_text().splitlines())
    assert run(times, accept=True) == {KEPT: ["fast"], verdict: ["slow"]}
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == before + 2
    assert [run(times) for _ in range(2)] == [{KEPT: ["fast"], UNKNOWN: ["slow"]}] * 2
    assert [run(times) for _ in range(3)] == [ALL_KEPT] * 3
    assert run(1.3 * times) == {KEPT: ["fast"], SLOWER: ["slow"]}


def test_what_others_disturb_is_neither_judged_nor_history(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(4):
        run()
    before = (tmp_path / "history.jsonl").read_text()
    assert run(9.0, accept=True, others=[0.4]) == {DISTURBED: ["fast", "slow"]}
    assert (tmp_path / "history.jsonl").read_text() == before
    said = "disturbed: other programs used 40% of the cores. Run it again when nothing else runs.\n"
    assert capsys.readouterr().out.endswith(said)
    assert run(others=[0.4, 0.4, 0.4, 0.0, 0.4]) == {DISTURBED: ["fast"], KEPT: ["slow"]}, "one calm run is enough"


def test_what_a_row_itself_computes_is_not_taken_for_others() -> None:
    watch = CpuWatch()
    before = watch.now()
    timed("python -c 'sum(range(10**7))'")
    after = watch.now()
    assert after.own_s - before.own_s > 0.05


@pytest.mark.parametrize("other", [{"device": "another CPU"}, {"versions": {"torch": "9.9"}}])
def test_other_devices_and_versions_are_not_compared(
    other: dict[str, Any], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(4):
        run()
    capsys.readouterr()
    assert run(1.5, {"cpu": {**ABOUT["cpu"], **other}}) == {UNKNOWN: ["fast", "slow"]}
    assert capsys.readouterr().out.count(": 0 earlier calls ") == 2
    assert run() == ALL_KEPT


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
    for only, said in (("*on a*", "no NVIDIA GPU here: gptq on a GPU; rtn, decode on a GPU\n"), ("help", "")):
        monkeypatch.setattr(sys, "argv", ["suite", "--only", only, "--history", str(tmp_path / "history.jsonl")])
        suite.main()
        waiting, judged_rows, _ = capsys.readouterr().out.partition("1 of ")
        assert waiting.endswith(said)
        assert bool(waiting) == bool(said)
        assert judged_rows


def test_a_slower_row_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["suite", "--only", "help", "--history", str(tmp_path / "history.jsonl")])
    monkeypatch.setattr(suite, "best_device", lambda: "cpu")
    monkeypatch.setattr(suite, "measured", lambda *_: {SLOWER: ["help"]})
    with pytest.raises(SystemExit, match=r"slower than before: help\. If it is meant, --accept writes it down\."):
        suite.main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--accept"])
    suite.main()
    monkeypatch.setattr(suite, "measured", lambda *_: {DISTURBED: ["help"]})
    suite.main()
    assert capsys.readouterr().out.splitlines() == [
        "1 of 1 rows were judged; slower than before: help",
        "0 of 1 rows were judged; slower than before: none",
    ]
