"""One process of a model that is split over several, started by `ranks.py` through `rank_start.py`.

In: one JSON message, the fields of `Job`; then one for each call, which every rank makes, in the
same order:
`{"call": "stream", "tokens": [[...]], "new_tokens": 8}`. Out: a message for each: `{"done": ...}`
or `{"error": {...}}`. Logits go through a file without a name that both processes have open.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from optkit.devices.peak_memory import Peak, watched_peak
from optkit.errors import OptkitError
from optkit.processes.crashes import told_crash
from optkit.session.memory import local_part
from optkit.session.splitting import join
from optkit.stage import Setting


@dataclass(frozen=True)
class Job:
    """What a rank opens, and which one it is."""

    directory: str
    settings: Sequence[tuple[str, dict[str, Any]]]
    """`module:Class` with its fields."""
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


class Rank:
    """An opened share of a model, and what it does when it is called."""

    def __init__(self, job: Job, memory: int) -> None:
        """Join the others and open the model; raises what `open_session` raises."""
        from optkit.session.opening import open_session
        from optkit.session.torch_session import TorchSession

        self._job, self._memory = job, memory
        if job.device == "cpu":
            torch.set_num_threads(job.threads)
        join(job.device, job.rank, job.ranks, job.meeting, job.timeout_s)
        settings = [_setting(name, fields) for name, fields in job.settings]
        opened = open_session(Path(job.directory), settings, job.device, job.dtype, None, job.trust_remote_code)
        assert isinstance(opened, TorchSession)
        self.session = opened
        self.session.choose = _agreed
        self._answers: Iterator[Tensor] = iter(())
        self._watching, self._peak = ExitStack(), Peak()

    def opened(self) -> dict[str, Any]:
        """Say what is open, and a number that must be the same everywhere."""
        session = self.session
        probe = session.logits(torch.arange(min(4, session.vocabulary)).unsqueeze(0))
        held = sum(part.numel() * part.element_size() for part in map(local_part, set(session.model.parameters())))
        return {
            "vocabulary": session.vocabulary,
            "positions": session.positions,
            "dtype": session.dtype,
            "product_dtype": session.product_dtype,
            "notes": list(session.notes),
            "codes_cache": session.codes_cache,
            "compiled": session.compiled,
            "weights": held,
            "probe": [list(probe.shape), probe.double().sum().item()],
        }

    def logits(self, tokens: list[list[int]]) -> list[int]:
        """Leave the logits, float32 [batch, sequence, vocabulary], in the common memory; the shape
        is returned.
        """
        found = self.session.logits(torch.tensor(tokens))
        if self._job.rank == 0:
            os.ftruncate(self._memory, found.numel() * 4)
            with mmap.mmap(self._memory, found.numel() * 4) as shared:
                target = torch.frombuffer(shared, dtype=torch.float32)
                target.copy_(found.reshape(-1))
                del target
        return list(found.shape)

    def stream(self, tokens: list[list[int]], new_tokens: int) -> None:
        """Begin to answer; what was begun before is forgotten."""
        self._answers = self.session.stream(torch.tensor(tokens), new_tokens)

    def next(self) -> list[int]:
        """Return the next tokens, one of each sequence."""
        found: list[int] = next(self._answers).tolist()
        return found

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the bytes that this rank reads."""
        return self.session.decode_bytes(batch, context)

    def attention_kernels(self, tokens: list[list[int]]) -> str:
        """See the session's."""
        return self.session.attention_kernels(torch.tensor(tokens))

    def notes(self) -> list[str]:
        """See the session's."""
        return list(self.session.notes)

    def watch(self) -> None:
        """Begin to watch the peak of memory."""
        self._watching.close()
        self._peak = self._watching.enter_context(watched_peak(self._job.device))

    def watched(self) -> dict[str, Any]:
        """Return the peak since then."""
        self._watching.close()
        return vars(self._peak)


def serve(channel: Connection, asked: queue.SimpleQueue[dict[str, Any]], memory: int) -> None:
    """Open the model, then do what is asked; `rank_start.py` ends this process when the parent is
    gone.
    """
    job = Job(**asked.get())
    rank: Rank | None = None
    while True:
        try:
            if rank is None:
                rank = Rank(job, memory)
                reply: Any = rank.opened()
            else:
                message = asked.get()
                reply = getattr(rank, message.pop("call"))(**message)
            said = {"done": reply}
        except Exception as error:
            said = {"error": _described(error)}
        channel.send_bytes(json.dumps(said).encode())
        if rank is None:
            return


def _setting(name: str, fields: dict[str, Any]) -> Setting:
    module, _, kind = name.partition(":")
    found: Setting = getattr(import_module(module), kind).model_validate(fields)
    return found


def _agreed(logits: Tensor) -> Tensor:
    """float [batch, sequence, vocabulary] -> the likeliest last tokens, int64 [batch, 1]: those of
    rank 0, so that nobody drifts off.
    """
    chosen = logits[:, -1:].argmax(-1)
    distributed.broadcast(chosen, src=0)
    return chosen


def _described(error: Exception) -> dict[str, Any]:
    if isinstance(error, OptkitError):
        return {
            "class": type(error).__name__,
            "what": error.what,
            "where": error.where,
            "why": error.why,
            "remedy": error.remedy,
        }
    return {"class": "", **told_crash(error)}
