"""What a child tells and how it ends, seen from its parent; the child is `tests/support/talkative.py`."""

import ast
import gc
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import psutil
import pytest

from optkit.common.out_of_resources import is_out_of_memory
from optkit.errors import ResourceError
from optkit.processes.child import CHILD_PROGRAM, Child, collect
from optkit.processes.child_program import importing
from optkit.processes.commands import foreign_environment
from optkit.processes.crashes import ChildEndedError, ChildError
from optkit.progress import SilentProgress
from tests.support.fresh_python import environment
from tests.support.remembered import Lines
from tests.support.waiting import ended

ROOT = Path(__file__).parents[2]
TALKATIVE = ROOT / "tests" / "support" / "talkative.py"


class Interrupting(SilentProgress):
    """Ctrl-C, as soon as the child says which processes it and its own child are."""

    pids: tuple[int, ...] = ()

    def say(self, line: str) -> None:
        self.pids = tuple(map(int, line.split()))
        raise KeyboardInterrupt


def talkative(**options: Any) -> Child:
    return Child(TALKATIVE, name="the child", **options)


def ask(do: str, log: Path | None = None, **order: Any) -> Any:
    with talkative(log=log) as child:
        child.send({"do": do, **order})
        return child.result()


@pytest.mark.parametrize("value", [None, 0.1, "two\nlines", {"samples": [1 / 3] * 100_000}])
def test_a_result_comes_back_as_it_was(value: object) -> None:
    assert ask("result", value=value) == value


def test_a_child_takes_several_orders() -> None:
    with talkative() as child:
        child.send({"do": "sum_two", "first": 1})
        child.send({"second": 2})
        assert child.result() == 3


def test_progress_is_drawn_here() -> None:
    progress, parts = Lines(), []
    with talkative() as child:
        child.send({"do": "progress"})
        child.result(progress, {"read": lambda part: parts.append(part)})
    bars = ["outer of 2 runs", "inner of 1", "+1", "+2 there", "end", "end"]
    assert progress.lines == ["opened", *bars, "warning: slow", "left open of 1", "end"]
    assert parts == ["layer 3"]


def test_what_it_prints_goes_to_the_log_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    assert ask("printing", log) == ""
    assert sorted(log.read_text().split("\n")) == [
        "",
        "noise of a child",
        "noise of fd 1",
        "noise of fd 2",
        '{"type": "error"}',
    ]
    assert capfd.readouterr() == ("", "")


def test_without_a_log_it_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    ask("printing")
    out, err = capfd.readouterr()
    assert (out, "noise of fd 1" in err, "noise of a child" in err) == ("", True, True)


def test_an_error_of_optkit_comes_over_as_the_nearest_that_there_is() -> None:
    with pytest.raises(ResourceError, match=r"^here: memory ran out\. So it is\. Lower it\.$") as caught:
        ask("optkit_error")
    error = caught.value
    assert (error.what, error.where, error.why, error.remedy) == ("memory ran out", "here", "So it is", "Lower it")


def test_another_error_comes_over_with_its_place_and_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match=r"^the child failed with ValueError at <string>:1: odd and more") as caught:
        ask("python_error", tmp_path / "log", code="raise ValueError('odd\\nand more')")
    assert caught.value.first_words == "ValueError: odd"
    assert "\nIn the child:\nTraceback (most recent call last)" in caught.value.__notes__[0]
    assert "Traceback (most recent call last)" in (tmp_path / "log").read_text()


def test_an_error_without_a_word_is_the_line_that_raised_it() -> None:
    with pytest.raises(ChildError) as caught:
        ask("result")
    assert caught.value.first_words.startswith("TypeError: result() missing 1 required")
    with pytest.raises(ChildError) as caught:
        ask("end", status="x", number=None)
    assert caught.value.first_words.startswith("TypeError: ")
    with pytest.raises(ChildError) as caught:
        ask("python_error", code="raise KeyError")
    assert caught.value.first_words == "KeyError:  (<string>, line 1)"


def test_what_is_no_json_is_an_error() -> None:
    with pytest.raises(ChildError, match="TypeError .* not JSON serializable"):
        ask("python_error", code="parent.tell('x', value={1, 2})")


def test_a_target_that_is_not_there() -> None:
    with Child("no_such_module", name="the child") as child, pytest.raises(ChildError, match="ModuleNotFoundError"):
        child.result()
    with Child("/no/such.py", name="the child") as child, pytest.raises(ChildError, match="FileNotFoundError"):
        child.result()


@pytest.mark.parametrize(
    ("order", "how", "words"),
    [
        ({"status": 7, "words": [1, 2, 3, 4]}, "ended with status 7", "Its last words: 2 / 3 / 4"),
        ({"number": signal.SIGSEGV}, "was ended by SIGSEGV", "It said nothing"),
        (
            {"number": signal.SIGKILL},
            "was ended by SIGKILL (the system ends a process so when memory runs out)",
            "It said nothing",
        ),
    ],
)
def test_a_child_that_ends_without_a_word(order: dict[str, Any], how: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ChildEndedError) as caught:
        ask("end", tmp_path / "log", **order)
    assert (caught.value.how, caught.value.last_words) == (how, words)
    assert str(caught.value) == f"the child {how} and without a result"
    assert is_out_of_memory(caught.value) == ("SIGKILL" in how)


