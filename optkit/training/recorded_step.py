"""A step of training that is recorded once on a GPU and replayed.
Python starts the kernels of a small block more slowly than they run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from optkit.kernels.cuda.graph_capture import aside

PLAIN_CALLS = 3
"""Calls before the recording: libraries and the optimizer get ready in them."""


class RecordedStep:
    """Does a step that depends on nothing but parameters and the tensors that it is given.

    On a GPU it is recorded as a CUDA graph. A step that cannot be recorded, as it waits for the GPU
    (experts wait for what the router says), is called each time.
    """

    def __init__(self, step: Callable[..., None]) -> None:
        """`step` takes tensors; their shapes and dtypes are the same at each call."""
        self._step = step
        self._plain_calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: tuple[Tensor, ...] = ()

    def __call__(self, *tensors: Tensor) -> None:
        if not self._graph and tensors[0].is_cuda and self._plain_calls == PLAIN_CALLS:
            self._record(tensors)
        if self._graph:
            for held, given in zip(self._given, tensors, strict=True):
                held.copy_(given)
            self._graph.replay()
            return
        self._plain_calls += 1
        if tensors[0].is_cuda:
            self._beside(tensors)
        else:
            self._step(*tensors)

    def _beside(self, tensors: tuple[Tensor, ...]) -> None:
        """Do the step on another stream, as what autograd keeps of the default one ends a recording."""
        stream, current = aside(tensors[0].get_device()), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._step(*tensors)
        current.wait_stream(stream)

    def _record(self, tensors: tuple[Tensor, ...]) -> None:
        self._given = tuple(given.clone() for given in tensors)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=aside(tensors[0].get_device())):
                self._step(*self._given)
        except RuntimeError:  # from here on it is called
            torch.cuda.synchronize()
            return
        self._graph = graph
