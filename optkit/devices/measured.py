"""Measure a device's roof with torch: bandwidth, and rates of matrix products for each dtype.

Kernels alone are timed: on CUDA by events around a group of calls, on CPUs by the clock. Buffers
are several times as large as the last cache, so nothing that is read was in one; matrices hold
normal numbers, because zeros cost less power and let clocks rise.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from optkit.common.statistics import quantile
from optkit.common.tensor_float32 import tensor_float32
from optkit.devices.roof import Rate, Roof
from optkit.environment import device_name, memory
from optkit.kernels.float8_linear import why_not_scaled
from optkit.kernels.int8_linear import why_not_integers
from optkit.model.memory import return_freed_memory
from optkit.progress import Progress

WARM_UP_S = 0.2
"""Clocks have risen, threads are awake and libraries have chosen their kernels."""
REPEATS, FEWEST_REPEATS = 15, 5
LIMIT_S = 1.0
"""After which no more than the fewest repeats are made."""
GROUP_S = {"cpu": 0.02, "cuda": 0.004}
"""Least time of a group of calls that is timed as one."""
CUDA_BUFFER = 4 << 30
CPU_BUFFER = 256 << 20
LARGEST_CPU_BUFFER = 1 << 30
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
BEYOND = 4
"""Times the last cache that a buffer on a CPU is large."""
SIDES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Sides of the square matrices; the better rate counts."""


def measure_roof(device: str, progress: Progress) -> Roof:
    """Return what a device (`cpu`, `cuda:1`) reaches, with the spread of repeats; takes seconds.

    Raises torch's out-of-memory error if half of the free memory is less than the smallest
    buffer.
    """
    products = dict(_products(device))
    with progress.task(f"measuring {device_name(device)}", 2 + len(products), "rates") as task, torch.inference_mode():
        read = _best(_reads(device), device)
        task.advance(note="read")
        copy = _best(_copies(device), device)
        task.advance(note="copy")
        rates = {}
        for name, calls in products.items():
            with tensor_float32(name == "tf32"):
                rates[name] = _best(calls(), device)
            task.advance(note=name)
    return_freed_memory(device)
    return Roof(reading=read, copying=copy, products=rates)


def buffer_bytes(device: str) -> int:
    """Return how large the buffers are that bandwidth is measured on."""
    free = memory(device).available_bytes
    if device != "cpu":
        return min(CUDA_BUFFER, free // 4)
    return min(max(CPU_BUFFER, BEYOND * last_cache_bytes()), LARGEST_CPU_BUFFER, free // 4)


def last_cache_bytes(caches: Path = CACHES) -> int:
    """Return the size of a CPU's largest cache, 0 if the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = [path.read_text(encoding="ascii").strip() for path in caches.glob("index*/size")]
    return max(
        (int(text[:-1]) * units[text[-1]] for text in found if text[-1:] in units and text[:-1].isdigit()), default=0
    )


Calls = Iterator[tuple[Callable[[], object], float]]
"""Calls to be timed, each with the bytes or operations that it stands for."""


def _reads(device: str) -> Calls:
    """Yield ways to read a buffer once: the fastest is what the memory gives. A matrix-vector
    product is what decoding does.
    """
    columns = 4096
    rows = buffer_bytes(device) // 4 // columns
    held = _buffer(rows * columns, device).view(rows, columns)
    vector, product = torch.randn(columns, device=device), torch.empty(rows, device=device)
    size = float(held.numel() * held.element_size())
    yield lambda: torch.mv(held, vector, out=product), size
    yield held.sum, size
    yield held.amax, size


def _buffer(elements: int, device: str) -> Tensor:
    """Return float32 [elements] of normal numbers.
    On a CPU in huge pages if Linux gives them; reading is slower without.
    """
    if device != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.randn(elements, device=device)
    memory = mmap.mmap(-1, 4 * elements)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).normal_()


def _copies(device: str) -> Calls:
    held, target = (_buffer(buffer_bytes(device) // 8, device) for _ in range(2))
    yield lambda: target.copy_(held), 2.0 * held.numel() * held.element_size()


def _products(device: str) -> Iterator[tuple[str, Callable[[], Calls]]]:
    """Yield dtype -> products, for the dtypes that the device computes in itself."""
    yield "fp32", lambda: _dense(device, torch.float32)
    if device == "cpu":
        yield "bf16", lambda: _dense(device, torch.bfloat16)
    else:
        if torch.cuda.get_device_capability(device) >= (8, 0):
            yield "tf32", lambda: _dense(device, torch.float32)
            yield "bf16", lambda: _dense(device, torch.bfloat16)
        yield "fp16", lambda: _dense(device, torch.float16)
    if why_not_integers(1024, 1024, device) is None:
        yield "int8", lambda: _integers(device)
    if why_not_scaled(1024, 1024, device) is None:
        yield "fp8", lambda: _floats8(device)


def _dense(device: str, dtype: torch.dtype) -> Calls:
    for side in SIDES[device.partition(":")[0]]:
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty(side, side, device=device, dtype=dtype)
        yield partial(torch.mm, left, right.T, out=out), 2.0 * side**3


def _integers(device: str) -> Calls:
    for side in SIDES[device.partition(":")[0]]:
        left, right = (torch.randint(-128, 128, (side, side), device=device, dtype=torch.int8) for _ in range(2))
        yield partial(torch._int_mm, left, right.T), 2.0 * side**3


def _floats8(device: str) -> Calls:
    one = torch.ones((), device=device)
    for side in SIDES[device.partition(":")[0]]:
        left, right = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        yield (
            partial(torch._scaled_mm, left, right.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
            2.0 * side**3,
        )


def _best(calls: Calls, device: str) -> Rate:
    """Return the rate of the fastest of several calls, the median of its repeats, with quartiles."""
    found = [_rate(call, amount, device) for call, amount in calls]
    return max(found, key=lambda each: each.value)


def _rate(call: Callable[[], object], amount: float, device: str) -> Rate:
    clock = _cpu_seconds if device == "cpu" else _cuda_seconds
    started, single = time.perf_counter(), clock(call, 1, device)
    while time.perf_counter() - started < WARM_UP_S:
        single = clock(call, 1, device)
    count = max(1, round(GROUP_S[device.partition(":")[0]] / single))
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < FEWEST_REPEATS or (len(samples) < REPEATS and time.perf_counter() - started < LIMIT_S):
        samples.append(count * amount / clock(call, count, device))
    low, middle, high = (quantile(samples, part) for part in (0.25, 0.5, 0.75))
    return Rate(value=middle, low=low, high=high, repeats=len(samples))


def _cpu_seconds(call: Callable[[], object], count: int, _device: str) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def _cuda_seconds(call: Callable[[], object], count: int, device: str) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
