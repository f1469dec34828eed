"""How fast GPUs of one host exchange data: all-reduce, with a process for each GPU.

Bus bandwidth is what nccl-tests calls so: bytes / seconds x 2 (n - 1) / n, which hardware limits
whatever the number of GPUs is. https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from optkit.common.frozen import Frozen
from optkit.errors import ResourceError, UsageError
from optkit.processes.commands import safe_children

SIZES = (1 << 20, 16 << 20, 256 << 20, 1 << 30)
"""Bytes of the tensors: what decoding exchanges is small, what training and prefill exchange is
large.
"""
WARM_UP, REPEATS = 5, 20
TIMEOUT_S = 120


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
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    with tempfile.TemporaryDirectory() as place:
        try:
            with safe_children():
                spawn(_work, args=(processes, backend, tuple(sizes), place, timeout_s), nprocs=processes)
        except (ProcessRaisedException, ProcessExitedException, RuntimeError) as error:
            last = str(error).strip().splitlines()[-1]
            remedy = "Run it again with NCCL_DEBUG=INFO to see which link fails" if backend == "nccl" else ""
            raise ResourceError(
                f"{processes} processes cannot exchange data by {backend}", where="links", why=last, remedy=remedy
            ) from error
        seconds = json.loads((Path(place) / "seconds.json").read_text(encoding="utf-8"))
    share = 2 * (processes - 1) / processes
    return tuple(
        LinkRate(size_bytes=size, seconds=each, bus_bytes_per_s=size / each * share)
        for size, each in zip(sizes, seconds, strict=True)
    )


def _work(rank: int, processes: int, backend: str, sizes: Sequence[int], place: str, timeout_s: float) -> None:
    """Take part in every all-reduce; rank 0 writes the seconds."""
    import torch
    from torch import distributed

    device = torch.device(f"cuda:{rank}" if backend == "nccl" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = f"file://{place}/meeting"
    distributed.init_process_group(
        backend, init_method=meeting, rank=rank, world_size=processes, timeout=timedelta(seconds=timeout_s)
    )
    try:
        seconds = [_time(size, device) for size in sizes]
        if rank == 0:
            (Path(place) / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _time(size: int, device: object) -> float:
    import torch
    from torch import distributed

    data = torch.ones(size // 4, dtype=torch.float32, device=device)  # type: ignore[call-overload]
    distributed.all_reduce(data)
    if not bool((data == distributed.get_world_size()).all()):
        raise RuntimeError(f"the sum of {size:,} bytes came out wrong")
    data.zero_()
    samples: list[float] = []
    for _ in range(WARM_UP + REPEATS):
        distributed.barrier()
        _finish(device)
        start = time.perf_counter()
        distributed.all_reduce(data)
        _finish(device)
        samples.append(time.perf_counter() - start)
    return sorted(samples[WARM_UP:])[REPEATS // 2]


def _finish(device: object) -> None:
    import torch

    if str(device) != "cpu":
        torch.cuda.synchronize(device)  # type: ignore[arg-type]
