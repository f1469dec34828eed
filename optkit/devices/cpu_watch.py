"""How much of this process's cores others used meanwhile, so that spoiled timings are known."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

FEWEST_TICKS = 20
"""Of all cores together: of less time the kernel's count, in ticks of 10 ms, says nothing."""


@dataclass(frozen=True)
class Moment:
    """Ticks of all cores since the machine started, and seconds that this process has computed."""

    busy: int
    all: int
    own_s: float


class CpuWatch:
    """Reads /proc/stat (man 5 proc_stat) before and after; without it, nobody else is ever seen."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._cores = {f"cpu{core}" for core in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()

    def now(self) -> Moment:
        """Return the counts of this moment. Time that the hypervisor gave to others (steal) is
        busy.
        """
        busy = everything = 0
        for line in self._stat.read_text(encoding="utf-8").splitlines() if self._stat.is_file() else ():
            name, *fields = line.split()
            if name in self._cores:
                user, nice, system, idle, waiting, *interrupts = map(int, fields[:8])
                busy += user + nice + system + sum(interrupts)
                everything += user + nice + system + idle + waiting + sum(interrupts)
        return Moment(busy, everything, time.process_time())

    def others(self, before: Moment) -> float:
        """Return the share of the cores' time that others took; 0 if it is too soon to say."""
        after = self.now()
        ticks = after.all - before.all
        if ticks < FEWEST_TICKS:
            return 0.0
        own = (after.own_s - before.own_s) * os.sysconf("SC_CLK_TCK")
        return max(0.0, after.busy - before.busy - own) / ticks
