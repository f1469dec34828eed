"""A child process, as its parent has it: started, given orders, heard and ended.
It runs `child_program.py`; what it started ends with it.

    with Child("optkit.onnx.build_worker", name="the process that exported", log=log) as child:
        child.send(order)
        value = child.result(progress)

The child ends with this process, however that ends. What it prints goes to the log, or to our
stderr, and never to our stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from optkit.errors import OptkitError
from optkit.processes import signals
from optkit.processes.commands import ask_to_end, kill_group, python_command, python_environment, start
from optkit.processes.crashes import ChildEndedError, ChildError, error_of
from optkit.progress import Progress, SilentProgress, Task

CHILD_PROGRAM = Path(__file__).with_name("child_program.py").absolute()
POLL_S = 0.5
"""How often a silent child is looked at."""
END_S = 30.0
"""How long a child that has said its last word may take to end."""
GONE_S = 2.0
"""How long the end of a child that has closed its channel may take to be seen."""
GRACE_S = 3.0
"""How long the others may take to fail of the same once one has failed; then they wait for it in vain. It told its
error before its connections closed, so no other can fail of that earlier.
"""


class Child:
    """A process that works for this one; a context that ends it."""

    def __init__(
        self,
        target: str | Path,
        *,
        name: str,
        python: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        patience_s: float = 0.0,
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
    ) -> None:
        """Start a module or file with `work(parent)`, in our Python or in a command's.
        `name` stands for it in errors.

        A child that has to be ended gets a SIGINT and has `patience_s` to clean up. Raises OSError
        if it cannot be started.
        """
        self.name, self._log, self._patience_s = name, log, patience_s
        self.value: Any = None
        self._told_end, self._rest = False, b""
        self._channel, writing = os.pipe()
        command = [*(python or python_command()), str(CHILD_PROGRAM), str(writing), str(target)]
        try:
            with contextlib.ExitStack() as files:
                files.callback(os.close, writing)
                output = files.enter_context(log.open("wb")) if log else None
                self.process = start(
                    command,
                    stdin=subprocess.PIPE,
                    pass_fds=(writing, *pass_fds),
                    env=python_environment() if env is None else env,
                    cwd=cwd,
                    **({"stdout": output, "stderr": output} if output else {}),
                )
        except BaseException:
            os.close(self._channel)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def send(self, order: Mapping[str, Any]) -> None:
        """Give an order; one that a child does not take any more is dropped."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def result(
        self,
        progress: Progress | None = None,
        others: Mapping[str, Callable[..., object]] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Draw what the child tells until it has a result, and return that.
        `others` take messages of other types.

        Raises the child's error (see `error_of`), ChildEndedError if it ends without one,
        TimeoutError.
        """
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        with Bars(progress or SilentProgress()) as bars:
            while ready([self], deadline - time.monotonic()):
                if self.hear(bars, others or {}):
                    return self.value
        raise TimeoutError(f"{self.name} said nothing within {timeout_s:g} s")

    def hear(self, bars: Bars, others: Mapping[str, Callable[..., object]]) -> bool:
        """Draw what a child that is `ready` has told; True if that is a `value` too.
        Raises as `result` does.
        """
        if b"\n" not in self._rest:
            # what a child started may hold the channel open after its end
            part = os.read(self._channel, 1 << 16) if wait([self._channel], 0) else b""
            if not part:
                raise self._ended()
            self._rest += part
        while b"\n" in self._rest:
            line, _, self._rest = self._rest.partition(b"\n")
            message = json.loads(line)
            kind = message.pop("type")
            self._told_end = kind in ("result", "error")
            if kind == "result":
                self.value = message["value"]
                return True
            if kind == "error":
                raise error_of(message, self.name, self._log)
            if kind in others:
                others[kind](**message)
            else:
                bars.draw(kind, message)
        return False

    def end(self) -> None:
        """End the child with everything that it started.
        One that is done may first leave by itself.
        """
        if self._told_end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        elif self._patience_s:
            ask_to_end(self.process, signal.SIGINT, self._patience_s)
        self.kill()
        signals.check()

    def kill(self) -> None:
        """End the child with everything that it started at once."""
        kill_group(self.process)
        if self._channel >= 0:
            os.close(self._channel)
            self._channel = -1

    def _ended(self) -> ChildEndedError:
        signals.check()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GONE_S)
        return ChildEndedError(self.name, self.process.returncode, self._log)


def ready(children: Sequence[Child], timeout_s: float = float("inf")) -> list[Child]:
    """Return the children that have told something or ended, none when the time is over.
    It is a safe point while it waits.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        signals.check()
        over = [child for child in children if b"\n" in child._rest or child.process.poll() is not None]
        left = deadline - time.monotonic()
        told = wait([child._channel for child in children], 0 if over else max(0, min(POLL_S, left)))
        if told or over or left <= 0:
            return [child for child in children if child._channel in told] or over


def collect(
    children: Sequence[Child], progress: Progress | None = None, timeout_s: float | None = None
) -> tuple[dict[int, Any], dict[int, OptkitError | ChildError]]:
    """Return the results and the errors of children that work together, by their places.

    Once one has answered, the others have `timeout_s`, and `GRACE_S` once one has failed; those
    that say nothing by then are in neither. Nobody waits for the others of one that ended.
    """
    results: dict[int, Any] = {}
    errors: dict[int, OptkitError | ChildError] = {}
    deadline = float("inf")
    with Bars(progress or SilentProgress()) as bars:
        while waiting := [child for index, child in enumerate(children) if index not in results.keys() | errors.keys()]:
            told = ready(waiting, deadline - time.monotonic())
            for child in told:
                try:
                    if child.hear(bars, {}):
                        results[children.index(child)] = child.value
                except (OptkitError, ChildError) as error:
                    errors[children.index(child)] = error
            if not told or any(isinstance(error, ChildEndedError) for error in errors.values()):
                break
            limit_s = GRACE_S if errors else timeout_s if results else None
            deadline = min(deadline, float("inf") if limit_s is None else time.monotonic() + limit_s)
    return results, errors


class Bars:
    """What children tell of their progress, drawn here; a context that closes the bars."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._all = progress, contextlib.ExitStack()
        self._tasks: dict[int, tuple[Task, contextlib.ExitStack]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._all.__exit__(*error)

    def draw(self, kind: str, message: Mapping[str, Any]) -> None:
        """Draw one message, if it is of progress."""
        match kind:
            case "task":
                bar = self._all.enter_context(contextlib.ExitStack())
                task = self._progress.task(message["label"], message["total"], message["unit"])
                self._tasks[message["id"]] = bar.enter_context(task), bar
            case "advance":
                self._tasks[message["id"]][0].advance(message["steps"], message["note"])
            case "begin":
                self._tasks[message["id"]][0].begin()
            case "end":
                self._tasks.pop(message["id"])[1].close()
            case "say":
                self._progress.say(message["line"])
            case "warn":
                self._progress.warn(message["line"])
