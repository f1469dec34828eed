"""How much of this process's cores others use: so spoiled timings are known, and threads make room."""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from optkit.progress import Progress

FEWEST_TICKS = 20
"""Of all cores together: of less time the kernel's count, in ticks of 10 ms, says nothing."""
CROWD = 0.25
"""Share of the cores that others use, from which on threads had better sleep while they wait.
Those that spin take the cores from whoever they wait for: a token takes six times as long.
"""
SAMPLE_S = 0.2
WAIT_POLICY, PASSIVE = "OMP_WAIT_POLICY", "PASSIVE"
"""What OpenMP reads when torch is imported: how threads wait for each other."""


@dataclass(frozen=True)
class Moment:
    """Ticks of all cores since the machine started, and seconds that this process and those that it
    has waited for have computed.
    """

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
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return Moment(busy, everything, time.process_time() + ended.ru_utime + ended.ru_stime)

    def others(self, before: Moment) -> float:
        """Return the share of the cores' time that others took; 0 if it is too soon to say."""
        after = self.now()
        ticks = after.all - before.all
        if ticks < FEWEST_TICKS:
            return 0.0
        own = (after.own_s - before.own_s) * os.sysconf("SC_CLK_TCK")
        return max(0.0, after.busy - before.busy - own) / ticks


def crowd() -> float:
    """Return the share of the cores that others use now, 0 if that is little or the user has chosen
    how threads wait. It takes 0.2 s.
    """
    if WAIT_POLICY in os.environ:
        return 0.0
    watch = CpuWatch()
    before = watch.now()
    time.sleep(SAMPLE_S)
    others = watch.others(before)
    return others if others > CROWD else 0.0


def make_room(progress: Progress) -> None:
    """Import torch so that its threads sleep while they wait, if others use the cores now.
    The variable is set during the import alone: processes of this one decide for themselves.
    """
    if "torch" in sys.modules or not (others := crowd()):
        return
    progress.say(f"other programs use {others:.0%} of the cores, so threads sleep while they wait")
    os.environ[WAIT_POLICY] = PASSIVE
    try:
        import torch as torch
    finally:
        del os.environ[WAIT_POLICY]
