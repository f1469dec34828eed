"""Commands that run as processes which end with this one.
They start in a group of their own and end with everything that they started.

A Python among them imports nothing from the directory that it runs in, whose files are nobody's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optkit.processes import signals

SAFE_PATH = "PYTHONSAFEPATH"
"""Variable that does for all Pythons below a process what `-P` does for one: their own directories
are no places to import from.
"""
POLL_S = 0.1
STDERR = 2
ASKED_S = 0.5
"""How long a process may take to clean up when this one has been asked to stop."""


def python_command(*arguments: str, python: str | Path = sys.executable) -> list[str]:
    """Return the command line of a Python of at least 3.11, with `-P`.
    It is ours or that of an environment of ours.
    """
    return [str(python), "-P", *arguments]


def python_environment(**changed: str) -> dict[str, str]:
    """Return the variables of a process that runs our Python: our own places to import from.
    What it starts gets `SAFE_PATH`.
    """
    places = [str(Path(each).absolute()) for each in sys.path if each]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), SAFE_PATH: "1", **changed}


def foreign_environment(**changed: str) -> dict[str, str]:
    """Return the variables of a process that runs another Python than ours.
    Nothing says where ours imports from.
    """
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", SAFE_PATH)
    return {**{name: value for name, value in os.environ.items() if name not in ours}, **changed}


@contextlib.contextmanager
def safe_children() -> Iterator[None]:
    """Let no Python that starts meanwhile import anything from its working directory.
    Any library may start it.
    """
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that leads a session of its own.
    `end_group` ends it, and so does a signal to this one.

    Its stdout is our stderr, unless `options` say otherwise: our own stdout is for results.
    """
    process = subprocess.Popen(command, start_new_session=True, **{"stdout": STDERR, **options})
    signals.adopt(process.pid)
    return process


def run(
    command: Sequence[str], *, text: bytes = b"", timeout_s: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command with `text` as its stdin, and return its status and what it printed.
    It ends with this process's work.

    Raises subprocess.TimeoutExpired.
    """
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    given: bytes | None = text
    with start(command, **streams, **options) as process:
        try:
            while True:
                try:
                    printed, complaints = (
                        each.decode(errors="replace") for each in process.communicate(given, timeout=POLL_S)
                    )
                    return subprocess.CompletedProcess(command, process.returncode, printed, complaints)
                except subprocess.TimeoutExpired:
                    given = None
                    signals.check()
                    if deadline is not None and time.monotonic() > deadline:
                        raise
        finally:
            end_group(process)


def ask_to_end(process: subprocess.Popen[bytes], number: signal.Signals, patience_s: float) -> None:
    """Send a process a signal, and let it clean up for a while.
    The while is short if this process has itself been asked to stop.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ASKED_S if signals.asked() else patience_s)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its own group, as `kill_group` does; a safe point."""
    kill_group(process)
    signals.check()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Close the stdin of a process that leads its own group and kill what is left of the group.
    Wait for the process.
    """
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    signals.release(process.pid)
    process.wait()
