"""One process of a training on several devices: `python -m optkit.training.worker DIRECTORY`,
started by `accelerate launch`.

DIRECTORY/job.json          what to do: the fields of `Job`, written by optkit/training/launch.py
DIRECTORY/messages.jsonl    how far the first process is, a JSON object a line
DIRECTORY/rank-N.log        what each process prints
DIRECTORY/rank-N.json       why it failed: {"time", "kind", "what", "where", "why", "remedy"}
DIRECTORY/report.json       the stage's report, written last by the first process
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from optkit.common.atomic import write_text_atomically
from optkit.common.frozen import Frozen
from optkit.errors import OptkitError
from optkit.processes.crashes import told_crash
from optkit.stage import Context, Report, Transform

JOB, MESSAGES, REPORT = "job.json", "messages.jsonl", "report.json"
SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others: longer than writing a checkpoint takes."""


class Job(Frozen):
    """What all processes do together."""

    stage: str
    """`module:Class`."""
    fields: dict[str, Any]
    source: Path
    target: Path
    device: str
    """`cpu` or `cuda`, of which each process takes its own."""
    seed: int
    data: Path | None
    trust_remote_code: bool
    origin: Path | None
    workspace: Path | None
    may_link: bool


class Messages:
    """Progress of the first process, written for the one that waits for it; the others are silent."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def task(self, label: str, total: int, unit: str = "") -> MessageTask:
        """Open a bar."""
        self.send(type="start", label=label, total=total, unit=unit)
        return MessageTask(self)

    def say(self, line: str) -> None:
        """Pass a line on."""
        self.send(type="say", line=line)

    def warn(self, line: str) -> None:
        """Pass a warning on."""
        self.send(type="warn", line=line)

    def send(self, **message: Any) -> None:
        """Write one line."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(message) + "\n")


class MessageTask:
    """A bar that somebody else draws."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.messages.send(type="end")

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Move the bar."""
        self.messages.send(type="advance", steps=steps, note=note)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the system to end this process when its parent ends, however that happens; nothing where
    the system is not Linux.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os._exit(1)


def main(directory: Path) -> None:
    """Do the job and leave, with the status 1 where it failed; processes that still wait for this
    one are ended by the launcher.
    """
    rank = int(os.environ["RANK"])
    with (directory / f"rank-{rank}.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    end_with_parent()
    try:
        report = work(Job.model_validate_json((directory / JOB).read_text(encoding="utf-8")), directory, rank)
        if rank == 0:
            write_text_atomically(directory / REPORT, json.dumps(asdict(report)))
    except BaseException as error:
        traceback.print_exc()
        write_text_atomically(directory / f"rank-{rank}.json", json.dumps(_described(error)))
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def work(job: Job, directory: Path, rank: int) -> Report:
    """Join the others and run the stage."""
    import torch
    from torch import distributed

    device = job.device
    if device != "cpu":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo" if job.device == "cpu" else "nccl", timeout=TIMEOUT)
    context = Context(
        device=device,
        seed=job.seed,
        progress=Messages(directory / MESSAGES if rank == 0 else None),
        data=job.data,
        trust_remote_code=job.trust_remote_code,
        origin=job.origin,
        workspace=job.workspace,
        may_link=job.may_link,
    )
    module, _, name = job.stage.partition(":")
    stage = getattr(importlib.import_module(module), name).model_validate(job.fields)
    assert isinstance(stage, Transform)
    report = stage.run(job.source, job.target, context)
    distributed.barrier()
    distributed.destroy_process_group()
    return report


def _described(error: BaseException) -> dict[str, Any]:
    described: dict[str, Any] = {"time": time.time(), "kind": type(error).__name__}
    if isinstance(error, OptkitError):
        return described | {"what": error.what, "where": error.where, "why": error.why, "remedy": error.remedy}
    return described | told_crash(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
