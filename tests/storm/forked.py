"""Run the command line in a fork of this process, which has imported everything already: a run then
costs what it computes alone.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

LIMIT_S = 20.0
POLL_S = 0.005
MARK = "OPTKIT_STORM_CASE"
PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "optkit.measuring.measurement",
    "optkit.pipeline",
    "optkit.session",
    "optkit.stages.rtn",
    "optkit_cli.main",
    "optkit_cli.run",
    "optkit_evals.divergence",
    "optkit_evals.footprint",
    "optkit_evals.perplexity",
)


def preload() -> None:
    """Import what runs need; no thread may be started, for a fork has only the one that forks."""
    import torch

    for name in PRELOADED:
        import_module(name)
    torch.set_num_threads(1)


@dataclass
class Ended:
    """How a command ended."""

    words: tuple[str, ...]
    status: int | None
    """None: it was still there at the limit."""
    out: str
    err: str
    seconds: float

    @property
    def flaws(self) -> list[str]:
        """Return what no command may do, whatever it is given."""
        found = [] if self.status is not None else [f"hangs: there after {self.seconds:.0f} s"]
        if "Traceback (most recent call last)" in self.err or "Exception ignored in" in self.err:
            found.append("a traceback")
        if "bug in optkit" in self.err:
            found.append("a bug in optkit")
        if self.status is not None and self.status < 0:
            found.append(f"ended by {signal.Signals(-self.status).name}")
        return found

    def told(self) -> str:
        """Return one line: the command, its status and its last words."""
        last = (self.err.strip().splitlines() or self.out.strip().splitlines() or [""])[-1]
        return f"optkit {' '.join(self.words)[:160]} -> {self.status}: {last[:240]}"


@dataclass
class Running:
    """A command under way in a process of its own."""

    words: tuple[str, ...]
    pid: int
    directory: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def err(self) -> str:
        """What it has said so far."""
        return (self.directory / "err").read_text(encoding="utf-8", errors="replace")

    def ended(self) -> int | None:
        """Return its exit status, None as long as it is there."""
        found, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None

    def send(self, number: int) -> None:
        """Send it a signal."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait until it ends; kill it at the limit."""
        status = None
        while status is None and time.monotonic() - self.started < limit_s:
            status = self.ended()
            if status is None:
                time.sleep(POLL_S)
        seconds = time.monotonic() - self.started
        if status is None:
            self.send(signal.SIGKILL)
            os.waitpid(self.pid, 0)
        out = (self.directory / "out").read_text(encoding="utf-8", errors="replace")
        return Ended(self.words, status, out, self.err, seconds)


def start(words: Sequence[str], directory: Path, variables: Mapping[str, str] | None = None) -> Running:
    """Start the command line with these words in a directory, in a session of its own; what it says
    goes to `out` and `err` there.
    """
    said = directory / f".said-{time.monotonic_ns()}"
    said.mkdir()
    pid = os.fork()
    if pid == 0:
        _be_the_command(list(words), directory, said, dict(variables or {}))
    return Running(tuple(words), pid, said)


def call(
    words: Sequence[str], directory: Path, variables: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> Ended:
    """Run the command line with these words, and return how it ended."""
    return start(words, directory, variables).wait(limit_s)


def apart(work: Callable[[], Any], limit_s: float) -> int | None:
    """Run a function in a fork; return its exit status, 0 if it returned, None if it was
    still there at the limit.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        found, ended = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(ended)
        time.sleep(POLL_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def left_behind(mark: str) -> list[int]:
    """Return the processes that a case started and that are still there."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            alive = (place / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
            if alive and wanted in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def _be_the_command(words: list[str], directory: Path, said: Path, variables: dict[str, str]) -> None:
    status = 99
    try:
        os.setsid()
        os.chdir(directory)
        os.environ.update(variables)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(said / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["optkit", *words]
        from optkit_cli.start import start as enter

        enter()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
