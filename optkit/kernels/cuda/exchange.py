"""What the GPUs of a split model give each other: sums of partial products, and the likeliest token.
Each process writes into the memory of the others, see `exchange.cu`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from optkit.errors import StageError
from optkit.kernels.cuda.nvrtc import compiled, driver

OWN_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS of cuda.h."""
THREADS = 256
VECTOR = 8
"""Numbers of 16 bits that a thread holds."""
BLOCK_VECTORS = THREADS // 8 * 7
MOST_ROWS = 1024
"""Rows that are exchanged at once by the kernel: what memory they have to fit."""
MOST_OF_MANY = 256
"""Rows that more than two GPUs exchange by it: each sends its own to all others, and NCCL does not."""


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


@dataclass(frozen=True)
class Exchange:
    """Sums and maxima over all processes of the default group, which all of them ask for."""

    rank: int
    ranks: int
    packets: int
    memories: Tensor
    """int64 [ranks]: where the memory of each begins, as this process sees it."""
    numbers: Tensor
    """int32: what each block has exchanged so far."""

    @staticmethod
    def open(width: int, device: torch.device) -> Exchange:
        """Share memory for sums of rows of `width` numbers.
        Raises StageError if the GPUs do not see each other's.
        """
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        rows = MOST_ROWS if ranks == 2 else MOST_OF_MANY
        packets = (_blocks(rows * width) + 1) * THREADS  # the last are those of `agree`
        memories = _shared_memories(2 * ranks * packets * 16, rank, device)
        numbers = torch.zeros(packets // THREADS, dtype=torch.int32, device=device)
        return Exchange(rank, ranks, packets, torch.tensor(memories, dtype=torch.int64, device=device), numbers)

    def has_kernel_for(self, rows: int) -> bool:
        """Say whether the kernel adds up so many rows; NCCL does others."""
        return self.ranks == 2 or rows <= MOST_OF_MANY

    def sum_into_(
        self, y: Tensor, x: Tensor, of_outputs: Tensor | None = None, of_rows: Tensor | None = None, *, add: bool
    ) -> None:
        """Write the sum of all x, float [rows, width], into y, or add it; x may be overwritten.
        Can be captured in a CUDA graph.

        of_outputs, of_rows: float32 [width] and [rows], by which x is multiplied first if there are any of rows.
        """
        rows, width = x.shape
        if not self.has_kernel_for(rows):
            distributed.all_reduce(x)
            (y.add_ if add else y.copy_)(x)
            return
        macros = {"RESIDUAL": add, "SCALED": False if of_rows is None else width // VECTOR}
        kernel = self._kernel("sum", x.dtype, macros)
        for first in range(0, rows, MOST_ROWS):
            part, total = x[first : first + MOST_ROWS], y[first : first + MOST_ROWS]
            scales = of_outputs, None if of_rows is None else of_rows[first:]
            arguments = (self.memories, self.numbers, part, total, *scales, part.numel() // VECTOR)
            kernel((_blocks(part.numel()), 1, 1), THREADS, arguments)

    def agree_(self, best: Tensor, share: int) -> None:
        """Let `best` of `choose`, each of a share of the vocabulary, be that of all."""
        arguments = (self.memories, self.numbers, best, len(best), share)
        self._kernel("agree", torch.bfloat16, {})((1, 1, 1), THREADS, arguments)

    def gathered(self, shares: Tensor) -> Tensor:
        """Return what all have, float [batch, numbers], side by side."""
        found = [torch.empty_like(shares) for _ in range(self.ranks)]
        distributed.all_gather(found, shares)
        return torch.cat(found, -1)

    @staticmethod
    def first(reason: str | None) -> str | None:
        """Return the reason of the first that has one."""
        return next(filter(None, _gathered(reason)), None)

    def _kernel(self, name: str, dtype: torch.dtype, macros: dict[str, int]) -> Any:
        macros = macros | {"RANKS": self.ranks, "RANK": self.rank, "PACKETS": self.packets}
        return compiled("exchange.cu", name, macros | {"BF16": dtype == torch.bfloat16}, self.numbers.get_device())


def _blocks(numbers: int) -> int:
    return -(-numbers // (VECTOR * BLOCK_VECTORS))


def _shared_memories(size: int, rank: int, device: torch.device) -> list[int]:
    """Return where `size` zeroed bytes of each process lie, as this one sees them.
    They stay until it ends: nobody else can tell when the others are done.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the context is torch's
        own, handle = ctypes.c_uint64(), _Handle()
        library = driver()
        status = library.cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(size))
        status = status or library.cuMemsetD8_v2(own, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        status = status or library.cuIpcGetMemHandle(ctypes.byref(handle), own)
        torch.cuda.synchronize()
        handles = _gathered(None if status else bytes(handle))
        found = []
        for other, raw in enumerate(handles):
            place = own if other == rank else ctypes.c_uint64()
            if other != rank and raw is not None and not status:
                given = _Handle.from_buffer_copy(raw)
                status = library.cuIpcOpenMemHandle_v2(ctypes.byref(place), given, OWN_ACCESS)
            found.append(place.value)
    if any(_gathered(status)):
        raise StageError(
            f"{len(handles)} GPUs cannot share memory",
            where="cuda_graphs",
            why="The GPUs cannot write into each other's memory",
            remedy="See `nvidia-smi topo -p2p w`, or take cuda_graphs out of the recipe",
        )
    return found


def _gathered(value: Any) -> list[Any]:
    """Return what each process has, as all of them see it."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found
