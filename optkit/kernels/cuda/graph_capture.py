"""Kernels captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


@cache
def aside(device: int) -> torch.cuda.Stream:
    """Return the one stream of a GPU on which graphs are got ready and recorded: cuBLAS keeps 32 MiB for
    each pair of a stream and a thread until the process ends.
    """
    return torch.cuda.Stream(device)


def captured(launch: Callable[[], object], beside: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
    """Return what `launch` launches as a graph; a first run outside of it compiles and loads the kernels.
    It shares the memory of a graph beside which it never runs, and which lives as long.
    """
    stream = aside(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    pool = beside.pool() if beside else None
    # NCCL's thread asks CUDA meanwhile
    with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
        launch()
    return graph
