"""Warm up and repeat one configuration of a timing, and say how quiet the machine was meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from optkit.common.byte_sizes import size_text
from optkit.devices.cpu_watch import CpuWatch
from optkit.devices.gpu_watch import GpuWatch, devices_of
from optkit.devices.peak_memory import Peak, peak_of
from optkit.measure import AttendingSession, EvalContext, ProposingSession, Session
from optkit.progress import Task
from optkit_evals.timing import (
    MOST_REPEATS,
    SETTLED,
    Timing,
    WarmUp,
    answer,
    random_tokens,
    uninterrupted,
    wants_more,
    warm_up,
)

CALM = 0.05
"""Share of the cores that other processes may use during a repeat that counts."""


@dataclass(frozen=True)
class Cell:
    """One configuration of the grid."""

    batch: int
    prompt: int
    new_tokens: int
    engine: str = ""
    """Another one than optkit's own session."""

    @property
    def labels(self) -> dict[str, int | str]:
        other: dict[str, int | str] = {"engine": self.engine} if self.engine else {}
        return {"batch": self.batch, "prompt": self.prompt, "new_tokens": self.new_tokens} | other

    def __str__(self) -> str:
        return f"batch {self.batch}, prompt {self.prompt}"


@dataclass(frozen=True)
class Effort:
    """How long one turn of a configuration goes on."""

    warmup: int
    """Runs before the repeats, at least."""
    repeats: int
    """At least; `MOST_REPEATS` times as many at most."""
    interval: float
    """How large standard errors may be, as a fraction of their means, before the repeats stop."""
    limit_s: float

    def wants_more(self, timings: Sequence[Timing], calm: Sequence[Timing]) -> bool:
        """Say whether another repeat free of others is due, within the limits of all together."""
        if len(timings) >= MOST_REPEATS * self.repeats or (
            len(timings) >= self.repeats and sum(each.total_s for each in timings) >= self.limit_s
        ):
            return False
        return wants_more(calm, self.repeats, self.interval, self.limit_s)


@dataclass(frozen=True)
class Repeats:
    """What was measured of a cell."""

    timings: Sequence[Timing]
    peak: Peak
    energy_j: float | None
    """Of all repeats together."""


def repeat(session: Session, cell: Cell, effort: Effort, context: EvalContext, watch: GpuWatch, task: Task) -> Repeats:
    """Return the repeats of a configuration during which others left the cores alone, if enough did."""
    tokens = random_tokens(session, cell.batch, cell.prompt, context.seed)
    with context.progress.task(f"warming up, {cell}", 0, "runs") as warming, uninterrupted():
        settling = warm_up(session, tokens, cell.new_tokens, effort.warmup, effort.limit_s, warming)
    if isinstance(session, ProposingSession) and session.speculation:
        session.speculation.reset()
    with peak_of(session) as peak, uninterrupted():
        before_j = watch.energy_j()
        timings, calm = _time(session, tokens, cell, effort, watch, task)
        after_j = watch.energy_j()
    for warning in _warnings(peak, settling):
        context.warn(f"throughput, {cell}: {warning}")
    if peak.each:
        shares = ", ".join(size_text(size) for size in peak.each)
        context.notes.append(
            f"throughput, {cell}: the peak of memory was {shares} in the processes that hold the model"
        )
    kept = _kept(timings, calm, cell, effort, context)
    attention = (
        f"; attention by {session.attention_kernels(tokens[:1])}" if isinstance(session, AttendingSession) else ""
    )
    context.notes.append(
        f"throughput, {cell}, {cell.new_tokens} new tokens: {settling.runs} warm-up runs, "
        f"{len(kept)} repeats{attention}"
    )
    used_j = after_j - before_j if after_j is not None and before_j is not None else None
    return Repeats(tuple(kept), peak, used_j)


def _time(
    session: Session, tokens: Any, cell: Cell, effort: Effort, watch: GpuWatch, task: Task
) -> tuple[list[Timing], list[Timing]]:
    """Return all repeats, and those during which others left the cores alone."""
    timings, calm = list[Timing](), list[Timing]()
    cpu = CpuWatch() if devices_of(session) == ("cpu",) else None
    while effort.wants_more(timings, calm):
        before = cpu.now() if cpu else None
        timings.append(answer(session, tokens, cell.new_tokens))
        if not cpu or not before or cpu.others(before) <= CALM:
            calm.append(timings[-1])
        watch.read()
        task.advance(steps=int(len(timings) <= effort.repeats), note=str(cell))
    return timings, calm


def _kept(timings: list[Timing], calm: list[Timing], cell: Cell, effort: Effort, context: EvalContext) -> list[Timing]:
    """Return the repeats that count, and say how many do not."""
    disturbed = len(timings) - len(calm)
    if len(calm) < effort.repeats:
        context.warn(
            f"throughput, {cell}: other processes used more than {CALM:.0%} of the cores during {disturbed} of"
            f" {len(timings)} repeats; run again with --retime on a quiet machine"
        )
        return timings
    if disturbed:
        context.notes.append(
            f"throughput, {cell}: {disturbed} repeats are left out, during which other processes used more "
            f"than {CALM:.0%} of the cores"
        )
    return calm


def _warnings(peak: Peak, settling: WarmUp) -> Iterator[str]:
    if not settling.settled:
        yield (
            f"{settling.runs} warm-up runs, and their running mean still moves by more than {SETTLED:.0%};"
            f" something else may be using the machine"
        )
    if peak.unknown:
        yield f"peak_memory_bytes is not reported: {peak.unknown}"
