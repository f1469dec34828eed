"""A clock that a stand-in of a session moves, and what a terminal is told."""

from __future__ import annotations

from optkit.progress import SilentProgress, SilentTask
from tests.support.bigram_session import BigramSession


class Clock:
    """A clock that only the session moves."""

    def __init__(self, session: BigramSession, first_s: float = 0.5, between_s: float = 0.1) -> None:
        self.now = 0.0
        self.answers = 0
        self.first_s, self.between_s = first_s, between_s
        self.slow_answers: dict[int, float] = {}
        session.on_token = self.tick

    def tick(self, batch: int, index: int) -> None:
        self.answers += index == 0
        factor = self.slow_answers.get(self.answers, 1.0)
        self.now += factor * (self.first_s if index == 0 else self.between_s)


class Lines(SilentProgress, SilentTask):
    """A progress, and a task of it, that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def task(self, label, total, unit=""):
        self.lines.append(f"{label} 0/{total} {unit}")
        return self

    def say(self, line):
        self.lines.append(line)

    def advance(self, steps=1, note=""):
        self.lines.append(f"+{steps} {note}".strip())
