"""A model that is split over several devices, each with a process of its own.
This process asks, and sees a session like any other.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from optkit.common.byte_sizes import size_text
from optkit.common.frozen import described
from optkit.devices.peak_memory import Peak
from optkit.errors import StageError
from optkit.progress import of_pairs
from optkit.session.generating import GeneratingSession
from optkit.session.rank_group import RankGroup
from optkit.stage import Opening


class ParallelSession(GeneratingSession):
    """Implements `optkit.measure.Session`.
    Every call is made by all ranks, and rank 0 gives the result.
    """

    def __init__(self, opening: Opening, count: int) -> None:
        """Start the ranks, from the device of `opening` on, and let them open the model.
        Raises what that raises.
        """
        device = opening.device
        first = int(device.partition(":")[2] or 0)
        self.devices = tuple("cpu" if device == "cpu" else f"cuda:{first + index}" for index in range(count))
        super().__init__(replace(opening, device=self.devices[0]))
        job = {
            "directory": str(opening.directory.absolute()),
            "settings": [described(each) for each in opening.settings],
            "dtype": opening.dtype,
            "trust_remote_code": opening.trust_remote_code,
        }
        self._ranks = RankGroup(job, self.devices)
        told = self._ranks.opened
        self.vocabulary, self.positions = int(told[0]["vocabulary"]), int(told[0]["positions"])
        self.dtype, self.product_dtype = str(told[0]["dtype"]), str(told[0]["product_dtype"])
        self.codes_cache, self.compiled = bool(told[0]["codes_cache"]), bool(told[0]["compiled"])
        self._said = of_pairs(told[0]["notes"])
        held = " and ".join(sorted({size_text(each["weights"]) for each in told}))
        how = "processes by gloo" if device == "cpu" else f"GPUs ({', '.join(self.devices)}) by nccl"
        self._note = f"tensor_parallel: {count} {how}, {held} of weights on each"
        self._check_alike(told)

    @property
    def notes(self) -> tuple[str, ...]:
        if self._ranks.alive:
            self._said = of_pairs(self._ranks.call("notes")[0])
        return (self._note, *self._said)

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [batch, sequence] -> float32 [batch, sequence, vocabulary], on the first device.
        Raises what one device raises.
        """
        shape = self._ranks.call("logits", tokens=tokens)[0]
        size = 4 * shape[0] * shape[1] * shape[2]
        with mmap.mmap(self._ranks.memory, size) as shared:
            view = torch.frombuffer(shared, dtype=torch.float32)
            found = view.clone() if self.device == "cpu" else view.to(self.device)
            del view
        return found.reshape(shape)

    def stream(self, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """Yield the greedy tokens, int64 [batch], on the CPU, each when all devices have finished it:
        a copy to the first device would stand in line with the next step.
        """
        first = self._ranks.call("stream", tokens=tokens, new_tokens=new_tokens)[0]
        return self._stream(first, new_tokens - 1)

    def decode_bytes(self, batch: int, context: int) -> int:
        """Return the fewest bytes that one decode step reads, on all devices together."""
        return sum(self._ranks.call("decode_bytes", batch=batch, context=context))

    def attention_kernels(self, tokens: Tensor) -> str:
        """Return which kernels compute the attention on each device, see `TorchSession`."""
        return str(self._ranks.call("attention_kernels", tokens=tokens)[0])

    @contextmanager
    def watched_peak(self) -> Iterator[Peak]:
        """Watch the memory of every process.
        Of GPUs the fullest counts, of a CPU, which they share, all together.
        """
        peak = Peak()
        self._ranks.call("watch")
        yield peak
        found = [Peak(**each) for each in self._ranks.call("watched")]
        peak.unknown = next((each.unknown for each in found if each.unknown), "")
        sizes = [each.size_bytes for each in found if each.size_bytes is not None]
        reserved = [each.reserved_bytes for each in found if each.reserved_bytes is not None]
        if sizes and not peak.unknown:
            peak.size_bytes = sum(sizes) if self.device == "cpu" else max(sizes)
            peak.reserved_bytes = max(reserved, default=None)
            peak.each = tuple(sizes)

    def close(self) -> None:
        """End the processes; the session cannot be used afterwards."""
        self._ranks.close()

    def _stream(self, first: list[int], others: int) -> Iterator[Tensor]:
        yield torch.tensor(first, dtype=torch.int64)
        for _ in range(others):
            yield torch.tensor(self._ranks.call("next")[0], dtype=torch.int64)

    def _check_alike(self, told: Sequence[dict[str, Any]]) -> None:
        """Raise StageError if the ranks do not compute the same logits of a few tokens.
        It is raised for those of less than a whole vocabulary too.
        """
        shape, total = told[0]["probe"]
        if shape[-1] != self.vocabulary or any(each["probe"] != [shape, total] for each in told):
            self.close()
            raise StageError(
                f"the processes compute different logits: {[each['probe'] for each in told]}",
                where="tensor_parallel",
                why="transformers' plan for this architecture does not fit its weights",
                remedy="Take it out of the recipe, or use offload",
            )
