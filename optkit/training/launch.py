"""Run a stage in several processes, one for each device: `accelerate launch` with a worker of ours,
watched until the last has ended.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optkit import errors
from optkit.environment import cpu_cores
from optkit.errors import OptkitError, StageError
from optkit.processes import stopping
from optkit.processes.crashes import with_trace
from optkit.processes.start import ask_to_end, end_group, python_command, python_environment, start
from optkit.progress import Progress, Task
from optkit.stage import Context, Report, Transform
from optkit.training.worker import JOB, MESSAGES, REPORT, Job, end_with_parent

POLL_S = 0.1
END_S = 20.0
"""How long the launcher may take to end its processes."""
LAST_LINES = 3
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
    """Return the report of `stage.run`, run by so many processes together; they end with this one,
    however that ends.

    Raises the error of the process that failed, or StageError with the rank and the last lines of
    one that was lost; what they printed stays then in the workspace.
    """
    with _directory(context.workspace) as directory:
        module = type(stage)
        job = Job(
            stage=f"{module.__module__}:{module.__qualname__}",
            fields=stage.model_dump(mode="json"),
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
        if not (directory / REPORT).is_file():
            raise _error(directory, devices, where)
        return Report(**json.loads((directory / REPORT).read_text(encoding="utf-8")))


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
    """Return the command line; a configuration of our own stands in place of the user's for
    accelerate.
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
    return python_command("-m", "optkit.training.launch", *options, "-m", "optkit.training.worker", str(directory))


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
    """Run the launcher until it ends, drawing what the first process says."""
    with (directory / LAUNCHER_LOG).open("wb") as log:
        process = start(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_variables(devices))
        try:
            with contextlib.ExitStack() as bars:
                heard = Heard(directory / MESSAGES, context.progress, bars)
                while process.poll() is None:
                    heard.listen()
                    stopping.check()
                    time.sleep(POLL_S)
                heard.listen()
        finally:
            _end(process)


@dataclass
class Heard:
    """What the first process has said so far."""

    path: Path
    progress: Progress
    bars: contextlib.ExitStack
    task: Task | None = None
    place: int = 0

    def listen(self) -> None:
        """Pass on what is new."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self.place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.place += len(whole)
        for line in whole.splitlines():
            self._pass_on(json.loads(line))

    def _pass_on(self, message: Mapping[str, Any]) -> None:
        match message["type"]:
            case "start":
                self.task = self.bars.enter_context(
                    self.progress.task(message["label"], message["total"], message["unit"])
                )
            case "advance" if self.task is not None:
                self.task.advance(message["steps"], message["note"])
            case "end":
                self.bars.pop_all().close()
                self.task = None
            case "say":
                self.progress.say(message["line"])
            case "warn":
                self.progress.warn(message["line"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its processes; those that are left end with it."""
    ask_to_end(process, signal.SIGTERM, END_S)
    end_group(process)


def _error(directory: Path, devices: int, where: str) -> OptkitError:
    """Return why there is no report: a process that a signal ended, else the first error, those of
    users before those of the code.
    """
    place = f"What they printed is in {directory}; the training goes on from its last checkpoint when it is run again"
    launcher = _text(directory / LAUNCHER_LOG)
    for rank, status in DIED.findall(launcher):
        number = signal.Signals(-int(status))
        if number is not signal.SIGTERM:  # which is how the launcher ends those that are left
            memory = " (the system ends a process so when memory runs out)" if number is signal.SIGKILL else ""
            what = f"rank {rank} of {devices} was ended by {number.name}{memory}"
            return StageError(what, where=where, why=_last_words(directory / f"rank-{rank}.log"), remedy=place)
    told = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(directory.glob("rank-*.json"))]
    if not told:
        what = f"{devices} processes could not be started"
        return StageError(
            what,
            where=where,
            why=_last_words(directory / LAUNCHER_LOG),
            remedy=f"The launcher's output is in {directory}",
        )
    path, first = min(told, key=lambda each: ("where" not in each[1], each[1]["time"]))
    if "where" in first:
        kind = getattr(errors, first["kind"], StageError)
        refused = sum("where" in said for _, said in told)
        rank = "" if refused == devices else f", rank {path.stem.removeprefix('rank-')} of {devices}"
        made: OptkitError = kind.__new__(kind)
        OptkitError.__init__(
            made, first["what"], where=f"{first['where']}{rank}", why=first["why"], remedy=first["remedy"]
        )
        return made
    rank = f"rank {path.stem.removeprefix('rank-')} of {devices}"
    failed = StageError(
        f"{rank} failed with {first['what']}", where=where, why=_last_words(path.with_suffix(".log")), remedy=place
    )
    return with_trace(failed, first, rank)


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in _text(log).splitlines() if line.strip()]
    return f"Its last lines: {' / '.join(lines[-LAST_LINES:])}" if lines else "It said nothing"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


if __name__ == "__main__":  # the launcher's process: `accelerate launch` that ends with the one that started it
    end_with_parent(signal.SIGTERM)
    from accelerate.commands.launch import main

    main()
