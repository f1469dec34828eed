"""The processes of a model split over devices: started, called together, and ended together."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.errors import OptkitError, StageError
from optkit.processes.child import Child, collect
from optkit.processes.commands import python_environment
from optkit.processes.crashes import ChildEndedError, ChildError

WHERE = "tensor_parallel"
PROGRAM = "optkit.session.rank_worker"
"""What runs as a rank."""
TIMEOUT_S = 600.0
"""How long a rank waits for the others, and how long the others may take once one has answered."""


class RankGroup:
    """One process for each share of a model. Every call goes to all of them; they end with this
    process, however that ends.
    """

    def __init__(self, job: dict[str, Any], devices: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        """Start them on devices (`cpu`, `cuda:1`).
        `job` holds what all of `rank.Job` have in common.
        """
        self.devices, self.timeout_s = tuple(devices), timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="optkit-ranks-"))
        self.memory = _nameless_memory()
        self._children: list[Child] = []
        self._end = weakref.finalize(self, _end, self._children, self.memory, self._folder)
        self._broken = ""
        count = len(self.devices)
        meeting = str(self._folder / "meeting")
        common = {**job, "ranks": count, "meeting": meeting, "timeout_s": timeout_s, "memory": self.memory}
        try:
            for index, device in enumerate(self.devices):
                threads = max(1, torch.get_num_threads() // count)
                self._start(index, device, threads)
                self._children[index].send({**common, "rank": index, "device": device, "threads": threads})
            self.opened: list[dict[str, Any]] = self._collect(None)
        except BaseException:
            self.close()
            raise

    def call(self, name: str, tokens: Tensor | None = None, **arguments: Any) -> list[Any]:
        """Let all ranks make a call; their results, in order. Raises the error of the first that
        fails, StageError if one is gone.

        tokens: int64 [batch, sequence], through the common memory: as text thousands of them take milliseconds.
        """
        if self._broken:
            raise StageError(
                "its processes were ended", where=WHERE, why=f"Before, {self._broken}", remedy="Open it again"
            )
        if tokens is not None:
            os.pwrite(self.memory, tokens.to("cpu", torch.int64).numpy().tobytes(), 0)
            arguments["shape"] = list(tokens.shape)
        try:
            for child in self._children:
                child.send({"call": name, **arguments})
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

    def _start(self, index: int, device: str, threads: int) -> None:
        on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)} if device == "cpu" else {}
        variables = python_environment(TOKENIZERS_PARALLELISM="false", **on_cpu)
        log = self._folder / f"{index}.log"
        child = Child(PROGRAM, name=self._name(index), env=variables, log=log, pass_fds=(self.memory,))
        self._children.append(child)

    def _collect(self, timeout_s: float | None) -> list[Any]:
        """Return an answer from each. Once one has failed, or answered, the others have a limited
        time; else there is none.
        """
        results, errors = collect(self._children, timeout_s=timeout_s)
        if len(results) == len(self._children):
            return [results[index] for index in range(len(results))]
        lost = [error for error in errors.values() if isinstance(error, ChildEndedError)]
        if len(errors) == len(self._children) and not lost:
            raise _ours(errors[min(errors)])
        first = next(iter([*lost, *errors.values()]), None)
        silent = [index for index in range(len(self._children)) if index not in results]
        error = _ours(first) if first else self._silent(silent)
        self._broken = error.what
        self._end()  # the ranks that are left wait for one that does not come
        raise error

    def _silent(self, indices: Sequence[int]) -> OptkitError:
        names = ", ".join(self._name(index) for index in indices)
        return StageError(
            f"{names} did not answer within {self.timeout_s:.0f} s of the others",
            where=WHERE,
            remedy="Run it again with NCCL_DEBUG=INFO, and `optkit doctor --links`, to see which link fails",
        )

    def _name(self, index: int) -> str:
        return f"process {index + 1} of {len(self.devices)} ({self.devices[index]})"


def _ours(error: OptkitError | ChildError) -> OptkitError:
    if isinstance(error, OptkitError):
        return error
    told = StageError(str(error), where=WHERE, why=error.last_words)
    told.__cause__ = error
    return told


def _nameless_memory() -> int:
    """Return the descriptor of memory that two processes can share."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("optkit-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _end(children: Sequence[Child], memory: int, folder: Path) -> None:
    """End the processes with everything that they started."""
    for child in children:
        child.kill()
    os.close(memory)
    shutil.rmtree(folder, ignore_errors=True)
