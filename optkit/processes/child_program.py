"""The child's side: every process that optkit hands work to begins here.
It runs as `python child_program.py DESCRIPTOR TARGET`.

It imports the standard library alone, and runs in any Python of at least 3.10, with or without
optkit.

TARGET       a module, or the path of a file, with `work(parent)`, whose result is told
stdin        orders, a JSON object a line; it stays open for as long as the parent lives, and this
             process ends with it
DESCRIPTOR   what this process tells, a JSON object a line; stdout and stderr belong to the libraries

    {"type": "task", "id": 1, "label": "awq", "total": 30, "unit": "blocks"}   a bar
    {"type": "advance", "id": 1, "steps": 1, "note": "model.layers.3"}
    {"type": "begin", "id": 1}
    {"type": "end", "id": 1}
    {"type": "say", "line": "..."}
    {"type": "warn", "line": "..."}
    {"type": "result", "value": {...}}             the order is done
    {"type": "error", "kinds": ["KeyError", ...]}   it failed: the fields of `described`
    {"type": "logits", ...}                         whatever else a target and its parent agree on
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import queue
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol


class Lines(Protocol):
    """Where lines go: a file, or what stands for one."""

    def write(self, line: str, /) -> Any: ...
    def flush(self) -> Any: ...


class Parent:
    """The process that started this one: it gives orders, and draws what it is told; a `Progress`."""

    def __init__(self, lines: Lines) -> None:
        self._lines, self._lock, self._numbers = lines, threading.Lock(), itertools.count(1)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen(self) -> None:
        """Take orders from stdin and end with it from now on; libraries find stdin empty."""
        orders = os.dup(0)
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), 0)
        threading.Thread(target=self._listen, args=(orders,), daemon=True).start()

    def order(self) -> dict[str, Any]:
        """Return the next order; waits for it."""
        return self._orders.get()

    def tell(self, type: str, **message: Any) -> None:
        """Write one message."""
        line = json.dumps({"type": type, **message})
        with self._lock:
            self._lines.write(f"{line}\n")
            self._lines.flush()

    def task(self, label: str, total: int, unit: str = "") -> RemoteTask:
        number = next(self._numbers)
        self.tell("task", id=number, label=label, total=total, unit=unit)
        return RemoteTask(self, number)

    def say(self, line: str) -> None:
        self.tell("say", line=line)

    def warn(self, line: str) -> None:
        self.tell("warn", line=line)

    def _listen(self, descriptor: int) -> None:
        rest = b""
        try:
            while part := os.read(descriptor, 1 << 16):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    self._orders.put(json.loads(line))
        finally:  # with everything that this process started, if it leads a group of its own
            if os.getpgrp() == os.getpid():
                os.killpg(os.getpgrp(), signal.SIGKILL)
            os._exit(1)


class RemoteTask:
    """A bar that the parent draws."""

    def __init__(self, parent: Parent, number: int) -> None:
        self._parent, self._number = parent, number

    def __enter__(self) -> RemoteTask:
        return self

    def __exit__(self, *_: object) -> None:
        self._parent.tell("end", id=self._number)

    def advance(self, steps: int = 1, note: str = "") -> None:
        self._parent.tell("advance", id=self._number, steps=steps, note=note)

    def begin(self) -> None:
        self._parent.tell("begin", id=self._number)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Leave what is imported inside out of garbage collections, if torch is among it.
    They would make the import of torch and transformers a third longer.
    """
    if "torch" in sys.modules:  # garbage may hold tensors
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def one_line(error: BaseException) -> str:
    """Return e.g. `ZeroDivisionError at rank.py:12: division by zero`."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" at {Path(last[0].filename).name}:{last[0].lineno}" if last else ""
    what = " ".join(str(error).split())
    return f"{type(error).__name__}{place}: {what}" if what else f"{type(error).__name__}{place}"


def words(error: BaseException) -> str:
    """Return e.g. `ValueError: too large`.
    Of an error without a word it is the line of code that raised it.
    """
    last = traceback.extract_tb(error.__traceback__)[-1:]
    code = f"{last[0].line} ({Path(last[0].filename).name}, line {last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {str(error).strip() or code}"


def described(error: BaseException) -> dict[str, Any]:
    """Return an exception as JSON values, from which `crashes.error_of` makes one."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    parts = vars(error) if "OptkitError" in kinds else {}
    return {
        "kinds": kinds,
        "text": str(error),
        "parts": {name: value for name, value in parts.items() if isinstance(value, str)},
        "errno": error.errno if isinstance(error, OSError) else None,
        "one_line": one_line(error),
        "words": words(error),
        "trace": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "cause": error.__cause__ and described(error.__cause__),
    }


def answer(parent: Parent, work: Callable[[], Any]) -> int:
    """Tell what comes of the work, and return the exit status."""
    try:
        parent.tell("result", value=work())
    except KeyboardInterrupt:  # the parent asked for the end
        return 128 + signal.SIGINT
    except BaseException as error:
        parent.tell("error", **described(error))
        return 1
    return 0


def main(descriptor: int, target: str) -> int:
    """Do the work of the target and return the exit status."""
    os.set_inheritable(descriptor, False)
    with contextlib.suppress(ValueError):  # a Python without `-P` would import from beside this file
        sys.path.remove(str(Path(__file__).parent))
    with open(descriptor, "w", encoding="utf-8") as lines:
        parent = Parent(lines)
        parent.listen()
        return answer(parent, lambda: _work_of(target)(parent))


def _work_of(target: str) -> Callable[[Parent], Any]:
    with importing():
        work: Callable[[Parent], Any] = (
            runpy.run_path(target)["work"] if target.endswith(".py") else importlib.import_module(target).work
        )
    return work


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
