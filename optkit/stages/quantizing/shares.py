"""Which rows of which matrices each process rounds, so that all are done at about the same time. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROWS = 64
"""Rows come in so many: products of matrices take longer at other lengths."""
PER_INPUT = 8e6
"""What rounding one input of however many rows takes beside its arithmetic, in multiplications of an H200: launches."""
HALVINGS = 20


@dataclass(frozen=True)
class Work:
    """Rows that are rounded at a time, in parts that no process shares with another."""

    once: float
    """What a process needs that takes any of it."""
    each: float
    """And for each part."""
    rows: int
    step: int
    """Rows of a part; the last may have fewer."""

    @property
    def parts(self) -> int:
        """Return how many there are."""
        return -(-self.rows // self.step)


def factoring(inputs: int) -> float:
    """Return what it takes to factor a Hessian, and to tell others the factor."""
    return inputs**3 / 9


def rounding(stacks: int, outputs: int, inputs: int, factored: bool = False) -> Work:
    """Return the work of stacks of one shape, each with a Hessian of its own, which may be `factored` before."""
    launching, before = PER_INPUT * inputs, 0.0 if factored else factoring(inputs)
    if stacks == 1:
        return Work(before + launching, ROWS * inputs**2, outputs, ROWS)
    return Work(launching, before + outputs * inputs**2, stacks * outputs, outputs)


def divided(works: Sequence[Work], processes: int, busy: float = 0.0) -> list[list[int]]:
    """Return for each of the works how many of its rows each process takes, in the order of processes. The last
    one is `busy` with something else before.
    """
    least, most = 0.0, 2 * (busy + sum(work.once + work.parts * work.each for work in works))
    found = _within(works, processes, most, busy)
    for _ in range(HALVINGS if processes > 1 else 0):
        middle = (least + most) / 2
        better = _within(works, processes, middle, busy)
        found, least, most = (found, middle, most) if better is None else (better, least, middle)
    assert found is not None, "one process alone has time for all"
    return [_rows(work, parts) for work, parts in zip(works, found, strict=True)]


def _within(works: Iterable[Work], processes: int, limit: float, busy: float) -> list[list[int]] | None:
    """Return the parts that each process takes if none takes longer than a limit, None if that is too short."""
    times, found = [limit] * (processes - 1) + [limit - busy], []
    process = 0
    for work in works:
        parts, taken = work.parts, [0] * processes
        while parts:
            taken[process] = max(0, min(parts, int((times[process] - work.once) / work.each)))
            parts -= taken[process]
            times[process] -= work.once + taken[process] * work.each if taken[process] else 0
            process += 1 if parts else 0
            if process == processes:
                return None
        found.append(taken)
    return found


def _rows(work: Work, parts: Iterable[int]) -> list[int]:
    left, found = work.rows, []
    for count in parts:
        found.append(min(left, count * work.step))
        left -= found[-1]
    return found
