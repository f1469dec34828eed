"""Run a stage in several processes, one for each device, which end together: a training, or a calibration."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from optkit.common.frozen import described
from optkit.environment import cpu_cores
from optkit.errors import OptkitError, StageError
from optkit.processes.child import Child, collect
from optkit.processes.commands import python_environment
from optkit.processes.crashes import ChildEndedError, ChildError
from optkit.stage import Context, Report, Transform
from optkit.training.worker import PATHS, Job

WORKER = "optkit.training.worker"


def launch(stage: Transform, source: Path, target: Path, context: Context, devices: int, where: str) -> Report:
    """Return the report of `stage.run`, run by so many processes together.
    They end with this one, however that ends.

    Raises the error of the process that failed, or StageError with the rank and the last lines of
    one that was lost; what they printed stays then in the workspace.
    """
    with _directory(context.workspace) as directory, contextlib.ExitStack() as running:
        children = []
        for rank in range(devices):
            name, log = f"rank {rank} of {devices}", directory / f"rank-{rank}.log"
            child = running.enter_context(Child(WORKER, name=name, log=log, env=_variables(devices)))
            child.send(_job(stage, source, target, context, rank, devices, directory).model_dump(mode="json"))
            children.append(child)
        results, errors = collect(children, context.progress)
        if len(results) < devices:
            raise _error(errors, directory, devices, where)
        return Report(**results[0])


def _job(stage: Transform, source: Path, target: Path, context: Context, rank: int, ranks: int, directory: Path) -> Job:
    paths = {name: str(path.absolute()) if (path := getattr(context, name)) else None for name in PATHS}
    told = {"seed": context.seed, "trust_remote_code": context.trust_remote_code, "may_link": context.may_link}
    return Job(
        stage=described(stage),
        source=source.absolute(),
        target=target.absolute(),
        device=context.device.partition(":")[0],
        context={**told, **paths},
        rank=rank,
        ranks=ranks,
        meeting=directory.absolute() / "meeting",
    )


@contextlib.contextmanager
def _directory(workspace: Path | None) -> Iterator[Path]:
    """Give an empty directory for the processes, gone afterwards unless they fail."""
    if workspace is None:
        directory = Path(tempfile.mkdtemp(prefix="optkit-ranks-"))
    else:
        directory = workspace / "ranks"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    yield directory
    shutil.rmtree(directory)


def _variables(devices: int) -> dict[str, str]:
    """Return the environment of the processes: our packages, and each its share of the cores."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cpu_cores() // devices))
    return python_environment(OMP_NUM_THREADS=threads, TOKENIZERS_PARALLELISM="false")


def _error(errors: Mapping[int, OptkitError | ChildError], directory: Path, devices: int, where: str) -> OptkitError:
    """Return why there is no report.
    It is a process that is lost, else the first error, those of users before those of the code.
    """
    lost = [rank for rank, error in errors.items() if isinstance(error, ChildEndedError)]
    refused = [rank for rank, error in errors.items() if isinstance(error, OptkitError)]
    first = next(iter([*lost, *refused, *sorted(errors, key=lambda rank: getattr(errors[rank], "time", 0.0))]))
    error = errors[first]
    if isinstance(error, OptkitError):
        rank = "" if len(refused) == devices else f", rank {first} of {devices}"
        OptkitError.__init__(error, error.what, where=f"{error.where}{rank}", why=error.why, remedy=error.remedy)
        return error
    remedy = f"What they printed is in {directory}; what was finished is kept, so run it again to go on"
    unforeseen = StageError(str(error), where=where, why=error.last_words, remedy=remedy)
    unforeseen.__cause__ = error
    return unforeseen
