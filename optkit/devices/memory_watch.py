"""Memory in use over time: one thread reads it beside the work, the less often the longer that takes."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from optkit.common.frozen import Frozen
from optkit.progress import Progress, Task

PERIOD_S = 0.2
"""Between two readings at first; twice as long whenever `2 * MOST` of a phase are there."""
MOST = 40
"""Readings of a phase that are kept, about."""
OPEN = "open"
"""The phase in which a model is opened."""
LOOK_EVERY = 25
"""Readings after which child processes are looked for: that takes 100 times as long as a reading."""
TURN = re.compile(r", turn \d+ of \d+$")
Reading = tuple[float, int, int]
"""Seconds since the phase began, resident and allocated bytes."""


class MemoryTrace(Frozen):
    """The memory in use during one phase of a run, thinned: of neighbouring readings the largest."""

    name: str
    """The step, the eval or a part of it: `open`, `warming up, batch 1, prompt 128`."""
    of: str = ""
    """The model that was measured: `unmodified` or `artifact`; empty for a step."""
    seconds: tuple[float, ...]
    """When each was read, since the phase began."""
    resident_bytes: tuple[int, ...]
    """Of the run and all processes that it started; in a timed turn of the process that is timed."""
    allocated_bytes: tuple[int, ...] = ()
    """What torch allocated on the GPU; empty on a CPU, and of other processes."""


@dataclass
class _Phase:
    name: str
    began: float
    period_s: float = PERIOD_S
    readings: list[Reading] = field(default_factory=list)

    @property
    def resident(self) -> list[int]:
        return [resident for _, resident, _ in self.readings]

    def add(self, resident: int, allocated: int) -> None:
        self.readings.append((time.perf_counter() - self.began, resident, allocated))
        if len(self.readings) >= 2 * MOST:
            self.readings, self.period_s = _thinned(self.readings, MOST), 2 * self.period_s


class MemoryWatch:
    """Reads the memory from entering to leaving, in phases; a context."""

    def __init__(self, name: str, device: str = "cpu", *, own: bool = True) -> None:
        """Begin with the phase `name`. Without `own` the processes that this one started are read
        alone, without the GPU: nothing of the reading happens in a process that is timed.
        """
        import psutil

        self._this = psutil.Process()
        self._device, self._own = device if own else "cpu", own
        self._phases = [_Phase(name, time.perf_counter())]
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._read_on, name="memory watch", daemon=True)
        self._children: list[Any] = []
        self._count = 0

    def __enter__(self) -> Self:
        self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._read()

    def begin(self, name: str) -> None:
        """End the phase and begin another, unless it is called so already."""
        if self._phases[-1].name == name:
            return
        self._read()
        with self._lock:
            self._phases.append(_Phase(name, time.perf_counter()))
        self._read()

    @property
    def traces(self) -> tuple[MemoryTrace, ...]:
        """What was read, phase by phase; without those in which nothing ran, and those without a name."""
        with self._lock:
            known = [each for each in self._phases if each.name and any(each.resident)]
            return tuple(_trace(each, self._device != "cpu") for each in known)

    def _read_on(self) -> None:
        while not self._over.wait(self._phases[-1].period_s):
            self._read()

    def _read(self) -> None:
        with self._lock:
            self._phases[-1].add(sum(self._each_resident()), _allocated(self._device))

    def _each_resident(self) -> Iterator[int]:
        import psutil

        if self._count % LOOK_EVERY == 0 or not (self._own or self._children):
            self._children = self._this.children(recursive=True)
        self._count += 1
        for process in [*([self._this] if self._own else []), *self._children]:
            with contextlib.suppress(psutil.Error):  # it has ended
                yield process.memory_info().rss


@dataclass(frozen=True)
class PhasedProgress:
    """A progress whose bars are the phases of a memory watch; what comes after the last of them has no name."""

    progress: Progress
    watch: MemoryWatch

    def task(self, label: str, total: int, unit: str = "") -> Task:
        """Open a bar, and begin the phase of its name when it is entered."""
        return _PhasedTask(self.progress.task(label, total, unit), self.watch, TURN.sub("", label))

    def say(self, line: str) -> None:
        self.progress.say(line)

    def warn(self, line: str) -> None:
        self.progress.warn(line)


@dataclass
class _PhasedTask:
    task: Task
    watch: MemoryWatch
    name: str
    before: str = ""

    def __enter__(self) -> Self:
        self.task.__enter__()
        self.before = self.watch._phases[-1].name
        self.watch.begin(self.name)
        return self

    def __exit__(self, *error: Any) -> None:
        outermost = self.before in (OPEN, "") and self.name != self.before
        self.watch.begin("" if outermost else self.before)
        self.task.__exit__(*error)

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.task.advance(steps, note)

    def begin(self) -> None:
        self.task.begin()


def thinned(traces: Sequence[MemoryTrace], most: int) -> tuple[MemoryTrace, ...]:
    """Return traces with at most so many readings together, though two of each."""
    share = max(2, most // max(1, len(traces)))
    found = []
    for each in traces:
        columns = (each.seconds, each.resident_bytes, each.allocated_bytes or (0,) * len(each.seconds))
        phase = _Phase(each.name, 0.0, readings=_thinned([*zip(*columns, strict=True)], share))
        found.append(_trace(phase, bool(each.allocated_bytes)).model_copy(update={"of": each.of}))
    return tuple(found)


def _thinned(readings: Sequence[Reading], most: int) -> list[Reading]:
    """Return the largest of neighbours; the last stands for itself, so that the end stays where it is."""
    if len(readings) <= most:
        return [*readings]
    rest = readings[:-1]
    size = -(-len(rest) // (most - 1))
    bins = [rest[at : at + size] for at in range(0, len(rest), size)]
    return [*((its[0][0], max(each[1] for each in its), max(each[2] for each in its)) for its in bins), readings[-1]]


def _trace(phase: _Phase, on_gpu: bool) -> MemoryTrace:
    seconds, resident, allocated = zip(*phase.readings, strict=True)
    return MemoryTrace(
        name=phase.name,
        seconds=tuple(round(each, 3) for each in seconds),
        resident_bytes=resident,
        allocated_bytes=allocated if on_gpu else (),
    )


def _allocated(device: str) -> int:
    torch = None if device == "cpu" else sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_allocated(device))
