"""Progress that a test looks at afterwards."""

from optkit.progress import SilentProgress, SilentTask


class Lines(SilentProgress, SilentTask):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def task(self, label: str, total: int, unit: str = "") -> SilentTask:
        self.lines.append(f"{label} of {total} {unit}".strip())
        return self

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.lines.append(f"+{steps} {note}".strip())

    def __exit__(self, *_: object) -> None:
        self.lines.append("end")

    def say(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, line: str) -> None:
        self.lines.append(f"warning: {line}")
