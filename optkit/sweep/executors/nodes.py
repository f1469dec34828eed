"""What executors on a cluster share: nodes fill the store, and the driver publishes from it."""

from __future__ import annotations

import json
import os
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from optkit.errors import OptkitError
from optkit.pipeline import run
from optkit.processes import signals
from optkit.processes.child import Bars
from optkit.processes.crashes import error_of
from optkit.progress import Named, Progress
from optkit.store.shared import VARIABLE
from optkit.sweep.executors.base import LOGS, Executor, Order, Outcome, reason_of

POLL_S = 0.5


class NodesExecutor(Executor):
    """Has orders made by nodes; a subclass says how they get there and back.

    A node makes and measures a recipe as this machine would, and keeps in the store what it made.
    Then the recipe runs here once more, finds all of it, and publishes the artifact.
    """

    together: ClassVar[bool] = True

    def __init__(self) -> None:
        self._orders: dict[str, Order] = {}
        self._refused: dict[str, Outcome] = {}
        self._bars: dict[str, Bars] = {}
        self._open = ExitStack()
        self._seen, self._started = "", False

    @abstractmethod
    def submit(self, order: Order, described: Mapping[str, Any]) -> None:
        """Hand over an order; raises OptkitError if no node can make it."""

    @abstractmethod
    def results(self, wait_s: float) -> dict[str, dict[str, Any]]:
        """Wait for orders that end, and return what `make_on_node` did, by their names."""

    @abstractmethod
    def lines(self) -> Iterable[tuple[str, str]]:
        """Return what nodes said since: the name of an order, and a line."""

    @abstractmethod
    def cancel(self) -> None:
        """End what is at work."""

    def begin(self, order: Order) -> None:
        """Hand over an order."""
        if not self._started:
            self._seen, self._started = self._leave_sign(order.store), True
            self.start(order)
        self._orders[order.name] = order
        try:
            self.submit(order, self.describe(order))
        except OptkitError as error:
            self._refused[order.name] = Outcome(None, reason_of(error))

    def start(self, order: Order) -> None:
        """Reach the nodes, before the first order is handed over."""

    def describe(self, order: Order) -> dict[str, Any]:
        """Return what a node has to know of an order: of several GPUs it sees its own, and gates
        are judged here.
        """
        ungated = replace(order, recipe=order.recipe.model_copy(update={"gates": {}}), against=None)
        device = order.device.partition(":")[0]
        return {**ungated.described(), "device": device, "seen": self._seen}

    def ended(self, progress: Progress, timeout_s: float | None) -> dict[str, Outcome]:
        """Wait until nodes have made orders, and publish what they made."""
        deadline = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while True:
            signals.check()
            left = deadline - time.monotonic()
            found = self.results(0 if self._refused else max(0.0, min(POLL_S, left)))
            self._draw(progress)
            outcomes, self._refused = self._refused, {}
            outcomes |= {name: self._published(name, result, progress) for name, result in found.items()}
            for name in outcomes:
                self._orders.pop(name)
            if outcomes or left <= 0:
                return outcomes

    def stop(self) -> None:
        """End what is at work on nodes."""
        self.cancel()
        self._orders.clear()
        self._open.close()
        self._started = False

    def _published(self, name: str, result: Mapping[str, Any], progress: Progress) -> Outcome:
        """Return what became of an order that a node is done with."""
        order = self._orders[name]
        if bars := self._bars.pop(name, None):
            bars.__exit__(None, None, None)
        if said := result.get("refused"):
            raise error_of(said, f"the node of {name}")
        logs = order.out.parent / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{name}.log").write_text(result["log"], encoding="utf-8")
        if result["verdict"] is None:
            return Outcome(None, result["reason"], result["seconds"])
        try:
            scorecard = run(
                order.recipe,
                out=order.out,
                device=order.device,
                store=order.store,
                data=order.data,
                against=order.against,
                timings=False,
                since=order.since,
                progress=Named(progress, name),
            )
        except OptkitError as error:
            return Outcome(None, reason_of(error), result["seconds"])
        return Outcome(str(scorecard.verdict), "", result["seconds"])

    def _draw(self, progress: Progress) -> None:
        for name, line in self.lines():
            message = json.loads(line)
            kind = message.pop("type")
            if kind == "begin":  # again, if the node before was lost
                if bars := self._bars.pop(name, None):
                    bars.__exit__(None, None, None)
                self._bars[name] = Bars(Named(progress, name))
            elif name in self._bars:
                self._bars[name].draw(kind, message)

    def _leave_sign(self, store: Path) -> str:
        """Return a file in the store by which nodes know that they share it; nothing if they need not."""
        store.mkdir(parents=True, exist_ok=True)
        if os.environ.get(VARIABLE):
            return ""
        return self._open.enter_context(tempfile.NamedTemporaryFile(dir=store, prefix=".sweep-")).name
