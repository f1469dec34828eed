"""A teacher's likeliest tokens for rows of a text, on disk, so it runs once for all students.

`answers-00000.safetensors` holds rows, int64 [n], and for each of them the likeliest tokens: top,
float16 [n, s, k], their log-probabilities, and indices, int32 [n, s, k].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from optkit.progress import Progress
from optkit.training.checkpoints import write_tensors
from optkit.training.losses import top_divergence, top_of
from optkit.training.shared_answers import SharedPlace
from optkit.training.teacher import LiveTeacher

POSITIONS_AT_ONCE = 1024
"""Positions whose logits are held together."""
BATCHES_A_FILE = 16


class TopTargets:
    """The likeliest tokens of some sequences, and nothing about hidden states."""

    hidden_states: Sequence[Tensor] = ()
    attentions: Sequence[Tensor] = ()

    def __init__(self, top: Tensor, indices: Tensor) -> None:
        """Take float [b * s, k] and int64 [b * s, k]."""
        self.top, self.indices = top, indices

    def divergence(self, logits: Tensor, positions: slice, temperature: float) -> Tensor:
        return top_divergence(logits, self.top[positions], self.indices[positions], temperature)


class KnownTeacher:
    """A teacher whose answers lie on disk."""

    def __init__(self, shared: SharedPlace) -> None:
        """Open what is there."""
        self.shared = shared
        self._files: dict[Path, Any] = {}
        self._where: dict[int, tuple[Any, int]] = {}
        self._read()

    def missing(self, rows: Sequence[int]) -> list[int]:
        """Return the rows that were never answered, each once."""
        self._read()
        return [row for row in dict.fromkeys(rows) if row not in self._where]

    def targets(self, rows: Sequence[int], tokens: Tensor) -> TopTargets:
        found = [self._where[row] for row in rows]
        top, indices = (
            torch.cat([handle.get_slice(name)[place] for handle, place in found]) for name in ("top", "indices")
        )
        return TopTargets(top.to(tokens.device, torch.float32), indices.to(tokens.device, torch.int64))

    def learn(
        self,
        rows: Sequence[int],
        tokens: Tensor,
        open_teacher: Callable[[], LiveTeacher],
        count: int,
        temperature: float,
        batch_size: int,
        progress: Progress,
    ) -> None:
        """Ask a teacher about new rows of int64 [sequences, s], keep its `count` likeliest tokens.

        A run that is killed keeps what it asked so far. Raises ResourceError on a full disk.
        """
        if not self.missing(rows):
            return
        with self.shared.alone(), progress.task("teacher", len(self.missing(rows)), "sequences") as task:
            rows = self.missing(rows)
            if not rows:  # another process asked while this one waited
                return
            teacher = open_teacher()
            step = batch_size * BATCHES_A_FILE
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                answers = [
                    _ask(teacher, tokens[some[at : at + batch_size]], count, temperature)
                    for at in range(0, len(some), batch_size)
                ]
                top, indices = (torch.cat(part) for part in zip(*answers, strict=True))
                number = len(list(self.shared.place.glob("answers-*.safetensors")))
                write_tensors(
                    self.shared.place / f"answers-{number:05d}.safetensors",
                    {"rows": torch.tensor(some), "top": top.to(torch.float16), "indices": indices.to(torch.int32)},
                )
                task.advance(len(some))
        self._read()

    def _read(self) -> None:
        for path in sorted(set(self.shared.place.glob("answers-*.safetensors")) - set(self._files)):
            self._files[path] = handle = safe_open(path, framework="pt")
            for place, row in enumerate(handle.get_tensor("rows").tolist()):
                self._where.setdefault(row, (handle, place))


def _ask(teacher: LiveTeacher, tokens: Tensor, count: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities float [b, s, count] and tokens int64 [b, s, count] on the CPU."""
    targets = teacher.targets((), tokens.to(teacher.model.device))
    tops, indices = [], []
    for start in range(0, tokens.numel(), POSITIONS_AT_ONCE):
        top, found = top_of(targets.logits(slice(start, start + POSITIONS_AT_ONCE)), count, temperature)
        tops.append(top.cpu())
        indices.append(found.cpu())
    return torch.cat(tops).view(*tokens.shape, count), torch.cat(indices).view(*tokens.shape, count)
