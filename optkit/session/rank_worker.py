"""One process of a model that is split over several, started by `rank_group.py`.

Its first order has the fields of `Job`; the further ones are calls, which every rank makes, in the
same order: `{"call": "stream", "shape": [1, 512], "new_tokens": 8}`. Tokens come and logits go through
a file without a name that all processes have open.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from optkit.common.frozen import restored
from optkit.devices.peak_memory import Peak, watched_peak
from optkit.kernels.shares import local_part
from optkit.processes.child_program import Parent, answer
from optkit.progress import as_pairs
from optkit.session.opening import open_session
from optkit.session.splitting import join
from optkit.session.torch_session import TorchSession


@dataclass(frozen=True)
class Job:
    """What a rank opens, and which one it is."""

    directory: str
    settings: Sequence[dict[str, Any]]
    """See `frozen.described`."""
    device: str
    """As this process sees it."""
    dtype: str | None
    trust_remote_code: bool
    rank: int
    ranks: int
    meeting: str
    """A file that is not there yet, through which the ranks find each other."""
    timeout_s: float
    """How long a rank waits for the others."""
    threads: int
    memory: int
    """The descriptor of the file for tokens and logits."""


class Rank:
    """An opened share of a model, and what it does when it is called."""

    def __init__(self, job: Job) -> None:
        """Join the others and open the model; raises what `open_session` raises."""
        self._job, self._memory = job, job.memory
        os.set_inheritable(job.memory, False)
        if job.device == "cpu":
            torch.set_num_threads(job.threads)
        join(job.device, job.rank, job.ranks, job.meeting, job.timeout_s)
        settings = [restored(each) for each in job.settings]
        opened = open_session(Path(job.directory), settings, job.device, job.dtype, None, job.trust_remote_code)
        assert isinstance(opened, TorchSession)
        self.session = opened
        self.session.choose = _agreed
        self._answers: Iterator[Tensor] = iter(())
        self._aside = nullcontext() if job.device == "cpu" else torch.cuda.stream(torch.cuda.Stream())
        self._watching, self._peak = ExitStack(), Peak()

    def opened(self) -> dict[str, Any]:
        """Say what is open, and a number that must be the same everywhere."""
        session = self.session
        probe = session.logits(torch.arange(min(4, session.vocabulary)).unsqueeze(0))
        tensors = (*session.model.parameters(), *session.model.buffers())
        storages = [local_part(tensor).untyped_storage() for tensor in tensors]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}  # layers of a graph are views of one
        return {
            "vocabulary": session.vocabulary,
            "positions": session.positions,
            "dtype": session.dtype,
            "product_dtype": session.product_dtype,
            "notes": as_pairs(session.notes),
            "codes_cache": session.codes_cache,
            "compiled": session.compiled,
            "weights": sum(held.values()),
            "probe": [list(probe.shape), probe.double().sum().item()],
        }

    def logits(self, shape: list[int]) -> list[int]:
        """Leave the logits, float32 [batch, sequence, vocabulary], in the common memory, behind the exchanges with
        ranks that had to read their tokens first. The shape is returned.
        """
        found = self.session.logits(self._tokens(shape))
        if self._job.rank == 0:
            os.ftruncate(self._memory, found.numel() * 4)
            with mmap.mmap(self._memory, found.numel() * 4) as shared:
                target = torch.frombuffer(shared, dtype=torch.float32)
                target.copy_(found.reshape(-1))
                del target
        return list(found.shape)

    def stream(self, shape: list[int], new_tokens: int) -> list[int]:
        """Begin to answer; what was begun before is forgotten. Return the first tokens, one of each sequence."""
        self._answers = self.session.stream(self._tokens(shape), new_tokens)
        return self.next()

    def next(self) -> list[int]:
        """Return the next tokens, one of each sequence."""
        tokens = next(self._answers)
        with self._aside:  # on the usual stream a copy would wait for the step that runs by now
            found: list[int] = tokens.tolist()
        return found

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the bytes that this rank reads."""
        return self.session.decode_bytes(batch, context)

    def attention_kernels(self, shape: list[int]) -> str:
        return self.session.attention_kernels(self._tokens(shape))

    def notes(self) -> list[tuple[str, bool]]:
        return as_pairs(self.session.notes)

    def watch(self) -> None:
        """Begin to watch the peak of memory."""
        self._watching.close()
        self._peak = self._watching.enter_context(watched_peak(self._job.device))

    def watched(self) -> dict[str, Any]:
        """Return the peak since then."""
        self._watching.close()
        return vars(self._peak)

    def _tokens(self, shape: list[int]) -> Tensor:
        """Return the tokens of a call, int64 [batch, sequence]."""
        read = os.pread(self._memory, 8 * math.prod(shape), 0)
        return torch.frombuffer(bytearray(read), dtype=torch.int64).view(shape)


def work(parent: Parent) -> None:
    """Open the model, then do what is asked, until the parent ends this process."""
    rank = Rank(Job(**parent.order()))
    parent.tell("result", value=rank.opened())
    while True:
        order = parent.order()
        answer(parent, partial(getattr(rank, order.pop("call")), **order))


def _agreed(logits: Tensor) -> Tensor:
    """float [batch, sequence, vocabulary] -> the likeliest last tokens, int64 [batch, 1].
    They are those of rank 0, so that nobody drifts off.
    """
    chosen = logits[:, -1:].argmax(-1)
    distributed.broadcast(chosen, src=0)
    return chosen
