"""Run a worker: a child process in a library's environment, which does not have optkit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from optkit.backends.environments import Environment
from optkit.backends.libraries import LIBRARIES
from optkit.environment import offline_on
from optkit.errors import StageError
from optkit.processes.child import Child
from optkit.processes.commands import foreign_environment, python_command
from optkit.processes.crashes import ChildEndedError, ChildError
from optkit.progress import Progress

LAUNCH = Path(__file__).with_name("workers") / "launch.py"
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
    """Run the worker of a library on a request and return the details of its result.
    The request has the fields of `launch.Job`.

    It runs in a folder of its own, since libraries leave files in the working directory. What the
    library prints goes to `log`, which stays if the worker fails, with the newest of the others
    beside it. Raises StageError with the library's exception, or with what `check_logits` finds in
    the file that it is given.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    places = {key: str(Path(request[key]).absolute()) for key in ("source", "target") if key in request}
    asked = {**request, **places, "worker": environment.name, "device": _device(str(request["device"]))}
    with log.open("wb") as held, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        fcntl.flock(held, fcntl.LOCK_SH)
        _delete_old_logs(log)
        python = python_command(python=environment.interpreter.absolute())
        variables = _variables(environment, str(request["device"]))
        with Child(launch, name=environment.name, python=python, env=variables, log=log, cwd=Path(folder)) as child:
            child.send(asked)
            try:
                details: dict[str, Any] = child.result(progress, {"logits": lambda file: check_logits(Path(file))})
            except ChildError as error:
                raise _failure(error, environment.name, log) from error
    log.unlink(missing_ok=True)
    return details


def _failure(error: ChildError, name: str, log: Path) -> StageError:
    where = f"backend {name}"
    if isinstance(error, ChildEndedError):
        what = f"its process {error.how} and without a result"
        if not log.exists():
            return StageError(what, where=where, why="Its output was deleted meanwhile")
        return StageError(what, where=where, why=error.last_words, remedy=f"Its output is in {log}")
    remedy = f"Its whole output is in {log}; `backend: optkit` does without it"
    return StageError(error.first_words, where=where, why="The library stopped there", remedy=remedy)


def _variables(environment: Environment, device: str) -> dict[str, str]:
    """Return the worker's environment variables.
    It gets no network, no packages of ours, no GPU but the one that was asked for.
    """
    library = LIBRARIES.get(environment.name)
    return {
        **foreign_environment(),
        "PATH": os.pathsep.join((str(environment.interpreter.parent), os.environ.get("PATH", os.defpath))),
        **offline_on(device),
        **(library.variables if library else {}),
    }


def _device(device: str) -> str:
    """Return the device as the worker sees it: of the GPUs it sees the one alone."""
    return "cpu" if device == "cpu" else "cuda:0"


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


@contextlib.contextmanager
def work_directory(beside: Path) -> Iterator[Path]:
    """Give a directory on the disk of another one, gone with everything in it afterwards."""
    with tempfile.TemporaryDirectory(prefix=".foreign-", dir=beside.parent) as made:
        yield Path(made)
