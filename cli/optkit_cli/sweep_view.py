"""A sweep on the terminal: a table that lives while it runs, plain lines elsewhere, and what it left."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from optkit.common.visible import visible
from optkit.progress import Progress, Task
from optkit.sweep.record import Entry, Status, SweepRecord
from optkit_cli.progress import Pace, PacedTask, SafePoints, line_progress
from optkit_cli.tables import duration_text, plain_table, verdict_text

STYLES = {Status.WAITING: "dim", Status.MADE: "yellow", Status.DONE: "green", Status.FAILED: "bold red"}


@contextlib.contextmanager
def watching() -> Iterator[tuple[Lines | LiveTable, Progress]]:
    """Give who draws a sweep on stderr, and its progress: a live table on a terminal, else lines."""
    if progress := line_progress():
        yield Lines(progress), SafePoints(progress)
        return
    from rich.live import Live

    console = Console(stderr=True, highlight=False)
    table = LiveTable(console)
    with Live(table, console=console, redirect_stdout=False, redirect_stderr=False):
        yield table, SafePoints(table)


@dataclass
class Lines:
    """A line whenever a combination is begun, is made or fails."""

    progress: Progress
    before: SweepRecord | None = None
    now: tuple[str, ...] = ()

    def show(self, record: SweepRecord, now: Collection[str]) -> None:
        """Print what is new."""
        known = {entry.name: entry for entry in self.before.entries} if self.before else {}
        over = len(record.entries) - len(record.having(Status.WAITING))
        count = f"{over}/{record.total}"
        for entry in record.entries:
            earlier = known.get(entry.name)
            if self.before and earlier and (earlier.status, earlier.reason) != (entry.status, entry.reason):
                self.progress.say(visible(f"{count}  {entry.name}: {said_of(entry)}"))
        for name in now:
            if name not in self.now:
                self.progress.say(visible(f"{count}  {name}"))
        self.before, self.now = record, tuple(now)


@dataclass
class LiveTable:
    """The table of all combinations, with what is at work below it; a `Progress` as well."""

    console: Console
    record: SweepRecord | None = None
    now: tuple[str, ...] = ()
    said: str = ""
    tasks: list[Pace] = field(default_factory=list)

    def show(self, record: SweepRecord, now: Collection[str]) -> None:
        """Draw the table anew."""
        self.record, self.now, self.said = record, tuple(now), ""

    def task(self, label: str, total: int, unit: str = "") -> Task:
        """Open a task that is drawn below the table."""
        return LiveTask(self, Pace(label, total, unit))

    def say(self, line: str) -> None:
        """Draw one line below the table, until the next."""
        self.said = line

    def warn(self, line: str) -> None:
        self.console.print(f"warning: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def __rich__(self) -> RenderableType:
        """Return the table as it is now."""
        if self.record is None:
            return Text("")
        lines = [f"{pace.label}  {pace.count}  {pace.left}".rstrip() for pace in self.tasks[-1:]]
        below = "  ".join(part for part in (*self.now[:1], self.said, *lines) if part)
        return Group(sweep_table(self.record, self.now), Text(visible(below), style="dim"))


class LiveTask(PacedTask):
    """One task below the live table."""

    def __init__(self, table: LiveTable, pace: Pace) -> None:
        self.table, self.pace = table, pace

    def __enter__(self) -> LiveTask:
        self.table.tasks.append(self.pace)
        return self

    def __exit__(self, *_: object) -> None:
        self.table.tasks.remove(self.pace)

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.pace.done += steps


def sweep_table(record: SweepRecord, now: Collection[str] = ()) -> Table:
    """Return a line for each combination."""
    table = plain_table("combination", "", "gates", ">made in", "")
    for entry in record.entries:
        state = Text("at work", style="cyan") if entry.name in now else Text(entry.status, style=STYLES[entry.status])
        table.add_row(
            Text(entry.name),
            state,
            verdict_text(entry.verdict) if entry.verdict else Text("-"),
            Text(duration_text(entry.seconds) if entry.seconds else "-"),
            Text(entry.reason if entry.reason else "" if entry.weights else "weights deleted"),
        )
    return table


def said_of(entry: Entry) -> str:
    """Return e.g. `made in 12 s, PASS`."""
    made = entry.status is Status.MADE or (entry.status is Status.DONE and entry.timed_with is None)
    took = f" in {duration_text(entry.seconds)}" if entry.seconds and made else ""
    verdict = f", {entry.verdict}" if entry.verdict and entry.status is Status.DONE else ""
    return f"{entry.status}{took}{verdict}{f': {entry.reason}' if entry.reason else ''}"


def closing_view(record: SweepRecord, directory: Path, **choice: Any) -> list[RenderableType]:
    """Return what to print at the end: how far each is, and the comparison of those that are there.
    `choice` is what `compare` takes.
    """
    from optkit.comparison import compare
    from optkit_cli.compare_view import comparison_view

    there = [directory / entry.name for entry in record.having(Status.DONE, Status.MADE)]
    parts: list[RenderableType] = [sweep_table(record), *(comparison_view(compare(there, **choice)) if there else ())]
    failed = record.having(Status.FAILED)
    waiting = record.total - len(there) - len(failed)
    counts = [f"{len(there)} of {record.total} are there"]
    counts += [f"{len(failed)} failed (--retry tries them again)"] if failed else []
    counts += [f"{waiting} wait for the same command"] if waiting else []
    return [Text(""), *parts, Text(""), Text(f"{', '.join(counts)}  {directory}")]
