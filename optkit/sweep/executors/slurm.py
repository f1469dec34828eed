"""Executor `slurm`: recipes as jobs of Slurm, submitted by submitit."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from optkit.environment import unmet
from optkit.errors import MissingPackageError, ResourceError, UsageError, first_line
from optkit.sweep.executors.base import LOGS, Order
from optkit.sweep.executors.nodes import NodesExecutor
from optkit.sweep.executors.on_node import make_on_node

MINUTES = 24 * 60
"""How long a job may take, if the user does not say; submitit's own default is five minutes."""
LOOK_S = 5.0
"""How often Slurm is asked what its queue holds."""
GRACE_S = 15.0
"""How long a shared disk may take to show what a job that ended left."""
LOOKS = 60
"""So often the queue may lack a job that it never had."""
QUEUE = ("squeue", "--states=all", "--noheader", "--format=%i|%T|%r")
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)


class SlurmExecutor(NodesExecutor):
    """Makes each artifact in a job that asks for the CPUs, GPUs and memory that its plan says.

    The sweep's directory lies on a disk that all nodes share: orders and what becomes of them go
    through files in it. A job that is preempted, or whose time is over, is queued again.
    """

    settings: ClassVar[frozenset[str]] = frozenset({"slurm"})

    def __init__(self, slurm: Mapping[str, str] | None = None) -> None:
        """Take options of sbatch, e.g. `partition`; `time` counts minutes. `cluster=local` runs the
        jobs here. Raises MissingPackageError without submitit, UsageError without Slurm.
        """
        super().__init__()
        if unmet(["submitit"]):
            raise MissingPackageError("submitit", where="--executor slurm", install="optkit[slurm]")
        self._options = dict(slurm or {})
        self._cluster = self._options.pop("cluster", "slurm")
        self._minutes = self._options.pop("time", str(MINUTES))
        if not self._minutes.isdecimal():
            what, remedy = f"'{self._minutes}' is no number of minutes", "Write --slurm time=90"
            raise UsageError(what, where="--slurm time", remedy=remedy)
        self._jobs: dict[str, Any] = {}
        self._read: dict[str, Any] = {}
        self._queue = Queue()

    def start(self, order: Order) -> None:
        """Make the folder of the jobs."""
        import submitit

        folder = (order.out.parent / LOGS / "slurm").absolute()
        if self._cluster == "slurm" and submitit.SlurmExecutor.affinity() < 0:
            remedy = "Run it where Slurm is, or try it with --slurm cluster=local"
            raise UsageError("there is no srun here", where="--executor slurm", remedy=remedy)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        try:
            self._submitit = submitit.AutoExecutor(folder=folder, cluster=self._cluster)
        except ValueError as error:
            what, remedy = f"there is no cluster '{self._cluster}'", "Take slurm, local or debug"
            raise UsageError(what, where="--slurm cluster", remedy=remedy) from error

    def submit(self, order: Order, described: Mapping[str, Any]) -> None:
        """Make a job of an order; raises ResourceError if Slurm refuses it."""
        import submitit

        lines = self._folder / f"{order.name}.lines"
        lines.write_text("")
        try:
            self._submitit.update_parameters(
                name=order.name,
                timeout_min=int(self._minutes),
                cpus_per_task=order.needs.cpus,
                mem_gb=-(-order.needs.ram_bytes // 2**30),
                slurm_additional_parameters=self._options,
                **({"gpus_per_node": order.needs.gpus} if order.needs.gpus else {}),
            )
            self._jobs[order.name] = self._submitit.submit(Make(), described, lines)
        except submitit.core.utils.FailedJobError as error:
            remedy = "Change what it asks for, e.g. --slurm mem=16GB or --slurm partition=gpu"
            raise ResourceError(
                f"Slurm refuses the job: {first_line(error)}", where=order.name, remedy=remedy
            ) from error
        self._read[order.name] = self._open.enter_context(lines.open(encoding="utf-8"))

    def results(self, wait_s: float) -> dict[str, dict[str, Any]]:
        """Return what jobs returned, or how Slurm ended them."""
        until = time.monotonic() + wait_s
        while not (done := [name for name, job in self._jobs.items() if self._is_done(job)]):
            if time.monotonic() >= until:
                break
            time.sleep(0.1)
        return {name: self._result(self._jobs.pop(name)) for name in done}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Return what jobs wrote since, and why they wait."""
        for name, job in self._jobs.items():
            if why := self._queue.news(job.job_id):
                yield name, json.dumps({"type": "begin"})
                yield name, json.dumps({"type": "say", "line": f"waits in Slurm's queue: {why}"})
        for name, file in self._read.items():
            place = file.tell()
            while (line := file.readline()).endswith("\n"):
                yield name, line
                place = file.tell()
            file.seek(place)  # a line may be half there

    def cancel(self) -> None:
        for job in self._jobs.values():
            job.cancel(check=False)
        self._jobs.clear()

    def _is_done(self, job: Any) -> bool:
        """Say whether a job left its result, or will leave none."""
        if self._cluster != "slurm":
            return bool(job.done())
        return job.paths.result_pickle.exists() or self._queue.has_ended(job.job_id)

    def _result(self, job: Any) -> dict[str, Any]:
        """Return what a job returned, or how it ended."""
        import submitit

        state = self._queue.state(job.job_id)
        ended = f"ended as {state}" if state else f"was not in the queue at {LOOKS} looks and ended"
        remedy = "" if state else f". Look at `sacct -j {job.job_id}`, then run the sweep again"
        try:
            if self._cluster == "slurm" and not job.paths.result_pickle.exists():
                raise submitit.core.utils.UncompletedJobError(f"job {job.job_id} {ended} without a result{remedy}")
            found: dict[str, Any] = job.result()
        except submitit.core.utils.UncompletedJobError as error:
            log = f"{job.stdout() or ''}\n{job.stderr() or ''}"
            return {"verdict": None, "reason": f"Slurm: {first_line(error)}", "seconds": 0.0, "log": log}
        return found


class Queue:
    """What Slurm says of this user's jobs.

    submitit asks `sacct`, which knows nothing if a cluster keeps no accounts, and asks it every ten
    minutes in the end. `squeue` is always there, and has a job until minutes after its end.
    """

    def __init__(self) -> None:
        self._asked, self._jobs = float("-inf"), dict[str, tuple[str, str]]()
        self._ended: dict[str, float] = {}
        self._looks, self._first = 0, dict[str, int]()
        self._told: dict[str, str] = {}

    def has_ended(self, job: str) -> bool:
        """Say whether a job ended, and whatever it left can be seen."""
        self._look()
        unlisted = not self.state(job) and self._looks - self._first.setdefault(job, self._looks) >= LOOKS
        if self.state(job) not in ENDED and not unlisted:
            self._ended.pop(job, None)
            return False
        return self._ended.setdefault(job, time.monotonic()) + GRACE_S <= time.monotonic()

    def state(self, job: str) -> str:
        return self._jobs.get(job, ("", ""))[0]

    def news(self, job: str) -> str:
        """Return why a job waits, if that is another reason than was told last."""
        state, why = self._jobs.get(job, ("", ""))
        why = why if state == "PENDING" and why != "None" else ""
        before, self._told[job] = self._told.get(job, ""), why
        return why if why != before else ""

    def _look(self) -> None:
        if time.monotonic() - self._asked < LOOK_S:
            return
        self._asked = time.monotonic()
        said = subprocess.run([*QUEUE, f"--user={os.getuid()}"], capture_output=True, text=True, check=False)
        if said.returncode == 0:  # else Slurm does not answer now, and its jobs go on
            self._looks += 1
            found = [line.split("|", 2) for line in said.stdout.splitlines()]
            gone = dict.fromkeys(self._jobs, ("COMPLETED", ""))
            self._jobs = gone | {job: (state, why) for job, state, why in found}


class Make:
    """The job of an order, as submitit calls it."""

    def __call__(self, order: Mapping[str, Any], lines: Path) -> dict[str, Any]:
        """Make the order, and write what is said meanwhile."""
        with lines.open("a", encoding="utf-8") as file:
            return make_on_node(order, file)

    def checkpoint(self, order: Mapping[str, Any], lines: Path) -> Any:
        """Return what is queued in its place when Slurm takes the node away."""
        import submitit

        return submitit.helpers.DelayedSubmission(self, order, lines)
