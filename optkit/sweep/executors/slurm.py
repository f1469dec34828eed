"""Executor `slurm`: recipes as jobs of Slurm, submitted by submitit."""

from __future__ import annotations

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
            raise UsageError(f"'{self._minutes}' is no number of minutes", where="--slurm time")
        self._jobs: dict[str, Any] = {}
        self._read: dict[str, Any] = {}

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
            raise ResourceError(f"Slurm refuses the job: {first_line(error)}", where=order.name) from error
        self._read[order.name] = self._open.enter_context(lines.open(encoding="utf-8"))

    def results(self, wait_s: float) -> dict[str, dict[str, Any]]:
        """Return what jobs returned, or how Slurm ended them."""
        until = time.monotonic() + wait_s
        while not (done := [name for name, job in self._jobs.items() if job.done()]) and time.monotonic() < until:
            time.sleep(0.1)
        return {name: _result(self._jobs.pop(name)) for name in done}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Return what jobs wrote since."""
        for name, file in self._read.items():
            place = file.tell()
            while (line := file.readline()).endswith("\n"):
                yield name, line
                place = file.tell()
            file.seek(place)  # a line may be half there

    def cancel(self) -> None:
        """Cancel the jobs."""
        for job in self._jobs.values():
            job.cancel(check=False)
        self._jobs.clear()


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


def _result(job: Any) -> dict[str, Any]:
    import submitit

    try:
        found: dict[str, Any] = job.result()
    except submitit.core.utils.UncompletedJobError as error:
        log = f"{job.stdout()}\n{job.stderr()}"
        return {"verdict": None, "reason": f"Slurm: {first_line(error)}", "seconds": 0.0, "log": log}
    return found
