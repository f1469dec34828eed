"""Progress of a running command, always on stderr: bars on a terminal, lines of text or of JSON
elsewhere.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TextIO

from optkit.common.visible import visible
from optkit.processes import signals
from optkit.progress import Progress, SilentProgress, SilentTask, Task
from optkit_cli.failures import json_line
from optkit_cli.options import invocation
from optkit_cli.output import only_the_result_on_stdout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

LINE_INTERVAL_S = 5.0
LINE_INTERVAL_SHARE = 0.1
"""At most one plain line of a task in so many seconds, and in this share of the time that it has
taken so far.
"""
JSON_INTERVAL_S = 1.0
"""At most one line of JSON of a task in so many seconds."""
LEAST_KNOWN = 0.02
"""Share of a task from which on it is told how long the rest takes."""
WORTH_A_LINE_S = 1.0
"""A bar that was there for less leaves no line behind."""


def open_progress() -> SafePoints:
    """Return stderr's progress: bars on a terminal, else lines; only warnings when asked to be quiet."""
    if lines := line_progress():
        return SafePoints(lines)
    from rich.console import Console

    return SafePoints(BarProgress(Console(stderr=True, highlight=False)))


@contextlib.contextmanager
def working() -> Iterator[SafePoints]:
    """Give the progress of work during which whatever libraries print goes to stderr."""
    with only_the_result_on_stdout():
        yield open_progress()


def line_progress() -> WarningsOnly | None:
    """Return stderr's progress in lines; None on a terminal, which can be drawn on."""
    asked = invocation()
    if asked.quiet:
        return WarningsOnly(sys.stderr, as_json=asked.logs_json)
    if asked.logs_json:
        return LineProgress(sys.stderr, JSON_INTERVAL_S, interval_share=0, as_json=True)
    from rich.console import Console

    console = Console(stderr=True)
    return None if console.is_terminal and not console.is_dumb_terminal else LineProgress(sys.stderr)


@dataclass(frozen=True)
class SafePoints:
    """Says what another says, each word in one line.
    It is a point at which a run that is asked to stop does so.
    """

    to: Progress

    def task(self, label: str, total: int, unit: str = "") -> Task:
        """Open a task whose steps are such points."""
        signals.check()
        return SafeTask(self.to.task(visible(label), total, unit))

    def say(self, line: str) -> None:
        signals.check()
        self.to.say(visible(line))

    def warn(self, line: str) -> None:
        self.to.warn(visible(line))
        signals.check()


