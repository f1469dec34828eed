"""What went wrong in another process is said in a line, with `--debug` in full; and a system that
optkit does not run on.
"""

import errno
import json

import pytest
from optkit_cli import validate
from optkit_cli.failures import failure_of
from optkit_cli.main import main

from optkit.errors import RecipeError, StageError
from optkit.processes.child_program import described, one_line
from optkit.processes.crashes import ChildError, error_of
from tests.support.fresh_python import python

OUT_OF_MEMORY = ValueError("so")
OUT_OF_MEMORY.__cause__ = MemoryError()


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_crash_comes_over_with_its_place_and_its_traceback() -> None:
    told = described(raised(ZeroDivisionError("division\nby zero")))
    heard = error_of(told, "the other process")
    assert isinstance(heard, ChildError)
    assert str(heard).startswith("the other process failed with ZeroDivisionError at test_crashes.py:")
    assert str(heard).endswith(": division by zero")
    assert "Traceback (most recent call last)" in heard.__notes__[0]


def test_an_exception_that_was_not_raised_has_no_place() -> None:
    assert one_line(KeyError()) == "KeyError"


def test_an_error_of_optkit_survives_as_json() -> None:
    told = described(StageError("no", where="here", why="because", remedy="Do"))
    error = error_of(json.loads(json.dumps(told)), "the other process")
    assert (type(error), str(error), getattr(error, "why", "")) == (StageError, "here: no. because. Do.", "because")
    assert str(error_of(described(RecipeError([])), "the other process")) == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory."),
        (OUT_OF_MEMORY, "out of memory."),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"),
            "out of memory.",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "the output: the disk is full."),
        (
            OSError(errno.EFBIG, "File too large", "model.safetensors"),
            "larger than this process may write (ulimit -f). Raise that limit, e.g. by `ulimit -f unlimited`.",
        ),
        (OSError(errno.EMFILE, "Too many open files", "kept.json"), "Raise that limit, e.g. by `ulimit -n 4096`."),
        (ValueError("Error while serializing: I/O error: No space left on device (os error 28)"), "the disk is full."),
    ],
)
def test_memory_and_room_that_ran_out_over_there_are_no_bug(error: Exception, said: str) -> None:
    for each in (error, error_of(described(raised(error)), "the other process")):
        assert said in failure_of(each).message
        assert failure_of(each).kind == "ResourceError"


def test_the_whole_traceback_is_shown_for_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_arguments: object) -> None:
        raise error_of(described(raised(ZeroDivisionError("so"))), "the process that measured")

    monkeypatch.setattr(validate.command, "callback", fail)
    assert main(["validate", "x"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the process that measured failed with ZeroDivisionError at test_crashes.py:")
    assert line.endswith(": so. This is a bug in optkit. Run the command again with --debug to see the traceback.")
    assert main(["validate", "x", "--debug"]) == 1
    assert capsys.readouterr().err.count("Traceback (most recent call last)") == 2


@pytest.mark.parametrize("code", ["from optkit_cli.start import start; start()", "import optkit"])
def test_a_system_without_fcntl_is_told_what_is_supported(code: str) -> None:
    done = python("-c", f"import sys; sys.modules['fcntl'] = None; {code}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].partition(": ")[2].startswith("optkit runs on Linux and macOS. ")
    assert done.stderr.rstrip().endswith("On Windows use WSL.")
    assert ("Traceback" in done.stderr) == (code == "import optkit")
