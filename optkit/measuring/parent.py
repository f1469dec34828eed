"""A turn of timed evals in a Python process of its own, so that nothing of before is in its
numbers.

What this process has left behind (memory that an allocator keeps, compiled code, settings of
libraries) would be in the timings and in the peak of memory. The other one is told what to do by a
line of JSON, and answers with such lines: progress, then metrics with their raw samples, or an
error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from optkit import errors
from optkit.common.frozen import Frozen
from optkit.devices.nvml import WAITING
from optkit.errors import EvalError, OptkitError, ResourceError
from optkit.measure import Eval, EvalContext, Metric
from optkit.processes import stopping
from optkit.processes.crashes import heard_crash
from optkit.processes.start import ask_to_end, end_group, python_command, python_environment, start
from optkit.progress import Progress, Task
from optkit.stage import Setting

MODULE = "optkit.measuring.child"
END_S = 15.0
"""How long a process that is asked to end may take to clean up."""


@dataclass(frozen=True)
class Answer:
    """What an eval measured in a turn."""

    metrics: tuple[Metric, ...]
    notes: tuple[str, ...]
    session_notes: tuple[str, ...]
    environment: Mapping[str, Any]


def measure_apart(
    directory: Path,
    settings: Sequence[Setting],
    evals: Sequence[Eval],
    device: str,
    trust_remote_code: bool,
    context: EvalContext,
    index: int,
) -> list[Answer]:
    """Open a model directory in a fresh process, run the turn `index` of each eval, one after
    another, and return what each measured.

    Raises what opening and measuring raise, ResourceError where the system ends the process,
    EvalError where it ends otherwise.
    """
    order = {
        "directory": str(directory.absolute()),
        "settings": [described(setting) for setting in settings],
        "evals": [described(each) for each in evals],
        "device": device,
        "trust_remote_code": trust_remote_code,
        "seed": context.seed,
        "data": None if context.data is None else str(context.data.absolute()),
        "calibrated_on": [dict(text) for text in context.calibrated_on],
        "turn": index,
        "threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
    }
    with _process() as (process, messages):
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        said = _listen(messages, context.progress)
        if said is None:
            stopping.check()
            raise _ended(process.wait(END_S), ", ".join(each.kind for each in evals))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    return [_answer(each) for each in said]


def described(value: Frozen) -> dict[str, Any]:
    """Return a setting or an eval as JSON values."""
    return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": value.model_dump(mode="json")}


def restored(said: Mapping[str, Any]) -> Any:
    """Return what `described` described."""
    module, _, name = said["class"].partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found.model_validate(said["fields"])


def told_error(error: OptkitError) -> dict[str, Any]:
    """Return an error as JSON values."""
    fields = {name: value for name, value in vars(error).items() if isinstance(value, str)}
    return {"kinds": [kind.__name__ for kind in type(error).__mro__], "text": str(error), "fields": fields}


def heard_error(said: Mapping[str, Any]) -> OptkitError:
    """Return the error that `told_error` told; of a class that `optkit.errors` does not have, as
    the nearest that it has.
    """
    kind = next(getattr(errors, name) for name in said["kinds"] if hasattr(errors, name))
    error: OptkitError = kind.__new__(kind)
    Exception.__init__(error, said["text"])
    vars(error).update({"what": said["text"], "where": "", "why": "", "remedy": ""} | said["fields"])
    return error


@contextlib.contextmanager
def _process() -> Iterator[tuple[subprocess.Popen[bytes], IO[str]]]:
    """Start the process, which ends with this one however that ends, and with the block."""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as messages:  # noqa: PTH123
        try:
            process = start(
                python_command("-m", MODULE, str(writing)), stdin=subprocess.PIPE, pass_fds=(writing,), env=_variables()
            )
        finally:
            os.close(writing)
        try:
            yield process, messages
        finally:
            _end(process)


def _variables() -> dict[str, str]:
    """Return the process's environment variables, having given back the memory that this one does
    not use.
    """
    return python_environment(**{WAITING: str(int(_leave_memory()))})


def _leave_memory() -> bool:
    """Give back what allocators of this process keep; return whether it is on a GPU."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    from optkit.model.memory import return_freed_memory

    return_freed_memory()
    if not torch.cuda.is_initialized():
        return False
    torch.cuda.empty_cache()
    return True


def _listen(messages: IO[str], progress: Progress) -> list[dict[str, Any]] | None:
    """Pass on what the process says until it has answered; None where it ends without a word."""
    with ExitStack() as bars:
        tasks: dict[int, tuple[Task, ExitStack]] = {}
        for message in map(json.loads, messages):
            match message["type"]:
                case "task":
                    bar = bars.enter_context(ExitStack())
                    task = bar.enter_context(progress.task(message["label"], message["total"], message["unit"]))
                    tasks[message["id"]] = task, bar
                case "advance":
                    tasks[message["id"]][0].advance(message["steps"], message["note"])
                case "done":
                    tasks.pop(message["id"])[1].close()
                case "say":
                    progress.say(message["line"])
                case "warn":
                    progress.warn(message["line"])
                case "answer":
                    return list(message["evals"])
                case "error":
                    raise heard_error(message)
                case "crash":
                    raise heard_crash(message, "the process that measured")
    return None


def _answer(said: Mapping[str, Any]) -> Answer:
    return Answer(
        metrics=tuple(Metric.model_validate(metric) for metric in said["metrics"]),
        notes=tuple(said["notes"]),
        session_notes=tuple(said["session_notes"]),
        environment=said["environment"],
    )


def _ended(status: int, evals: str) -> OptkitError:
    if status == -signal.SIGKILL:
        return ResourceError(
            "the process that measured was ended by the system",
            where=evals,
            why="It does so where memory runs out",
            remedy="Lower batch_sizes, prompts or new_tokens, or measure a smaller model",
        )
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return EvalError(
        f"the process that measured ended {how} and without a result", where=evals, why="What it printed stands above"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process: let it clean up, then end it with everything that it started."""
    ask_to_end(process, signal.SIGINT, END_S)
    end_group(process)
