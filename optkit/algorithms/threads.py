"""Run many small tensor operations on one CPU thread.
Handing each of them to several threads costs more than it saves.

CPU time on two cores that others use too, one thread and two: a scale search 0.29 s and 0.97 s, a
block of GPTQ 20 ms and 122 ms, one of SparseGPT 115 ms and 217 ms. Of torch's LAPACK calls the
batched LU alone runs inside torch's own threads, in which Intel's MKL never returns after this
switch; pyproject.toml forbids it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one CPU thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
