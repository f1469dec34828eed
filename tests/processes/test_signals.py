"""A signal ends a command whatever its main thread is at: said at once, with the right status, and
with nothing left behind.
"""

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from optkit.processes import signals
from optkit.store.store import Store
from tests.support.fresh_python import environment, python

SIGNALS = [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 143), (signal.SIGHUP, "terminated", 129)]
COMMAND = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a shell lets its background jobs ignore some of them
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
from optkit.processes import signals
from optkit_cli import start, validate
def ready():
    print("ready", flush=True)
{work}
validate.command.callback = work
sys.argv[1:] = ["validate", "x"]
start.start()
"""
IN_DEL = """
class Slow:
    def __del__(self):
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
def work(**_):
    ready()
    while True:
        Slow()
        signals.check()
"""
SOON = "signals.CHILDREN_S, signals.END_S = 0.25, 1.0\n"
"""In front of what reaches no safe point: it is ended sooner than a user's command."""
IN_C = """
def work(**_):
    import hashlib
    ready()
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
SWALLOWED = """
def work(**_):
    ready()
    while True:
        try:
            signals.check()
            time.sleep(0.01)
        except BaseException:
            pass
"""
CLEARS_UP = """
def work(**_):
    try:
        ready()
        while True:
            signals.check()
            time.sleep(0.01)
    finally:
        print("cleared", flush=True)
"""
WITH_A_CHILD = """
def work(**_):
    import subprocess
    from optkit.processes.commands import end_group, start
    process = start(["sh", "-c", "sleep 600 & echo $! $$; wait"], stdout=subprocess.PIPE)
    print(process.stdout.readline().decode(), end="", flush=True)
    try:
        ready()
        process.stdout.read()
        print("taken for an answer", flush=True)
    finally:
        end_group(process)
"""
WITH_A_COMMAND = """
def work(**_):
    from optkit.processes.commands import run
    ready()
    run(["sleep", "600"])
"""
WAITS = """
def work(**_):
    from pathlib import Path
    from optkit.store.store import Store
    with Store(Path({root!r})).lock("key", waiting=ready):
        pass
"""
ENDING = """
def work(**_):
    import atexit
    atexit.register(lambda: (ready(), time.sleep(60)))
"""


@contextmanager
def running(work: str, before: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Give a command that is at work, and what it printed before it was."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.replace("{work}", work)],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    said = ""
    try:
        while (line := process.stdout.readline()) != "ready\n":
            assert line, process.communicate()
            said += line
        yield process, said
    finally:
        process.kill()
        process.communicate()


def is_there(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("work", "number", "word", "status"),
    [
        *((work, *each) for work in (IN_DEL, SOON + SWALLOWED) for each in SIGNALS[:2]),
        *((CLEARS_UP, *each) for each in SIGNALS),
        (SOON + IN_C, *SIGNALS[0]),
        (WITH_A_COMMAND, *SIGNALS[1]),
    ],
    ids=["del-2", "del-15", "caught-2", "caught-15", "clears-2", "clears-15", "clears-1", "c", "child"],
)
def test_a_signal_ends_what_runs(work: str, number: signal.Signals, word: str, status: int) -> None:
    with running(work) as (process, _):
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert out == ("cleared\n" if work == CLEARS_UP else "")
    first, *rest = err.splitlines()
    assert first == f"{word}: stopping; a second signal ends at once"
    assert "\n".join(rest).strip() == f"{word}; finished steps are kept, run the same command again to go on"


def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(f"signals.CHILDREN_S = signals.END_S = 600.0{IN_C}") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        process.stderr.readline()
        time.sleep(2 * signals.SAME_S)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err == "terminated; finished steps are kept, run the same command again to go on\n"


def test_the_same_signal_twice_at_once_is_one_request() -> None:
    with running(CLEARS_UP.replace("signals.check()", "signals.asked() and time.sleep(0.5); signals.check()")) as (
        process,
        _,
    ):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "cleared\n")


def test_who_waits_for_a_process_goes_on_to_a_safe_point_and_takes_its_end_for_no_answer() -> None:
    with running(WITH_A_CHILD) as (process, said):
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert not any(map(is_there, map(int, said.split())))
    assert out in ("", "taken for an answer\n")


def test_the_processes_end_with_one_that_has_to_be_ended() -> None:
    stuck = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
    with running(SOON + WITH_A_CHILD.replace("process.stdout.read()", stuck)) as (process, said):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any(map(is_there, map(int, said.split())))


def test_a_process_that_waits_for_a_lock_is_ended(tmp_path: Path) -> None:
    with Store(tmp_path).lock("key"), running(WAITS.replace("{root!r}", repr(str(tmp_path)))) as (process, _):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143


def test_a_signal_in_the_last_moments_ends_them() -> None:
    with running(SOON + ENDING) as (process, _):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143


def test_a_signal_in_the_first_moments_ends_them() -> None:
    begin = """
import threading
start_thread = threading.Thread.start
def begin(thread):
    signal.raise_signal(signal.SIGINT)
    start_thread(thread)
threading.Thread.start = begin
"""
    done = python("-c", COMMAND.replace("{work}", f"{begin}{SOON}{IN_DEL}"))
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        130,
        "interrupted: stopping; a second signal ends at once",
    )


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("a") as held, (tmp_path / "lock").open("a") as wanted:
        fcntl.flock(held, fcntl.LOCK_EX)
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"], pass_fds=(held.fileno(),))
        held.close()  # the process keeps the lock until it ends
        signals.take_lock(wanted, fcntl.LOCK_EX)
        assert other.wait(60) == 0


def test_the_library_leaves_signals_alone() -> None:
    code = """
import signal, sys
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
import optkit, optkit.pipeline
try:
    optkit.run({"name": "x", "model": "nowhere", "evals": ["footprint"]})
except optkit.OptkitError:
    pass
assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
from optkit.processes import signals
assert not signals.asked()
signals.check()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("plain")
"""
    # A shell lets its background jobs, and so this test in one, ignore SIGINT.
    code = f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    done = python("-c", code)
    assert (done.stdout, done.returncode) == ("plain\n", 0), done.stderr


def test_a_forked_process_has_signals_of_its_own() -> None:
    work = """
def work(**_):
    import os
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), signals.asked(), flush=True)
    ready()
"""
    with running(work) as (_, said):
        assert said == f"{-signal.SIGTERM} False\n"
