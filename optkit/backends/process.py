"""Run a worker: a subprocess in a library's environment, told what to do by one JSON line, heard
through a pipe of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from optkit.backends.environments import Environment
from optkit.backends.libraries import LIBRARIES
from optkit.environment import only_visible
from optkit.errors import StageError
from optkit.processes.start import end_group, foreign_environment, python_command, start
from optkit.progress import Progress, Task

LAUNCH = Path(__file__).with_name("workers") / "launch.py"
END_S = 60.0
"""How long a worker that has said its last word may take to end."""
KEPT_LOGS = 10
"""Logs of runs that failed."""


def run_worker(
    environment: Environment,
    request: Mapping[str, Any],
    progress: Progress,
    log: Path,
    check_logits: Callable[[Path], None],
    launch: Path = LAUNCH,
) -> dict[str, Any]:
    """Run the worker of a library on a request (the fields of `launch.Job`) and return the details
    of its result.

    It ends with this process, however that ends, and runs in a folder of its own, since libraries
    leave files where they run. What the library prints goes to `log`, which stays where the worker
    fails, with the newest of the others beside it. Raises StageError with the library's exception,
    or with what `check_logits` finds in the file that it is given.
    """
    name = environment.name
    log.parent.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    places = {key: str(Path(request[key]).absolute()) for key in ("source", "target") if key in request}
    asked = {**request, **places, "device": _device(str(request["device"]))}
    with (
        open(reading, encoding="utf-8") as messages,  # noqa: PTH123
        log.open("wb") as output,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        fcntl.flock(output, fcntl.LOCK_SH)
        _delete_old_logs(log)
        command = python_command(str(launch.absolute()), name, str(writing), python=environment.interpreter.absolute())
        variables = _variables(environment, str(request["device"]))
        process = start(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=(writing,), env=variables
        )
        try:
            os.close(writing)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
            details = _listen(messages, progress, check_logits, name, log)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        finally:
            end_group(process)
        if details is None:
            raise StageError(
                _how_it_ended(process.returncode),
                where=f"backend {name}",
                why=_last_line(log),
                remedy=f"Its output is in {log}" if log.exists() else "",
            )
    log.unlink(missing_ok=True)
    return details


def _listen(
    messages: IO[str], progress: Progress, check_logits: Callable[[Path], None], name: str, log: Path
) -> dict[str, Any] | None:
    """Pass on what the worker says until it has a result; None where it ends without a word."""
    with contextlib.ExitStack() as bars:
        task: Task | None = None
        for message in map(json.loads, messages):
            match message["type"]:
                case "start":
                    task = bars.enter_context(progress.task(message["label"], message["total"], message["unit"]))
                case "advance" if task is not None:
                    task.advance(message["steps"], message["note"])
                case "warn":
                    progress.warn(f"{name}: {message['line']}")
                case "logits":
                    check_logits(Path(message["file"]))
                case "result":
                    return dict(message["details"])
                case "error":
                    raise StageError(
                        f"{message['exception']}: {message['message']}",
                        where=f"backend {name}",
                        why="The library stopped there",
                        remedy=f"Its whole output is in {log}; `backend: optkit` does without it",
                    )
    return None


def _variables(environment: Environment, device: str) -> dict[str, str]:
    """Return the worker's environment variables: no network, no packages of ours, no GPU but the
    one that was asked for.
    """
    library = LIBRARIES.get(environment.name)
    return {
        **foreign_environment(),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": os.pathsep.join((str(environment.interpreter.parent), os.environ.get("PATH", os.defpath))),
        **only_visible(device),
        **(library.variables if library else {}),
    }


def _device(device: str) -> str:
    """Return the device as the worker sees it: of the GPUs it sees the one alone."""
    return "cpu" if device == "cpu" else "cuda:0"


def _how_it_ended(status: int) -> str:
    if status < 0:
        memory = " (the system ends a process so when memory runs out)" if -status == signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-status).name}{memory}"
    return f"its process ended with status {status} and without a result"


def _delete_old_logs(log: Path) -> None:
    """Delete the logs beside one that no worker writes to any more, but for the newest."""
    with contextlib.suppress(FileNotFoundError):  # another run deletes them too
        others = sorted(
            (path for path in log.parent.glob("*.log") if path != log), key=lambda path: path.stat().st_mtime
        )
        for path in others[:-KEPT_LOGS]:
            with path.open("r") as file, contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _last_line(log: Path) -> str:
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "Its output was deleted meanwhile"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"Its last words: {lines[-1]}" if lines else "It said nothing"


@contextlib.contextmanager
def work_directory(beside: Path) -> Iterator[Path]:
    """Give a directory on the disk of another one, gone with everything in it afterwards."""
    with tempfile.TemporaryDirectory(prefix=".foreign-", dir=beside.parent) as made:
        yield Path(made)
