"""One process of an all-reduce that is timed, started by optkit/reports/doctor/gpu_links.py."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import torch
from torch import distributed

from optkit.devices.process_group import join
from optkit.processes.child_program import Parent, answer

WARM_UP, REPEATS = 5, 20


def work(parent: Parent) -> None:
    """Take part and leave at once: processes of a group cannot always end as others do."""
    status = answer(parent, lambda: seconds_of(**parent.order()))
    sys.stdout.flush()
    os._exit(status)


def seconds_of(device: str, rank: int, ranks: int, meeting: str, sizes: Sequence[int], timeout_s: float) -> list[float]:
    """Return the median seconds of an all-reduce of each size.

    Raises RuntimeError if what comes out is not the sum.
    """
    join(device, rank, ranks, meeting, timeout_s)
    seconds = [_time(size, torch.device(device)) for size in sizes]
    distributed.barrier()
    distributed.destroy_process_group()
    return seconds


def _time(size: int, device: torch.device) -> float:
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
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


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
