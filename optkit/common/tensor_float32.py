"""Products in TF32, on NVIDIA GPUs from Ampere on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def tensor_float32(allowed: bool = True) -> Iterator[None]:
    """Let products of float32 round their factors to TF32 within the block, or not: a switch of the whole process."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
