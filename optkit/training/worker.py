"""One process of a stage on several devices, started by optkit/training/launch.py."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from optkit.common.frozen import Frozen, restored
from optkit.processes.child_program import Parent, answer, importing
from optkit.progress import SilentProgress
from optkit.stage import Context, Report, Transform

TIMEOUT_S = 1800.0
"""How long a process waits for the others: longer than writing a checkpoint or a finished block takes."""

PATHS = ("data", "origin", "workspace")
"""Fields of a `Context` that are paths or None."""


class Job(Frozen):
    """What all processes do together, and which one this is."""

    stage: dict[str, Any]
    """See `frozen.described`."""
    source: Path
    target: Path
    device: str
    """`cpu` or `cuda`, of which each process takes its own."""
    context: dict[str, Any]
    """The other fields of a `Context` that are JSON values."""
    rank: int
    ranks: int
    meeting: Path
    """A file that is not there yet, through which they find each other."""


def work(parent: Parent) -> None:
    """Do the job and leave at once: processes of a group cannot always end as others do."""
    job = Job.model_validate(parent.order())
    status = answer(parent, lambda: asdict(run(job, parent)))
    sys.stdout.flush()
    os._exit(status)


def run(job: Job, parent: Parent) -> Report:
    """Join the others and run the stage; the first process tells its progress."""
    device = "cpu" if job.device == "cpu" else f"cuda:{job.rank}"
    stage = restored(job.stage)
    assert isinstance(stage, Transform)
    with importing(), ThreadPoolExecutor(1) as beside:
        from torch import distributed

        from optkit.devices.process_group import join

        beside.submit(import_module, "optkit.model.skeleton")  # every stage needs it, and transformers with it
        join(device, job.rank, job.ranks, str(job.meeting), TIMEOUT_S)
        stage.begin(device)
    paths = {name: value and Path(value) for name, value in job.context.items() if name in PATHS}
    progress = parent if job.rank == 0 else SilentProgress()
    context = Context(**{**job.context, **paths, "device": device, "progress": progress})
    report = stage.run(job.source, job.target, context)
    distributed.barrier()
    distributed.destroy_process_group()
    return report
