"""Progress: few plain lines in a log, bars on a terminal, nothing but warnings when quiet."""

import io
import json
from datetime import UTC, datetime

import click
import pytest
from optkit_cli.options import Invocation
from optkit_cli.progress import BarProgress, LineProgress, Pace, SafePoints, WarningsOnly, clock_text, open_progress
from rich.console import Console

from optkit import pipeline
from optkit.errors import StageError
from optkit.progress import Progress
from optkit.scorecard import Scorecard
from tests.support.command_line import spoken


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run_blocks(progress: Progress, clock: Clock, steps: int, step_s: float, total: int = 30) -> None:
    with progress.task("gptq", total, "blocks") as task:
        for index in range(steps):
            clock.now_s += step_s
            task.advance(note=f"model.layers.{index}")


def test_lines_say_start_end_and_how_long_the_rest_takes() -> None:
    stream, clock = io.StringIO(), Clock()
    run_blocks(LineProgress(stream, interval_s=5, clock=clock), clock, steps=30, step_s=2.5)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "gptq  0/30 blocks"
    assert lines[1] == "gptq  2/30 blocks  7%  1:10 left  model.layers.1"
    assert lines[6] == "gptq  12/30 blocks  40%  0:45 left  model.layers.11"
    assert lines[-1] == "gptq  30/30 blocks  in 1:15"
    assert len(lines) == 15


def test_a_long_task_prints_fewer_lines_the_longer_it_takes() -> None:
    stream, clock = io.StringIO(), Clock()
    run_blocks(LineProgress(stream, interval_s=5, clock=clock), clock, steps=3600, step_s=1, total=3600)
    assert len(stream.getvalue().splitlines()) < 60


def test_quick_steps_print_no_line_between() -> None:
    stream, clock = io.StringIO(), Clock()
    run_blocks(LineProgress(stream, interval_s=5, clock=clock), clock, steps=30, step_s=0.01)
    assert stream.getvalue().splitlines() == ["gptq  0/30 blocks", "gptq  30/30 blocks  in 0:00"]


def test_a_task_that_fails_says_where_it_stopped() -> None:
    stream, clock = io.StringIO(), Clock()
    with pytest.raises(RuntimeError), LineProgress(stream, clock=clock).task("gptq", 30, "blocks") as task:
        clock.now_s += 7
        task.advance()
        raise RuntimeError
    assert stream.getvalue().splitlines()[-1] == "gptq  1/30 blocks  stopped after 0:07"


