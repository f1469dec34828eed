"""Who makes a recipe's artifact for a sweep: this machine, in a process of its own for each recipe."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from optkit.errors import OptkitError
from optkit.processes.child import Child
from optkit.processes.crashes import ChildEndedError, ChildError
from optkit.progress import Progress
from optkit.recipe.recipe import Recipe

MODULE = "optkit.sweep.make_worker"
PATIENCE_S = 5.0
LOGS = "logs"


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


@dataclass(frozen=True)
class Outcome:
    """What became of an order; the artifact and its scorecard lie in its directory."""

    verdict: str | None = None
    """Of the gates; None if there is no artifact."""
    reason: str = ""
    """Why there is none; empty if the time was over."""
    seconds: float = 0.0


class Executor(Protocol):
    """Makes artifacts somewhere."""

    def run(self, order: Order, progress: Progress, timeout_s: float | None) -> Outcome:
        """Make the artifact of an order. What fails is told in the outcome and not raised.

        After `timeout_s` it is ended: what is finished stays in the store.
        """
        ...


class LocalExecutor:
    """Makes each artifact in a fresh process here.
    A crash, or memory that runs out, ends that process alone.
    """

    def run(self, order: Order, progress: Progress, timeout_s: float | None) -> Outcome:
        """Start a process, and wait for it."""
        began = time.monotonic()
        verdict, reason = None, ""
        log = order.out.parent / LOGS / f"{order.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with Child(MODULE, name="the process that made it", log=log, patience_s=PATIENCE_S) as child:
                child.send(_described(order))
                verdict = child.result(progress, timeout_s=timeout_s)["verdict"]
        except TimeoutError:
            reason = ""
        except (OptkitError, ChildError) as error:
            reason = reason_of(error)
        return Outcome(verdict, reason, round(time.monotonic() - began, 3))


def reason_of(error: Exception) -> str:
    """Return why something failed, in one line."""
    words = getattr(error, "last_words", "") if isinstance(error, ChildEndedError) else ""
    return " ".join(f"{error}. {words}".split() if words else str(error).split()) or type(error).__name__


def _described(order: Order) -> dict[str, Any]:
    """Return an order as JSON values."""
    return {
        "recipe": order.recipe.resolved(),
        "out": str(order.out.absolute()),
        "device": order.device,
        "store": str(order.store.absolute()),
        "data": None if order.data is None else str(order.data.absolute()),
        "against": order.against,
    }
