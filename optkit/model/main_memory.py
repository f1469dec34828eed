"""Main memory for bytes that are read or copied."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALONE_BYTES = 1 << 20
"""What has as many bytes lies in pages of its own: memory that comes and goes in pieces of the size of
tensors is lost between what stays.
"""


MOST_PINNED = 1 << 29
"""Of a tensor: torch keeps what it pinned."""


def own_bytes(size: int) -> bytearray | mmap.mmap:
    """Return so many bytes that nothing else lies beside."""
    if size < ALONE_BYTES:
        return bytearray(size)
    pages = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)
    with suppress(AttributeError, OSError):  # a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # filled ten times as fast as small ones, which come one by one
    return pages


def pinned(size: int) -> Tensor:
    """Return so many bytes from and to which a GPU copies by itself; torch keeps them for the next one.
    To fill them takes a fifth of the time of filling memory that is new to the process.
    """
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
