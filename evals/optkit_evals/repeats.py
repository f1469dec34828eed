"""Warm up and repeat one configuration of a timing, and say how quiet the machine was meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optkit.common.byte_sizes import size_text
from optkit.devices.cpu_watch import CpuWatch
from optkit.devices.gpu_watch import GpuWatch, devices_of
from optkit.devices.peak_memory import Peak, peak_of
from optkit.measure import AttendingSession, EvalContext, ProposingSession, Session
from optkit.progress import Task
from optkit_evals.timing import SETTLED, Timing, WarmUp, answer, is_certain, random_tokens, uninterrupted, warm_up

CALM = 0.05
"""Share of the cores that other processes may use during a repeat that counts."""
MOST_REPEATS = 4
"""Times the repeats asked for, after which no more are made however wide the interval is."""


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
    """Of warm-up runs beyond `warmup` and of repeats together; one repeat is made in any case."""

    def wants_more(self, timings: Sequence[Timing], calm: Sequence[Timing]) -> bool:
        """Say whether another repeat is due: too few were free of others, or they differ too much.

        How many there are depends on how they differ within a turn alone, so that the interval,
        which stands on the turns' means, stays honest.
        """
        spent_s = sum(each.total_s for each in timings)
        if timings and (len(timings) >= MOST_REPEATS * self.repeats or spent_s >= self.limit_s):
            return False
        return len(calm) < max(self.repeats, 2) or not is_certain(calm, self.interval)


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
    effort = replace(effort, limit_s=effort.limit_s - settling.further_s)
    if isinstance(session, ProposingSession) and session.speculation:
        session.speculation.reset()
    with peak_of(session) as peak, uninterrupted():
        before_j = watch.energy_j()
        timings, calm = _time(session, tokens, cell, effort, watch, task, context)
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
    over = f" of {effort.repeats}, since limit_s was over" if len(timings) < effort.repeats else ""
    context.notes.append(
        f"throughput, {cell}, {cell.new_tokens} new tokens: {settling.runs} warm-up runs, "
        f"{len(kept)} repeats{over}{attention}"
    )
    used_j = after_j - before_j if after_j is not None and before_j is not None else None
    return Repeats(tuple(kept), peak, used_j)


def _time(
    session: Session, tokens: Any, cell: Cell, effort: Effort, watch: GpuWatch, task: Task, context: EvalContext
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
        if len(timings) == effort.repeats > len(calm) and effort.wants_more(timings, calm):
            context.progress.warn(
                f"throughput, {cell}: other processes use more than {CALM:.0%} of the cores;"
                f" repeats go on for up to {effort.limit_s:.0f} s, until enough of them are undisturbed"
            )
    return timings, calm


def _kept(timings: list[Timing], calm: list[Timing], cell: Cell, effort: Effort, context: EvalContext) -> list[Timing]:
    """Return the repeats that count, and say how many do not."""
    disturbed = len(timings) - len(calm)
    if disturbed and len(calm) < effort.repeats:
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
