"""Which of several kernels computes a layer fastest on this machine, found by timing them:
milliseconds, once for each kind of layer and kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optkit.algorithms.threads import one_thread
from optkit.kernels.kept_choices import kept_choice
from optkit.kernels.packed_linear import PackedWeight

TIMED_S = 0.004
FEWEST, MOST = 3, 50
"""Calls that are timed of each kernel: as many as take `TIMED_S` on average, within these bounds;
the fastest counts.
"""
GAIN = 1.2
"""A kernel later in the order is taken if it is this many times faster: so close ones do not
change places from run to run.
"""
WORTH_S = 5e-6
"""What it has to save at each call besides: in layers of microseconds noise alone is `GAIN`, and
another kernel computes other numbers.
"""


@dataclass(frozen=True)
class Kernel:
    """One way to compute with a packed weight."""

    refuses: Callable[[PackedWeight, torch.dtype, str], str | None]
    """(weight, dtype, device) -> why not, None if it can."""
    build: Callable[[PackedWeight, Tensor | None, torch.dtype], nn.Module]
    phrase: Callable[[PackedWeight], str]
    """What the notes say of it: `use ...`."""


def fastest(
    kernels: Sequence[Kernel], weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, device: str
) -> tuple[nn.Module, Kernel]:
    """Return the layer by the fastest kernel at one row of activations; the earlier if close."""
    if len(kernels) == 1:
        return kernels[0].build(weight, bias, dtype), kernels[0]
    form = {
        "outputs": weight.outputs,
        "inputs": weight.inputs,
        "bits": weight.bits,
        "group_size": weight.group_size,
        "symmetric": weight.zeros is None,
        "in_order": weight.group_of_input is None,
        "bias": bias is not None,
        "dtype": dtype,
    }

    def layers() -> list[nn.Module]:
        return [kernel.build(weight, bias, dtype) for kernel in kernels]

    row = torch.ones(1, weight.inputs, dtype=dtype, device=device)
    names = [kernel.phrase(weight) for kernel in kernels]
    chosen = kernels[kept_choice(form, names, device, lambda: first_among_equals(seconds(layers(), row)))]
    return chosen.build(weight, bias, dtype), chosen


def first_among_equals(times: Sequence[float]) -> int:
    """Return the first that takes less than `GAIN` times as long as the fastest, or not `WORTH_S`
    longer. Times are in seconds.
    """
    limit = max(min(times) * GAIN, min(times) + WORTH_S)
    return next(index for index, taken in enumerate(times) if taken < limit)


def seconds(layers: Sequence[Callable[[Tensor], Tensor]], rows: Tensor) -> list[float]:
    """Return the shortest time that each layer takes, called in turns, on a CPU of one thread.
    A machine that changes its speed meanwhile then does so for all. How long threads wait for each
    other says what else runs.
    """
    with torch.inference_mode(), one_thread():
        for layer in layers:
            layer(rows)  # what a first call sets up is not timed
        rounds: list[list[float]] = []
        while len(rounds) < FEWEST or (sum(map(sum, rounds)) < TIMED_S * len(layers) and len(rounds) < MOST):
            rounds.append([_seconds(layer, rows) for layer in layers])
    return [min(times) for times in zip(*rounds, strict=True)]


def _seconds(layer: Callable[[Tensor], Tensor], rows: Tensor) -> float:
    start = _clock(rows)
    layer(rows)
    return _clock(rows) - start


def _clock(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
        return time.perf_counter()
    return time.thread_time()
