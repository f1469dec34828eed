"""The contract of executors: orders go in, outcomes come out."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from optkit import __version__
from optkit.environment import cpu_threads, visible_gpus
from optkit.plan import Plan
from optkit.processes.crashes import ChildEndedError
from optkit.progress import Progress
from optkit.recipe.recipe import Recipe
from optkit.store.shared import VARIABLE

LOGS = "logs"
"""The folder beside the artifacts for what their processes print."""
PROCESS_BYTES = 2 << 30
"""What Python and torch take beside what a plan predicts."""


@dataclass(frozen=True)
class Needs:
    """What making an artifact takes of a machine."""

    cpus: int
    gpus: int
    ram_bytes: int

    @classmethod
    def of(cls, plan: Plan) -> Needs:
        """Return what a plan says. It has as many CPU threads as torch would use here, and a GPU
        has its share of them.
        """
        gpus = 0
        cpus = cpu_threads()
        if plan.device != "cpu":
            gpus = max((getattr(entry.value, "devices", 1) for entry in plan.recipe.stages), default=1)
            cpus = max(1, cpus * gpus // max(gpus, visible_gpus()))
        return cls(cpus, gpus, plan.ram_bytes + PROCESS_BYTES)


@dataclass(frozen=True)
class Order:
    """A recipe to be made and measured, but for its timings."""

    name: str
    """Of the combination."""
    recipe: Recipe
    out: Path
    """The directory of the artifact."""
    device: str
    store: Path
    data: Path | None
    against: str | None = None
    """The earlier release that gates are relative to, as `optkit.run` takes it."""
    since: str | None = None
    """When the sweep began; what was measured before is noted."""
    needs: Needs = Needs(1, 0, 0)

    def described(self) -> dict[str, Any]:
        """Return the order as JSON values, for another process."""
        return {
            "name": self.name,
            "recipe": self.recipe.resolved(),
            "out": str(self.out.absolute()),
            "device": self.device,
            "store": str(self.store.absolute()),
            "data": None if self.data is None else str(self.data.absolute()),
            "against": self.against,
            "since": self.since,
            "cwd": str(Path.cwd()),
            "remote": os.environ.get(VARIABLE),
            "optkit": __version__,
        }


@dataclass(frozen=True)
class Outcome:
    """What became of an order; the artifact and its scorecard lie in its directory."""

    verdict: str | None = None
    """Of the gates; None if there is no artifact."""
    reason: str = ""
    """Why there is none; empty if the time was over."""
    seconds: float = 0.0


class Executor(ABC):
    """Makes artifacts somewhere; a context that ends what is at work."""

    together: ClassVar[bool] = False
    """It takes orders while others are at work."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """The options of `optkit sweep` that it is made with."""

    @abstractmethod
    def begin(self, order: Order) -> None:
        """Take an order. Raises OptkitError if this executor can make none of them."""

    @abstractmethod
    def ended(self, progress: Progress, timeout_s: float | None) -> dict[str, Outcome]:
        """Wait until an order ends, and return what became of those that did, by their names.
        What fails is told in the outcome and not raised. It is empty after `timeout_s`.
        """

    def stop(self) -> None:  # noqa: B027
        """End what is at work: what is finished stays in the store."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def reason_of(error: Exception) -> str:
    """Return why something failed, in one line."""
    words = getattr(error, "last_words", "") if isinstance(error, ChildEndedError) else ""
    return " ".join(f"{error}. {words}".split() if words else str(error).split()) or type(error).__name__
