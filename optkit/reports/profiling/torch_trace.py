"""Trace prefill and decode of a torch session with torch.profiler.
It gives Chrome traces, time by kernel or operation, memory and NVTX ranges.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from optkit.common.grouping import by_key
from optkit.measure import QueueingSession, Session
from optkit.reports.profiling.kinds import kind_of
from optkit.reports.profiling.profile_report import Line

MEMORY_ENTRIES = 200_000
"""Allocations that a memory snapshot remembers."""


@dataclass(frozen=True)
class Traced:
    """What the profiler saw of one phase."""

    traced_s: float
    busy_s: float
    """On a GPU: while any kernel ran. On a CPU: inside of operations."""
    lines: tuple[Line, ...]
    """The longest first."""


def time_phases(session: Session, tokens: Tensor, new_tokens: int) -> tuple[float, float]:
    """Return the seconds of prefill and of all steps after it, without a profiler."""
    start = time.perf_counter()
    stream = _steps(session, tokens, new_tokens)
    next(stream)
    _finish(session)
    middle = time.perf_counter()
    for _ in stream:
        pass
    _finish(session)
    return middle - start, time.perf_counter() - middle


def _steps(session: Session, tokens: Tensor, new_tokens: int) -> Iterator[Tensor]:
    """Return the steps of a request; on a GPU Python runs ahead, as when throughput is measured."""
    if session.device != "cpu" and isinstance(session, QueueingSession):
        return session.queue(tokens, new_tokens)
    return session.stream(tokens, new_tokens)


def _finish(session: Session) -> None:
    if session.device != "cpu":
        torch.cuda.synchronize(session.device)


def trace_phases(session: Session, tokens: Tensor, new_tokens: int, directory: Path) -> dict[str, Traced]:
    """Return prefill and decode as the profiler saw them; writes PHASE.trace.json for each."""
    stream = _steps(session, tokens, new_tokens)
    with _traced(session.device, directory / "prefill.trace.json") as prefill, record_function("prefill"):
        next(stream)
        _finish(session)
    with _traced(session.device, directory / "decode.trace.json") as decode:
        for step in range(new_tokens - 1):
            with record_function(f"decode {step + 1}"):
                next(stream)
        _finish(session)
    stream.close()  # type: ignore[attr-defined]
    return {"prefill": prefill[0], "decode": decode[0]}


@contextlib.contextmanager
def _traced(device: str, trace: Path) -> Iterator[list[Traced]]:
    """Profile what happens inside; the list is filled at the end."""
    found: list[Traced] = []
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device != "cpu" else [])
    with profile(activities=activities) as profiler:
        start = time.perf_counter()
        yield found
        traced_s = time.perf_counter() - start
    profiler.export_chrome_trace(str(trace))
    found.append(_read(profiler, traced_s, DeviceType.CPU if device == "cpu" else DeviceType.CUDA))


def _read(profiler: Any, traced_s: float, wanted: DeviceType) -> Traced:
    events = [event for event in profiler.events() if event.device_type == wanted and not _is_annotation(event)]
    if wanted == DeviceType.CPU:
        ordered = longest_first(by_key((event.name, event.self_cpu_time_total / 1e6) for event in events))
        return Traced(traced_s, min(traced_s, sum(line.seconds for line in ordered)), ordered)
    ordered = longest_first(by_key((event.name, event.time_range.elapsed_us() / 1e6) for event in events))
    spans = ((event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events)
    return Traced(traced_s, covered(spans), ordered)


def longest_first(seconds: Mapping[str, Sequence[float]]) -> tuple[Line, ...]:
    """Return a line for each name with its times."""
    lines = (Line(name=name, kind=kind_of(name), seconds=sum(each), calls=len(each)) for name, each in seconds.items())
    return tuple(sorted(lines, key=lambda line: -line.seconds))


def _is_annotation(event: Any) -> bool:
    """Say whether an event is a range that we, torch or the profiler named, and nothing that ran."""
    named = event.name in ("prefill", "cudaDeviceSynchronize") or event.name.startswith(
        ("decode ", "ProfilerStep", "[memory]")
    )
    return named or bool(event.is_user_annotation) or event.name.startswith("Activity Buffer Request")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def snapshot_memory(session: Session, tokens: Tensor, new_tokens: int, path: Path) -> None:
    """Write the allocations of one request on a GPU, for https://docs.pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)
    try:
        for _ in session.stream(tokens, new_tokens):
            pass
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def mark_ranges(session: Session, tokens: Tensor, new_tokens: int) -> None:
    """Answer once with NVTX ranges around phases, steps and operations, for Nsight.
    All is between cudaProfilerStart and cudaProfilerStop.
    """
    stream = _steps(session, tokens, new_tokens)
    torch.cuda.profiler.start()
    with torch.autograd.profiler.emit_nvtx():
        for step in range(new_tokens):
            with torch.cuda.nvtx.range(f"decode {step}" if step else "prefill"):
                next(stream)
        _finish(session)
    torch.cuda.profiler.stop()