def test_the_last_words_of_a_child_without_a_log_stand_above() -> None:
    with pytest.raises(ChildEndedError, match=r"ended with status 0 and without a result$") as caught:
        ask("half_a_line")
    assert caught.value.last_words == "What it printed stands above"


def test_a_process_that_holds_the_channel_of_a_dead_child_open_is_not_waited_for() -> None:
    with pytest.raises(ChildEndedError, match="SIGKILL"):
        ask("leave_a_child")


def test_a_child_that_says_nothing_in_time(tmp_path: Path) -> None:
    progress = Lines()
    with talkative() as child:
        child.send({"do": "sleep", "place": str(tmp_path / "place")})
        with pytest.raises(TimeoutError, match=r"^the child said nothing within 2 s$"):
            child.result(progress, timeout_s=2)
    assert ended(*(int(pid) for line in progress.lines for pid in line.split()))


@pytest.mark.parametrize(("patience_s", "cleans"), [(10.0, True), (0.0, False)])
def test_an_interrupt_ends_it_with_its_children(patience_s: float, cleans: bool, tmp_path: Path) -> None:
    progress = Interrupting()
    with pytest.raises(KeyboardInterrupt), talkative(patience_s=patience_s) as child:
        child.send({"do": "sleep", "place": str(tmp_path / "place")})
        child.result(progress)
    assert len(progress.pids) == 2
    assert ended(*progress.pids)
    assert (tmp_path / "place").exists() == cleans


def test_one_that_does_not_hear_is_ended_too(tmp_path: Path) -> None:
    progress = Interrupting()
    with pytest.raises(KeyboardInterrupt), talkative(patience_s=0.1) as child:
        child.send({"do": "sleep", "place": str(tmp_path / "place"), "stubborn": True})
        child.result(progress)
    assert ended(*progress.pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_a_parent_that_dies(number: int, tmp_path: Path) -> None:
    program = f"""
from tests.processes.test_child import Lines, talkative
class Printing(Lines):
    def say(self, line):
        print(line, flush=True)
with talkative() as child:
    child.send({{"do": "sleep", "place": {str(tmp_path / "place")!r}}})
    child.result(Printing())
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(number)
    assert ended(*pids)


def test_several_children_are_heard_together() -> None:
    progress = Lines()
    with talkative() as first, talkative() as second, talkative() as third:
        first.send({"do": "progress"})
        second.send({"do": "result", "value": 2})
        third.send({"do": "python_error", "code": "raise ValueError('odd')"})
        results, errors = collect([first, second, third], progress)
    assert results == {0: None, 1: 2}
    assert [(index, error.first_words) for index, error in errors.items()] == [(2, "ValueError: odd")]
    assert "inner of 1" in progress.lines


@pytest.mark.parametrize(
    ("do", "grace_s", "timeout_s"),
    [
        ({"do": "result", "value": 1}, 600.0, 0.3),
        ({"do": "python_error", "code": "raise ValueError"}, 0.3, None),
        ({"do": "end", "status": 3}, 600.0, None),
    ],
)
def test_nobody_waits_for_ever_for_the_others(
    do: dict[str, Any], grace_s: float, timeout_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.processes.child.GRACE_S", grace_s)
    with talkative() as silent, talkative() as other:
        silent.send({"do": "sleep", "place": str(tmp_path / "place")})
        other.send(do)
        results, errors = collect([silent, other], timeout_s=timeout_s)
    assert 0 not in results | errors
    assert 1 in results | errors


def test_an_environment_without_optkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (tmp_path / "json.py").write_text("raise SystemError('imported from the working directory')")
    python = [str(tmp_path / "env" / "bin" / "python")]
    for command in (python, [*python, "-P"]):
        with talkative(python=command, env=foreign_environment(), cwd=tmp_path) as child:
            child.send({"do": "environment"})
            seen = child.result()
        assert seen["collected"], "garbage is, but for what was imported"
        assert not seen["optkit"]
        assert str(ROOT / "optkit" / "processes") not in seen["path"]


def test_the_worker_file_imports_the_standard_library_alone() -> None:
    tree = ast.parse(CHILD_PROGRAM.read_text(encoding="utf-8"))
    names = {each.names[0].name for each in ast.walk(tree) if isinstance(each, ast.Import)}
    names |= {str(each.module) for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


@pytest.mark.parametrize("there", [False, True])
def test_only_what_is_imported_first_is_left_out_of_garbage_collections(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    monkeypatch.setitem(sys.modules, "torch", sys) if there else monkeypatch.delitem(sys.modules, "torch", False)
    with importing():
        assert gc.isenabled() == there
    assert gc.isenabled()
    assert len(frozen) == (not there)


def test_a_program_that_is_not_there_leaves_nothing_open() -> None:
    before = psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError):
        talkative(python=["/no/such/python"])
    assert psutil.Process().num_fds() == before


def test_nothing_is_open_afterwards() -> None:
    before = psutil.Process().num_fds()
    ask("result", value=1)
    assert psutil.Process().num_fds() == before
