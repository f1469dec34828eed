"""The processes of a model that is split over several devices: started, called together, and ended
together.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from optkit import errors
from optkit.errors import OptkitError, StageError
from optkit.processes import stopping
from optkit.processes.crashes import with_trace
from optkit.processes.start import python_command, python_environment, start

TIMEOUT_S = 600.0
"""How long a rank waits for the others, and how long the others may take once one has answered."""
GRACE_S = 10.0
"""How long the others may take once one has failed; then they wait for it in vain."""
END_S = 2.0
"""How long a rank may take to notice that it is over."""
PROGRAM = Path(__file__).with_name("rank_start.py")
"""What Python runs as a rank, with the descriptors of its socket and of the common memory."""
PLAIN_ERRORS = ("EvalError", "ResourceError", "SourceError", "StageError")


class Ranks:
    """One process for each share of a model. Every call goes to all of them; they end with this
    process, however that ends.
    """

    def __init__(self, job: dict[str, Any], devices: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        """Start them on devices (`cpu`, `cuda:1`); `job` holds what all of `rank.Job` have in
        common. Raises what opening raises.
        """
        self.devices, self.timeout_s = tuple(devices), timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="optkit-ranks-"))
        self.memory = _nameless_memory()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Connection] = []
        self._end = weakref.finalize(self, _end, self._processes, self._channels, self.memory, self._folder)
        self._broken = ""
        count = len(self.devices)
        common = {**job, "ranks": count, "meeting": str(self._folder / "meeting"), "timeout_s": timeout_s}
        try:
            for index, device in enumerate(self.devices):
                self._start(index, device)
                self._send(
                    index,
                    {**common, "rank": index, "device": device, "threads": max(1, torch.get_num_threads() // count)},
                )
            self.opened: list[dict[str, Any]] = self._collect(None)
        except BaseException:
            self.close()
            raise

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Let all ranks make a call; their results, in order. Raises the error of the first that
        fails, StageError where one is gone.
        """
        if self._broken:
            raise StageError(
                "its processes were ended",
                where="tensor_parallel",
                why=f"Before, {self._broken}",
                remedy="Open it again",
            )
        try:
            for index in range(len(self.devices)):
                self._send(index, {"call": name, **arguments})
            return self._collect(self.timeout_s)
        except KeyboardInterrupt:  # an answer that nobody waited for would be taken for that of the next call
            self._broken = self._broken or "it was interrupted"
            self._end()
            raise

    @property
    def alive(self) -> bool:
        """Whether they can be called."""
        return not self._broken

    def close(self) -> None:
        """End all of them."""
        self._broken = self._broken or "the session was closed"
        self._end()

    def _start(self, index: int, device: str) -> None:
        ours, theirs = socket.socketpair()
        threads = str(max(1, torch.get_num_threads() // len(self.devices)))
        on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads} if device == "cpu" else {}
        variables = python_environment(TOKENIZERS_PARALLELISM="false", **on_cpu)
        if device == "cpu" and sys.platform == "linux":
            variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = python_command(str(PROGRAM), str(theirs.fileno()), str(self.memory))
        with theirs, self._log(index).open("wb") as log:
            self._processes.append(
                start(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(), self.memory),
                    env=variables,
                )
            )
        self._channels.append(Connection(ours.detach()))

    def _send(self, index: int, message: dict[str, Any]) -> None:
        try:
            self._channels[index].send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise self._gone(index) from error

    def _collect(self, timeout_s: float | None) -> list[Any]:
        """Return an answer from each. Once one has failed, or answered, the others have a limited
        time; else there is none.
        """
        results: list[Any] = [None] * len(self._channels)
        failed: dict[int, OptkitError] = {}
        waiting = {channel: index for index, channel in enumerate(self._channels)}
        deadline = None
        while waiting:
            ready = wait(list(waiting), timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._fail(next(iter(failed.values()), self._silent(sorted(waiting.values()))))
            for channel in ready:
                assert isinstance(channel, Connection)
                index = waiting.pop(channel)
                try:
                    message = json.loads(channel.recv_bytes())
                except (EOFError, OSError):
                    raise self._gone(index) from None
                if "error" in message:
                    failed[index] = self._error(index, message["error"])
                else:
                    results[index] = message["done"]
            if failed and waiting:
                deadline = min(deadline or float("inf"), time.monotonic() + GRACE_S)
            elif timeout_s is not None and deadline is None:
                deadline = time.monotonic() + timeout_s
        if failed and len(failed) < len(self._channels):
            raise self._fail(next(iter(failed.values())))
        if failed:
            raise failed[min(failed)]
        return results

    def _error(self, index: int, said: dict[str, Any]) -> OptkitError:
        """Return what a rank raised, as ours."""
        if said["class"] in PLAIN_ERRORS:
            kind: type[OptkitError] = getattr(errors, said["class"])
            return kind(said["what"], where=said["where"], why=said["why"], remedy=said["remedy"])
        return with_trace(
            StageError(f"{self._name(index)} failed: {said['what']}", where="tensor_parallel"), said, self._name(index)
        )

    def _gone(self, index: int) -> OptkitError:
        """Return how a rank ended that should not have, with its last words."""
        stopping.check()
        with suppress(subprocess.TimeoutExpired):
            self._processes[index].wait(END_S)
        status = self._processes[index].returncode
        how = f"was ended by {signal.Signals(-status).name}" if status and status < 0 else f"ended with status {status}"
        if status is None:
            how = "says nothing any more"
        memory = "; the system ends a process so when memory runs out" if status == -signal.SIGKILL else ""
        said = [
            line.strip()
            for line in self._log(index).read_text(encoding="utf-8", errors="replace").splitlines()
            if line.strip()
        ]
        why = f"Its last words: {said[-1]}" if said else "It said nothing"
        return self._fail(StageError(f"{self._name(index)} {how}{memory}", where="tensor_parallel", why=why))

    def _silent(self, indices: Sequence[int]) -> OptkitError:
        names = ", ".join(self._name(index) for index in indices)
        return StageError(
            f"{names} did not answer within {self.timeout_s:.0f} s of the others",
            where="tensor_parallel",
            remedy="Run it again with NCCL_DEBUG=INFO, and `optkit doctor --links`, to see which link fails",
        )

    def _fail(self, error: OptkitError) -> OptkitError:
        """End all: the ranks that are left wait for one that does not come."""
        self._broken = error.what
        self._end()
        return error

    def _name(self, index: int) -> str:
        return f"process {index + 1} of {len(self.devices)} ({self.devices[index]})"

    def _log(self, index: int) -> Path:
        return self._folder / f"{index}.log"


def _nameless_memory() -> int:
    """Return the descriptor of memory that two processes can share."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("optkit-logits")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _end(
    processes: Sequence[subprocess.Popen[bytes]], channels: Sequence[Connection], memory: int, folder: Path
) -> None:
    """End the processes with everything that they started."""
    for channel in channels:
        channel.close()
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        stopping.release(process.pid)
        process.wait()
    os.close(memory)
    shutil.rmtree(folder, ignore_errors=True)
