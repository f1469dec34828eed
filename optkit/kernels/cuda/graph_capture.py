"""Kernels captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return what `launch` launches as a graph; a first run outside of it compiles and loads the kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's thread asks CUDA meanwhile
        launch()
    return graph
