"""Giving memory that was freed back to the system."""

from __future__ import annotations

import ctypes
import sys


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
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
