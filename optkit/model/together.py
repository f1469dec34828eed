"""The processes that run a stage together, each on its share of a text.

What decides how a stage goes on is the same in all of them: sums over the text are those of all
shares, and what could differ by a bit is made by one process and told to the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")
Rows = TypeVar("Rows")
"""Tokens, prompts with images, or numbers of rows."""


class Together:
    """A process alone; whatever would be exchanged stays as it is."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes, and speaks for all."""
        return self.rank == 0

    def share(self, rows: Rows) -> Rows:
        """Return this process's share of sequences, every so many of them; perhaps none."""
        every: Any = rows
        found: Rows = every if self.count == 1 else every[self.rank :: self.count]
        return found

    def part(self, length: int) -> slice:
        """Return which of so many rows are this process's; all if there are fewer than processes."""
        return self._parts(length)[self.rank]

    def _parts(self, length: int) -> list[slice]:
        if length < self.count:
            return [slice(length)] * self.count
        ends = [rank * length // self.count for rank in range(self.count + 1)]
        return [slice(*each) for each in pairwise(ends)]

    def dealt(self, items: Sequence[T], compute: Callable[[T], R]) -> list[R]:
        """Return what is computed of each item, by one process each.
        It is pickled, with its tensors on the CPU.
        """
        mine = [compute(item) for item in items[self.rank :: self.count]]
        if self.count == 1:
            return mine
        all_of = self.gather(mine)
        return [all_of[index % self.count][index // self.count] for index in range(len(items))]

    def gather(self, value: T) -> list[T]:
        """Return the value, which is pickled, of each process."""
        return [value]

    def tell(self, value: T) -> T:
        """Return the first process's value, which is pickled."""
        return value

    def tell_(self, tensor: Tensor, rank: int) -> None:
        """Put one process's numbers into a contiguous tensor of all."""

    def whole(self, part: Tensor, length: int) -> Tensor:
        """Return so many rows, [length, ...], of which this process has its `part`."""
        return part

    def joined(self, rows: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the rows of all processes, [rows, ...], the first's first. `sizes`: how many each has, if all know."""
        return rows

    def sum_(self, tensor: Tensor) -> None:
        """Put the sum over the processes into a tensor."""

    def most_(self, tensor: Tensor) -> None:
        """Put the largest of each number into a tensor; NaN if one is."""


class Processes(Together):
    """One of the processes of torch's default group."""

    def __init__(self) -> None:
        from torch import distributed

        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()

    def gather(self, value: T) -> list[T]:
        from torch import distributed

        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, value)
        return found

    def tell(self, value: T) -> T:
        from torch import distributed

        told: list[Any] = [value]
        distributed.broadcast_object_list(told, 0)
        found: T = told[0]
        return found

    def tell_(self, tensor: Tensor, rank: int) -> None:
        from torch import distributed

        distributed.broadcast(tensor, rank)

    def whole(self, part: Tensor, length: int) -> Tensor:
        if length < self.count:
            return part
        return self.joined(part, [each.stop - each.start for each in self._parts(length)])

    def joined(self, rows: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        import torch

        if rows.element_size() == 1 and rows.dtype != torch.uint8:  # 8-bit floats are sent as they are stored
            return self.joined(rows.contiguous().view(torch.uint8), sizes).view(rows.dtype)
        sizes = self.gather(len(rows)) if sizes is None else sizes
        found = rows.new_empty(sum(sizes), *rows.shape[1:])
        for rank, part in enumerate(found.split(list(sizes))):
            if rank == self.rank:
                part.copy_(rows)
            if len(part):
                self.tell_(part, rank)
        return found

    def sum_(self, tensor: Tensor) -> None:
        from torch import distributed

        distributed.all_reduce(tensor)

    def most_(self, tensor: Tensor) -> None:
        from torch import distributed

        unknown = tensor.isnan().to(tensor.dtype)
        distributed.all_reduce(tensor.nan_to_num_(0.0, float("inf")), distributed.ReduceOp.MAX)
        distributed.all_reduce(unknown, distributed.ReduceOp.MAX)
        tensor.masked_fill_(unknown.bool(), float("nan"))


ALONE = Together()


def together(devices: int) -> Together:
    """Return the processes that run a stage on so many devices, if this is one of them; else this alone."""
    if devices == 1 or "torch" not in sys.modules:
        return ALONE
    from torch import distributed

    return Processes() if distributed.is_available() and distributed.is_initialized() else ALONE
