"""Giving memory that was freed back to the system or keeping it, and room elsewhere for what does not fit."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.environment import memory
from optkit.model.main_memory import own_bytes
from optkit.model.writer import disk_space_for

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHARE = 0.5
"""Of the free main memory: larger states than this lie in a file."""
GPU_SHARE, LITTLE_BYTES = 1 / 8, 1 << 26
"""Of a GPU's memory: larger states than this wait in main memory. What works on them takes several times
as much, and copies are made beside it.
"""

KEPT_BYTES = 256 << 20
LARGEST_IN_HEAP = 32 << 20
"""More is refused by glibc; what is larger never stays."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def is_little_of_gpu(size: int, gpu_bytes: int | None) -> bool:
    """Whether hidden states of so many bytes stay on a GPU with so much memory; None: nobody knows how much."""
    return gpu_bytes is None or size <= max(LITTLE_BYTES, GPU_SHARE * gpu_bytes)


def usable_gpu_bytes(device: torch.device) -> int | None:
    """Return what this process may take of a GPU, with what it took; None for a CPU."""
    if device.type == "cpu":
        return None
    import torch

    return memory(str(device)).available_bytes + torch.cuda.memory_reserved(device)


def room_for_states(like: Tensor, shape: Sequence[int], gpu: torch.device | None = None) -> Tensor:
    """Return room for hidden states on the device and in the dtype of some; for a `gpu`: of main memory, where it
    reads and writes them by itself.
    If they would take most of the free main memory, it is a file of TMPDIR that is gone when they are.

    Raises ResourceError if that disk is full.
    """
    import torch

    if like.device.type != "cpu" and not gpu:
        return like.new_empty(shape)
    states = like.new_empty(shape, device="meta")
    if states.nbytes <= SHARE * memory().available_bytes:
        return _registered(states, gpu) if gpu else like.new_empty(shape)
    with tempfile.NamedTemporaryFile(prefix="optkit-states-") as file:
        with disk_space_for(Path(file.name), states.nbytes):
            if sys.platform == "linux":  # a full disk would kill the process later
                os.posix_fallocate(file.fileno(), 0, states.nbytes)
        return torch.from_file(file.name, shared=True, size=states.numel(), dtype=like.dtype).view(*shape)


def _registered(states: Tensor, gpu: torch.device) -> Tensor:
    """Return room in main memory that CUDA knows, without which it copies while nothing else runs. Where it takes
    no more memory, as often under WSL, the room serves all the same.
    """
    import torch

    room = torch.frombuffer(own_bytes(states.nbytes), dtype=states.dtype).view(states.shape)
    if _told_cuda(gpu, "cudaHostRegister", room.data_ptr(), room.nbytes, 0):
        forget = weakref.finalize(room.untyped_storage(), _told_cuda, gpu, "cudaHostUnregister", room.data_ptr())
        forget.atexit = False
    return room


def _told_cuda(gpu: torch.device, function: str, *arguments: int) -> bool:
    """Call a function of CUDA's runtime, and return whether it did it."""
    import torch

    with torch.cuda.device(gpu):  # on another one CUDA would begin to work, and take memory for it
        refused = int(getattr(torch.cuda.cudart(), function)(*arguments))
        if refused:
            with suppress(RuntimeError):  # what torch launches next raises what CUDA said here
                torch.zeros(1, device=gpu)
    return not refused


def return_freed_memory(device: str = "cpu") -> None:
    """Ask glibc for it, and torch for what it keeps of a GPU's; elsewhere nothing is needed.

    Weights and activations of a few MB come and go in an order that leaves its heap with holes.
    Over the blocks of a small model the resident memory grows to that of the whole model, although
    one block is alive; and a packed model that was opened would keep the words that were unpacked
    on the way.
    """
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()
    if trim := _glibc("malloc_trim"):
        trim(0)


def keep_freed_memory() -> None:
    """Tell glibc to keep up to `KEPT_BYTES` of what was freed last, until `return_freed_memory`.

    It would give activations of a few MB back after each layer, and the next one would fault page by page.
    """
    if tell := _glibc("mallopt"):
        tell(M_TRIM_THRESHOLD, KEPT_BYTES)
        tell(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)


def _glibc(name: str) -> Any:
    """Return a function of it, None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
