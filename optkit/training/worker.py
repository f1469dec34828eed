"""One process of a training on several devices, started by `accelerate launch`.
It runs as `python -m optkit.training.worker DIRECTORY`.

DIRECTORY/job.json       what to do: the fields of `Job`, written by optkit/training/launch.py
DIRECTORY/rank-N.log     what each process prints
DIRECTORY/rank-N.jsonl   what each tells, see optkit/processes/worker.py; progress is the first's
stdin                    is open for as long as the process lives that wants the training
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from optkit.common.frozen import Frozen, restored
from optkit.processes.worker import Parent, answer
from optkit.progress import SilentProgress
from optkit.stage import Context, Report, Transform

JOB = "job.json"
TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others: longer than writing a checkpoint takes."""


class Job(Frozen):
    """What all processes do together."""

    stage: dict[str, Any]
    """See `frozen.described`."""
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


def main(directory: Path) -> None:
    """Do the job and leave, with the status 1 if it failed.
    The launcher ends processes that still wait for this one.
    """
    rank = int(os.environ["RANK"])
    with (directory / f"rank-{rank}.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with (directory / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as lines:
        parent = Parent(lines)
        parent.listen()
        status = answer(parent, lambda: asdict(work(directory, rank, parent)))
    sys.stdout.flush()
    os._exit(status)


def work(directory: Path, rank: int, parent: Parent) -> Report:
    """Join the others and run the stage."""
    import torch
    from torch import distributed

    job = Job.model_validate_json((directory / JOB).read_text(encoding="utf-8"))
    device = job.device
    if device != "cpu":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo" if job.device == "cpu" else "nccl", timeout=TIMEOUT)
    context = Context(
        device=device,
        seed=job.seed,
        progress=parent if rank == 0 else SilentProgress(),
        data=job.data,
        trust_remote_code=job.trust_remote_code,
        origin=job.origin,
        workspace=job.workspace,
        may_link=job.may_link,
    )
    stage = restored(job.stage)
    assert isinstance(stage, Transform)
    report = stage.run(job.source, job.target, context)
    distributed.barrier()
    distributed.destroy_process_group()
    return report


if __name__ == "__main__":
    main(Path(sys.argv[1]))