def test_steps_may_have_no_unit_and_no_total() -> None:
    stream, clock = io.StringIO(), Clock()
    with LineProgress(stream, interval_s=0, clock=clock).task("scan", 0) as task:
        clock.now_s += 1
        task.advance(3, "a file")
    assert stream.getvalue().splitlines() == ["scan  0", "scan  3  a file", "scan  3  in 0:01"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (31.4, "0:31"), (59.7, "1:00"), (725, "12:05"), (11400, "3:10:00")]
)
def test_clock_text(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_pace_knows_nothing_before_the_first_step() -> None:
    assert Pace("gptq", 30, "blocks").left == ""
    assert [bool(Pace("import", 272, "tensors", done=done).left) for done in (1, 5, 6, 271, 272)] == [0, 0, 1, 1, 0]


def test_what_an_earlier_run_did_says_nothing_of_the_rest() -> None:
    stream, clock = io.StringIO(), Clock()
    with LineProgress(stream, interval_s=1, clock=clock).task("gptq", 30, "blocks") as task:
        task.advance(20)
        clock.now_s += 5  # text through finished blocks
        task.begin()
        clock.now_s += 60
        task.advance()
    assert stream.getvalue().splitlines()[1] == "gptq  21/30 blocks  70%  9:00 left"


def test_quiet_prints_warnings_only() -> None:
    stream = io.StringIO()
    progress = WarningsOnly(stream)
    with progress.task("gptq", 30, "blocks") as task:
        task.advance(30)
    progress.say("nothing")
    progress.warn("the baseline fell back to eager")
    assert stream.getvalue() == "warning: the baseline fell back to eager\n"


def terminal(stream: io.StringIO, width: int = 80) -> Console:
    return Console(
        file=stream,
        force_terminal=True,
        width=width,
        height=25,
        color_system="truecolor",
        legacy_windows=False,
        _environ={},
    )


def test_bars_show_count_share_and_note_and_go_when_done() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = BarProgress(terminal(stream), clock=clock)
    with progress.task("gptq", 30, "blocks") as task:
        for index in range(12):
            clock.now_s += 2.5
            task.advance(note=f"model.layers.{index}")
        assert progress.bars is not None
        progress.bars.refresh()
        drawn = stream.getvalue()
    assert all(part in drawn for part in ("gptq", "12/30 blocks", "40%", "0:45 left", "model.layers.11"))
    assert progress.bars is None
    assert stream.getvalue().rstrip().endswith("gptq  12/30 blocks  in 0:30")


def test_bars_may_lie_in_each_other_and_lines_stand_above_them() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = BarProgress(terminal(stream), clock=clock)
    with progress.task("evals", 2), progress.task("perplexity", 15, "windows"):
        progress.say("[not markup] 100%")
        progress.warn("careful")
        assert progress.open_tasks == 2
    assert progress.open_tasks == 0
    assert "[not markup] 100%" in stream.getvalue()
    assert "warning: careful" in stream.getvalue()
    assert "  in 0:" not in stream.getvalue()


def test_a_bar_that_fails_leaves_its_line_and_the_terminal() -> None:
    stream = io.StringIO()
    progress = BarProgress(terminal(stream))
    with pytest.raises(RuntimeError), progress.task("gptq", 30, "blocks"):
        raise RuntimeError
    assert stream.getvalue().rstrip().endswith("gptq  0/30 blocks  stopped after 0:00")
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_lines_where_stderr_is_no_terminal() -> None:
    assert isinstance(open_progress().to, LineProgress)
    with click.Context(click.Command("run"), obj=Invocation(quiet=True)):
        assert type(open_progress().to) is WarningsOnly


def test_json_lines_say_how_far_a_task_is() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineProgress(stream, 1, clock, interval_share=0, as_json=True)
    run_blocks(progress, clock, steps=3, step_s=0.6, total=3)
    progress.say("kept")
    SafePoints(progress).warn("one\ntwo")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["level"] for line in lines] == ["info"] * 4 + ["warning"]
    assert [(line["step"], line["done"], line["of"], line["unit"]) for line in lines] == [
        ("gptq", 0, 3, "blocks"),
        ("gptq", 2, 3, "blocks"),
        ("gptq", 3, 3, "blocks"),
        *[(None,) * 4] * 2,
    ]
    assert lines[1]["message"] == "gptq  2/3 blocks  67%  0:01 left  model.layers.1"
    assert lines[4]["message"] == "one\\ntwo"
    assert [datetime.fromisoformat(line["time"]).tzinfo for line in lines] == [UTC] * 5


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_the_log_of_a_command_is_json_and_its_result_is_not(
    quiet: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(*_words: object, progress: Progress, **_settings: object) -> Scorecard:
        with progress.task("perplexity", 4, "windows") as task:
            task.advance(4)
        progress.warn("careful")
        return Scorecard(name="x", artifact_key="ab" * 32, created="now", recipe={})

    monkeypatch.setattr(pipeline, "evaluate", evaluate)
    text, _ = spoken(capsys, "eval", "m", "--evals", "e.yaml")
    out, err = spoken(capsys, "eval", "m", "--evals", "e.yaml", "--log-format", "json", *quiet)
    assert out == text
    steps = [json.loads(line)["step"] for line in err.splitlines()]
    assert steps == ([None] if quiet else ["perplexity", "perplexity", None])

    def refuse(*_words: object, **_settings: object) -> Scorecard:
        raise StageError("it cannot", where="gptq")

    monkeypatch.setattr(pipeline, "evaluate", refuse)
    _, err = spoken(capsys, "eval", "m", "--evals", "e.yaml", "--log-format", "json", status=1)
    (line,) = map(json.loads, err.splitlines())
    assert (line["level"], line["message"]) == ("error", "gptq: it cannot.")
