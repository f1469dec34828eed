"""How fast GPUs of one host exchange data: all-reduce, with a process for each GPU.

Bus bandwidth is what nccl-tests calls so: bytes / seconds x 2 (n - 1) / n, which hardware limits
whatever the number of GPUs is. https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from optkit.common.frozen import Frozen
from optkit.errors import OptkitError, ResourceError, UsageError
from optkit.processes.child import Child, collect
from optkit.processes.crashes import ChildError

SIZES = (1 << 20, 16 << 20, 256 << 20, 1 << 30)
"""Bytes of the tensors: what decoding exchanges is small, what training and prefill exchange is
large.
"""
WORKER = "optkit.reports.doctor.gpu_links_worker"
TIMEOUT_S = 120.0


class LinkRate(Frozen):
    """All-reduce of one size."""

    size_bytes: int
    seconds: float
    """The median of the repeats."""
    bus_bytes_per_s: float


def gpu_links() -> tuple[LinkRate, ...]:
    """Return how fast all GPUs of this host sum a tensor by NCCL; UsageError for fewer than two."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        why = f"torch sees {count} GPU{'' if count == 1 else 's'} here"
        raise UsageError("there are no two GPUs between which data could go", where="--links", why=why)
    return all_reduce_rates(count, "nccl")


def all_reduce_rates(
    processes: int, backend: str, sizes: Sequence[int] = SIZES, timeout_s: float = TIMEOUT_S
) -> tuple[LinkRate, ...]:
    """Return the rates of an all-reduce over processes, by `nccl` (a GPU each) or `gloo` (on CPUs).

    Raises ResourceError if the processes cannot exchange data, or what comes out is not the sum.
    """
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as running:
        children = []
        for rank in range(processes):
            log = Path(place) / f"rank-{rank}.log"
            child = running.enter_context(Child(WORKER, name=f"rank {rank} of {processes}", log=log))
            order = {"rank": rank, "ranks": processes, "meeting": f"{place}/meeting", "sizes": [*sizes]}
            child.send({**order, "device": f"cuda:{rank}" if backend == "nccl" else "cpu", "timeout_s": timeout_s})
            children.append(child)
        results, errors = collect(children, timeout_s=timeout_s)
    if len(results) < processes:
        raise _error(errors, processes, backend)
    share = 2 * (processes - 1) / processes
    return tuple(
        LinkRate(size_bytes=size, seconds=each, bus_bytes_per_s=size / each * share)
        for size, each in zip(sizes, results[0], strict=True)
    )


def _error(errors: Mapping[int, OptkitError | ChildError], processes: int, backend: str) -> ResourceError:
    """Return why data could not be exchanged: the first thing that went wrong in a process."""
    first = min(errors.values(), key=lambda error: getattr(error, "time", 0.0), default=None)
    words = first.words if isinstance(first, ChildError) else ""
    last = (words or str(first or "a process says nothing any more")).strip().splitlines()[-1]
    remedy = "Run it again with NCCL_DEBUG=INFO to see which link fails" if backend == "nccl" else ""
    refused = ResourceError(
        f"{processes} processes cannot exchange data by {backend}", where="links", why=last, remedy=remedy
    )
    refused.__cause__ = first
    return refused
