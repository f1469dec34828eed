"""Run a stage in several processes, one for each device.
`accelerate launch` starts a worker of ours, watched until the last has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from optkit.common.frozen import described
from optkit.environment import cpu_cores
from optkit.errors import OptkitError, StageError
from optkit.processes import stopping
from optkit.processes.conversation import Bars
from optkit.processes.crashes import ending, error_of, keep_trace, last_words
from optkit.processes.start import ask_to_end, end_group, python_command, python_environment, start
from optkit.stage import Context, Report, Transform
from optkit.training.worker import JOB, Job

POLL_S = 0.1
END_S = 20.0
"""How long the launcher may take to end its processes."""
LAUNCHER_LOG = "launcher.log"
DIED = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(-\d+) \(pid")
"""How torch's launcher tells of a process that a signal ended."""


def launch(
    stage: Transform,
    source: Path,
    target: Path,
    context: Context,
    devices: int,
    parallel: Literal["ddp", "fsdp"],
    where: str,
) -> Report:
    """Return the report of `stage.run`, run by so many processes together.
    They end with this one, however that ends.

    Raises the error of the process that failed, or StageError with the rank and the last lines of
    one that was lost; what they printed stays then in the workspace.
    """
    with _directory(context.workspace) as directory:
        job = Job(
            stage=described(stage),
            source=source.absolute(),
            target=target.absolute(),
            device=context.device.partition(":")[0],
            seed=context.seed,
            data=context.data.absolute() if context.data else None,
            trust_remote_code=context.trust_remote_code,
            origin=context.origin.absolute() if context.origin else None,
            workspace=context.workspace.absolute() if context.workspace else None,
            may_link=context.may_link,
        )
        (directory / JOB).write_text(job.model_dump_json(), encoding="utf-8")
        _run(_command(directory, devices, parallel), directory, devices, context)
        last = _last_message(_told(directory, 0))
        if last.get("type") != "result":
            raise _error(directory, devices, where)
        return Report(**last["value"])


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


def _command(directory: Path, devices: int, parallel: Literal["ddp", "fsdp"]) -> list[str]:
    """Return the command line.
    A configuration of our own stands in place of the user's for accelerate.
    """
    kind = "FSDP" if parallel == "fsdp" else "MULTI_GPU"
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {kind}",
        "mixed_precision: 'no'",
        f"num_processes: {devices}",
    ]
    lines += ["num_machines: 1", "machine_rank: 0", "main_training_function: main", "use_cpu: false"]
    lines += ["fsdp_config: {fsdp_version: 2}"] if parallel == "fsdp" else []
    (directory / "accelerate.yaml").write_text("\n".join([*lines, ""]), encoding="utf-8")
    options = ["--config_file", str(directory / "accelerate.yaml"), "--main_process_port", "0"]
    return python_command("-m", "accelerate.commands.launch", *options, "-m", "optkit.training.worker", str(directory))


def _variables(devices: int) -> dict[str, str]:
    """Return the environment of the processes: our packages, and each its share of the cores."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cpu_cores() // devices))
    variables = python_environment(OMP_NUM_THREADS=threads, TOKENIZERS_PARALLELISM="false")
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_"))
    }


def _run(command: list[str], directory: Path, devices: int, context: Context) -> None:
    """Run the launcher until it ends, drawing what the first process tells.

    All processes hear at the end of stdin that nobody waits for them any more.
    """
    _told(directory, 0).touch()
    with (directory / LAUNCHER_LOG).open("wb") as log:
        process = start(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=_variables(devices))
    try:
        with _told(directory, 0).open("rb") as told, Bars(context.progress) as bars:
            over = False
            while not over:
                over = process.poll() is not None
                for message in _new_messages(told):
                    bars.draw(message.pop("type"), message)
                stopping.check()
                time.sleep(0 if over else POLL_S)
    finally:
        ask_to_end(process, signal.SIGTERM, END_S)
        end_group(process)


def _told(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.jsonl"


def _new_messages(told: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield what was written since the last time, up to the last whole line."""
    while (line := told.readline()).endswith(b"\n"):
        yield json.loads(line)
    told.seek(-len(line), os.SEEK_CUR)


def _last_message(told: Path) -> dict[str, Any]:
    if not told.is_file():
        return {}
    with told.open("rb") as file:
        return deque([{}, *_new_messages(file)], maxlen=1).pop()


def _error(directory: Path, devices: int, where: str) -> OptkitError:
    """Return why there is no report.
    It is a process that a signal ended, else the first error, those of users before those of the
    code.
    """
    remedy = f"What they printed is in {directory}; the training goes on from its last checkpoint when it is run again"
    log = directory / LAUNCHER_LOG
    for rank, status in DIED.findall(log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""):
        if -int(status) != signal.SIGTERM:  # which is how the launcher ends those that are left
            what, why = f"rank {rank} of {devices} {ending(int(status))}", last_words(directory / f"rank-{rank}.log")
            return StageError(what, where=where, why=why, remedy=remedy)
    failed = {rank: said for rank in range(devices) if (said := _last_message(_told(directory, rank))).get("kinds")}
    if not failed:
        what, remedy = f"{devices} processes could not be started", f"The launcher's output is in {directory}"
        return StageError(what, where=where, why=last_words(log), remedy=remedy)
    errors = {rank: error_of(failed[rank], f"rank {rank} of {devices}") for rank in failed}
    refused = [rank for rank in errors if isinstance(errors[rank], OptkitError)]
    first = min(refused or failed, key=lambda rank: float(failed[rank]["time"]))
    error = errors[first]
    if isinstance(error, OptkitError):
        rank = "" if len(refused) == devices else f", rank {first} of {devices}"
        OptkitError.__init__(error, error.what, where=f"{error.where}{rank}", why=error.why, remedy=error.remedy)
        return error
    log = directory / f"rank-{first}.log"
    unforeseen = StageError(str(error), where=where, why=last_words(log), remedy=remedy)
    unforeseen.__cause__ = error
    keep_trace(failed[first], log)
    return unforeseen
