"""Executor `local`: this machine, in a process of its own for each recipe, one after another."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optkit.errors import OptkitError
from optkit.processes.child import Child
from optkit.processes.commands import python_environment
from optkit.processes.crashes import ChildError
from optkit.progress import Progress
from optkit.store.shared import VARIABLE
from optkit.sweep.executors.base import LOGS, Executor, Order, Outcome, reason_of

MODULE = "optkit.sweep.executors.make_worker"
PATIENCE_S = 5.0


class LocalExecutor(Executor):
    """Makes each artifact in a fresh process here.
    A crash, or memory that runs out, ends that process alone.
    """

    order: Order

    def begin(self, order: Order) -> None:
        """Take an order; it is made while `ended` waits."""
        self.order = order

    def ended(self, progress: Progress, timeout_s: float | None) -> dict[str, Outcome]:
        """Make the artifact of the order; after `timeout_s` it is ended."""
        return {self.order.name: self.run(self.order, progress, timeout_s)}

    def run(self, order: Order, progress: Progress, timeout_s: float | None) -> Outcome:
        """Make the artifact of an order, and leave what its process prints in its log."""
        log = order.out.parent / LOGS / f"{order.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return make_in_child(order.described(), log, progress, timeout_s)


def make_in_child(
    order: Mapping[str, Any], log: Path, progress: Progress, timeout_s: float | None, cwd: Path | None = None
) -> Outcome:
    """Start a process that makes what an order describes, and wait for it."""
    began = time.monotonic()
    verdict, reason = None, ""
    env = python_environment(**({VARIABLE: order["remote"]} if order["remote"] else {}))
    try:
        with Child(MODULE, name="the process that made it", log=log, patience_s=PATIENCE_S, env=env, cwd=cwd) as child:
            child.send(order)
            verdict = child.result(progress, timeout_s=timeout_s)["verdict"]
    except TimeoutError:
        reason = ""
    except (OptkitError, ChildError) as error:
        reason = reason_of(error)
    return Outcome(verdict, reason, round(time.monotonic() - began, 3))
