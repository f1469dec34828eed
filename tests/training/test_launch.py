"""A stage in several processes: what comes back, and what becomes of the others when one is lost."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from optkit.errors import OptkitError, ResourceError, StageError
from optkit.processes.child_program import described
from optkit.processes.crashes import ChildEndedError, ChildError, error_of
from optkit.progress import SilentProgress
from optkit.stage import Context, Report
from optkit.training.launch import _error, launch
from tests.support.rank_stages import Together
from tests.support.remembered import Lines
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are ended by Linux's means")


def together(how: str, place: Path, progress: SilentProgress | None = None) -> Report:
    (place / "target").mkdir()
    context = Context(seed=7, workspace=place / "work", progress=progress or SilentProgress())
    return launch(Together(how=how), place, place / "target", context, 2, "together")


def failure(how: str, place: Path) -> OptkitError:
    with pytest.raises(OptkitError) as caught:
        together(how, place)
    return caught.value


def alive(place: Path) -> list[int]:
    pids = [int(path.read_text()) for path in (place / "target").glob("*.pid")]
    return [
        pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    ]


@pytest.mark.slow  # test_ranks shows it too
def test_the_report_of_the_first_process_comes_back(tmp_path: Path) -> None:
    progress = Lines()
    report = together("sum", tmp_path, progress)
    assert report.changed == 3
    assert report.skipped == {"a": "b"}
    assert report.details == {"seed": 7}
    assert "on cpu" in progress.lines
    assert not list((tmp_path / "work").iterdir())


MEMORY = ResourceError("no memory", where="together", why="It is full", remedy="Buy some")
REMEDY = "What they printed is in /d; what was finished is kept, so run it again to go on."


def refusal() -> OptkitError | ChildError:
    return error_of(described(MEMORY), "rank")


def crash(rank: int, time: float, log: Path | None = None) -> OptkitError | ChildError:
    said = described(ValueError("a mistake")) | {"time": time, "trace": "Traceback: all of it"}
    return error_of(said, f"rank {rank} of 2", log)


def test_what_all_refuse_is_refused_as_on_one_device() -> None:
    error = _error({1: refusal(), 0: refusal()}, Path("/d"), 2, "together")
    assert isinstance(error, ResourceError)
    assert str(error) == "together: no memory. It is full. Buy some."


@pytest.mark.parametrize("devices", [2, 3])
def test_what_one_refuses_names_it_though_others_miss_it_before(devices: int) -> None:
    error = _error({0: crash(0, 1.0), 1: refusal()}, Path("/d"), devices, "together")
    assert isinstance(error, ResourceError)
    assert str(error) == f"together, rank 1 of {devices}: no memory. It is full. Buy some."


def test_a_mistake_of_the_code_names_the_first_rank_and_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n\nthree\nfour\n")
    error = _error({0: crash(0, 2.0), 1: crash(1, 1.0, log)}, Path("/d"), 2, "together")
    what = "together: rank 1 of 2 failed with ValueError: a mistake. Its last words: two / three / four."
    assert str(error) == f"{what} {REMEDY}"
    assert error.__cause__ is not None
    assert "Traceback: all of it" in error.__cause__.__notes__[0]
    assert log.read_text().endswith("four\nTraceback: all of it")


def test_a_process_that_is_lost_counts_before_what_others_say_of_it() -> None:
    lost = ChildEndedError("rank 1 of 2", 1, Path("/no/log"))
    error = _error({0: crash(0, 1.0), 1: lost}, Path("/d"), 2, "together")
    assert str(error) == f"together: rank 1 of 2 ended with status 1 and without a result. It said nothing. {REMEDY}"


@pytest.mark.usefixtures("warm_children")
def test_a_lost_process_is_named_with_its_last_lines_and_the_other_is_ended(tmp_path: Path) -> None:
    error = failure("killed", tmp_path)
    assert isinstance(error, StageError)
    assert str(error).startswith(
        "together: rank 1 of 2 was ended by SIGKILL (the system ends a process so when memory runs out) and"
    )
    assert "Its last words: a line of rank 1." in str(error)
    assert f"is in {tmp_path / 'work' / 'ranks'}; what was finished is kept" in str(error)
    assert not alive(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("refuse", "together: no memory. It is full. Buy some."),
        ("refuse_alone", "together, rank 1 of 2: no memory. It is full. Buy some."),
        ("crash", "together: rank 1 of 2 failed with ValueError at "),
    ],
)
def test_a_failure_is_told_as_it_was(tmp_path: Path, how: str, expected: str) -> None:
    assert str(failure(how, tmp_path)).startswith(expected)


def wait_for(place: Path, count: int = 2) -> None:
    assert wait_until(lambda: len([*(place / "target").glob("*.pid")]) == count)


@pytest.mark.slow
def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    def interrupt() -> None:
        wait_for(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        together("sleep", tmp_path)
    thread.join()
    assert not alive(tmp_path)


@pytest.mark.slow
def test_they_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.training.test_launch import together; together('sleep', "
        f"Path({str(tmp_path)!r}))"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    ) as process:
        wait_for(tmp_path)
        process.kill()
    assert wait_until(lambda: not alive(tmp_path)), alive(tmp_path)
