"""Memory that runs out, and giving what was freed back to the system."""

from __future__ import annotations

import ctypes
import sys

NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
"""What torch's RuntimeErrors say of an allocation on the CPU, or of a memory map, that failed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is an allocation that failed, in main memory or on a GPU."""
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(part in str(error) for part in NO_MEMORY)
    )


def return_freed_memory() -> None:
    """Ask glibc for it; elsewhere nothing is needed.

    Weights and activations of a few MB come and go in an order that leaves its heap with holes: over the blocks of a small model the
    resident memory grows to that of the whole model, although one block is alive; and a packed model that was opened would keep the words
    that were unpacked on the way.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