@dataclass(frozen=True)
class SafeTask:
    """One task of `SafePoints`."""

    to: Task

    def __enter__(self) -> Self:
        self.to.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.to.__exit__(*error)

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count, and stop here if that is asked."""
        self.to.advance(steps, visible(note))
        signals.check()

    def begin(self) -> None:
        self.to.begin()


def clock_text(seconds: float) -> str:
    """Return `0:31`, `12:05` or `3:10:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass
class Pace:
    """How much of a task is done, and how long the rest will take if it goes on like this."""

    label: str
    total: int
    unit: str
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    start: float = field(init=False)
    began: float = field(init=False)
    kept: int = 0
    """What an earlier run did of it."""

    def __post_init__(self) -> None:
        self.start = self.began = self.clock()

    def begin(self) -> None:
        """Take what is done as kept: its time says nothing of the rest."""
        self.kept, self.began = self.done, self.clock()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.start

    @property
    def share(self) -> str:
        """`40%`; empty if nobody knows of how much."""
        return f"{self.done / self.total:.0%}" if self.total else ""

    @property
    def count(self) -> str:
        """How far it is: `12/30 blocks`, or `12 blocks` if nobody knows of how many."""
        return " ".join(
            part for part in (f"{self.done}/{self.total}" if self.total else f"{self.done}", self.unit) if part
        )

    @property
    def left(self) -> str:
        """`0:31 left` if it goes on like this; empty before 2% are done, since what comes once is in
        the first steps, and at the end.
        """
        made, remaining = self.done - self.kept, self.total - self.done
        if remaining <= 0 or made < max(1, LEAST_KNOWN * self.total):
            return ""
        return f"{clock_text((self.clock() - self.began) / made * remaining)} left"

    def ending(self, failed: bool) -> str:
        """Return the last line: `gptq 30/30 blocks in 4:12`.
        That what it left is kept is said by whoever kept it.
        """
        return f"{self.label}  {self.count}  {'stopped after' if failed else 'in'} {clock_text(self.elapsed_s)}"


class PacedTask(SilentTask):
    """A task that knows its pace."""

    pace: Pace

    def begin(self) -> None:
        self.pace.begin()


class WarningsOnly(SilentProgress):
    """Prints warnings and nothing else."""

    def __init__(self, stream: TextIO, *, as_json: bool = False) -> None:
        self.stream, self.as_json = stream, as_json

    def warn(self, line: str) -> None:
        """Print `warning: ...`."""
        self.write("warning", line)

    def write(self, level: str, message: str, pace: Pace | None = None) -> None:
        """Print one line of text or of JSON; `pace` is how far its task is."""
        if self.as_json:
            far = {"step": pace.label, "done": pace.done, "of": pace.total or None, "unit": pace.unit} if pace else {}
            print(json_line(level, message, **far), file=self.stream, flush=True)
        else:
            print(f"warning: {message}" if level == "warning" else message, file=self.stream, flush=True)


class LineProgress(WarningsOnly):
    """Lines, few enough for a log file."""

    def __init__(
        self,
        stream: TextIO,
        interval_s: float = LINE_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        *,
        interval_share: float = LINE_INTERVAL_SHARE,
        as_json: bool = False,
    ) -> None:
        super().__init__(stream, as_json=as_json)
        self.interval_s, self.interval_share, self.clock = interval_s, interval_share, clock

    def task(self, label: str, total: int, unit: str = "") -> Task:
        """Open a task that prints its start, its end and a line now and then."""
        return LineTask(self, Pace(label, total, unit, self.clock))

    def say(self, line: str) -> None:
        self.write("info", line)


class LineTask(PacedTask):
    """One task in plain lines: `gptq  12/30 blocks  40%  0:31 left  model.layers.11`."""

    def __init__(self, progress: LineProgress, pace: Pace) -> None:
        self.progress, self.pace = progress, pace
        self.last_line_s = pace.elapsed_s

    def __enter__(self) -> Self:
        self._say(f"{self.pace.label}  {self.pace.count}")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._say(self.pace.ending(failed=kind is not None))

    def _say(self, line: str) -> None:
        self.progress.write("info", line, self.pace)

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Count, and print a line if the last one is long enough ago."""
        pace = self.pace
        pace.done += steps
        pause_s = max(self.progress.interval_s, self.progress.interval_share * pace.elapsed_s)
        if pace.done == pace.total or pace.elapsed_s - self.last_line_s < pause_s:
            return
        self.last_line_s = pace.elapsed_s
        self._say("  ".join(part for part in (pace.label, pace.count, pace.share, pace.left, note) if part))


class BarProgress:
    """Bars that go when their work is done, with one line left of each."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.bars: Bars | None = None
        self.open_tasks = 0

    def task(self, label: str, total: int, unit: str = "") -> Task:
        return BarTask(self, Pace(label, total, unit, self.clock))

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        """Print `warning: ...` above the bars."""
        self.console.print(f"warning: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def bar_opened(self) -> Bars:
        """Return the live display, started with the first bar."""
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        if self.bars is None:
            self.bars = Bars(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[count]}", markup=False),
                TaskProgressColumn(),
                TextColumn("{task.fields[left]}", markup=False),
                TextColumn(
                    "{task.fields[note]}",
                    style="dim",
                    markup=False,
                    table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
                ),
                console=self.console,
                transient=True,
                expand=True,
                redirect_stdout=False,
            )
            self.bars.start()
        self.open_tasks += 1
        return self.bars

    def bar_closed(self) -> None:
        """End the live display with the last bar, so that the terminal is ours again."""
        self.open_tasks -= 1
        if self.open_tasks == 0 and self.bars is not None:
            self.bars.stop()
            self.bars = None


class BarTask(PacedTask):
    """One bar."""

    def __init__(self, progress: BarProgress, pace: Pace) -> None:
        self.progress, self.pace = progress, pace

    def __enter__(self) -> Self:
        self.bars = self.progress.bar_opened()
        self.bar = self.bars.add_task(self.pace.label, total=self.pace.total, count=self.pace.count, left="", note="")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.bars.remove_task(self.bar)
        self.progress.bar_closed()
        if kind is not None or self.pace.elapsed_s >= WORTH_A_LINE_S:
            self.progress.say(self.pace.ending(failed=kind is not None))

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.pace.done += steps
        self.bars.update(self.bar, completed=self.pace.done, count=self.pace.count, left=self.pace.left, note=note)
